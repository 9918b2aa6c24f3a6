//! One connection: what is read from it and written to it, each within its time.
//!
//! It owns the socket and its place among the others. What always holds: no more is read than the request announced, so
//! that what is left in `inbox` is the next request; a connection that waits for a request has no memory but this; what
//! is large is read and written in turns, between which other connections have theirs.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use rustix::net::{Shutdown, shutdown};
use tokio::net::TcpStream;
use tokio::time::{timeout, timeout_at};

use super::answer::Answer;
use super::body::{Body, Cursor, Slices};
use super::rooms::{self, Aside};
use super::table::Seat;
use super::timing::Timing;
use super::traffic::Traffic;
use crate::checksum::Checksum;
use crate::http::descriptors::Socket;
use crate::http::head::{LONGEST_HEAD, Method, RequestHead};
use crate::http::refusal::Refusal;

/// Bytes that a connection reads or writes before others have their turn: some hundred microseconds.
pub(super) const TURN: usize = 1 << 20;

/// Of that, bytes that are received at once, so that they are summed before they leave the processor's cache.
const STRIDE: usize = 256 << 10;

/// Bytes that are read at once where it is not known what comes, at least.
const SOME: usize = 4096;

/// Bytes of a body of JSON.
const MOST_JSON: u64 = 64 << 20;

/// Who sends or takes so many bytes, or the last ones, is not silent.
const PROGRESS: usize = 64 << 10;

/// Rest of a body that is read although nobody wants it, for the sake of the connection.
const MOST_DISCARDED: u64 = 64 << 10;

/// Why there is no answer, or a short one.
#[derive(Debug)]
pub(super) enum Trouble {
    /// It is refused.
    Refused(Refusal),
    /// Nobody is there any more, or nobody who keeps up.
    Broken,
}

impl From<Refusal> for Trouble {
    fn from(refusal: Refusal) -> Self {
        Trouble::Refused(refusal)
    }
}

/// The body of a request, whole.
pub(super) struct Whole {
    pub(super) bytes: Vec<u8>,
    /// What it takes.
    _aside: Aside,
}

/// Others have their turn: those that want this processor, and then those that this thread serves.
///
/// Without the first, who was woken by what was just done would wait for this thread's processor up to the next tick of
/// its clock, some milliseconds.
pub(super) async fn end_turn() {
    std::thread::yield_now();
    tokio::task::yield_now().await;
}

pub(super) struct Connection {
    stream: Arc<Socket<TcpStream>>,
    pub(super) seat: Seat,
    /// What has come and was not looked at.
    inbox: Vec<u8>,
    /// Bytes of the request's body that are still to be read.
    unread: u64,
    waits_for_continue: bool,
    timing: Timing,
    /// How long the other side may be silent.
    silence: Duration,
    /// Since when it is, but for so many bytes.
    silent_since: Instant,
    moved: usize,
    traffic: Arc<Traffic>,
}

impl Connection {
    pub(super) fn new(stream: Arc<Socket<TcpStream>>, seat: Seat, timing: Timing, traffic: Arc<Traffic>) -> Self {
        Connection {
            stream,
            seat,
            inbox: Vec::new(),
            unread: 0,
            waits_for_continue: false,
            timing,
            silence: timing.silence,
            silent_since: Instant::now(),
            moved: 0,
            traffic,
        }
    }

    /// Waits until something has come; `false` where nothing does, or the other side goes.
    pub(super) async fn awaits(&mut self, longest: Option<Duration>) -> bool {
        if !self.inbox.is_empty() {
            return true;
        }
        self.inbox = Vec::new();
        self.seat.set_idle();
        let comes = async {
            // That it was readable once says nothing: what made it so may have been read.
            while self.stream.readable().await.is_ok() {
                let mut begun = vec![0; SOME];
                match self.stream.try_read(&mut begun) {
                    Ok(0) => return false,
                    Ok(received) => {
                        self.traffic.received_bytes.fetch_add(received as u64, Relaxed);
                        begun.truncate(received);
                        self.inbox = begun;
                        return true;
                    }
                    Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {}
                    Err(_) => return false,
                }
            }
            false
        };
        match longest {
            Some(longest) => timeout(longest, comes).await.unwrap_or(false),
            None => comes.await,
        }
    }

    /// The head of the next request; `None` where there is none.
    pub(super) async fn head(&mut self) -> Result<Option<RequestHead>, Trouble> {
        let longest = self.timing.head;
        self.begin(self.timing.silence);
        let read = timeout(longest, async {
            loop {
                if let Some((head, length)) = RequestHead::parse(&self.inbox)? {
                    self.inbox.drain(..length);
                    return Ok(Some(head));
                }
                if self.receive(LONGEST_HEAD).await? == 0 {
                    return if self.inbox.is_empty() { Ok(None) } else { Err(Trouble::Broken) };
                }
            }
        });
        let head = read.await.unwrap_or_else(|_| {
            let seconds = longest.as_secs_f64();
            Err(Refusal::new(408, format!("the head of the request did not come within {seconds} s")).into())
        });
        self.seat.set_busy();
        let head = head?;
        if let Some(head) = &head {
            self.unread = head.content_length.unwrap_or_default();
            self.waits_for_continue = head.expects_continue && self.inbox.is_empty();
        }
        Ok(head)
    }

    /// The whole body of a request, which is small.
    pub(super) async fn whole_body(&mut self) -> Result<Whole, Trouble> {
        let length = self.unread;
        if length > MOST_JSON {
            return Err(Refusal::new(413, format!("a body of JSON has at most {MOST_JSON} bytes, not {length}")).into());
        }
        let aside = rooms::for_body(length, self.timing.silence).await?;
        self.tell_to_continue().await?;
        // It grows with what comes, not with what is announced.
        self.in_time(length, self.timing.with_room(), async |this| {
            while (this.inbox.len() as u64) < length {
                if this.receive(length as usize).await? == 0 {
                    return Err(Trouble::Broken);
                }
            }
            Ok(())
        })
        .await?;
        self.unread = 0;
        let rest = self.inbox.split_off(length as usize);
        Ok(Whole { bytes: std::mem::replace(&mut self.inbox, rest), _aside: aside })
    }

    /// What `parse` makes of the beginning of a body, which has at most `most` bytes.
    pub(super) async fn beginning<T>(
        &mut self,
        most: usize,
        parse: impl Fn(&[u8]) -> Result<Option<(T, usize)>, Refusal>,
    ) -> Result<T, Trouble> {
        self.tell_to_continue().await?;
        let most = usize::try_from(self.unread).unwrap_or(usize::MAX).min(most);
        self.in_time(0, self.timing.silence, async |this| {
            loop {
                let begun = &this.inbox[..this.inbox.len().min(most)];
                if let Some((parsed, length)) = parse(begun)? {
                    this.inbox.drain(..length);
                    this.unread -= length as u64;
                    return Ok(parsed);
                }
                if begun.len() == most {
                    return Err(Refusal::new(400, "the body ends within the header of a shard").into());
                }
                if this.receive(most).await? == 0 {
                    return Err(Trouble::Broken);
                }
            }
        })
        .await
    }

    /// Fills `target`, which others may wait for, with the next bytes of a body, and returns their checksum.
    pub(super) async fn fill(&mut self, target: &mut [u8]) -> Result<u64, Trouble> {
        let length = target.len() as u64;
        self.in_time(length, self.timing.with_room(), async |this| {
            let mut checksum = Checksum::new();
            let mut filled = this.inbox.len().min(target.len());
            target[..filled].copy_from_slice(&this.inbox[..filled]);
            this.inbox.drain(..filled);
            checksum.update(&target[..filled]);
            let mut turn = 0;
            while filled < target.len() {
                let end = target.len().min(filled + STRIDE);
                let received = this.read(&mut target[filled..end]).await?;
                if received == 0 {
                    return Err(Trouble::Broken);
                }
                checksum.update(&target[filled..filled + received]);
                filled += received;
                turn += received;
                if turn >= TURN {
                    turn = 0;
                    end_turn().await;
                }
            }
            this.unread -= length;
            Ok(checksum.value())
        })
        .await
    }

    /// Reads what is left of the body, if that is little; whether another request can follow.
    pub(super) async fn discard(&mut self) -> bool {
        let has_come = self.inbox.len() as u64 >= self.unread;
        if self.unread > MOST_DISCARDED || (self.waits_for_continue && !has_come) {
            return false;
        }
        let mut nowhere = vec![0; self.unread as usize];
        self.fill(&mut nowhere).await.is_ok()
    }

    /// Sends an answer, of a request by this method.
    pub(super) async fn send(&mut self, answer: &Answer, to: Method, keeps_alive: bool) -> Result<(), Trouble> {
        self.traffic.answered(answer.status);
        let head = Body::of_text(answer.head(keeps_alive));
        let body = if to == Method::Head { &Body::default() } else { &answer.body };
        self.in_time(body.len(), self.timing.silence, async |this| {
            // One call of the kernel for both, as long as they are small.
            let (mut first, mut second) = (Cursor::default(), Cursor::default());
            let mut rest = body.len();
            let mut turn = 0;
            loop {
                second.stage(body);
                let sent = {
                    let mut slices = Slices::new();
                    first.slices(&head, TURN, &mut slices);
                    let before: usize = slices.iter().map(|slice| slice.len()).sum();
                    // What is left is sent with it where that is little: the other side waits for the last byte.
                    let most = if rest <= (TURN + SOME) as u64 { rest as usize } else { TURN.saturating_sub(turn) };
                    second.slices(body, most, &mut slices);
                    if slices.is_empty() {
                        return Ok(());
                    }
                    this.stream.try_write_vectored(&slices).map(|sent| (sent.min(before), sent.saturating_sub(before)))
                };
                match sent {
                    Ok((of_head, of_body)) => {
                        first.advance(&head, of_head);
                        second.advance(body, of_body);
                        this.traffic.sent_bytes.fetch_add((of_head + of_body) as u64, Relaxed);
                        this.has_moved(of_head + of_body);
                        rest -= of_body as u64;
                        turn += of_head + of_body;
                        if turn >= TURN {
                            turn = 0;
                            end_turn().await;
                        }
                    }
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                        turn = 0;
                        let writable = timeout_at(this.silence_ends(), this.stream.writable()).await;
                        writable.map_err(|_| Trouble::Broken)?.map_err(|_| Trouble::Broken)?;
                    }
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(_) => return Err(Trouble::Broken),
                }
            }
        })
        .await
    }

    /// Ends the connection so that its last answer is read: were it closed with something unread, the kernel would take
    /// the answer back.
    pub(super) async fn linger(mut self) {
        let _ = shutdown(&**self.stream, Shutdown::Write);
        self.begin(self.timing.silence);
        let _ = timeout(Duration::from_secs(1), async {
            let mut nowhere = vec![0; 16 << 10];
            while let Ok(1..) = self.read(&mut nowhere).await {}
        })
        .await;
    }

    async fn tell_to_continue(&mut self) -> Result<(), Trouble> {
        if std::mem::take(&mut self.waits_for_continue) {
            let text = b"HTTP/1.1 100 Continue\r\n\r\n";
            // Nothing else is on its way, so that there is room for it.
            if self.stream.try_write(text).ok() != Some(text.len()) {
                return Err(Trouble::Broken);
            }
        }
        Ok(())
    }

    /// Does what moves so many bytes, in the time that there is for it, and without a longer `silence`.
    async fn in_time<T>(
        &mut self,
        bytes: u64,
        silence: Duration,
        work: impl AsyncFnOnce(&mut Self) -> Result<T, Trouble>,
    ) -> Result<T, Trouble> {
        self.begin(silence);
        let done = timeout(self.timing.whole(bytes), work(self)).await.unwrap_or(Err(Trouble::Broken));
        self.seat.set_busy();
        done
    }

    /// From here on the other side is waited for.
    fn begin(&mut self, silence: Duration) {
        self.silence = silence;
        self.has_moved(PROGRESS);
    }

    /// It sent or took so many bytes: a few now and then are as none.
    fn has_moved(&mut self, bytes: usize) {
        self.moved += bytes;
        if self.moved >= PROGRESS {
            self.moved = 0;
            self.silent_since = Instant::now();
            self.seat.set_halting();
        }
    }

    fn silence_ends(&self) -> tokio::time::Instant {
        (self.silent_since + self.silence).into()
    }

    /// Receives what there is, until `inbox` has `most` bytes.
    async fn receive(&mut self, most: usize) -> Result<usize, Trouble> {
        let begun = self.inbox.len();
        let room = most.saturating_sub(begun).min(begun.max(SOME));
        let mut inbox = std::mem::take(&mut self.inbox);
        inbox.resize(begun + room, 0);
        let received = self.read(&mut inbox[begun..]).await;
        inbox.truncate(begun + *received.as_ref().unwrap_or(&0));
        self.inbox = inbox;
        received
    }

    async fn read(&mut self, target: &mut [u8]) -> Result<usize, Trouble> {
        loop {
            match self.stream.try_read(target) {
                Ok(received) => {
                    self.traffic.received_bytes.fetch_add(received as u64, Relaxed);
                    self.has_moved(received);
                    return Ok(received);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    let readable = timeout_at(self.silence_ends(), self.stream.readable()).await;
                    readable.map_err(|_| Trouble::Broken)?.map_err(|_| Trouble::Broken)?;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return Err(Trouble::Broken),
            }
        }
    }
}

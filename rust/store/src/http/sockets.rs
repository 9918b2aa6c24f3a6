//! Sockets that a child made by `fork` does not inherit.
//!
//! Were a child to keep a copy of a socket, the other side would not notice the death of this process: a client would
//! wait for a response that nobody sends, and a controller's claims would outlive it. So a child closes these sockets
//! before anything else runs there.
//!
//! Invariants:
//!
//! 1. Each socket is registered as long as it is open. No fork happens between its creation and its registration, nor
//!    between the end of the registration and its closing.
//! 2. A child closes nothing twice: the numbers of closed descriptors are soon used again.
#![allow(unsafe_code)]

use std::io;
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::os::fd::AsRawFd;
use std::sync::Once;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

/// Descriptors with higher numbers stay open in children. The kernel allows no process more, unless told to.
const MOST: usize = 1 << 20;

const WORD: usize = u64::BITS as usize;

/// A bit for each descriptor.
static NOTED: [AtomicU64; MOST / WORD] = [const { AtomicU64::new(0) }; MOST / WORD];

/// One for each thread that makes or closes a socket at this moment, and [`FORKING`].
static BUSY: AtomicU64 = AtomicU64::new(0);

/// Somebody forks, or is about to.
const FORKING: u64 = 1 << 63;

/// As long as this lives nothing forks: for moments.
pub(super) struct NoFork(());

impl NoFork {
    pub(super) fn begin() -> io::Result<Self> {
        register()?;
        loop {
            let busy = BUSY.load(Ordering::Relaxed);
            let next = busy + 1;
            if busy & FORKING == 0
                && BUSY.compare_exchange_weak(busy, next, Ordering::Acquire, Ordering::Relaxed).is_ok()
            {
                return Ok(NoFork(()));
            }
            thread::yield_now();
        }
    }

    /// Notes a socket that was made since this began.
    pub(super) fn keep<S: AsRawFd>(&self, socket: S) -> Socket<S> {
        note(socket.as_raw_fd(), true);
        Socket { socket: ManuallyDrop::new(socket), process: std::process::id() }
    }
}

impl Drop for NoFork {
    fn drop(&mut self) {
        BUSY.fetch_sub(1, Ordering::Release);
    }
}

/// A socket that no child of this process has.
#[derive(Debug)]
pub(super) struct Socket<S: AsRawFd> {
    socket: ManuallyDrop<S>,
    process: u32,
}

impl<S: AsRawFd> Socket<S> {
    /// Another form of the same descriptor.
    pub(super) fn into_form<T: AsRawFd>(self, change: impl FnOnce(S) -> io::Result<T>) -> io::Result<Socket<T>> {
        let mut this = ManuallyDrop::new(self);
        let descriptor = this.socket.as_raw_fd();
        let no_fork = NoFork::begin()?;
        // SAFETY: `this` is never dropped, and its socket not used again.
        let socket = unsafe { ManuallyDrop::take(&mut this.socket) };
        note(descriptor, false);
        change(socket).map(|socket| no_fork.keep(socket))
    }
}

impl<S: AsRawFd> Socket<S> {
    /// Whether this process opened it, and not the one that it was forked from: in a child its number is another's.
    pub(super) fn is_own(&self) -> bool {
        self.process == std::process::id()
    }
}

impl<S: AsRawFd> Deref for Socket<S> {
    type Target = S;

    fn deref(&self) -> &S {
        &self.socket
    }
}

impl<S: AsRawFd> Drop for Socket<S> {
    fn drop(&mut self) {
        if !self.is_own() {
            return;
        }
        let no_fork = NoFork::begin();
        note(self.socket.as_raw_fd(), false);
        // SAFETY: this is its end.
        unsafe { ManuallyDrop::drop(&mut self.socket) };
        drop(no_fork);
    }
}

fn note(descriptor: i32, is_open: bool) {
    let Some(descriptor) = usize::try_from(descriptor).ok().filter(|&descriptor| descriptor < MOST) else { return };
    let (word, bit) = (&NOTED[descriptor / WORD], 1 << (descriptor % WORD));
    if is_open {
        word.fetch_or(bit, Ordering::Relaxed)
    } else {
        word.fetch_and(!bit, Ordering::Relaxed)
    };
}

/// Has the C library call what follows at each fork.
fn register() -> io::Result<()> {
    static ONCE: Once = Once::new();
    static FAILED: AtomicU64 = AtomicU64::new(0);
    ONCE.call_once(|| {
        // SAFETY: the functions do only what is allowed around a fork of a process with threads, and are never unloaded
        // while they may be called: the C library forgets them with the shared object.
        let outcome = unsafe { libc::pthread_atfork(Some(before), Some(after), Some(in_child)) };
        FAILED.store(u64::from(outcome.unsigned_abs()), Ordering::Relaxed);
    });
    match FAILED.load(Ordering::Relaxed) {
        0 => Ok(()),
        error => Err(io::Error::from_raw_os_error(i32::try_from(error).unwrap_or(libc::ENOMEM))),
    }
}

extern "C" fn before() {
    // Threads that fork at the same time come one after the other.
    while BUSY.fetch_or(FORKING, Ordering::Acquire) & FORKING != 0 {
        thread::yield_now();
    }
    while BUSY.load(Ordering::Acquire) != FORKING {
        thread::yield_now();
    }
}

extern "C" fn after() {
    BUSY.fetch_and(!FORKING, Ordering::Release);
}

extern "C" fn in_child() {
    for (place, word) in NOTED.iter().enumerate() {
        // Most are zero, and to write to them would take memory.
        if word.load(Ordering::Relaxed) == 0 {
            continue;
        }
        let mut rest = word.swap(0, Ordering::Relaxed);
        while rest != 0 {
            let descriptor = place * WORD + rest.trailing_zeros() as usize;
            // SAFETY: the threads that used it are not in the child, and what owned it there closes nothing.
            unsafe { libc::close(descriptor as i32) };
            rest &= rest - 1;
        }
    }
    after();
}

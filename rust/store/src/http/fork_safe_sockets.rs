//! Sockets that a child made by `fork` does not keep.
//!
//! If a child kept a copy of a socket, the other side would not notice the death of this process. A client would wait
//! for a response that nobody sends, and a controller's claims would outlive it. So a child closes these sockets before
//! anything else runs there. A fork between the creation of a socket and its registration, some microseconds,
//! leaves the child its copy.
//!
//! Invariant: a child closes nothing twice, since the numbers of closed descriptors are soon used again. So a socket is
//! registered after it is opened, and no longer when it is closed.
#![allow(unsafe_code)]

use std::io;
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::os::fd::AsRawFd;
use std::sync::Once;
use std::sync::atomic::{AtomicU64, Ordering};

/// Descriptors with higher numbers stay open in children. The kernel allows no process more, unless told to.
const MOST: usize = 1 << 20;

const WORD: usize = u64::BITS as usize;

/// A bit for each descriptor.
static REGISTERED: [AtomicU64; MOST / WORD] = [const { AtomicU64::new(0) }; MOST / WORD];

/// A socket that no child of this process has.
#[derive(Debug)]
pub(super) struct Socket<S: AsRawFd> {
    socket: ManuallyDrop<S>,
    process: u32,
}

impl<S: AsRawFd> Socket<S> {
    pub(super) fn new(socket: S) -> Self {
        static ONCE: Once = Once::new();
        ONCE.call_once(|| {
            // SAFETY: the function does only what is allowed in a child of a process with threads. It is never unloaded
            // while it may be called: the C library forgets it with the shared object. If there is no memory for
            // the registration, children keep their copies.
            unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
        });
        register(socket.as_raw_fd(), true);
        Socket { socket: ManuallyDrop::new(socket), process: std::process::id() }
    }

    /// Another form of the same descriptor.
    pub(super) fn into_form<T: AsRawFd>(self, change: impl FnOnce(S) -> io::Result<T>) -> io::Result<Socket<T>> {
        let mut this = ManuallyDrop::new(self);
        register(this.socket.as_raw_fd(), false);
        // SAFETY: `this` is never dropped, and its socket not used again.
        let socket = unsafe { ManuallyDrop::take(&mut this.socket) };
        change(socket).map(Socket::new)
    }

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
        if self.is_own() {
            register(self.socket.as_raw_fd(), false);
            // SAFETY: this is its end.
            unsafe { ManuallyDrop::drop(&mut self.socket) };
        }
    }
}

fn register(descriptor: i32, is_open: bool) {
    let Some(descriptor) = usize::try_from(descriptor).ok().filter(|&descriptor| descriptor < MOST) else { return };
    let (word, bit) = (&REGISTERED[descriptor / WORD], 1 << (descriptor % WORD));
    if is_open {
        word.fetch_or(bit, Ordering::Relaxed)
    } else {
        word.fetch_and(!bit, Ordering::Relaxed)
    };
}

extern "C" fn in_child() {
    for (place, word) in REGISTERED.iter().enumerate() {
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
}

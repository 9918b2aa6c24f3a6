//! State of one process, sleep on a word of shared memory, and the end of a process with its parent.
//!
//! Invariants: a child made by `fork` inherits no lock. One that another thread held at the fork would never be released
//! there. So the parent's value is leaked in the child (a few hundred bytes a fork).
#![allow(unsafe_code)]

use core::mem::MaybeUninit;
use core::sync::atomic::AtomicU32;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::time::Duration;
use std::{io, ptr};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::fd::{BorrowedFd, OwnedFd};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use rustix::thread::futex;

use crate::ShmError;

struct OwnedByProcess<T> {
    process: u32,
    value: T,
}

/// A value that is made once in each process that asks for it.
pub struct PerProcess<T> {
    entry: AtomicPtr<OwnedByProcess<T>>,
    make: fn() -> T,
}

impl<T: Send + Sync + 'static> PerProcess<T> {
    /// Made by `make` when a process first asks for it.
    pub const fn new(make: fn() -> T) -> Self {
        Self { entry: AtomicPtr::new(ptr::null_mut()), make }
    }

    /// The value of this process.
    pub fn get(&'static self) -> &'static T {
        let process = std::process::id();
        let mut seen = self.entry.load(Ordering::Acquire);
        loop {
            // SAFETY: every stored pointer is a leaked box, never freed and shared only.
            if let Some(entry) = unsafe { seen.as_ref() }
                && entry.process == process
            {
                return &entry.value;
            }
            let new = Box::into_raw(Box::new(OwnedByProcess { process, value: (self.make)() }));
            match self.entry.compare_exchange(seen, new, Ordering::AcqRel, Ordering::Acquire) {
                // SAFETY: just stored; as above.
                Ok(_) => return unsafe { &(*new).value },
                Err(other) => {
                    // SAFETY: `new` was never stored, so this is its one owner.
                    drop(unsafe { Box::from_raw(new) });
                    seen = other;
                }
            }
        }
    }

    /// The value of the process that this one was forked from, if it had one and this one has not.
    pub fn inherited(&'static self) -> Option<&'static T> {
        // SAFETY: every stored pointer is a leaked box, never freed and shared only.
        let entry = unsafe { self.entry.load(Ordering::Acquire).as_ref() }?;
        (entry.process != std::process::id()).then_some(&entry.value)
    }
}

/// The exit status.
const STATUS: i32 = 1;

/// Ends this process as soon as `pipe` becomes readable, its writing end is closed everywhere, or the process `pid` has
/// ended. A thread watches a copy of `pipe`.
///
/// # Errors
/// [`ShmError::Invalid`] for a number that is no process's, [`ShmError::Io`] where the system has no descriptor or
/// thread left.
pub fn exit_with_parent(pipe: BorrowedFd<'_>, pid: i32) -> Result<(), ShmError> {
    let failed = |errno| ShmError::io("watch", format!("process {pid}"), errno);
    let pipe = rustix::io::fcntl_dupfd_cloexec(pipe, 0).map_err(failed)?;
    let process = process(pid)?;
    without_signals(|| {
        std::thread::Builder::new().name("tundish-watcher".into()).spawn(move || watch(&pipe, process.as_ref()))
    })
    .map_err(|source| ShmError::Io { operation: "watch", object: format!("process {pid}"), source })?;
    Ok(())
}

fn watch(pipe: &OwnedFd, process: Option<&OwnedFd>) {
    // `poll` reports the end of a pipe without being asked.
    let mut events: Vec<_> =
        [Some(pipe), process].into_iter().flatten().map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
    while poll(&mut events, None).is_err() {}
    exit();
}

fn exit() -> ! {
    // SAFETY: ends the process without running any of its code.
    unsafe { libc::_exit(STATUS) }
}

/// A pidfd of the process; `None` if the kernel has none, and the pipe has to do.
fn process(pid: i32) -> Result<Option<OwnedFd>, ShmError> {
    // `from_raw` panics for a negative number.
    let number = if pid > 0 { Pid::from_raw(pid) } else { None };
    let number = number.ok_or_else(|| ShmError::Invalid(format!("{pid} is not the number of a process")))?;
    match pidfd_open(number, PidfdFlags::empty()) {
        Ok(process) => Ok(Some(process)),
        Err(Errno::SRCH) => exit(),
        Err(Errno::MFILE | Errno::NFILE) => Err(ShmError::io("watch", format!("process {pid}"), Errno::MFILE)),
        Err(_) => Ok(None),
    }
}

/// Does `work` with all signals blocked, so that the threads that it starts block them too.
///
/// # Errors
/// The work's own, and the system's where it blocks none.
pub fn without_signals<T>(work: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    let mut all = MaybeUninit::uninit();
    let mut before = MaybeUninit::uninit();
    // SAFETY: both sets are this function's; the first is filled before it is used.
    let changed = unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr())
    };
    if changed != 0 {
        return Err(io::Error::from_raw_os_error(changed));
    }
    let done = work();
    // SAFETY: the call above filled it with the signals that this thread blocked before.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), core::ptr::null_mut()) };
    done
}

/// Sleeps while `word` is `seen`, until a wake-up, a signal or the end of `longest`.
pub(crate) fn sleep(word: &AtomicU32, seen: u32, longest: Option<Duration>) {
    // A time that is too long for the kernel is no limit.
    let timeout = longest.and_then(|longest| futex::Timespec::try_from(longest).ok());
    let _ = futex::wait(word, futex::Flags::empty(), seen, timeout.as_ref());
}

/// Wakes every thread that sleeps on `word`, in every process.
pub(crate) fn wake_all(word: &AtomicU32) {
    let _ = futex::wake(word, futex::Flags::empty(), i32::MAX as u32);
}

#[cfg(test)]
mod tests {
    use core::sync::atomic::Ordering::SeqCst;
    use std::sync::Arc;
    use std::time::Instant;

    use super::*;

    #[test]
    fn a_sleep_ends_when_the_word_is_woken_has_changed_or_time_is_over() {
        let word = Arc::new(AtomicU32::new(1));
        let begin = Instant::now();
        sleep(&word, 0, None);
        sleep(&word, 1, Some(Duration::from_millis(20)));
        assert!(begin.elapsed() >= Duration::from_millis(20));
        let sleeper = std::thread::spawn({
            let word = Arc::clone(&word);
            move || {
                while word.load(SeqCst) == 1 {
                    sleep(&word, 1, None);
                }
            }
        });
        std::thread::sleep(Duration::from_millis(10));
        word.store(2, SeqCst);
        wake_all(&word);
        sleeper.join().unwrap();
    }
}

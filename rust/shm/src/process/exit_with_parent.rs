//! A thread that ends this process when another one ends.
//!
//! It needs no lock and no interpreter, so nothing keeps it waiting; and it takes no signals. A parent-death signal
//! would not do: it follows the thread that forked, and is lost when the parent is not the process that forked.
#![allow(unsafe_code)]

use core::mem::MaybeUninit;
use std::io;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::fd::{BorrowedFd, OwnedFd};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use crate::ShmError;

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

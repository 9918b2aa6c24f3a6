//! Low priorities for the threads of a shard writer, so that training keeps its processors and disk.
//!
//! Both settings apply to the calling thread only. Where the system refuses them, the thread goes on without.
#![allow(unsafe_code)]

use rustix::process::{getpriority_process, setpriority_process};

/// How much nicer a writer's thread is than the thread that made it. On a processor that both want, it gets a tenth of
/// the other's time. Nicer still would delay checksums so much that a save holds its memory for seconds longer.
const NICER: i32 = 10;

/// Lowers the processor and disk priorities of the calling thread.
pub(super) fn lower() {
    // On Linux a nice value belongs to a thread.
    let thread = Some(rustix::thread::gettid());
    if let Ok(nice) = getpriority_process(thread) {
        let _ = setpriority_process(thread, nice + NICER);
    }
    // From linux/ioprio.h: the lowest level of the class best effort (2). The idle class would starve while anybody
    // else uses the disk.
    const WHO_PROCESS: libc::c_int = 1;
    const THIS_THREAD: libc::c_int = 0;
    const BEST_EFFORT_LOWEST: libc::c_int = (2 << 13) | 7;
    // SAFETY: three integers are passed, and no memory.
    let _ = unsafe { libc::syscall(libc::SYS_ioprio_set, WHO_PROCESS, THIS_THREAD, BEST_EFFORT_LOWEST) };
}

//! What a writer's threads may take from the training: what it leaves.
//!
//! Both settings are of the calling thread alone. They are wishes: where the system knows no such thing, or refuses,
//! the thread goes on without.
#![allow(unsafe_code)]

/// How much nicer a writer's thread is than the one that made it: of a processor that both want it gets a tenth of
/// what the other gets. Not the nicest there is (one part in seventy): the checksums of two gigabytes take a tenth
/// of a second, and a save that waits seven for it holds its memory, and the next save, for as long.
#[cfg(target_os = "linux")]
const NICER: i32 = 10;

/// Lowers the priorities of the calling thread.
#[cfg(target_os = "linux")]
pub(super) fn lower() {
    use rustix::process::{getpriority_process, setpriority_process};

    // On Linux a nice value is a thread's, whatever POSIX says of processes.
    let thread = Some(rustix::thread::gettid());
    if let Ok(nice) = getpriority_process(thread) {
        let _ = setpriority_process(thread, nice + NICER);
    }
    // From linux/ioprio.h: the class best effort (2), its lowest level. The idle class would wait for as long as
    // anybody else uses the disk at all.
    const WHO_PROCESS: libc::c_int = 1;
    const THIS_THREAD: libc::c_int = 0;
    const BEST_EFFORT_LOWEST: libc::c_int = (2 << 13) | 7;
    // SAFETY: three integers are passed, and no memory.
    let _ = unsafe { libc::syscall(libc::SYS_ioprio_set, WHO_PROCESS, THIS_THREAD, BEST_EFFORT_LOWEST) };
}

#[cfg(not(target_os = "linux"))]
pub(super) fn lower() {}

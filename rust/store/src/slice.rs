//! Slices of the processor: how long a thread that works goes on before one that was woken has its turn.
//!
//! It owns nothing but the slice of a thread for a while. What always holds: a thread changes its own slice alone, and
//! neither how nice it is nor, where it is another program's choice, its policy; what was a thread's before is again at
//! the end. Where the kernel does not know such slices (before Linux 6.12) or refuses, nothing is lost but some time of
//! somebody's.
#![allow(unsafe_code)]

use std::marker::PhantomData;

#[cfg(target_os = "linux")]
use libc::{SCHED_BATCH, SCHED_OTHER, sched_attr};

/// The shortest that the kernel allows. Who is woken waits for the end of a slice: of a whole one until the next tick,
/// up to four milliseconds.
#[cfg(target_os = "linux")]
const SHORT: u64 = 100_000;

/// The calling thread's slices are short as long as this lives.
#[derive(Debug)]
pub(crate) struct ShortSlices {
    #[cfg(target_os = "linux")]
    before: Option<sched_attr>,
    /// Of one thread.
    _here: PhantomData<*const ()>,
}

impl ShortSlices {
    pub(crate) fn begin() -> Self {
        ShortSlices {
            #[cfg(target_os = "linux")]
            before: shorten(None),
            _here: PhantomData,
        }
    }
}

impl Drop for ShortSlices {
    fn drop(&mut self) {
        #[cfg(target_os = "linux")]
        if let Some(before) = &self.before {
            set(before);
        }
    }
}

/// For a thread that serves many, one after the other: its slices are short.
pub(crate) fn share() {
    #[cfg(target_os = "linux")]
    shorten(None);
}

/// For a thread that wakes up for long work: as the kernel has it for these, it waits for the end of what runs when it
/// is woken; and its slices are short.
pub(crate) fn be_patient() {
    #[cfg(target_os = "linux")]
    shorten(Some(SCHED_BATCH));
}

/// What there was before, where it was changed: a thread of a policy of real time is left alone.
#[cfg(target_os = "linux")]
fn shorten(policy: Option<i32>) -> Option<sched_attr> {
    let before = get()?;
    let is_usual = [SCHED_OTHER, SCHED_BATCH].contains(&(before.sched_policy as i32));
    let mut after = before;
    after.sched_policy = policy.map_or(before.sched_policy, |policy| policy as u32);
    after.sched_runtime = SHORT;
    (is_usual && set(&after)).then_some(before)
}

#[cfg(target_os = "linux")]
fn get() -> Option<sched_attr> {
    // SAFETY: all zero is a valid one.
    let mut found: sched_attr = unsafe { std::mem::zeroed() };
    let size = size_of::<sched_attr>();
    // SAFETY: the kernel writes as many bytes at most.
    let got = unsafe { libc::syscall(libc::SYS_sched_getattr, 0, &raw mut found, size, 0) };
    // Earlier kernels tell of no slices, and take none.
    (got == 0 && found.sched_runtime > 0).then_some(found)
}

#[cfg(target_os = "linux")]
fn set(attributes: &sched_attr) -> bool {
    // SAFETY: the kernel reads them, and changes this thread alone.
    unsafe { libc::syscall(libc::SYS_sched_setattr, 0, std::ptr::from_ref(attributes), 0) == 0 }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn slices_are_short_for_a_while() {
        let Some(before) = get() else { return };
        let facts = |attributes: sched_attr| {
            (attributes.sched_policy, attributes.sched_nice, attributes.sched_runtime, attributes.sched_flags)
        };
        let outer = ShortSlices::begin();
        if outer.before.is_none() {
            return;
        }
        let inner = ShortSlices::begin();
        assert_eq!(get().unwrap().sched_runtime, SHORT);
        drop(inner);
        assert_eq!(get().unwrap().sched_runtime, SHORT);
        drop(outer);
        assert_eq!(facts(get().unwrap()), facts(before));
    }

    #[test]
    fn a_thread_stays_as_nice_as_it_was() {
        // SAFETY: it changes this thread alone.
        let was_set = std::thread::spawn(|| unsafe {
            libc::setpriority(libc::PRIO_PROCESS, 0, 5) == 0 && {
                be_patient();
                share();
                get().is_none_or(|now| now.sched_nice == 5)
            }
        });
        assert!(was_set.join().unwrap());
    }
}

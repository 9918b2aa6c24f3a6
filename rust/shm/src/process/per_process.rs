//! Static state of one process: a child made by `fork` begins with a value of its own.
//!
//! Invariants: no lock is inherited. A lock that another thread held at the fork would never be released in the child.
//! So the parent's value is leaked there (a few hundred bytes a fork).
#![allow(unsafe_code)]

use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

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

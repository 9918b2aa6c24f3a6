//! The atomics and the mutex of the protocol. The model of the protocol replaces them by those of a model checker.

pub(crate) use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst};
pub(crate) use core::sync::atomic::{AtomicU32, AtomicU64, fence};
pub(crate) use std::sync::Mutex;

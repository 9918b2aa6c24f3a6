//! What the protocol's words are made of. A model of the protocol puts a model checker's in their place.

pub(crate) use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst};
pub(crate) use core::sync::atomic::{AtomicU32, AtomicU64, fence};
pub(crate) use std::sync::Mutex;

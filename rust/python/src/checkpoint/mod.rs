//! Bindings of `tundish-commit`: checkpoint roots, file images and the shard writer.

pub(crate) mod checkpoint_root;
mod descriptions;
pub(crate) mod file_image;
pub(crate) mod file_metadata;
pub(crate) mod read_lock;
pub(crate) mod shard_writer;
pub(crate) mod tensor_copy;

use std::ops::ControlFlow;

use tundish_packing::Progress;

use crate::long_work::SignalCheck;

/// Reports progress and checks signals; breaks on Ctrl-C.
fn tick(signals: &mut SignalCheck, phase: &'static str, done: u64, total: u64) -> ControlFlow<()> {
    if signals.tick(phase, done, total).is_ok() { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
}

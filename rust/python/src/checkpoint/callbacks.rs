//! A progress callback for `tundish-commit`, which also checks signals.

use std::ops::ControlFlow;

use tundish_packing::Progress;

use crate::long_work::SignalCheck;

/// Reports progress and checks signals; breaks on Ctrl-C.
pub(crate) fn tick(signals: &mut SignalCheck, phase: &'static str, done: u64, total: u64) -> ControlFlow<()> {
    if signals.tick(phase, done, total).is_ok() { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
}

//! The name of a segment of this process: claimed first, and given to the segment when that is whole.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tundish_shm::arena::Arena;
use tundish_shm::attachment::Keeper;
use tundish_shm::named::{NameClaim, NameHold, SegmentFolder, SegmentName};
use tundish_shm::{CheckCancelled, Segment, ShmError};

use super::check_signals;
use crate::long_work::SignalCheck;

/// A segment's name, before and after the segment has it.
pub(super) struct ClaimedName(Mutex<State>);

enum State {
    Claimed(NameClaim),
    /// Also kept by every view of this process: the last one removes the name.
    Held(Arc<NameHold>),
    /// The name went to another segment.
    Lost,
}

/// Makes a segment for `len` bytes: from the arena, or a new one for `name`.
pub(super) fn make_segment(
    len: usize,
    name: Option<&str>,
    signals: &mut SignalCheck,
) -> Result<(Segment, Option<ClaimedName>), ShmError> {
    let mut check_cancelled = || check_signals(signals);
    let Some(name) = name else {
        return Ok((Arena::of_arrays().take(len, &mut check_cancelled)?, None));
    };
    let folder = Arc::new(SegmentFolder::standard()?);
    let claim = NameClaim::new(folder, SegmentName::new(name)?, &mut check_cancelled)?;
    let segment = claim.make_segment(len, &mut check_cancelled)?;
    Ok((segment, Some(ClaimedName(Mutex::new(State::Claimed(claim))))))
}

impl ClaimedName {
    /// Gives the name to the segment. A second call does nothing.
    pub(super) fn publish_name(&self, segment: &Segment, check_cancelled: CheckCancelled<'_>) -> Result<(), ShmError> {
        let mut state = self.lock();
        match std::mem::replace(&mut *state, State::Lost) {
            State::Claimed(claim) => *state = State::Held(Arc::new(claim.publish(segment.file(), check_cancelled)?)),
            other => *state = other,
        }
        Ok(())
    }

    /// The value that views of this process keep.
    pub(super) fn keeper(&self) -> Option<Keeper> {
        match &*self.lock() {
            State::Held(hold) => Some(Arc::clone(hold) as Keeper),
            State::Claimed(_) | State::Lost => None,
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

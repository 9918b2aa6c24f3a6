//! The name of a segment of this process: claimed first, and taken when the segment is whole.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tundish_shm::arena::Arena;
use tundish_shm::attachment::Keeper;
use tundish_shm::named::{Claim, Directory, Hold, SegmentName};
use tundish_shm::{GoOn, Segment, ShmError};

use super::look;
use crate::enter::Door;

/// A segment's name, before it has it and afterwards.
pub(super) struct ClaimedName(Mutex<State>);

enum State {
    Claimed(Claim),
    /// Kept by every view of this process, too: the last one of them has it taken away.
    Held(Arc<Hold>),
    /// It could not be taken.
    Lost,
}

/// A segment for `len` bytes: of the arena, or where there is a name one that is to have it.
pub(super) fn take(
    len: usize,
    huge: bool,
    name: Option<&str>,
    door: &mut Door,
) -> Result<(Segment, Option<ClaimedName>), ShmError> {
    let mut go_on = || look(door);
    let Some(name) = name else {
        return Ok((Arena::of_arrays().take(len, huge, &mut go_on)?, None));
    };
    let directory = Arc::new(Directory::standard()?);
    let claim = Claim::new(directory, SegmentName::new(name)?, &mut go_on)?;
    let segment = claim.make_segment(len, huge, &mut go_on)?;
    Ok((segment, Some(ClaimedName(Mutex::new(State::Claimed(claim))))))
}

impl ClaimedName {
    /// Gives the name to the segment that it was claimed for. Done twice is done once.
    pub(super) fn appear(&self, segment: &Segment, go_on: GoOn<'_>) -> Result<(), ShmError> {
        let mut state = self.lock();
        match std::mem::replace(&mut *state, State::Lost) {
            State::Claimed(claim) => *state = State::Held(Arc::new(claim.publish(segment.file(), go_on)?)),
            other => *state = other,
        }
        Ok(())
    }

    /// What views of this process are to keep.
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

//! Finds the named segments of this user, and removes those that no process has any more.
//!
//! Invariants: only a file of this user, under a name of this library, with its header, is looked at. It is removed
//! only when no process holds it (`named/probe.rs`) and none is seen to map it (`maps.rs`). Any number of processes may
//! sweep at once, and create and attach meanwhile.

mod maps;

use std::path::PathBuf;

use crate::error::ShmError;
use crate::memory_file::GoOn;
use crate::named::probe::Probe;
use crate::named::{Directory, SegmentName};
use crate::owner::Owner;

/// Segments whose locks are held at once, and that one look at all processes is for.
const TOGETHER: usize = 64;

/// A named segment of this user.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NamedSegment {
    /// Its name.
    pub name: SegmentName,
    /// Its file.
    pub path: PathBuf,
    /// Bytes of the file.
    pub bytes: usize,
    /// Who made it.
    pub owner: Owner,
    /// Who has it.
    pub state: State,
}

/// Who has a segment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum State {
    /// At least one process holds it.
    Held,
    /// Nobody holds it, but these processes map it, without this library.
    QueueMemory(Vec<u32>),
    /// Nobody.
    Dead,
}

/// What a look at the named segments found.
#[derive(Debug, Default)]
#[non_exhaustive]
pub struct SweepReport {
    /// Dead ones: removed by [`sweep`], only found by [`survey`].
    pub dead: Vec<NamedSegment>,
    /// Those that a process holds or maps.
    pub live: Vec<NamedSegment>,
    /// What could not be looked at or removed. The next sweep tries again.
    pub failed: Vec<ShmError>,
}

/// Looks at the named segments of this user, and changes nothing.
///
/// # Errors
/// When the folder cannot be listed, and what `go_on` says. What concerns a single segment is in the report.
pub fn survey(directory: &Directory, go_on: GoOn<'_>) -> Result<SweepReport, ShmError> {
    look(directory, go_on, |_| Ok(()))
}

/// Removes the named segments of this user that nobody has, and nothing else.
///
/// # Errors
/// As [`survey`].
pub fn sweep(directory: &Directory, go_on: GoOn<'_>) -> Result<SweepReport, ShmError> {
    look(directory, go_on, |probe| probe.remove())
}

fn look(
    directory: &Directory,
    go_on: GoOn<'_>,
    treat_dead: impl Fn(&Probe<'_>) -> Result<(), ShmError>,
) -> Result<SweepReport, ShmError> {
    let mut report = SweepReport::default();
    for names in directory.names()?.chunks(TOGETHER) {
        let mut probes = Vec::new();
        // In the order of their names, as every sweep does: two never wait for each other.
        for name in names {
            match Probe::take(directory, name, go_on) {
                Ok(probe) => probes.extend(probe),
                Err(ShmError::Interrupted) => return Err(ShmError::Interrupted),
                Err(error) => report.failed.push(error),
            }
        }
        let states = match judge_all(&probes) {
            Ok(states) => states,
            Err(error) => {
                report.failed.push(error);
                continue;
            }
        };
        for (probe, state) in probes.iter().zip(states) {
            let treated = state.and_then(|state| {
                if state == State::Dead {
                    treat_dead(probe)?;
                }
                Ok(described(directory, probe, state))
            });
            match treated {
                Ok(segment) if segment.state == State::Dead => report.dead.push(segment),
                Ok(segment) => report.live.push(segment),
                Err(error) => report.failed.push(error),
            }
        }
    }
    Ok(report)
}

fn described(directory: &Directory, probe: &Probe<'_>, state: State) -> NamedSegment {
    let (name, path) = (probe.name().clone(), directory.path_of(probe.name()));
    NamedSegment { name, path, bytes: probe.bytes, owner: probe.owner, state }
}

/// Who has a segment.
pub(crate) fn judge(probe: &Probe<'_>) -> Result<State, ShmError> {
    judge_all(std::slice::from_ref(probe))?.pop().unwrap_or(Ok(State::Held))
}

/// Who has each segment, after one look at the maps of all processes; it stays so as long as the probe locks are held,
/// but for processes that map a file without asking. Fails where that look does.
fn judge_all(probes: &[Probe<'_>]) -> Result<Vec<Result<State, ShmError>>, ShmError> {
    let mut states: Vec<_> =
        probes.iter().map(|probe| Ok(if probe.is_held()? { State::Held } else { State::Dead })).collect();
    let is_dead = |state: &Result<State, ShmError>| matches!(state, Ok(State::Dead));
    let files: Vec<_> =
        probes.iter().zip(&states).filter(|(_, state)| is_dead(state)).map(|(probe, _)| probe.identity()).collect();
    if files.is_empty() {
        return Ok(states);
    }
    let mut mappers = maps::mappers(&files)?;
    for (probe, state) in probes.iter().zip(&mut states) {
        if is_dead(state)
            && let Some(processes) = mappers.remove(&probe.identity())
        {
            *state = Ok(State::QueueMemory(processes));
        }
    }
    Ok(states)
}

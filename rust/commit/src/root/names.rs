//! The names in a root.
//!
//! | name | what it is |
//! |---|---|
//! | `hf-100`, `dcp-100` | a published checkpoint: whole and durable |
//! | `hf-latest`, `dcp-latest` | a relative symbolic link to the newest |
//! | `discarded-hf-100`, `discarded-hf-100-2` | set aside by [`discard_after`](crate::root::Root::discard_after); no longer counted |
//! | `.hf-100.incomplete` | a checkpoint that is being written, or one that was overwritten |
//! | `.hf-100.removed-0` | a checkpoint that is being removed |
//! | `.discard-after-100` | marker of a `discard_after` under way; the next start completes it |
//! | `.hf-latest.incomplete` | a link before it has its name |
//! | `.owner` | the writer lock and the owner's heartbeat |
//!
//! Invariants: the owner may remove every hidden name here except the lock and the marker. All other names belong to
//! people and are never touched.

use std::ffi::{OsStr, OsString};

use crate::manifest::CheckpointKind;

/// The largest step, so that steps fit into signed integers everywhere.
pub(crate) const MAX_STEP: u64 = i64::MAX as u64;
pub(crate) const WRITER_LOCK: &str = ".owner";

/// The meaning of a name in a root.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum RootEntry {
    Checkpoint(CheckpointKind, u64),
    /// Left by a dead owner.
    Leftover,
    /// Checkpoints above this step are to be set aside.
    DiscardMarker(u64),
    Other,
}

pub(crate) fn checkpoint(kind: CheckpointKind, step: u64) -> OsString {
    format!("{kind}-{step}").into()
}

pub(crate) fn unfinished(kind: CheckpointKind, step: u64) -> OsString {
    format!(".{kind}-{step}.incomplete").into()
}

/// The name of the folder in which a checkpoint is written.
pub fn unfinished_name(kind: CheckpointKind, step: u64) -> String {
    unfinished(kind, step).to_string_lossy().into_owned()
}

pub(crate) fn removed(kind: CheckpointKind, step: u64, number: u64) -> OsString {
    format!(".{kind}-{step}.removed-{number}").into()
}

/// The candidates for the name of a checkpoint that is set aside.
pub(crate) fn set_aside(kind: CheckpointKind, step: u64, number: u64) -> OsString {
    match number {
        0 => format!("discarded-{kind}-{step}").into(),
        _ => format!("discarded-{kind}-{step}-{}", number + 1).into(),
    }
}

pub(crate) fn discard_marker(step: u64) -> OsString {
    format!(".discard-after-{step}").into()
}

pub(crate) fn latest_link(kind: CheckpointKind) -> OsString {
    format!("{kind}-latest").into()
}

/// The name of a link before it takes the place of `name`.
pub(crate) fn temporary(name: &OsStr) -> OsString {
    let mut temporary = OsString::from(".");
    temporary.push(name);
    temporary.push(".incomplete");
    temporary
}

pub(crate) fn classify(name: &OsStr) -> RootEntry {
    let Some(text) = name.to_str() else {
        return RootEntry::Other;
    };
    if let Some((kind, step)) = kind_and_step(text) {
        return RootEntry::Checkpoint(kind, step);
    }
    if let Some(step) = text.strip_prefix(".discard-after-").and_then(number) {
        return RootEntry::DiscardMarker(step);
    }
    if is_leftover(text) { RootEntry::Leftover } else { RootEntry::Other }
}

fn is_leftover(text: &str) -> bool {
    let Some(hidden) = text.strip_prefix('.') else {
        return false;
    };
    if let Some(name) = hidden.strip_suffix(".incomplete") {
        let is_pointer = CheckpointKind::ALL.into_iter().any(|kind| latest_link(kind) == name);
        return is_pointer || kind_and_step(name).is_some();
    }
    hidden
        .rsplit_once(".removed-")
        .is_some_and(|(name, count)| kind_and_step(name).is_some() && number(count).is_some())
}

fn kind_and_step(text: &str) -> Option<(CheckpointKind, u64)> {
    let (kind, step) = text.split_once('-')?;
    Some((kind.parse().ok()?, number(step)?))
}

/// Parses a number in the one spelling that this library writes.
fn number(text: &str) -> Option<u64> {
    let number = text.parse().ok()?;
    (number <= MAX_STEP && format!("{number}") == text).then_some(number)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn classified(name: &str) -> RootEntry {
        classify(OsStr::new(name))
    }

    #[test]
    fn own_names_are_recognised() {
        for step in [0, 7, MAX_STEP] {
            for kind in CheckpointKind::ALL {
                assert_eq!(classify(&checkpoint(kind, step)), RootEntry::Checkpoint(kind, step));
                assert_eq!(classify(&unfinished(kind, step)), RootEntry::Leftover);
                assert_eq!(classify(&removed(kind, step, 3)), RootEntry::Leftover);
                assert_eq!(classify(&set_aside(kind, step, 0)), RootEntry::Other);
                assert_eq!(classify(&set_aside(kind, step, 1)), RootEntry::Other);
                assert_eq!(classify(&latest_link(kind)), RootEntry::Other);
                assert_eq!(classify(&temporary(&latest_link(kind))), RootEntry::Leftover);
            }
            assert_eq!(classify(&discard_marker(step)), RootEntry::DiscardMarker(step));
        }
        assert_eq!(set_aside(CheckpointKind::Hf, 5, 1), "discarded-hf-5-2");
    }

    #[test]
    fn foreign_names_are_not_recognised() {
        for name in [
            "hf-007",
            "hf-+7",
            "hf--7",
            "hf-7 ",
            "hf-7.bak",
            "HF-7",
            "hf-9223372036854775808",
            "dcp-",
            "hf-latest",
            "notes.incomplete",
            ".notes.incomplete",
            ".hf-7",
            ".hf-07.incomplete",
            ".hf-7.removed",
            ".hf-7.removed-x",
            ".hf-7.incomplete.txt",
            ".discard-after-",
            ".discard-after-1x",
            ".owner",
            "checkpoints.json",
            "",
        ] {
            assert_eq!(classified(name), RootEntry::Other, "{name}");
        }
    }
}

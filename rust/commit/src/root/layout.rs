//! What lies in a root, and under which names.
//!
//! | name | what it is |
//! |---|---|
//! | `hf-100`, `dcp-100` | a published checkpoint: whole and durable |
//! | `hf-latest`, `dcp-latest` | the pointer: a relative symbolic link to the newest |
//! | `checkpoints.json` | the registry: what is published, for people and tools; made from the folders |
//! | `discarded-hf-100`, `discarded-hf-100-2` | set aside by [`discard_after`](super::Root::discard_after): whole, but no longer counted |
//! | `.hf-100.incomplete` | a checkpoint that is being written, or what an overwritten one held before |
//! | `.hf-100.removed-0` | a checkpoint that is being removed |
//! | `.discard-after-100` | a `discard_after` that is under way; the next start completes it |
//! | `.checkpoints.json.incomplete`, `.hf-latest.incomplete` | the registry, a pointer, before it has its name |
//! | `.exchange.incomplete` | an empty folder that shows whether the file system can exchange two |
//! | `.owner` | the owner's lock and heartbeat |
//!
//! What always holds: everything with a hidden name that is no lock and no intent may be removed by the owner;
//! any other name belongs to people and is never touched.

use std::ffi::{OsStr, OsString};

use crate::manifest::Kind;

/// Steps end here, so that they are integers everywhere.
pub(super) const MAX_STEP: u64 = i64::MAX as u64;
pub(super) const REGISTRY: &str = "checkpoints.json";
pub(super) const OWNER: &str = ".owner";
pub(super) const EXCHANGE_PROBE: &str = ".exchange.incomplete";

/// What a name in a root stands for.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Entry {
    Checkpoint(Kind, u64),
    /// What a dead owner left.
    Leftover,
    /// Set aside what is newer than this step.
    Intent(u64),
    Other,
}

pub(super) fn checkpoint(kind: Kind, step: u64) -> OsString {
    format!("{kind}-{step}").into()
}

pub(super) fn attempt(kind: Kind, step: u64) -> OsString {
    format!(".{kind}-{step}.incomplete").into()
}

pub(super) fn removed(kind: Kind, step: u64, number: u64) -> OsString {
    format!(".{kind}-{step}.removed-{number}").into()
}

/// The names for what is set aside: the first that is free is taken.
pub(super) fn set_aside(kind: Kind, step: u64, number: u64) -> OsString {
    match number {
        0 => format!("discarded-{kind}-{step}").into(),
        _ => format!("discarded-{kind}-{step}-{}", number + 1).into(),
    }
}

pub(super) fn intent(step: u64) -> OsString {
    format!(".discard-after-{step}").into()
}

pub(super) fn pointer(kind: Kind) -> OsString {
    format!("{kind}-latest").into()
}

/// The name of a file or link before it takes the place of `name`.
pub(super) fn temporary(name: &OsStr) -> OsString {
    let mut temporary = OsString::from(".");
    temporary.push(name);
    temporary.push(".incomplete");
    temporary
}

pub(super) fn classify(name: &OsStr) -> Entry {
    let Some(text) = name.to_str() else {
        return Entry::Other;
    };
    if let Some((kind, step)) = kind_and_step(text) {
        return Entry::Checkpoint(kind, step);
    }
    if let Some(step) = text.strip_prefix(".discard-after-").and_then(number) {
        return Entry::Intent(step);
    }
    if is_leftover(text) { Entry::Leftover } else { Entry::Other }
}

fn is_leftover(text: &str) -> bool {
    let Some(hidden) = text.strip_prefix('.') else {
        return false;
    };
    if let Some(name) = hidden.strip_suffix(".incomplete") {
        let is_pointer = Kind::ALL.into_iter().any(|kind| pointer(kind) == name);
        return name == REGISTRY || text == EXCHANGE_PROBE || is_pointer || kind_and_step(name).is_some();
    }
    hidden
        .rsplit_once(".removed-")
        .is_some_and(|(name, count)| kind_and_step(name).is_some() && number(count).is_some())
}

fn kind_and_step(text: &str) -> Option<(Kind, u64)> {
    let (kind, step) = text.split_once('-')?;
    Some((kind.parse().ok()?, number(step)?))
}

/// A number as this library writes it, and no other spelling of it.
fn number(text: &str) -> Option<u64> {
    let number = text.parse().ok()?;
    (number <= MAX_STEP && format!("{number}") == text).then_some(number)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn classified(name: &str) -> Entry {
        classify(OsStr::new(name))
    }

    #[test]
    fn own_names_are_recognised() {
        for step in [0, 7, MAX_STEP] {
            for kind in Kind::ALL {
                assert_eq!(classify(&checkpoint(kind, step)), Entry::Checkpoint(kind, step));
                assert_eq!(classify(&attempt(kind, step)), Entry::Leftover);
                assert_eq!(classify(&removed(kind, step, 3)), Entry::Leftover);
                assert_eq!(classify(&set_aside(kind, step, 0)), Entry::Other);
                assert_eq!(classify(&set_aside(kind, step, 1)), Entry::Other);
                assert_eq!(classify(&pointer(kind)), Entry::Other);
                assert_eq!(classify(&temporary(&pointer(kind))), Entry::Leftover);
            }
            assert_eq!(classify(&intent(step)), Entry::Intent(step));
        }
        assert_eq!(classified(".checkpoints.json.incomplete"), Entry::Leftover);
        assert_eq!(classified(EXCHANGE_PROBE), Entry::Leftover);
        assert_eq!(set_aside(Kind::Hf, 5, 1), "discarded-hf-5-2");
    }

    #[test]
    fn what_people_put_there_is_left_to_them() {
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
            assert_eq!(classified(name), Entry::Other, "{name}");
        }
    }
}

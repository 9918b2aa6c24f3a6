//! Which process this is, among all that may come upon one root.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::checksum::Checksum;

/// A process: where it runs and since when.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// The name of its machine, for people.
    pub host: String,
    /// What the machine's kernel drew when it was started; empty where that cannot be known.
    pub boot_id: String,
    /// The number of its process space: containers on one machine count their processes each for itself.
    pub pid_space: String,
    /// Its number there.
    pub pid: u32,
    /// When it was started, in the kernel's ticks: numbers of processes come round again.
    pub started: u64,
    /// Which of the programs it is that a process runs one after the other (by `exec`); empty where that cannot be
    /// known.
    #[serde(default)]
    pub program: String,
}

/// What is known of another process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Life {
    Alive,
    Dead,
    /// It runs elsewhere, if it does.
    Unknown,
}

impl Identity {
    /// This process.
    pub fn current() -> Self {
        let pid = std::process::id();
        let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default().trim().to_owned();
        let pid_space = std::fs::read_link("/proc/self/ns/pid").unwrap_or_default();
        Self {
            host: rustix::system::uname().nodename().to_string_lossy().into_owned(),
            boot_id: read("/proc/sys/kernel/random/boot_id"),
            pid_space: pid_space.to_string_lossy().into_owned(),
            pid,
            started: started(pid).unwrap_or(0),
            program: program(),
        }
    }

    /// Whether `other` runs, or ran, under this very kernel.
    pub(super) fn has_kernel_of(&self, other: &Identity) -> bool {
        !self.boot_id.is_empty() && self.boot_id == other.boot_id
    }

    /// Whether the process `other` lives, as far as this one can see.
    pub(super) fn sees(&self, other: &Identity) -> Life {
        let is_visible = !self.boot_id.is_empty()
            && !self.pid_space.is_empty()
            && (&self.boot_id, &self.pid_space) == (&other.boot_id, &other.pid_space);
        if !is_visible {
            return Life::Unknown;
        }
        if self.pid == other.pid && self.started == other.started {
            // The program before this one ended with all that it held.
            return if self.program == other.program { Life::Alive } else { Life::Dead };
        }
        match started(other.pid) {
            Some(started) if started == other.started => Life::Alive,
            _ => Life::Dead,
        }
    }
}

/// Where the kernel put the parts of this program is drawn anew for each, unless it was told not to.
fn program() -> String {
    std::fs::read("/proc/self/auxv").map_or_else(|_| String::new(), |vector| Checksum::of(&vector).to_string())
}

/// When the process was started; `None` where there is none of that number, or only what is left of a dead one.
fn started(pid: u32) -> Option<u64> {
    let text = std::fs::read_to_string(Path::new("/proc").join(pid.to_string()).join("stat")).ok()?;
    // The program's name stands in parentheses and may hold some itself. Behind it: the state, which is field 3.
    let fields: Vec<&str> = text.rsplit_once(')')?.1.split_whitespace().collect();
    if matches!(fields.first(), Some(&("Z" | "X" | "x"))) {
        return None;
    }
    fields.get(22 - 3)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn a_process_is_seen_as_long_as_it_lives() {
        let me = Identity::current();
        assert_ne!(me.started, 0);
        assert_eq!(me.sees(&me), Life::Alive);
        let mut other = Command::new("sleep").arg("60").spawn().unwrap();
        let mut seen = Identity { pid: other.id(), ..me.clone() };
        seen.started = started(seen.pid).unwrap();
        assert_eq!(me.sees(&seen), Life::Alive);
        // The same number, but an earlier process.
        assert_eq!(me.sees(&Identity { started: seen.started - 1, ..seen.clone() }), Life::Dead);
        other.kill().unwrap();
        // Dead, though its parent has not asked after it yet.
        while started(seen.pid).is_some() {
            std::thread::yield_now();
        }
        assert_eq!(me.sees(&seen), Life::Dead);
        other.wait().unwrap();
        assert_eq!(me.sees(&seen), Life::Dead);
    }

    #[test]
    fn nothing_is_known_of_processes_elsewhere() {
        let me = Identity::current();
        for other in [
            Identity { boot_id: "another".into(), ..me.clone() },
            Identity { pid_space: "pid:[1]".into(), ..me.clone() },
        ] {
            assert_eq!(me.sees(&other), Life::Unknown);
        }
        let nowhere = Identity { boot_id: String::new(), ..me };
        assert_eq!(nowhere.sees(&nowhere.clone()), Life::Unknown);
    }
}

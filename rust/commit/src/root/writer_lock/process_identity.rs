//! Identifies a process among all processes on all machines that may open one root.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::checksum::Checksum;

/// A process: where it runs and since when.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessIdentity {
    /// The name of its machine, for messages.
    pub host: String,
    /// The kernel's random boot id; empty where it is unknown.
    pub boot_id: String,
    /// Its pid namespace: containers on one machine number their processes separately.
    pub pid_space: String,
    /// Its process id in that namespace.
    pub pid: u32,
    /// Its start time in kernel ticks: process ids are reused.
    pub started: u64,
    /// Identifies the program, since `exec` changes it while the pid stays; empty where it is unknown.
    #[serde(default)]
    pub program: String,
}

/// Whether another process lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ProcessState {
    Alive,
    Dead,
    /// It may run where this process cannot see it.
    Unknown,
}

impl ProcessIdentity {
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

    /// Whether `other` runs, or ran, under the same kernel since the same boot.
    pub(crate) fn has_same_kernel_as(&self, other: &ProcessIdentity) -> bool {
        !self.boot_id.is_empty() && self.boot_id == other.boot_id
    }

    /// Whether the process `other` lives, as far as this process can see.
    pub(crate) fn state_of(&self, other: &ProcessIdentity) -> ProcessState {
        let is_visible = !self.boot_id.is_empty()
            && !self.pid_space.is_empty()
            && (&self.boot_id, &self.pid_space) == (&other.boot_id, &other.pid_space);
        if !is_visible {
            return ProcessState::Unknown;
        }
        if self.pid == other.pid && self.started == other.started {
            // The program before `exec` has ended, with its locks.
            return if self.program == other.program { ProcessState::Alive } else { ProcessState::Dead };
        }
        match started(other.pid) {
            Some(started) if started == other.started => ProcessState::Alive,
            _ => ProcessState::Dead,
        }
    }
}

/// A checksum of the program's load addresses, which the kernel randomizes for each `exec`.
fn program() -> String {
    std::fs::read("/proc/self/auxv").map_or_else(|_| String::new(), |vector| Checksum::of(&vector).to_string())
}

/// The start time of a process; `None` where it does not exist or is a zombie.
fn started(pid: u32) -> Option<u64> {
    let text = std::fs::read_to_string(Path::new("/proc").join(pid.to_string()).join("stat")).ok()?;
    // The program's name is in parentheses and may contain some. After it comes the state, which is field 3.
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
    fn a_process_is_alive_until_it_ends() {
        let me = ProcessIdentity::current();
        assert_ne!(me.started, 0);
        assert_eq!(me.state_of(&me), ProcessState::Alive);
        let mut other = Command::new("sleep").arg("60").spawn().unwrap();
        let mut seen = ProcessIdentity { pid: other.id(), ..me.clone() };
        seen.started = started(seen.pid).unwrap();
        assert_eq!(me.state_of(&seen), ProcessState::Alive);
        // An earlier process had the same pid.
        assert_eq!(me.state_of(&ProcessIdentity { started: seen.started - 1, ..seen.clone() }), ProcessState::Dead);
        other.kill().unwrap();
        // It is dead although its parent has not waited for it yet.
        while started(seen.pid).is_some() {
            std::thread::yield_now();
        }
        assert_eq!(me.state_of(&seen), ProcessState::Dead);
        other.wait().unwrap();
        assert_eq!(me.state_of(&seen), ProcessState::Dead);
    }

    #[test]
    fn processes_elsewhere_are_unknown() {
        let me = ProcessIdentity::current();
        for other in [
            ProcessIdentity { boot_id: "another".into(), ..me.clone() },
            ProcessIdentity { pid_space: "pid:[1]".into(), ..me.clone() },
        ] {
            assert_eq!(me.state_of(&other), ProcessState::Unknown);
        }
        let nowhere = ProcessIdentity { boot_id: String::new(), ..me };
        assert_eq!(nowhere.state_of(&nowhere.clone()), ProcessState::Unknown);
    }
}

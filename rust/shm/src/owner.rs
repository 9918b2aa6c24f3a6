//! Records which process made a segment, for people to read; nothing is decided by it.
//!
//! Locks alone tell whether a process holds a segment (`named/probe.rs`): process numbers are used again, and differ
//! between namespaces. The record has the time at which the process and the machine were started, so that a reader is
//! not misled by a number that was used again.

use rustix::process::geteuid;

/// The process that made a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Owner {
    /// Its number, in the namespace that it was in.
    pub process: u32,
    /// The user that it acted for.
    pub user: u32,
    /// When it was started: clock ticks since the machine was. Zero where the kernel did not say.
    pub started: u64,
    /// Half of the random number that the kernel draws when it starts. Zero where the kernel did not say.
    pub boot: u64,
}

impl Owner {
    /// Bytes of a written record.
    pub const BYTES: usize = 24;

    /// This process.
    pub fn current() -> Self {
        let process = std::process::id();
        let started = start_of(process).unwrap_or_default();
        Self { process, user: geteuid().as_raw(), started, boot: boot().unwrap_or_default() }
    }

    /// Whether it still runs, as far as this process can see: not if it is in another namespace.
    pub fn lives(&self) -> bool {
        boot() == Some(self.boot) && start_of(self.process) == Some(self.started)
    }

    /// The record as it lies in memory.
    pub fn to_bytes(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..4].copy_from_slice(&self.process.to_ne_bytes());
        bytes[4..8].copy_from_slice(&self.user.to_ne_bytes());
        bytes[8..16].copy_from_slice(&self.started.to_ne_bytes());
        bytes[16..].copy_from_slice(&self.boot.to_ne_bytes());
        bytes
    }

    /// A record that was written by a process of this machine. Any bytes are one.
    pub fn from_bytes(bytes: &[u8; Self::BYTES]) -> Self {
        let [a, b, c, d, e, f, g, h, rest @ ..] = *bytes;
        let word = |start: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&rest[start..start + 8]);
            u64::from_ne_bytes(word)
        };
        Self {
            process: u32::from_ne_bytes([a, b, c, d]),
            user: u32::from_ne_bytes([e, f, g, h]),
            started: word(0),
            boot: word(8),
        }
    }
}

/// When a running process was started: field 22 of its `stat`, as proc(5) counts.
fn start_of(process: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // The second field is a name in parentheses, which may hold anything.
    let mut fields = stat[stat.rfind(')')? + 1..].split_ascii_whitespace();
    let state = fields.next()?;
    if matches!(state, "Z" | "X") {
        return None;
    }
    fields.nth(18)?.parse().ok()
}

fn boot() -> Option<u64> {
    let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    let digits: String = id.chars().filter(|sign| *sign != '-').take(16).collect();
    u64::from_str_radix(&digits, 16).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_comes_back_as_it_was_written() {
        let owner = Owner { process: 1, user: 2, started: u64::MAX - 3, boot: 4 };
        assert_eq!(Owner::from_bytes(&owner.to_bytes()), owner);
    }

    #[test]
    fn this_process_lives_and_another_of_its_number_does_not() {
        let owner = Owner::current();
        assert!(owner.lives());
        assert!(!Owner { started: owner.started + 1, ..owner }.lives());
        assert!(!Owner { boot: owner.boot ^ 1, ..owner }.lives());
    }

    #[test]
    fn a_process_that_ended_and_was_not_waited_for_does_not_live() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let record = Owner { process: child.id(), ..Owner::current() };
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(10);
        while start_of(record.process).is_some() {
            assert!(std::time::Instant::now() < deadline, "it ends by itself");
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        child.wait().unwrap();
    }
}

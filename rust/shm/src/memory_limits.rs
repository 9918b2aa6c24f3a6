//! Reads how much memory is left on the machine, and to the control groups that this process is in.
//!
//! Anonymous shared memory belongs to no file system that could be full: the kernel kills a process that takes too
//! much. So a segment that does not fit is refused before its pages are reserved. Another process may take the same
//! memory in between; then the kernel's own limits decide.
//!
//! The kernel drops cached pages of files before it refuses memory, so they count as left (`MemAvailable` of proc(5),
//! `inactive_file` and `active_file` of the control groups' `memory.stat`).

use std::fs::read_to_string;
use std::path::{Path, PathBuf};

use crate::error::ShmError;

/// One byte in 256 is left for the page tables of two processes.
const FOR_PAGE_TABLES: u64 = 256;

/// Bytes that are left, and the limit that bounds them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Headroom {
    pub(crate) available: u64,
    pub(crate) bound: String,
}

/// Refuses a size that does not fit in the memory that is left.
///
/// # Errors
/// [`ShmError::NoHeadroom`]
pub(crate) fn check(asked: u64) -> Result<(), ShmError> {
    let needed = asked.saturating_add(asked / FOR_PAGE_TABLES);
    match headroom(Path::new("/")) {
        Some(Headroom { available, bound }) if available < needed => {
            Err(ShmError::NoHeadroom { asked, available, bound })
        }
        _ => Ok(()),
    }
}

/// Returns the memory that this process can have: the machine's, or the least limit of its control groups.
pub(crate) fn total() -> Option<u64> {
    let root = Path::new("/");
    let machine = meminfo(root, "MemTotal:");
    groups(root).iter().filter_map(|group| group.limit).chain(machine).min()
}

/// Returns the least memory that is left, by the files under `root`; `None` if they do not tell.
fn headroom(root: &Path) -> Option<Headroom> {
    let machine =
        meminfo(root, "MemAvailable:").map(|available| Headroom { available, bound: "on this machine".to_owned() });
    let groups = groups(root).into_iter().filter_map(|group| {
        let available = (group.limit?.saturating_sub(group.used)).saturating_add(group.reclaimable);
        Some(Headroom { available, bound: format!("to the control group {}", group.folder.display()) })
    });
    groups.chain(machine).min_by_key(|headroom| headroom.available)
}

fn meminfo(root: &Path, key: &str) -> Option<u64> {
    let text = read_to_string(root.join("proc/meminfo")).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(key))?;
    let kibibytes: u64 = line.split_ascii_whitespace().next()?.parse().ok()?;
    kibibytes.checked_mul(1024)
}

/// A control group's account of its memory.
struct ControlGroup {
    folder: PathBuf,
    limit: Option<u64>,
    used: u64,
    reclaimable: u64,
}

/// The names of the same files and fields in one version of control groups.
struct CgroupVersion {
    system: &'static str,
    limit: &'static str,
    used: &'static str,
    /// In version 1 only these count the groups below, too.
    reclaimable: [&'static str; 2],
}

const VERSIONS: [CgroupVersion; 2] = [
    CgroupVersion {
        system: "cgroup2",
        limit: "memory.max",
        used: "memory.current",
        reclaimable: ["inactive_file", "active_file"],
    },
    CgroupVersion {
        system: "cgroup",
        limit: "memory.limit_in_bytes",
        used: "memory.usage_in_bytes",
        reclaimable: ["total_inactive_file", "total_active_file"],
    },
];

/// The control groups of this process, and their ancestors.
fn groups(root: &Path) -> Vec<ControlGroup> {
    let read = |path: &str| read_to_string(root.join(path)).unwrap_or_default();
    let (own, mounts) = (read("proc/self/cgroup"), read("proc/self/mountinfo"));
    let mut groups = Vec::new();
    for version in &VERSIONS {
        let Some(path) = own.lines().find_map(|line| path_in(line, version)) else { continue };
        let Some((mount_root, mount)) = mounts.lines().find_map(|line| mount_of(line, version)) else { continue };
        // In a container the mount may show a part of the tree only, or the path may lead out of it.
        let inside = path.strip_prefix(mount_root.trim_end_matches('/')).unwrap_or_default();
        let top = root.join(mount.trim_start_matches('/'));
        let mut folder = top.clone();
        if !inside.contains("..") {
            folder.extend(inside.split('/').filter(|name| !name.is_empty()));
        }
        while folder.starts_with(&top) {
            groups.extend(read_group(&folder, version));
            folder.pop();
        }
    }
    groups
}

/// Parses a line of `/proc/self/cgroup`, `number:controllers:path`: the path if it is the memory group of `version`.
fn path_in<'a>(line: &'a str, version: &CgroupVersion) -> Option<&'a str> {
    let (number, rest) = line.split_once(':')?;
    let (controllers, path) = rest.split_once(':')?;
    let is_it = match version.system {
        "cgroup2" => number == "0" && controllers.is_empty(),
        _ => controllers.split(',').any(|controller| controller == "memory"),
    };
    is_it.then_some(path)
}

/// Parses a line of `/proc/self/mountinfo`: the mounted folder and the mount point.
fn mount_of<'a>(line: &'a str, version: &CgroupVersion) -> Option<(&'a str, &'a str)> {
    let (before, after) = line.split_once(" - ")?;
    let mut system = after.split(' ');
    if system.next()? != version.system {
        return None;
    }
    if version.system == "cgroup" && !system.next_back()?.split(',').any(|option| option == "memory") {
        return None;
    }
    let mut fields = before.split(' ').skip(3);
    Some((fields.next()?, fields.next()?))
}

/// `None` where the group does not account for memory.
fn read_group(folder: &Path, version: &CgroupVersion) -> Option<ControlGroup> {
    let read = |name: &str| read_to_string(folder.join(name)).ok();
    // "max" is no number: no limit.
    let limit = read(version.limit)?.trim().parse().ok();
    let used = read(version.used)?.trim().parse().ok()?;
    let stat = read("memory.stat").unwrap_or_default();
    let reclaimable = stat
        .lines()
        .filter_map(|line| line.split_once(' '))
        .filter(|(name, _)| version.reclaimable.contains(name))
        .filter_map(|(_, bytes)| bytes.trim().parse::<u64>().ok())
        .sum();
    Some(ControlGroup { folder: folder.to_owned(), limit, used, reclaimable })
}

#[cfg(test)]
#[expect(clippy::disallowed_methods, reason = "the tests write what the kernel would")]
mod tests {
    use std::fs::{create_dir_all, write};

    use super::*;

    const MEMINFO: &str = "MemTotal:       1000 kB\nMemFree:         100 kB\nMemAvailable:    600 kB\n";

    fn tree(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            create_dir_all(path.parent().unwrap()).unwrap();
            write(path, text).unwrap();
        }
        root
    }

    fn left(files: &[(&str, &str)]) -> Option<(u64, String)> {
        let root = tree(files);
        let headroom = headroom(root.path())?;
        Some((headroom.available, headroom.bound.replace(&root.path().display().to_string(), "")))
    }

    #[test]
    fn without_groups_the_machine_bounds() {
        assert_eq!(left(&[("proc/meminfo", MEMINFO)]), Some((600 << 10, "on this machine".to_owned())));
        assert_eq!(left(&[]), None);
    }

    #[test]
    fn every_group_upward_bounds_and_cached_files_count_as_left() {
        let files = [
            ("proc/meminfo", MEMINFO),
            ("proc/self/cgroup", "0::/job/step\n"),
            ("proc/self/mountinfo", "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"),
            ("sys/fs/cgroup/job/step/memory.max", "max\n"),
            ("sys/fs/cgroup/job/step/memory.current", "5000\n"),
            ("sys/fs/cgroup/job/memory.max", "100000\n"),
            ("sys/fs/cgroup/job/memory.current", "90000\n"),
            ("sys/fs/cgroup/job/memory.stat", "anon 7\nactive_file 1000\ninactive_file 200\nshmem 4000\n"),
        ];
        assert_eq!(left(&files), Some((11_200, "to the control group /sys/fs/cgroup/job".to_owned())));
    }

    #[test]
    fn the_first_version_counts_the_groups_below_too() {
        let files = [
            ("proc/meminfo", MEMINFO),
            ("proc/self/cgroup", "9:name=systemd:/\n4:cpu,memory:/job\n0::/\n"),
            (
                "proc/self/mountinfo",
                "30 23 0:26 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n\
                 31 23 0:27 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n",
            ),
            ("sys/fs/cgroup/memory/job/memory.limit_in_bytes", "50000\n"),
            ("sys/fs/cgroup/memory/job/memory.usage_in_bytes", "60000\n"),
            ("sys/fs/cgroup/memory/job/memory.stat", "inactive_file 9\ntotal_inactive_file 300\ntotal_active_file 4\n"),
        ];
        assert_eq!(left(&files), Some((304, "to the control group /sys/fs/cgroup/memory/job".to_owned())));
    }

    #[test]
    fn a_container_that_sees_a_part_of_the_tree_is_found_in_it() {
        for (own, root) in [("0::/box/one\n", "/box/one"), ("0::/../two\n", "/"), ("0::/\n", "/")] {
            let mount = format!("30 23 0:26 {root} /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n");
            let files = [
                ("proc/meminfo", MEMINFO),
                ("proc/self/cgroup", own),
                ("proc/self/mountinfo", mount.as_str()),
                ("sys/fs/cgroup/memory.max", "4096\n"),
                ("sys/fs/cgroup/memory.current", "96\n"),
            ];
            assert_eq!(left(&files), Some((4000, "to the control group /sys/fs/cgroup".to_owned())), "{own}");
        }
    }

    #[test]
    fn more_than_any_machine_has_is_refused_with_the_bytes_left() {
        let error = check(1 << 60).unwrap_err();
        assert!(
            matches!(error, ShmError::NoHeadroom { asked, available, .. } if asked == 1 << 60 && available < asked)
        );
        check(1).unwrap();
    }
}

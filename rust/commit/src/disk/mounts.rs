//! Where the numbers that a folder gives with its names can be believed.
//!
//! A folder is listed in a few calls, however much lies in it; to look at each name takes one call a name, and on a
//! network file system a message. What always holds: a number is believed only on a file system that is known to give
//! in its folders what a look at the name would give; never of a name that something is mounted at, since the folder
//! gives the number of what lies under it; and never where nothing is known of the mount. Who is not told looks.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;

use rustix::fs::{AtFlags, StatxFlags, statx};

/// Their sources take both numbers from the same place. Missing are, among others, btrfs and bcachefs, where the folder
/// may give the number of a subvolume; overlayfs, which makes up numbers of its own; and whatever goes through FUSE.
const HONEST: [&[u8]; 9] = [b"ext2", b"ext3", b"ext4", b"xfs", b"tmpfs", b"nfs", b"nfs4", b"lustre", b"ceph"];

/// The mounts that this thread sees.
const MOUNTS: &str = "/proc/thread-self/mountinfo";

/// The numbers in one folder.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Numbers {
    /// The last part of the path of every mount, wherever it is.
    mounted: BTreeSet<OsString>,
}

impl Numbers {
    /// Whether the number is that of what has the name.
    pub(super) fn are_of(&self, name: &OsStr) -> bool {
        // What is written otherwise among the mounts than it is.
        let is_escaped = name.as_bytes().iter().any(|byte| b" \t\n\\#".contains(byte));
        !is_escaped && !self.mounted.contains(name)
    }
}

/// What the numbers in a folder say; `None` where they may say anything.
pub(super) fn numbers_in(folder: impl AsFd) -> Option<Numbers> {
    // Without a word with the server: the mount is known here.
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    let found = statx(folder, "", flags, StatxFlags::MNT_ID).ok()?;
    if found.stx_mask & StatxFlags::MNT_ID.bits() == 0 {
        return None;
    }
    told(&std::fs::read(MOUNTS).ok()?, found.stx_mnt_id)
}

/// Reads a table of mounts, as proc(5) describes it, for a folder of the mount `id`.
fn told(table: &[u8], id: u64) -> Option<Numbers> {
    let mut is_honest = false;
    let mut mounted = BTreeSet::new();
    for line in table.split(|&byte| byte == b'\n').filter(|line| !line.is_empty()) {
        let mut fields = line.split(|&byte| byte == b' ');
        let found = fields.next()?;
        let place = fields.nth(3)?;
        let kind = fields.skip_while(|field| *field != b"-").nth(1)?;
        mounted.extend(place.rsplit(|&byte| byte == b'/').next().map(|name| OsStr::from_bytes(name).to_owned()));
        is_honest |= found == id.to_string().as_bytes() && HONEST.contains(&kind);
    }
    is_honest.then_some(Numbers { mounted })
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &str = "\
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw,discard
30 27 0:27 / /shared rw,relatime shared:3 master:1 - nfs4 server:/export rw
31 30 0:28 / /shared/run/hf-20 rw - tmpfs none rw
32 27 0:29 / /with\\040blank/dcp-7 rw - overlay none rw
33 27 0:30 / /odd rw - - - -
";

    #[test]
    fn numbers_are_told_where_the_file_system_is_honest_and_nothing_is_mounted() {
        for id in [27, 30, 31] {
            let numbers = told(TABLE.as_bytes(), id).unwrap();
            assert!(numbers.are_of(OsStr::new("hf-10")), "{id}");
            for mounted in ["hf-20", "dcp-7", "shared"] {
                assert!(!numbers.are_of(OsStr::new(mounted)), "{id}: {mounted}");
            }
        }
        assert!(!told(TABLE.as_bytes(), 27).unwrap().are_of(OsStr::new("with blank")));
    }

    #[test]
    fn nothing_is_told_where_they_may_be_anything() {
        // Of a file system that makes up its own; of mounts that are not there; of a table that cannot be read.
        for id in [32, 33, 34, 2, 0] {
            assert_eq!(told(TABLE.as_bytes(), id), None, "{id}");
        }
        assert_eq!(told(b"", 27), None);
        assert_eq!(told(b"27 1 254:0 / / rw,relatime", 27), None);
        assert_eq!(told(b"27 1 254:0 / / rw - ext4 /dev/vda rw\n28 27", 27), None);
    }

    #[test]
    fn the_folders_of_this_machine_tell_what_a_look_tells_or_nothing() {
        use crate::disk::{Disk, RealDisk};
        let own = tempfile::tempdir().unwrap();
        let folders = ["/", "/sys", "/sys/fs", "/dev", "/usr"].map(std::path::Path::new);
        for path in folders.into_iter().chain([own.path().parent().unwrap()]) {
            let Ok(folder) = RealDisk.open_path(path) else { continue };
            let device = RealDisk.folder_status(&folder, path).unwrap().device;
            for listed in RealDisk.list_with_numbers(&folder, path).unwrap() {
                // What goes or is replaced meanwhile tells nothing: a second list shows that it was not.
                let found = RealDisk.look_at(&folder, &listed.name, path);
                let is_unchanged = RealDisk.list_with_numbers(&folder, path).unwrap().contains(&listed);
                if let (Some(number), Ok(Some(found)), true) = (listed.number, found, is_unchanged) {
                    assert_eq!((number, device), (found.number, found.device), "{listed:?} in {}", path.display());
                }
            }
        }
    }
}

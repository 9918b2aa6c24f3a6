//! Paths, file names, and the names of hidden folders.
//!
//! A hidden folder is called `.NAME.<16 hexadecimal digits>.incomplete`: 8 digits of a tag for the machine and file
//! system of the writer (see `hidden_folder.rs`), then 8 random ones. A sweep removes no other name.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Component, Path, PathBuf};

use crate::error::CommitError;

const SUFFIX: &[u8] = b".incomplete";
const NONCE_DIGITS: usize = 16;
/// How much longer a hidden name is than its target's: two dots, the nonce, the suffix. In bytes.
const OVERHEAD: usize = 2 + NONCE_DIGITS + SUFFIX.len();
/// The longest name of a file on all common file systems, bytes.
const NAME_MAX: usize = 255;

/// The hidden name for `target`.
pub(crate) fn hidden(target: &OsStr, tag: u32, random: u32) -> OsString {
    let mut name = Vec::with_capacity(target.len() + OVERHEAD);
    name.push(b'.');
    name.extend_from_slice(target.as_bytes());
    name.extend_from_slice(format!(".{tag:08x}{random:08x}").as_bytes());
    name.extend_from_slice(SUFFIX);
    OsString::from_vec(name)
}

/// The tag in a hidden name; `None` for any other name.
pub(crate) fn tag_of(name: &OsStr) -> Option<u32> {
    let name = name.as_bytes();
    // A dot, at least one byte of a target name, and the rest.
    if name.len() <= OVERHEAD || name[0] != b'.' {
        return None;
    }
    let (head, nonce) = name.strip_suffix(SUFFIX)?.split_last_chunk::<NONCE_DIGITS>()?;
    let lower_hexadecimal = |digit: &u8| matches!(digit, b'0'..=b'9' | b'a'..=b'f');
    if head.last() != Some(&b'.') || !nonce.iter().all(lower_hexadecimal) {
        return None;
    }
    u32::from_str_radix(std::str::from_utf8(&nonce[..8]).ok()?, 16).ok()
}

/// Splits a target into the absolute path of its parent and its name. Symbolic links are not resolved.
pub(crate) fn split_target(target: &Path) -> Result<(PathBuf, OsString), CommitError> {
    let invalid = |reason| CommitError::InvalidName { path: target.to_path_buf(), reason };
    let (parent, name) = split(target)?;
    if name.len() + OVERHEAD > NAME_MAX {
        return Err(invalid("its last part is longer than 226 bytes"));
    }
    if tag_of(&name).is_some() {
        return Err(invalid("names of this form are those of unfinished folders"));
    }
    Ok((parent, name))
}

/// The absolute form of `path`; symbolic links are not resolved.
pub(crate) fn absolute(path: &Path) -> Result<PathBuf, CommitError> {
    std::path::absolute(path).map_err(|source| CommitError::Io {
        operation: "find the current folder for",
        path: path.to_path_buf(),
        source,
    })
}

/// Splits a path into the absolute path of a folder and a name in it. Symbolic links are not resolved.
pub(crate) fn split(path: &Path) -> Result<(PathBuf, OsString), CommitError> {
    let invalid = |reason| CommitError::InvalidName { path: path.to_path_buf(), reason };
    // `file_name` alone would take `plan/.` for `plan`.
    if path.as_os_str().as_bytes().ends_with(b"/.") {
        return Err(invalid("it does not end in a name"));
    }
    let name = path.file_name().ok_or_else(|| invalid("it does not end in a name"))?;
    if name.as_bytes().contains(&0) {
        return Err(invalid("it holds a zero byte"));
    }
    let absolute = absolute(path)?;
    let parent = absolute.parent().ok_or_else(|| invalid("it has no parent folder"))?;
    Ok((parent.to_path_buf(), name.to_os_string()))
}

/// The name of a target that [`split_target`] accepted.
pub(crate) fn last_part(target: &Path) -> &OsStr {
    target.file_name().unwrap_or_default()
}

/// Refuses anything but one plain file name.
pub(crate) fn check_file_name(folder: &Path, name: &str) -> Result<(), CommitError> {
    let mut components = Path::new(name).components();
    let plain = matches!(components.next(), Some(Component::Normal(part)) if part == name)
        && components.next().is_none()
        && !name.contains('\0');
    if plain {
        return Ok(());
    }
    Err(CommitError::InvalidName {
        path: folder.join(name),
        reason: "a file's name is one plain name, without slashes",
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hidden_names_are_recognised_and_no_others() {
        let name = hidden(OsStr::new("plan"), 0x0012_abcd, 0x1);
        assert_eq!(name, ".plan.0012abcd00000001.incomplete");
        assert_eq!(tag_of(&name), Some(0x0012_abcd));
        for other in [
            "plan.0012abcd00000001.incomplete",
            "..0012abcd00000001.incomplete",
            ".0012abcd00000001.incomplete",
            ".plan.0012abcd0000001.incomplete",
            ".plan.0012ABCD00000001.incomplete",
            ".plan.+012abcd00000001.incomplete",
            ".plan0012abcd00000001.incomplete",
            ".plan.0012abcd00000001.incomplete2",
            ".plan.incomplete",
            "",
            ".",
        ] {
            assert_eq!(tag_of(OsStr::new(other)), None, "{other}");
        }
    }

    #[test]
    fn the_longest_target_name_still_has_a_hidden_name() {
        let longest = "x".repeat(NAME_MAX - OVERHEAD);
        assert_eq!(longest.len(), 226);
        assert_eq!(hidden(OsStr::new(&longest), 1, 2).len(), NAME_MAX);
        assert!(split_target(Path::new(&longest)).is_ok());
        assert!(split_target(Path::new(&format!("{longest}x"))).is_err());
    }
}

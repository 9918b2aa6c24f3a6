//! Whether a file system has room for a plan, before anything of it is written.

use std::path::Path;

use crate::error::PackError;
use crate::npy::Layout;
use crate::plan::Field;

/// Bytes of the files of the six columns, of which `wide` tells those with 8 bytes a value.
pub(crate) fn bytes_of_columns(packs: u64, pieces: u64, wide: [bool; 6]) -> u128 {
    let len = |field| if field == Field::Indices { pieces } else { packs };
    Field::ALL.into_iter().zip(wide).map(|(field, wide)| Layout { wide, len: len(field) }.file_bytes()).sum()
}

/// Whether there are `needed` bytes free for what is to appear as `target`, as far as the file system tells.
///
/// # Errors
/// As `tundish_commit::free_space`.
pub(crate) fn has(target: &Path, needed: u128) -> Result<bool, PackError> {
    Ok(tundish_commit::free_space(target)?.is_none_or(|free| u128::from(free) >= needed))
}

/// Refuse a plan of `needed` bytes that is to appear as `target`, where there are fewer.
///
/// # Errors
/// `NoRoom`; as `tundish_commit::free_space`.
pub(crate) fn check(target: &Path, needed: u128, packs: u64, pieces: u64) -> Result<(), PackError> {
    // What lies there takes no more room, and whoever makes the folder tells of it.
    if has(target, needed)? || target.symlink_metadata().is_ok() {
        return Ok(());
    }
    // What dead writers left goes as the folder is made, and its room may be enough.
    let parent = target.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    drop(tundish_commit::sweep(parent));
    match tundish_commit::free_space(target)? {
        Some(free) if u128::from(free) < needed => {
            Err(PackError::NoRoom { path: target.to_owned(), needed, packs, pieces, free })
        }
        _ => Ok(()),
    }
}

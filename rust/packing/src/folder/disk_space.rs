//! Refuses a plan that the file system has no room for, before anything of it is written.

use std::path::Path;

use super::npy::NpyHeader;
use crate::error::PackError;
use crate::plan::{Field, WideColumns};

/// Bytes of the files of the columns; `wide` tells which columns have 8 bytes a value.
pub(super) fn bytes_of_columns(packs: u64, pieces: u64, fields: &[Field], wide: WideColumns) -> u128 {
    let len = |field: Field| if field.is_per_piece() { pieces } else { packs };
    let bytes = |&field: &Field| NpyHeader { wide: wide[field as usize], len: len(field) }.file_bytes();
    fields.iter().map(bytes).sum()
}

/// Refuse a plan of `needed` bytes that is to appear as `target` where fewer bytes are free.
///
/// # Errors
/// `NoRoom`; as `tundish_commit::free_space`.
pub(super) fn check(target: &Path, needed: u128, packs: u64, pieces: u64) -> Result<(), PackError> {
    let has_room =
        || Ok::<_, PackError>(tundish_commit::free_space(target)?.is_none_or(|free| u128::from(free) >= needed));
    // What lies at the target already takes no more room, and creating the folder reports it.
    if has_room()? || target.symlink_metadata().is_ok() {
        return Ok(());
    }
    // Creating the folder removes what dead writers left, and that may make room enough.
    let parent = target.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    drop(tundish_commit::sweep(parent));
    match tundish_commit::free_space(target)? {
        Some(free) if u128::from(free) < needed => {
            Err(PackError::NoRoom { path: target.to_owned(), needed, packs, pieces, free })
        }
        _ => Ok(()),
    }
}

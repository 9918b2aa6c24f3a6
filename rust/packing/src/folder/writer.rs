//! Writes a plan folder, which is published when it is complete and durable.
//!
//! Invariants: the folder appears under its name whole, or not at all (`tundish-commit`).

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::thread;

use tundish_commit::{AtomicFolder, FolderFile};

use super::npy::{HEADER_BYTES, NpyHeader};
use super::{BUFFER_BYTES, LARGEST_METADATA, METADATA_FILE, file_name, with_checksum};
use crate::checksums::{BLOCK, checksum, to_text};
use crate::error::PackError;
use crate::integers::IntegerKind;
use crate::plan::{Field, PlanInteger, PlanMetadata, PlanView, WideColumns};
use crate::progress::Progress;

/// One column on its way to its file.
struct ColumnWriter {
    file: FolderFile,
    wide: bool,
    /// Values appended so far.
    len: u64,
    /// Little-endian bytes of the last values, not yet written.
    buffer: Vec<u8>,
}

impl ColumnWriter {
    fn append<P: PlanInteger>(&mut self, values: &[P]) {
        self.len += values.len() as u64;
        let values = values.iter().map(|&value| -> i64 { value.into() });
        if self.wide {
            self.buffer.extend(values.flat_map(i64::to_le_bytes));
        } else {
            self.buffer.extend(values.flat_map(|value| (value as i32).to_le_bytes()));
        }
    }

    fn flush(&mut self) -> Result<(), PackError> {
        self.file.append(&self.buffer)?;
        self.buffer.clear();
        Ok(())
    }

    fn truncate(&mut self, len: u64) -> Result<(), PackError> {
        self.flush()?;
        self.len = len;
        self.file.truncate(u64::try_from(self.header().file_bytes()).unwrap_or(u64::MAX))?;
        Ok(())
    }

    /// Make the column durable; the file stays open. Its checksums, as text.
    fn finish(mut self, path: &Path, progress: &mut dyn Progress) -> Result<(File, String), PackError> {
        self.flush()?;
        let header = self.header();
        self.file.write_at(0, &header.bytes())?;
        let file = self.file.finish_open()?;
        // Read again, because pieces may have been removed from what was written.
        let bytes = header.file_bytes() as u64 - HEADER_BYTES as u64;
        let mut checksums = Vec::new();
        let mut block = vec![0u8; BLOCK];
        for start in (0..bytes).step_by(BLOCK) {
            if start.is_multiple_of(BUFFER_BYTES as u64) {
                progress.tick("publishing", start, bytes)?;
            }
            let block = &mut block[..(bytes - start).min(BLOCK as u64) as usize];
            file.read_exact_at(block, HEADER_BYTES as u64 + start)
                .map_err(|source| PackError::Io { path: path.to_path_buf(), source })?;
            checksums.push(checksum(block));
        }
        Ok((file, to_text(&checksums)))
    }

    fn header(&self) -> NpyHeader {
        NpyHeader { wide: self.wide, len: self.len }
    }
}

/// Writes columns to the files of a new folder.
pub(crate) struct FolderWriter {
    target: PathBuf,
    folder: AtomicFolder,
    columns: Vec<ColumnWriter>,
}

impl FolderWriter {
    /// Create the folder for columns in the order of `Field::ALL`; `wide` tells which have 8 bytes a value.
    pub(crate) fn create(target: &Path, fields: &[Field], wide: WideColumns) -> Result<Self, PackError> {
        let folder = AtomicFolder::create(target)?;
        let mut columns = Vec::with_capacity(fields.len());
        for &field in fields {
            let mut file = folder.create_file(&file_name(field))?;
            // The length is known last; until then zeros hold the place of the header.
            file.append(&[0; HEADER_BYTES])?;
            columns.push(ColumnWriter { file, wide: wide[field as usize], len: 0, buffer: Vec::new() });
        }
        Ok(Self { target: target.to_owned(), folder, columns })
    }

    /// Append values, all of which fit the column.
    ///
    /// # Errors
    /// `PackError::Commit` when the file cannot be written; an interrupt.
    pub(crate) fn append<P: PlanInteger>(
        &mut self,
        field: Field,
        values: &[P],
        progress: &mut dyn Progress,
    ) -> Result<(), PackError> {
        let column = &mut self.columns[field as usize];
        column.append(values);
        if column.buffer.len() >= BUFFER_BYTES {
            column.flush()?;
            // The write may have waited for the disk.
            progress.tick("writing", 0, 0)?;
        }
        Ok(())
    }

    /// Remove the last `count` values of a column.
    pub(crate) fn remove_last(&mut self, field: Field, count: u64) -> Result<(), PackError> {
        let column = &mut self.columns[field as usize];
        column.truncate(column.len - count)
    }

    /// Write what is left, make all of it durable, and give the folder its name.
    ///
    /// # Errors
    /// `PackError::Commit` when the folder cannot be written or its name is taken; an interrupt.
    pub(crate) fn publish(self, metadata: &PlanMetadata, progress: &mut dyn Progress) -> Result<(), PackError> {
        let Self { target, folder, columns } = self;
        let mut columns = Field::ALL.into_iter().zip(columns);
        let mut finished = Vec::new();
        let mut metadata = metadata.clone();
        while let Some((field, column)) = columns.next() {
            let outcome = progress
                .tick("publishing", 0, 0)
                .and_then(|()| column.finish(&target.join(file_name(field)), progress));
            match outcome {
                Ok((file, checksums)) => {
                    finished.push(file);
                    metadata.checksums.insert(field.name().into(), checksums);
                }
                Err(error) => {
                    let left: Vec<ColumnWriter> = columns.map(|(_, column)| column).collect();
                    remove(folder, (finished, left));
                    return Err(error);
                }
            }
        }
        let mut file = folder.create_file(METADATA_FILE)?;
        file.append(metadata_text(&metadata)?.as_bytes())?;
        file.finish()?;
        folder.publish()?;
        Ok(())
    }

    /// Remove what was written.
    pub(crate) fn abandon(self) {
        remove(self.folder, self.columns);
    }
}

/// Remove a folder that is not to be published, and leave it to a thread to close its files.
///
/// The kernel frees the blocks of a removed file when it is closed, and takes half a second a gigabyte: too long after
/// Ctrl-C.
fn remove(folder: AtomicFolder, files: impl Send + 'static) {
    // With the folder go the names of the files.
    drop(folder);
    // If no thread can be started, the files are closed here.
    drop(thread::Builder::new().name("tundish-close".into()).spawn(move || drop(files)));
}

/// The content of `METADATA_FILE`, no larger than what is read.
fn metadata_text(metadata: &PlanMetadata) -> Result<String, PackError> {
    let text = with_checksum(&metadata.to_json()?);
    if text.len() as u64 > LARGEST_METADATA {
        return Err(PackError::Invalid(format!(
            "{} datasets make {METADATA_FILE} larger than {LARGEST_METADATA} bytes; join some of them",
            metadata.samples.len()
        )));
    }
    Ok(text)
}

/// Bytes of the files of the columns; `wide` tells which columns have 8 bytes a value.
fn bytes_of_columns(packs: u64, pieces: u64, fields: &[Field], wide: WideColumns) -> u128 {
    let len = |field: Field| if field.is_per_piece() { pieces } else { packs };
    let bytes = |&field: &Field| NpyHeader { wide: wide[field as usize], len: len(field) }.file_bytes();
    fields.iter().map(bytes).sum()
}

/// Refuse a plan of `needed` bytes that is to appear as `target` where fewer bytes are free.
///
/// # Errors
/// `NoRoom`; as `tundish_commit::free_space`.
fn check_room(target: &Path, needed: u128, packs: u64, pieces: u64) -> Result<(), PackError> {
    let has_room =
        || Ok::<_, PackError>(tundish_commit::free_space(target)?.is_none_or(|free| u128::from(free) >= needed));
    // An existing target takes no more room, and creating the folder reports it.
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

/// Refuse a plan of at least `packs` packs and `pieces` pieces that the file system has no room for.
///
/// # Errors
/// `NoRoom`; `PackError::Commit` when the file system cannot be asked.
pub(crate) fn check_disk_space(target: &Path, packs: u64, pieces: u64, fields: &[Field]) -> Result<(), PackError> {
    let bytes = bytes_of_columns(packs, pieces, fields, WideColumns::default());
    check_room(target, bytes, packs, pieces)
}

/// Write a plan to a folder that is published when it is complete and durable.
///
/// # Errors
/// `NoRoom`, before anything is written; `Format` where the plan is mapped from damaged files; `PackError::Commit` when the
/// folder cannot be written or `target` is taken; an interrupt.
pub fn save(
    plan: &PlanView<'_>,
    metadata: &PlanMetadata,
    target: &Path,
    progress: &mut dyn Progress,
) -> Result<(), PackError> {
    // No damage is written anew with checksums that fit.
    plan.check_all(progress)?;
    let wide = Field::ALL.map(|field| plan.column(field).kind() == IntegerKind::I64);
    let fields = plan.fields();
    if plan.has_piece_ranges() != metadata.has_piece_ranges() {
        return Err(PackError::Mismatch(format!(
            "the plan has {} columns, which {METADATA_FILE} contradicts",
            fields.len()
        )));
    }
    let (packs, pieces) = (plan.packs() as u64, plan.column(Field::Indices).len() as u64);
    let mut sized = metadata.clone();
    for &field in fields {
        let column = plan.column(field);
        let blocks = (column.len() * if wide[field as usize] { 8 } else { 4 }).div_ceil(BLOCK);
        sized.checksums.insert(field.name().into(), to_text(&vec![0; blocks]));
    }
    let needed = bytes_of_columns(packs, pieces, fields, wide) + metadata_text(&sized)?.len() as u128;
    check_room(target, needed, packs, pieces)?;
    let mut writer = FolderWriter::create(target, fields, wide)?;
    match append_all(&mut writer, plan, progress) {
        Ok(()) => writer.publish(metadata, progress),
        Err(error) => {
            writer.abandon();
            Err(error)
        }
    }
}

fn append_all(writer: &mut FolderWriter, plan: &PlanView<'_>, progress: &mut dyn Progress) -> Result<(), PackError> {
    let mut values = vec![0i64; BUFFER_BYTES / 8];
    for &field in plan.fields() {
        let column = plan.column(field);
        for start in (0..column.len()).step_by(values.len()) {
            progress.tick("saving", start as u64, column.len() as u64)?;
            let values = &mut values[..(column.len() - start).min(BUFFER_BYTES / 8)];
            column.read(start, values);
            writer.append(field, values, progress)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::integers::Integers;
    use crate::plan::PlanCounts;
    use crate::request::{PackRequest, Packing};

    #[test]
    fn metadata_that_could_not_be_read_is_not_written() {
        let request = PackRequest::new(vec![Integers::from(&[] as &[i32]); 1_000_000], 1);
        let few = PlanMetadata::new(&request, Packing::Hard { drop_last: true }, PlanCounts::default(), "0".repeat(32));
        let text = metadata_text(&few).expect("a million datasets");
        assert!(text.len() as u64 <= LARGEST_METADATA && text.ends_with("}\n"));
        let many = PlanMetadata { samples: vec![u64::from(u32::MAX); 5_000_000], ..few };
        assert!(matches!(metadata_text(&many), Err(PackError::Invalid(text)) if text.contains("5000000 datasets")));
    }
}

//! A plan as a folder: `plan.json` and one `.npy` file a field.
//!
//! It owns the format. What always holds: a folder is published by `tundish-commit`, whole and
//! durable or not at all; `open` believes nothing it has not checked, opens each file once and maps
//! what it checked, and reads in constant memory.
#![allow(unsafe_code)]

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::thread;

use rustix::fs::{AtFlags, FileType, Mode, OFlags, Stat};
use rustix::io::Errno;

use serde::Deserialize;
use tundish_commit::{Folder, FolderFile};

use crate::cell::Cell;
use crate::error::PackError;
use crate::integers::IntegerKind;
use crate::mapping::MappedColumn;
use crate::memory;
use crate::npy::{self, HEADER_BYTES, Layout};
use crate::plan::{FORMAT_VERSION, Facts, Field, Views};
use crate::room;
use crate::sink::{Columns, Room, Sink};
use crate::watch::{Lookout, Watch};

/// The file that holds the facts.
pub const FACTS_FILE: &str = "plan.json";
/// A plan.json beyond this is none of ours: a million datasets fit.
const LARGEST_FACTS: u64 = 64 << 20;
/// Bytes written or checked between two looks at the watch.
const STEP_BYTES: usize = 1 << 20;

/// The name of a field's file.
#[must_use]
pub fn file_name(field: Field) -> String {
    format!("{}.npy", field.name())
}

/// Columns on their way into a folder.
struct Writer {
    folder: Folder,
    files: Vec<(FolderFile, bool, u64)>,
}

impl Writer {
    /// `wide` tells which columns have 8 bytes a value.
    fn create(target: &Path, wide: [bool; 6]) -> Result<Self, PackError> {
        let folder = Folder::create(target)?;
        let mut files = Vec::with_capacity(6);
        for (field, wide) in Field::ALL.into_iter().zip(wide) {
            let mut file = folder.create_file(&file_name(field))?;
            // The length is known last; until then the header holds its place.
            file.append(&[0; HEADER_BYTES])?;
            files.push((file, wide, 0));
        }
        Ok(Self { folder, files })
    }

    fn append<C: Cell>(&mut self, field: Field, values: &[C]) -> Result<(), PackError> {
        let (file, wide, len) = &mut self.files[field as usize];
        *len += values.len() as u64;
        let same_width = *wide == (size_of::<C>() == 8);
        if same_width && cfg!(target_endian = "little") {
            file.append(memory::as_bytes(values))?;
            return Ok(());
        }
        let mut bytes = Vec::with_capacity(values.len() * 8);
        for &value in values {
            let value: i64 = value.into();
            if *wide {
                bytes.extend_from_slice(&value.to_le_bytes());
            } else {
                let narrow = i32::try_from(value).map_err(|_| PackError::InputChanged)?;
                bytes.extend_from_slice(&narrow.to_le_bytes());
            }
        }
        file.append(&bytes)?;
        Ok(())
    }

    /// Remove what was written, as `drop` does, and return before the room of large files is given back: the kernel
    /// does that when they are closed, and takes half a second a gigabyte.
    fn abandon(self) {
        leave(self.folder, self.files);
    }

    fn publish(self, facts: &Facts, watch: &mut dyn Watch) -> Result<(), PackError> {
        let Self { folder, files } = self;
        let total = files.len() as u64;
        let mut files = files.into_iter();
        // Not closed before all are durable, for the sake of an interrupt: see `abandon`.
        let mut finished = Vec::with_capacity(files.len());
        while let Some((mut file, wide, len)) = files.next() {
            if let Err(interrupted) = watch.tick("publishing", finished.len() as u64, total) {
                leave(folder, (finished, file, files));
                return Err(interrupted);
            }
            file.write_at(0, &npy::header(wide, len))?;
            finished.push(file.finish_open()?);
        }
        let text = facts_text(facts)?;
        let mut file = folder.create_file(FACTS_FILE)?;
        file.append(text.as_bytes())?;
        file.finish()?;
        folder.publish()?;
        Ok(())
    }
}

/// Remove a folder that is not to be published, and leave it to a thread to close its files.
fn leave(folder: Folder, files: impl Send + 'static) {
    // With it go the names, so that nothing is to be seen of the files from here on.
    drop(folder);
    // Where no thread can be had, they are closed here.
    drop(thread::Builder::new().name("tundish-close".into()).spawn(move || drop(files)));
}

/// The content of `FACTS_FILE`, of no more bytes than are read.
fn facts_text(facts: &Facts) -> Result<String, PackError> {
    let mut text = facts.to_json()?;
    text.push('\n');
    if text.len() as u64 > LARGEST_FACTS {
        return Err(PackError::Invalid(format!(
            "{} datasets make {FACTS_FILE} larger than {LARGEST_FACTS} bytes; join some of them",
            facts.samples.len()
        )));
    }
    Ok(text)
}

/// Entries of each column that are gathered before they are written.
const GATHERED: usize = 1 << 16;

/// Writes columns straight to the files of a folder, as they are computed.
pub(crate) struct FileSink<C> {
    writer: Writer,
    gathered: Columns<C>,
    dataset_id: Vec<C>,
}

impl<C: Cell> FileSink<C> {
    pub(crate) fn create(target: &Path, wide: [bool; 6]) -> Result<Self, PackError> {
        let writer = Writer::create(target, wide)?;
        Ok(Self { writer, gathered: Columns::default(), dataset_id: Vec::new() })
    }

    /// Write the rest. Then the folder may be published.
    pub(crate) fn finish(&mut self, watch: &mut dyn Watch) -> Result<(), PackError> {
        self.flush(&mut || watch.tick("publishing", 0, Field::ALL.len() as u64))
    }

    pub(crate) fn publish(self, facts: &Facts, watch: &mut dyn Watch) -> Result<(), PackError> {
        self.writer.publish(facts, watch)
    }

    /// Remove what was written, without a wait: see `Writer::abandon`.
    pub(crate) fn abandon(self) {
        self.writer.abandon();
    }

    /// Write what is gathered. Each file may have to wait for the disk, so `look` is called after each.
    fn flush(&mut self, look: &mut dyn FnMut() -> Result<(), PackError>) -> Result<(), PackError> {
        let packs = self.gathered.packs.iter();
        let columns = [&self.dataset_id[..], &self.gathered.indices].into_iter().chain(packs.map(|column| &column[..]));
        for (field, column) in Field::ALL.into_iter().zip(columns) {
            self.writer.append(field, column)?;
            look()?;
        }
        self.dataset_id.clear();
        self.gathered.clear();
        Ok(())
    }
}

impl<C: Cell> Sink<C> for FileSink<C> {
    fn room(&mut self, pieces: usize, packs: usize, lookout: &mut Lookout<'_>) -> Result<Room<'_, C>, PackError> {
        if self.gathered.indices.len() + pieces > GATHERED || self.dataset_id.len() + packs > GATHERED {
            self.flush(&mut || lookout.look())?;
        }
        self.gathered.grow(pieces, packs)?;
        Ok(self.gathered.room())
    }

    unsafe fn keep(&mut self, pieces: usize, packs: usize, dataset_id: usize) -> Result<(), PackError> {
        // SAFETY: the caller's promise.
        unsafe { self.gathered.keep(pieces, packs) };
        self.dataset_id.resize(self.dataset_id.len() + packs, C::from_word(C::word_of(dataset_id)));
        Ok(())
    }

    fn retract(&mut self, pieces: usize) -> Result<(), PackError> {
        let gathered = pieces.min(self.gathered.indices.len());
        self.gathered.indices.truncate(self.gathered.indices.len() - gathered);
        let written = (pieces - gathered) as u64;
        if written > 0 {
            let (file, wide, len) = &mut self.writer.files[Field::Indices as usize];
            *len -= written;
            let width = if *wide { 8 } else { 4 };
            file.truncate(HEADER_BYTES as u64 + *len * width)?;
        }
        Ok(())
    }
}

/// Write a plan to a folder that is published when it is complete and durable.
///
/// # Errors
/// `NoRoom`, before anything is written; `PackError::Commit` when the folder cannot be written or `target` is taken.
pub fn save(views: &Views<'_>, facts: &Facts, target: &Path, watch: &mut dyn Watch) -> Result<(), PackError> {
    let wide = Field::ALL.map(|field| views.column(field).kind() == IntegerKind::I64);
    let (packs, pieces) = (views.packs() as u64, views.column(Field::Indices).len() as u64);
    let needed = room::bytes_of_columns(packs, pieces, wide) + facts_text(facts)?.len() as u128;
    room::check(target, needed, packs, pieces)?;
    let mut writer = Writer::create(target, wide)?;
    match append_all(&mut writer, views, watch) {
        Ok(()) => writer.publish(facts, watch),
        Err(PackError::Interrupted) => {
            writer.abandon();
            Err(PackError::Interrupted)
        }
        Err(error) => Err(error),
    }
}

fn append_all(writer: &mut Writer, views: &Views<'_>, watch: &mut dyn Watch) -> Result<(), PackError> {
    let mut scratch = vec![0u64; STEP_BYTES / 8];
    let mut narrow = Vec::<i32>::new();
    let mut long = Vec::<i64>::new();
    for field in Field::ALL {
        let column = views.column(field);
        for start in (0..column.len()).step_by(scratch.len()) {
            watch.tick("saving", start as u64, column.len() as u64)?;
            let values = &mut scratch[..(column.len() - start).min(STEP_BYTES / 8)];
            column.read(start, values);
            if column.kind() == IntegerKind::I64 {
                long.clear();
                long.extend(values.iter().map(|&value| value as i64));
                writer.append(field, &long)?;
            } else {
                narrow.clear();
                narrow.extend(values.iter().map(|&value| value as i32));
                writer.append(field, &narrow)?;
            }
        }
    }
    Ok(())
}

/// Check a plan folder and map its columns, in the order of `Field::ALL`.
///
/// Checked are the version, the parameters, each file's header and size, and that the offset
/// table rises strictly to the number of pieces. Time is linear in the packs, memory constant.
///
/// # Errors
/// `Missing` or `Format` with the file at fault.
pub fn open(folder: &Path, watch: &mut dyn Watch) -> Result<(Facts, [MappedColumn; 6]), PackError> {
    if cfg!(target_endian = "big") {
        return Err(PackError::Invalid("plan files are little-endian and cannot be mapped on this machine".into()));
    }
    let folder = PlanFolder::open(folder)?;
    let facts = folder.facts()?;
    let files = all(Field::ALL.map(|field| folder.column(field, &facts)))?;
    files[Field::IndicesCuLen as usize].check_offsets(&facts, watch)?;
    Ok((facts, all(files.map(ColumnFile::map))?))
}

fn all<T>(columns: [Result<T, PackError>; 6]) -> Result<[T; 6], PackError> {
    let [a, b, c, d, e, f] = columns;
    Ok([a?, b?, c?, d?, e?, f?])
}

/// A folder, opened once: files of a folder that takes its place meanwhile are not mixed with its own.
struct PlanFolder {
    path: PathBuf,
    directory: OwnedFd,
}

impl PlanFolder {
    fn open(path: &Path) -> Result<Self, PackError> {
        let missing = |reason: &str| PackError::Missing { path: path.to_path_buf(), reason: reason.into() };
        // To open files in it takes no right to list it.
        #[cfg(target_os = "linux")]
        let access = OFlags::PATH;
        #[cfg(not(target_os = "linux"))]
        let access = OFlags::RDONLY;
        let flags = access | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory = rustix::fs::open(path, flags, Mode::empty()).map_err(|errno| match errno {
            Errno::NOENT => missing("does not exist; a plan folder was expected"),
            Errno::NOTDIR => missing("is not a plan folder"),
            _ => PackError::Io { path: path.to_path_buf(), source: errno.into() },
        })?;
        Ok(Self { path: path.to_path_buf(), directory })
    }

    fn file(&self, name: &str) -> Result<(PathBuf, File), PackError> {
        let path = self.path.join(name);
        let failed = |errno: Errno| match errno {
            Errno::NOENT => PackError::Missing {
                path: path.clone(),
                reason: "is missing from the plan folder; make the plan again".into(),
            },
            _ => PackError::Io { path: path.clone(), source: errno.into() },
        };
        let check = |status: Stat| match FileType::from_raw_mode(status.st_mode) {
            FileType::RegularFile => Ok(()),
            _ => Err(PackError::Format { path: path.clone(), reason: "is not a regular file".into() }),
        };
        // Before it is opened, which does things to some devices; and after it, for what took its place meanwhile.
        check(rustix::fs::statat(&self.directory, name, AtFlags::empty()).map_err(failed)?)?;
        // A pipe is opened at once with NONBLOCK, and would be waited for without it.
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = rustix::fs::openat(&self.directory, name, flags, Mode::empty()).map_err(failed)?;
        check(rustix::fs::fstat(&file).map_err(failed)?)?;
        Ok((path, File::from(file)))
    }

    fn facts(&self) -> Result<Facts, PackError> {
        let (path, file) = self.file(FACTS_FILE)?;
        let wrong = |reason: String| PackError::Format { path: path.clone(), reason };
        let mut text = String::new();
        file.take(LARGEST_FACTS + 1).read_to_string(&mut text).map_err(|source| match source.kind() {
            ErrorKind::InvalidData => wrong("is not text; make the plan again".into()),
            _ => PackError::Io { path: path.clone(), source },
        })?;
        if text.len() as u64 > LARGEST_FACTS {
            return Err(wrong(format!("is larger than {LARGEST_FACTS} bytes; it is no plan's")));
        }
        // The version first: the rest of a later version may well look different.
        #[derive(Deserialize)]
        struct Version {
            format_version: Option<u64>,
        }
        let version: Version =
            serde_json::from_str(&text).map_err(|error| wrong(format!("is not valid JSON: {error}")))?;
        match version.format_version {
            Some(version) if version == u64::from(FORMAT_VERSION) => {}
            Some(version) => {
                return Err(wrong(format!(
                    "has format version {version}, and this version of tundish reads {FORMAT_VERSION}; make the plan again"
                )));
            }
            None => return Err(wrong("has no format_version; it is no plan's".into())),
        }
        let facts: Facts =
            serde_json::from_str(&text).map_err(|error| wrong(format!("does not describe a plan: {error}")))?;
        facts.check().map_err(|reason| wrong(format!("contradicts itself: {reason}; make the plan again")))?;
        Ok(facts)
    }

    fn column(&self, field: Field, facts: &Facts) -> Result<ColumnFile, PackError> {
        let (path, mut file) = self.file(&file_name(field))?;
        let wrong = |reason: String| PackError::Format { path: path.clone(), reason };
        let layout = npy::read_header(&mut file, &path)?;
        let expected = if field == Field::Indices { facts.pieces } else { facts.packs };
        if layout.len != expected {
            return Err(wrong(format!(
                "has the shape ({},), but {FACTS_FILE} says ({expected},); make the plan again",
                layout.len
            )));
        }
        let size = file.metadata().map_err(|source| PackError::Io { path: path.clone(), source })?.len();
        let needed = layout.file_bytes();
        if u128::from(size) != needed {
            let verdict = if u128::from(size) < needed { "is truncated" } else { "is too long" };
            return Err(wrong(format!("{verdict}: {size} bytes instead of {needed}; make the plan again")));
        }
        Ok(ColumnFile { path, file, layout })
    }
}

/// One column's file, opened once; its header and size are right.
struct ColumnFile {
    path: PathBuf,
    file: File,
    layout: Layout,
}

impl ColumnFile {
    fn map(self) -> Result<MappedColumn, PackError> {
        MappedColumn::new(&self.file, self.layout).map_err(|source| PackError::Io { path: self.path, source })
    }

    /// Read rather than mapped: a file that is cut short meanwhile is an error here, and would end the process there.
    fn check_offsets(&self, facts: &Facts, watch: &mut dyn Watch) -> Result<(), PackError> {
        let wrong = |reason: String| PackError::Format { path: self.path.clone(), reason };
        let Layout { len, .. } = self.layout;
        let width = self.layout.width();
        let mut buffer = vec![0u8; STEP_BYTES];
        let mut before = 0i64;
        let mut done = 0u64;
        while done < len {
            watch.tick("checking the plan", done, len)?;
            let count = (len - done).min((STEP_BYTES / width) as u64) as usize;
            let bytes = &mut buffer[..count * width];
            self.file
                .read_exact_at(bytes, HEADER_BYTES as u64 + done * width as u64)
                .map_err(|source| PackError::Io { path: self.path.clone(), source })?;
            for (pack, entry) in bytes.chunks_exact(width).enumerate() {
                let value = match *entry {
                    [a, b, c, d] => i64::from(i32::from_le_bytes([a, b, c, d])),
                    [a, b, c, d, e, f, g, h] => i64::from_le_bytes([a, b, c, d, e, f, g, h]),
                    _ => before,
                };
                if value <= before {
                    return Err(wrong(format!(
                        "does not add up: entry {} is {value} after {before}, but cumulative piece counts rise; \
                         make the plan again",
                        done + pack as u64
                    )));
                }
                before = value;
            }
            done += count as u64;
        }
        if before as u64 != facts.pieces {
            return Err(wrong(format!(
                "does not add up: it ends at {before}, but the plan has {} pieces; make the plan again",
                facts.pieces
            )));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::OrderKind;

    #[test]
    fn no_more_facts_are_written_than_are_read() {
        let few = Facts {
            format_version: FORMAT_VERSION,
            mode: "hard".into(),
            max_length: 1,
            drop_last: true,
            global_pack: true,
            order: OrderKind::Natural,
            seed: None,
            samples: vec![0; 1_000_000],
            tokens: 0,
            tokens_packed: 0,
            packs: 0,
            pieces: 0,
            empty_on_boundary: 0,
            tail_start: vec![0],
            fingerprint: "0".repeat(32),
        };
        let text = facts_text(&few).expect("a million datasets");
        assert!(text.len() as u64 <= LARGEST_FACTS && text.ends_with("}\n"));
        let many = Facts { samples: vec![u64::from(u32::MAX); 5_000_000], ..few };
        assert!(matches!(facts_text(&many), Err(PackError::Invalid(text)) if text.contains("5000000 datasets")));
    }
}

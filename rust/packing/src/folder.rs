//! A plan as a folder: `plan.json` and one `.npy` file a field.
//!
//! It owns the format. What always holds: a folder is published by `tundish-commit`, whole and
//! durable or not at all; `open` believes nothing it has not checked, and reads in constant memory.

use std::fs::File;
use std::io::{ErrorKind, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use serde::Deserialize;
use tundish_commit::{Folder, FolderFile};

use crate::error::PackError;
use crate::hard::{Cell, Columns, Room, Sink};
use crate::integers::IntegerKind;
use crate::memory;
use crate::npy::{self, HEADER_BYTES};
use crate::plan::{FORMAT_VERSION, Facts, Field, Views};
use crate::watch::Watch;

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

/// One column's file, checked.
#[derive(Clone, Debug)]
pub struct ColumnFile {
    /// Where it is.
    pub path: PathBuf,
    /// Whether its values have 8 bytes; else 4.
    pub wide: bool,
    /// How many values.
    pub len: u64,
    /// Where in the file they begin.
    pub offset: u64,
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

    fn publish(self, facts: &Facts, watch: &mut dyn Watch) -> Result<(), PackError> {
        let total = self.files.len() as u64;
        for (number, (mut file, wide, len)) in self.files.into_iter().enumerate() {
            watch.tick("publishing", number as u64, total)?;
            file.write_at(0, &npy::header(wide, len))?;
            file.finish()?;
        }
        let mut text = facts.to_json()?;
        text.push('\n');
        let mut file = self.folder.create_file(FACTS_FILE)?;
        file.append(text.as_bytes())?;
        file.finish()?;
        self.folder.publish()?;
        Ok(())
    }
}

/// Entries of each column that are gathered before they are written.
const GATHERED: usize = 1 << 16;

/// Writes columns straight to the files of a folder, as they are computed.
pub(crate) struct FileSink<C> {
    writer: Writer,
    room: Columns<C>,
    dataset_id: Vec<C>,
    pieces: usize,
    packs: usize,
}

impl<C: Cell> FileSink<C> {
    pub(crate) fn create(target: &Path, wide: [bool; 6]) -> Result<Self, PackError> {
        let writer = Writer::create(target, wide)?;
        Ok(Self { writer, room: Columns::default(), dataset_id: Vec::new(), pieces: 0, packs: 0 })
    }

    pub(crate) fn publish(mut self, facts: &Facts, watch: &mut dyn Watch) -> Result<(), PackError> {
        self.flush()?;
        self.writer.publish(facts, watch)
    }

    fn flush(&mut self) -> Result<(), PackError> {
        self.writer.append(Field::DatasetId, &self.dataset_id)?;
        self.writer.append(Field::Indices, &self.room.indices[..self.pieces])?;
        for (field, column) in Field::ALL[2..].iter().zip(&self.room.packs) {
            self.writer.append(*field, &column[..self.packs])?;
        }
        self.dataset_id.clear();
        (self.pieces, self.packs) = (0, 0);
        Ok(())
    }
}

impl<C: Cell> Sink<C> for FileSink<C> {
    fn room(&mut self, pieces: usize, packs: usize) -> Result<Room<'_, C>, PackError> {
        if self.pieces + pieces > GATHERED || self.packs + packs > GATHERED {
            self.flush()?;
        }
        Ok(self.room.room((self.pieces, pieces), (self.packs, packs)))
    }

    fn keep(&mut self, pieces: usize, packs: usize, dataset_id: usize) -> Result<(), PackError> {
        self.pieces += pieces;
        self.packs += packs;
        self.dataset_id.resize(self.packs, C::from_word(C::word_of(dataset_id)));
        Ok(())
    }

    fn retract(&mut self, pieces: usize) -> Result<(), PackError> {
        let gathered = pieces.min(self.pieces);
        self.pieces -= gathered;
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
/// `PackError::Commit` when the folder cannot be written or `target` is taken.
pub fn save(views: &Views<'_>, facts: &Facts, target: &Path, watch: &mut dyn Watch) -> Result<(), PackError> {
    let wide = Field::ALL.map(|field| views.column(field).kind() == IntegerKind::I64);
    let mut writer = Writer::create(target, wide)?;
    let mut scratch = vec![0u64; STEP_BYTES / 8];
    let mut narrow = Vec::<i32>::new();
    let mut long = Vec::<i64>::new();
    for field in Field::ALL {
        let column = views.column(field);
        for start in (0..column.len()).step_by(scratch.len()) {
            watch.tick("saving", start as u64, column.len() as u64)?;
            let values = &mut scratch[..(column.len() - start).min(STEP_BYTES / 8)];
            column.read(start, values);
            if wide[field as usize] {
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
    writer.publish(facts, watch)
}

/// Read and check a plan folder.
///
/// Checked are the version, the parameters, each file's header and size, and that the offset
/// table rises strictly to the number of pieces. Time is linear in the packs, memory constant.
///
/// # Errors
/// `Missing` or `Format` with the file at fault.
pub fn open(folder: &Path, watch: &mut dyn Watch) -> Result<(Facts, Vec<ColumnFile>), PackError> {
    let facts = read_facts(folder)?;
    let mut files = Vec::with_capacity(6);
    for field in Field::ALL {
        files.push(open_column(folder, field, &facts)?);
    }
    check_offsets(&files[Field::IndicesCuLen as usize], &facts, watch)?;
    Ok((facts, files))
}

fn read_facts(folder: &Path) -> Result<Facts, PackError> {
    let path = folder.join(FACTS_FILE);
    let wrong = |reason: String| PackError::Format { path: path.clone(), reason };
    if !folder.is_dir() {
        let reason =
            if folder.exists() { "is not a plan folder" } else { "does not exist; a plan folder was expected" };
        return Err(PackError::Missing { path: folder.to_path_buf(), reason: reason.into() });
    }
    let file = open_file(&path)?;
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
    let version: Version = serde_json::from_str(&text).map_err(|error| wrong(format!("is not valid JSON: {error}")))?;
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
    check_facts(&facts).map_err(|reason| wrong(format!("contradicts itself: {reason}; make the plan again")))?;
    Ok(facts)
}

fn check_facts(facts: &Facts) -> Result<(), String> {
    if facts.mode != "hard" {
        return Err(format!("mode {:?} is unknown", facts.mode));
    }
    if facts.max_length == 0 || facts.max_length > i64::MAX as u64 {
        return Err(format!("max_length is {}", facts.max_length));
    }
    let hexadecimal = |digit: u8| digit.is_ascii_digit() || (b'a'..=b'f').contains(&digit);
    if facts.fingerprint.len() != 32 || !facts.fingerprint.bytes().all(hexadecimal) {
        return Err("the fingerprint is not 32 hexadecimal digits".into());
    }
    if facts.seed.is_some() != (facts.order == crate::plan::OrderKind::Seed) {
        return Err("order and seed do not go together".into());
    }
    if facts.tokens > i64::MAX as u64 || facts.tokens_packed > facts.tokens {
        return Err(format!("{} of {} tokens are packed", facts.tokens_packed, facts.tokens));
    }
    if facts.pieces < facts.packs {
        return Err(format!("{} packs have {} pieces", facts.packs, facts.pieces));
    }
    let full = u128::from(facts.packs) * u128::from(facts.max_length);
    if u128::from(facts.tokens_packed) > full || (facts.drop_last && u128::from(facts.tokens_packed) != full) {
        return Err(format!("{} packs hold {} tokens", facts.packs, facts.tokens_packed));
    }
    let streams = if facts.global_pack { 1 } else { facts.samples.len() };
    if facts.tail_start.len() != streams {
        return Err(format!("{} datasets have {} tails", streams, facts.tail_start.len()));
    }
    if facts.tail_start.iter().any(|&start| start > i64::MAX as u64 || (facts.packs == 0 && start != 0)) {
        return Err("a tail starts where no sample is".into());
    }
    if facts.order == crate::plan::OrderKind::Given && facts.samples.len() != 1 {
        return Err("an order is given for a single dataset only".into());
    }
    if facts.samples.iter().try_fold(0u64, |sum, &samples| sum.checked_add(samples)).is_none_or(|sum| sum > 1 << 63) {
        return Err("the numbers of samples overflow".into());
    }
    Ok(())
}

fn open_file(path: &Path) -> Result<File, PackError> {
    let failed = |source: std::io::Error| match source.kind() {
        ErrorKind::NotFound => PackError::Missing {
            path: path.to_path_buf(),
            reason: "is missing from the plan folder; make the plan again".into(),
        },
        _ => PackError::Io { path: path.to_path_buf(), source },
    };
    // Before it is opened: opening a pipe would wait for somebody to write to it.
    if !std::fs::metadata(path).map_err(failed)?.is_file() {
        return Err(PackError::Format { path: path.to_path_buf(), reason: "is not a regular file".into() });
    }
    File::open(path).map_err(failed)
}

fn open_column(folder: &Path, field: Field, facts: &Facts) -> Result<ColumnFile, PackError> {
    let path = folder.join(file_name(field));
    let wrong = |reason: String| PackError::Format { path: path.clone(), reason };
    let mut file = open_file(&path)?;
    let layout = npy::read_header(&mut file, &path)?;
    let expected = if field == Field::Indices { facts.pieces } else { facts.packs };
    if layout.len != expected {
        return Err(wrong(format!(
            "has the shape ({},), but {FACTS_FILE} says ({expected},); make the plan again",
            layout.len
        )));
    }
    let width = if layout.wide { 8 } else { 4 };
    let size = file.metadata().map_err(|source| PackError::Io { path: path.clone(), source })?.len();
    let needed = u128::from(layout.len) * width + u128::from(layout.offset);
    if u128::from(size) != needed {
        let verdict = if u128::from(size) < needed { "is truncated" } else { "is too long" };
        return Err(wrong(format!("{verdict}: {size} bytes instead of {needed}; make the plan again")));
    }
    Ok(ColumnFile { path, wide: layout.wide, len: layout.len, offset: layout.offset })
}

fn check_offsets(column: &ColumnFile, facts: &Facts, watch: &mut dyn Watch) -> Result<(), PackError> {
    let wrong = |reason: String| PackError::Format { path: column.path.clone(), reason };
    let failed = |source| PackError::Io { path: column.path.clone(), source };
    let mut file = File::open(&column.path).map_err(failed)?;
    file.seek(SeekFrom::Start(column.offset)).map_err(failed)?;
    let width = if column.wide { 8 } else { 4 };
    let mut buffer = vec![0u8; STEP_BYTES];
    let mut before = 0i64;
    let mut done = 0u64;
    while done < column.len {
        watch.tick("checking the plan", done, column.len)?;
        let count = (column.len - done).min((STEP_BYTES / width) as u64) as usize;
        let bytes = &mut buffer[..count * width];
        file.read_exact(bytes).map_err(failed)?;
        let check = |pack: usize, value: i64, before: i64| {
            if value > before {
                return Ok(value);
            }
            Err(wrong(format!(
                "does not add up: entry {} is {value} after {before}, but cumulative piece counts rise; make the plan again",
                done + pack as u64
            )))
        };
        for (pack, entry) in bytes.chunks_exact(width).enumerate() {
            let value = match *entry {
                [a, b, c, d] => i64::from(i32::from_le_bytes([a, b, c, d])),
                [a, b, c, d, e, f, g, h] => i64::from_le_bytes([a, b, c, d, e, f, g, h]),
                _ => before,
            };
            before = check(pack, value, before)?;
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

//! Opens a plan folder: checks its files, and maps its columns.
//!
//! Invariants: every file is opened once, and what was checked is what is mapped. Nothing that a file says is believed
//! before it is checked. `plan.json` and the offsets are compared with their checksums here; blocks of the other columns are
//! compared when a value of them is first read.

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, FileType, Mode, OFlags, Stat};
use rustix::io::Errno;
use serde::Deserialize;

use super::mapped_column::MappedColumn;
use super::npy::{self, HEADER_BYTES, NpyHeader};
use super::{BUFFER_BYTES, LARGEST_METADATA, METADATA_FILE, file_name, split_checksum};
use crate::checksums::ColumnChecks;
use crate::error::PackError;
use crate::integers::Integers;
use crate::plan::{FORMAT_VERSION, Field, PlanMetadata, PlanView};
use crate::progress::Progress;

/// A plan folder that was opened and checked.
pub struct OpenPlan {
    /// The content of `plan.json`, without the checksums.
    pub metadata: PlanMetadata,
    /// Six columns, or eight, in the order of `Field::ALL`.
    pub columns: Vec<MappedColumn>,
    /// The checksums of each column.
    pub checks: Vec<ColumnChecks>,
}

impl OpenPlan {
    /// The plan, whose columns are compared with their checksums before they are read.
    ///
    /// # Errors
    /// As `PlanView::new`.
    pub fn view(&self) -> Result<PlanView<'_>, PackError> {
        let columns: Vec<Integers<'_>> = self.columns.iter().map(MappedColumn::view).collect();
        Ok(PlanView::new(&columns)?.with_checks(&self.checks))
    }
}

/// Check a plan folder and map its columns.
///
/// Checks the checksum of `plan.json`, the version, the parameters, and each file's header and size. The offset table has
/// to agree with its checksums and rise strictly to the number of pieces. Time is linear in the packs.
///
/// # Errors
/// `Missing` or `Format` with the file at fault.
pub fn open(folder: &Path, progress: &mut dyn Progress) -> Result<OpenPlan, PackError> {
    let folder = PlanFolder::open(folder)?;
    let mut metadata = folder.metadata()?;
    let checksums = std::mem::take(&mut metadata.checksums);
    let fields = Field::of_plan(metadata.has_piece_ranges());
    let files: Vec<ColumnFile> =
        fields.iter().map(|&field| folder.column(field, &metadata)).collect::<Result<_, _>>()?;
    let checks_of = |file: &ColumnFile, field: Field| {
        let text = checksums.get(field.name()).map_or("", String::as_str);
        ColumnChecks::new(file.path.clone(), text, file.header.file_bytes() - HEADER_BYTES as u128).map_err(|reason| {
            PackError::Format {
                path: folder.path.join(METADATA_FILE),
                reason: format!("{reason}; make the plan again"),
            }
        })
    };
    let checks: Vec<ColumnChecks> =
        files.iter().zip(fields).map(|(file, &field)| checks_of(file, field)).collect::<Result<_, _>>()?;
    let columns = files.iter().map(ColumnFile::map).collect::<Result<Vec<_>, _>>()?;
    let open = OpenPlan { metadata, columns, checks };
    let offsets = &files[Field::IndicesCuLen as usize];
    offsets.check_offsets(&open, progress)?;
    Ok(open)
}

/// A folder, opened once: files of a folder that takes its place meanwhile are not mixed with its own.
struct PlanFolder {
    path: PathBuf,
    directory: OwnedFd,
}

impl PlanFolder {
    fn open(path: &Path) -> Result<Self, PackError> {
        let missing = |reason: &str| PackError::Missing { path: path.to_path_buf(), reason: reason.into() };
        // Opening files in a folder takes no permission to list it.
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
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
        // Before opening, because opening has effects on some devices; and after it, because another file may have taken
        // its name.
        check(rustix::fs::statat(&self.directory, name, AtFlags::empty()).map_err(failed)?)?;
        // Without NONBLOCK, opening a pipe waits for a writer.
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = rustix::fs::openat(&self.directory, name, flags, Mode::empty()).map_err(failed)?;
        check(rustix::fs::fstat(&file).map_err(failed)?)?;
        Ok((path, File::from(file)))
    }

    fn metadata(&self) -> Result<PlanMetadata, PackError> {
        let (path, file) = self.file(METADATA_FILE)?;
        let wrong = |reason: String| PackError::Format { path: path.clone(), reason };
        let mut text = String::new();
        file.take(LARGEST_METADATA + 1).read_to_string(&mut text).map_err(|source| match source.kind() {
            ErrorKind::InvalidData => wrong("is not text; make the plan again".into()),
            _ => PackError::Io { path: path.clone(), source },
        })?;
        if text.len() as u64 > LARGEST_METADATA {
            return Err(wrong(format!("is larger than {LARGEST_METADATA} bytes; it is no plan's")));
        }
        let (json, is_intact) = split_checksum(&text);
        // The version first: another version may have other fields, and no checksum.
        #[derive(Deserialize)]
        struct Version {
            format_version: Option<u64>,
        }
        let version: Version =
            serde_json::from_str(&json).map_err(|error| wrong(format!("is not valid JSON: {error}")))?;
        match version.format_version {
            Some(version) if version == u64::from(FORMAT_VERSION) => {}
            Some(version) => {
                return Err(wrong(format!(
                    "has format version {version}, and this version of tundish reads {FORMAT_VERSION}; make the plan again"
                )));
            }
            None => return Err(wrong("has no format_version; it is no plan's".into())),
        }
        if !is_intact {
            return Err(wrong("is damaged: it differs from the checksum at its end; make the plan again".into()));
        }
        let metadata: PlanMetadata =
            serde_json::from_str(&json).map_err(|error| wrong(format!("does not describe a plan: {error}")))?;
        metadata.packing().map_err(|error| wrong(format!("contradicts itself: {error}; make the plan again")))?;
        Ok(metadata)
    }

    fn column(&self, field: Field, metadata: &PlanMetadata) -> Result<ColumnFile, PackError> {
        let (path, mut file) = self.file(&file_name(field))?;
        let wrong = |reason: String| PackError::Format { path: path.clone(), reason };
        let header = npy::read_header(&mut file, &path)?;
        let expected = if field.is_per_piece() { metadata.counts.pieces } else { metadata.counts.packs };
        if header.len != expected {
            return Err(wrong(format!(
                "has the shape ({},), but {METADATA_FILE} says ({expected},); make the plan again",
                header.len
            )));
        }
        let size = file.metadata().map_err(|source| PackError::Io { path: path.clone(), source })?.len();
        let needed = header.file_bytes();
        if u128::from(size) != needed {
            let outcome = if u128::from(size) < needed { "is truncated" } else { "is too long" };
            return Err(wrong(format!("{outcome}: {size} bytes instead of {needed}; make the plan again")));
        }
        Ok(ColumnFile { path, file, header })
    }
}

/// One column's file, opened once; its header and size are right.
struct ColumnFile {
    path: PathBuf,
    file: File,
    header: NpyHeader,
}

impl ColumnFile {
    fn map(&self) -> Result<MappedColumn, PackError> {
        MappedColumn::new(&self.file, self.header).map_err(|source| PackError::Io { path: self.path.clone(), source })
    }

    /// Check the cumulative piece counts. They are read, not mapped: a file that is truncated meanwhile is then an error.
    fn check_offsets(&self, open: &OpenPlan, progress: &mut dyn Progress) -> Result<(), PackError> {
        let wrong = |reason: String| PackError::Format { path: self.path.clone(), reason };
        let pieces = open.metadata.counts.pieces;
        let NpyHeader { len, .. } = self.header;
        let width = self.header.width();
        let mut buffer = vec![0u8; BUFFER_BYTES];
        let mut before = 0i64;
        let mut done = 0u64;
        while done < len {
            progress.tick("checking the plan", done, len)?;
            let count = (len - done).min((BUFFER_BYTES / width) as u64) as usize;
            let bytes = &mut buffer[..count * width];
            self.file
                .read_exact_at(bytes, HEADER_BYTES as u64 + done * width as u64)
                .map_err(|source| PackError::Io { path: self.path.clone(), source })?;
            open.checks[Field::IndicesCuLen as usize].check_bytes(bytes, done as usize * width)?;
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
        if before as u64 != pieces {
            return Err(wrong(format!(
                "does not add up: it ends at {before}, but the plan has {pieces} pieces; make the plan again"
            )));
        }
        Ok(())
    }
}

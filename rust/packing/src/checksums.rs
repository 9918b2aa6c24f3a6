//! Checksums of the columns of a plan folder, a block of values at a time: XXH3 (Yann Collet).
//!
//! Invariants: a block is compared before a value of it is used, and once. A block that differs is an error each time.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use xxhash_rust::xxh3::xxh3_64;

use crate::error::PackError;
use crate::integers::{IntegerKind, Integers};
use crate::memory;

/// Bytes a block; part of the format.
pub(crate) const BLOCK: usize = 1 << 16;
/// Hexadecimal digits of a checksum.
const DIGITS: usize = 16;

/// The checksum of a block or of a small file.
pub(crate) fn checksum(bytes: &[u8]) -> u64 {
    xxh3_64(bytes)
}

/// Checksums as text.
pub(crate) fn to_text(checksums: &[u64]) -> String {
    checksums.iter().map(|checksum| format!("{checksum:016x}")).collect()
}

/// The checksums of one column in its file, and which of its blocks were compared.
#[derive(Debug)]
pub struct ColumnChecks {
    path: PathBuf,
    expected: Vec<u64>,
    is_checked: Vec<AtomicBool>,
    /// Blocks that were not compared yet.
    left: AtomicUsize,
}

impl ColumnChecks {
    /// The checksums of a column of `bytes` bytes in the file at `path`; an error is a clause that says what is wrong.
    pub(crate) fn new(path: PathBuf, text: &str, bytes: u128) -> Result<Self, String> {
        let blocks = bytes.div_ceil(BLOCK as u128);
        let digits = |number: usize| {
            let text = text.get(number * DIGITS..(number + 1) * DIGITS)?;
            u64::from_str_radix(text, 16).ok()
        };
        let expected: Option<Vec<u64>> = (0..text.len().div_ceil(DIGITS)).map(digits).collect();
        match expected {
            Some(expected) if expected.len() as u128 == blocks => {
                let is_checked = expected.iter().map(|_| AtomicBool::new(false)).collect();
                let left = AtomicUsize::new(expected.len());
                Ok(Self { path, expected, is_checked, left })
            }
            _ => Err(format!("the checksums of {} are not those of {bytes} bytes", path.display())),
        }
    }

    /// Compare bytes of the column, which begin with a block at `start` and end with one or with the column.
    ///
    /// # Errors
    /// As `check`.
    pub(crate) fn check_bytes(&self, bytes: &[u8], start: usize) -> Result<(), PackError> {
        bytes.chunks(BLOCK).zip(start / BLOCK..).try_for_each(|(block, number)| self.note(number, checksum(block)))
    }

    /// Whether all blocks were compared.
    pub(crate) fn are_done(&self) -> bool {
        self.left.load(Ordering::Relaxed) == 0
    }

    /// Whether the blocks that hold the values `range` of the column were compared.
    pub(crate) fn is_checked(&self, column: &Integers<'_>, range: Range<usize>) -> bool {
        self.are_done() || blocks_of(column, range).all(|block| self.is_checked[block].load(Ordering::Relaxed))
    }

    /// Compare the blocks that hold the values `range` of the column, unless they were compared before.
    ///
    /// # Errors
    /// `Format` for a block that differs.
    pub(crate) fn check(&self, column: &Integers<'_>, range: Range<usize>) -> Result<(), PackError> {
        for block in blocks_of(column, range) {
            if self.is_checked[block].load(Ordering::Relaxed) {
                continue;
            }
            self.note(block, checksum_of(column, block))?;
        }
        Ok(())
    }

    /// Note that a block was compared, which has the checksum `found`.
    fn note(&self, block: usize, found: u64) -> Result<(), PackError> {
        if found != self.expected[block] {
            let start = block * BLOCK;
            return Err(PackError::Format {
                path: self.path.clone(),
                reason: format!(
                    "is damaged: a value in bytes {start} to {} differs from the checksum; make the plan again",
                    start + BLOCK
                ),
            });
        }
        if !self.is_checked[block].swap(true, Ordering::Relaxed) {
            self.left.fetch_sub(1, Ordering::Relaxed);
        }
        Ok(())
    }
}

fn values_a_block(column: &Integers<'_>) -> usize {
    BLOCK / if column.kind() == IntegerKind::I64 { 8 } else { 4 }
}

fn blocks_of(column: &Integers<'_>, range: Range<usize>) -> Range<usize> {
    let values = values_a_block(column);
    if range.is_empty() { 0..0 } else { range.start / values..range.end.div_ceil(values) }
}

/// The checksum of a block, whose bytes are copied first: another process may write to the file.
fn checksum_of(column: &Integers<'_>, block: usize) -> u64 {
    let values = values_a_block(column);
    let start = block * values;
    let count = values.min(column.len() - start);
    if column.kind() == IntegerKind::I64 {
        let mut copy = vec![0i64; count];
        column.read(start, &mut copy);
        checksum(memory::as_bytes(&copy))
    } else {
        let mut copy = vec![0i32; count];
        column.read(start, &mut copy);
        checksum(memory::as_bytes(&copy))
    }
}

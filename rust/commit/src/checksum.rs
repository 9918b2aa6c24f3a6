//! Checksums of files: CRC-64/NVME, which object stores use too.
//!
//! The crate `crc-fast` sums the bytes. Checksums of adjacent parts combine into that of both, so any number of threads
//! may write the parts of a file in any order.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::str::FromStr;

use crc_fast::CrcAlgorithm;

const PREFIX: &str = "crc64nvme:";

/// The polynomial x⁶⁴ + … with its coefficients in reflected order: the highest bit belongs to x⁰.
const POLYNOMIAL: u64 = 0x9a6c_9329_ac4b_c9b5;

/// The polynomial 1.
const ONE: u64 = 1 << 63;

/// A CRC-64/NVME, written as `crc64nvme:` and 16 lower-case hexadecimal digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Checksum(u64);

impl Checksum {
    /// The checksum of no bytes.
    pub const EMPTY: Checksum = Checksum(0);

    /// The checksum of `bytes`.
    pub fn of(bytes: &[u8]) -> Self {
        Checksum(crc_fast::checksum(CrcAlgorithm::Crc64Nvme, bytes))
    }

    /// The checksum of the bytes of `self` followed by `length` bytes with the checksum `next`.
    ///
    /// Appending bytes multiplies the earlier remainder by x⁸ for each; the power is found by repeated squaring.
    /// The method is that of zlib's `crc32_combine` (Mark Adler), some thirty times as fast as the matrix method of
    /// `crc-fast`.
    #[must_use]
    pub fn then(self, next: Checksum, length: u64) -> Checksum {
        Checksum(multiply(self.0, power_of_x8(length)) ^ next.0)
    }
}

/// x⁸ⁿ modulo the polynomial.
fn power_of_x8(mut n: u64) -> u64 {
    let mut square = ONE >> 8;
    let mut power = ONE;
    while n > 0 {
        if n & 1 == 1 {
            power = multiply(power, square);
        }
        square = multiply(square, square);
        n >>= 1;
    }
    power
}

/// The product of two polynomials modulo the polynomial, all in reflected order.
fn multiply(a: u64, mut b: u64) -> u64 {
    let mut product = 0;
    for power in (0..u64::BITS).rev() {
        if a >> power & 1 == 1 {
            product ^= b;
        }
        let carry = b & 1;
        b = (b >> 1) ^ (POLYNOMIAL * carry);
    }
    product
}

impl fmt::Display for Checksum {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{PREFIX}{:016x}", self.0)
    }
}

/// A text that is not a checksum.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a checksum of the form crc64nvme:0123456789abcdef")]
pub struct NotAChecksum;

impl FromStr for Checksum {
    type Err = NotAChecksum;

    fn from_str(text: &str) -> Result<Self, NotAChecksum> {
        let digits = text.strip_prefix(PREFIX).ok_or(NotAChecksum)?;
        let well_formed = digits.len() == 16 && digits.bytes().all(|digit| matches!(digit, b'0'..=b'9' | b'a'..=b'f'));
        if !well_formed {
            return Err(NotAChecksum);
        }
        u64::from_str_radix(digits, 16).map(Checksum).map_err(|_| NotAChecksum)
    }
}

/// The progress of one file: submitted ranges, written bytes, and the checksum of summed ranges.
#[derive(Debug)]
pub(crate) struct FileProgress {
    size: u64,
    /// Start and end of each submitted range; adjacent ranges are merged.
    submitted: BTreeMap<u64, u64>,
    bytes_written: u64,
    /// Start of each summed range, with its length and checksum; adjacent ranges are merged.
    summed: BTreeMap<u64, (u64, Checksum)>,
}

impl FileProgress {
    pub(crate) fn new(size: u64) -> Self {
        FileProgress { size, submitted: BTreeMap::new(), bytes_written: 0, summed: BTreeMap::new() }
    }

    /// Records a submitted range, which is not empty and lies within the file. Returns `false`, and records nothing, if
    /// a part of it was submitted before.
    pub(crate) fn submit(&mut self, range: Range<u64>) -> bool {
        let before = self.submitted.range(..range.end).next_back().map(|(&start, &end)| (start, end));
        let touches = before.filter(|&(_, end)| end == range.start);
        if before.is_some_and(|(_, end)| end > range.start) {
            return false;
        }
        let end = self.submitted.remove(&range.end).unwrap_or(range.end);
        self.submitted.insert(touches.map_or(range.start, |(start, _)| start), end);
        true
    }

    /// The first byte that was not submitted; `None` when all were.
    pub(crate) fn first_gap(&self) -> Option<u64> {
        let gap = match self.submitted.first_key_value() {
            Some((0, &end)) => end,
            _ => 0,
        };
        (gap < self.size).then_some(gap)
    }

    /// Records that `length` submitted bytes were written; whether they were the last of the file.
    pub(crate) fn wrote(&mut self, length: u64) -> bool {
        self.bytes_written += length;
        self.bytes_written == self.size
    }

    /// Records the checksum of `length` bytes at `offset`.
    pub(crate) fn sum(&mut self, offset: u64, length: u64, checksum: Checksum) {
        let (mut start, mut run) = (offset, (length, checksum));
        if let Some((length, sum)) = self.summed.remove(&(offset + length)) {
            run = (run.0 + length, run.1.then(sum, length));
        }
        if let Some((&before, &(length, sum))) = self.summed.range(..offset).next_back()
            && before + length == offset
        {
            start = before;
            run = (length + run.0, sum.then(run.1, run.0));
        }
        self.summed.insert(start, run);
    }

    /// The checksum of the whole file, after all of it was summed.
    pub(crate) fn checksum(&self) -> Checksum {
        self.summed.first_key_value().map_or(Checksum::EMPTY, |(_, &(_, checksum))| checksum)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Bit by bit, from the definition: reflected, all ones at first and inverted at the end.
    fn oracle(bytes: &[u8]) -> u64 {
        let mut register = !0u64;
        for &byte in bytes {
            register ^= u64::from(byte);
            for _ in 0..8 {
                register = if register & 1 == 1 { register >> 1 ^ POLYNOMIAL } else { register >> 1 };
            }
        }
        !register
    }

    #[test]
    fn the_check_value_of_the_standard() {
        assert_eq!(Checksum::of(b"123456789"), Checksum(0xae8b_1486_0a79_9888));
        assert_eq!(Checksum::of(b""), Checksum::EMPTY);
        assert_eq!(POLYNOMIAL.reverse_bits(), 0xad93_d235_94c9_3659);
    }

    #[test]
    fn a_checksum_is_read_as_it_is_written_and_nothing_else_is() {
        let sum = Checksum(0x0123_4567_89ab_cdef);
        assert_eq!(sum.to_string(), "crc64nvme:0123456789abcdef");
        assert_eq!("crc64nvme:0123456789abcdef".parse(), Ok(sum));
        for other in [
            "",
            "0123456789abcdef",
            "crc64nvme:0123456789abcde",
            "crc64nvme:0123456789abcdeF",
            "crc64nvme:+123456789abcdef",
        ] {
            assert_eq!(other.parse::<Checksum>(), Err(NotAChecksum), "{other}");
        }
    }

    #[test]
    fn lengths_beyond_memory_combine_too() {
        // A part of zeros twice as long is two of them.
        let part = Checksum::of(&[0; 1 << 16]);
        let (mut sum, mut length) = (part, 1u64 << 16);
        while length < 1 << 62 {
            sum = sum.then(sum, length);
            length *= 2;
        }
        let crate_says = |length| crc_fast::checksum_combine(CrcAlgorithm::Crc64Nvme, 7, 9, length);
        assert_eq!(Checksum(7).then(Checksum(9), 1 << 40).0, crate_says(1 << 40));
        assert_eq!(sum.then(Checksum::EMPTY, 0), sum);
    }

    proptest! {
        #[test]
        fn any_parts_combine_to_the_whole(
            bytes in prop::collection::vec(any::<u8>(), 0..5000),
            cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..5),
        ) {
            let mut cuts: Vec<_> = cuts.iter().map(|cut| cut.index(bytes.len() + 1)).collect();
            cuts.extend([0, bytes.len()]);
            cuts.sort_unstable();
            let sum = cuts.windows(2).fold(Checksum::EMPTY, |sum, cut| {
                let part = &bytes[cut[0]..cut[1]];
                sum.then(Checksum::of(part), part.len() as u64)
            });
            prop_assert_eq!(sum.0, oracle(&bytes));
        }
    }
}

//! Checksums of shards on the network: CRC-64/NVME, computed by the crate `crc-fast`.
//!
//! It finds every damage within 64 successive bits, and all other damage but for one case in 2⁶⁴. Truncation is found
//! by the length that travels beside it. With carry-less multiplication it is computed several times as fast as memory
//! is copied into a socket, and faster than the other checksum that was measured.

use crc_fast::{CrcAlgorithm, Digest};

/// Computes a checksum piece by piece.
#[derive(Clone, Copy, Debug)]
pub struct RunningChecksum(Digest);

impl RunningChecksum {
    /// The checksum of no bytes.
    pub fn new() -> Self {
        RunningChecksum(Digest::new(CrcAlgorithm::Crc64Nvme))
    }

    /// The checksum of `bytes`.
    pub fn of(bytes: &[u8]) -> u64 {
        crc_fast::checksum(CrcAlgorithm::Crc64Nvme, bytes)
    }

    /// Adds `bytes`.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The checksum of all bytes up to here.
    pub fn value(&self) -> u64 {
        self.0.finalize()
    }
}

impl Default for RunningChecksum {
    fn default() -> Self {
        RunningChecksum::new()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn it_is_the_one_that_the_catalogue_of_parametrised_crcs_lists() {
        assert_eq!(RunningChecksum::of(b"123456789"), 0xae8b_1486_0a79_9888);
    }

    proptest! {
        #[test]
        fn parts_make_the_same_as_the_whole(bytes: Vec<u8>, cut: proptest::sample::Index) {
            let (first, rest) = bytes.split_at(cut.index(bytes.len() + 1));
            let mut checksum = RunningChecksum::new();
            checksum.update(first);
            checksum.update(rest);
            prop_assert_eq!(checksum.value(), RunningChecksum::of(&bytes));
        }
    }
}

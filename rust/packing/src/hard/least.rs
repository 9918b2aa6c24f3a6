//! How large a plan is at least, before any of it is computed.

use std::path::Path;

use super::{OrderSource, Prepared};
use crate::error::PackError;
use crate::fingerprint::LEAF;
use crate::room;
use crate::watch::Watch;

/// Leaves that are counted between two looks at the watch: a few milliseconds.
const LEAVES_A_TICK: usize = 256;

impl Prepared<'_> {
    /// Refuse a plan that the file system has no room for, as far as that is known before any work.
    pub(super) fn check_room(&self, target: &Path, watch: &mut dyn Watch) -> Result<(), PackError> {
        // As if no sample were empty: to count those takes a pass over the lengths, which a disk that is nearly full
        // is worth, and no other.
        let samples: Vec<u64> = self.streams.iter().map(|stream| stream.len() as u64).collect();
        let needed = |(packs, pieces)| room::bytes_of_columns(packs, pieces, [false; 6]);
        if room::has(target, needed(self.least(&samples)))? {
            return Ok(());
        }
        let least = self.least(&self.filled(watch)?);
        room::check(target, needed(least), least.0, least.1)
    }

    /// How many samples of each stream are not empty.
    fn filled(&self, watch: &mut dyn Watch) -> Result<Vec<u64>, PackError> {
        let mut scratch = vec![0u32; LEAF];
        let mut counts = Vec::with_capacity(self.streams.len());
        for stream in &self.streams {
            let mut filled = 0u64;
            for (leaf, start) in (0..stream.len()).step_by(LEAF).enumerate() {
                if leaf % LEAVES_A_TICK == 0 {
                    watch.tick("counting empty samples", start as u64, stream.len() as u64)?;
                }
                let lengths = &mut scratch[..LEAF.min(stream.len() - start)];
                // What does not fit 32 bits is not empty, though its lower half may be.
                filled += match stream.read(start, lengths) <= u64::from(u32::MAX) {
                    true => lengths.iter().filter(|&&length| length != 0).count() as u64,
                    false => {
                        let mut wide = vec![0u64; lengths.len()];
                        stream.read(start, &mut wide);
                        wide.iter().filter(|&&length| length != 0).count() as u64
                    }
                };
            }
            counts.push(filled);
        }
        Ok(counts)
    }

    /// Packs and pieces that the plan has at least, whatever the order is. `filled`: samples of each stream that are
    /// not empty.
    fn least(&self, filled: &[u64]) -> (u64, u64) {
        let max_length = self.request.max_length;
        let (mut packs, mut pieces) = (0u64, 0u64);
        for ((stream, scan), &filled) in self.streams.iter().zip(&self.scans).zip(filled) {
            let left_out = match self.request.order {
                OrderSource::Given(order) => (stream.len() - order.len()) as u64,
                OrderSource::Natural | OrderSource::Seed(_) => 0,
            };
            // Those that an order leaves out may be the longest ones, and none of them empty.
            let filled = filled.saturating_sub(left_out);
            let tokens = scan.tokens.saturating_sub(left_out.saturating_mul(scan.longest));
            // A sample that has tokens is a piece, unless it lies in the tail that is left out, with one token or more.
            let (closed, tail) = match (self.request.drop_last, left_out) {
                (false, _) => (tokens.div_ceil(max_length), 0),
                (true, 0) => (tokens / max_length, tokens % max_length),
                (true, _) => (tokens / max_length, max_length - 1),
            };
            packs = packs.saturating_add(closed);
            // So is every pack, of one sample at least.
            pieces = pieces.saturating_add(filled.saturating_sub(tail).max(closed));
        }
        (packs, pieces)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::{OrderSource, Prepared, Request};
    use crate::integers::Integers;
    use crate::watch::Silent;

    fn request<'a>(
        lengths: &'a [Vec<u64>],
        order: OrderSource<'a>,
        max_length: u64,
        drop_last: bool,
        global_pack: bool,
    ) -> Request<'a> {
        let lengths = lengths.iter().map(|lengths| Integers::from(&lengths[..])).collect();
        Request { lengths, order, max_length, drop_last, global_pack, threads: 1 }
    }

    /// The least that is known of it, and what it is.
    fn sizes(request: Request<'_>) -> [(u64, u64); 2] {
        let prepared = Prepared::new(request, &mut Silent).unwrap();
        let facts = prepared.pack(&mut Silent).unwrap().facts;
        [prepared.least(&prepared.filled(&mut Silent).unwrap()), (facts.packs, facts.pieces)]
    }

    proptest! {
        #[test]
        fn no_plan_is_smaller(
            lengths in prop::collection::vec(prop_oneof![0u64..3, 0u64..90], 0..60),
            more in prop::collection::vec(0u64..5, 0..9),
            used in 0usize..=60,
            max_length in 1u64..40,
            shift in prop_oneof![Just(0u32), Just(32)],
            drop_last in any::<bool>(),
            global_pack in any::<bool>(),
        ) {
            // Beyond 32 bits, of which the lower ones are none.
            let lengths: Vec<u64> = lengths.iter().map(|length| length << shift).collect();
            let max_length = max_length << shift;
            let order: Vec<i64> = (0..lengths.len() as i64).rev().take(used).collect();
            let one = [lengths.clone()];
            let given = OrderSource::Given(Integers::from(&order[..]));
            let two = [lengths, more];
            for [least, actual] in [
                sizes(request(&one, given, max_length, drop_last, global_pack)),
                sizes(request(&two, OrderSource::Natural, max_length, drop_last, global_pack)),
                sizes(request(&two, OrderSource::Seed(3), max_length, drop_last, global_pack)),
            ] {
                prop_assert!(least.0 <= actual.0 && least.1 <= actual.1, "{least:?} is beyond {actual:?}");
            }
        }
    }

    #[test]
    fn of_short_samples_all_pieces_are_known() {
        let lengths = [vec![1; 10_000], vec![0; 50]];
        let [least, actual] = sizes(request(&lengths, OrderSource::Seed(1), 4096, true, true));
        // Of those that are empty nobody knows where they come to lie.
        assert_eq!((least, actual.0), ((2, 8192), 2));
        assert!((8192..=8192 + 50).contains(&actual.1));

        let lengths = [vec![1; 10_000]];
        let order: Vec<i64> = (500..10_000).collect();
        let given = OrderSource::Given(Integers::from(&order[..]));
        assert_eq!(sizes(request(&lengths, given, 100, true, false)), [(95, 9401), (95, 9500)]);
        assert_eq!(sizes(request(&lengths, given, 100, false, false)), [(95, 9500), (95, 9500)]);
    }
}

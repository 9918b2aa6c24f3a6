//! Asking the memory for what will be read soon, one place a sample, beside work that waits for no memory.
//!
//! What always holds: nothing here changes what is computed.

use crate::fingerprint::LEAF;
use crate::integers::Integers;
use crate::memory;

/// Of fewer samples the caches next to the processor hold most lengths.
pub(super) const WORTHWHILE_SAMPLES: usize = 1 << 21;

/// How to ask for the length of a sample. A type for each way, so that the loops that ask are compiled for it.
pub(super) trait Ask: Copy + Send + Sync {
    /// Samples whose lengths are asked for before any of them is read. Few enough that the processor still knows by
    /// then where their pages lie, and has their lines in its second-level cache.
    const RUN: usize = 1024;
    /// Whether it asks at all.
    const IS_ASKING: bool = true;
    fn ask(self, index: u64);
}

/// For what is not worth asking for: lengths that lie in the caches, or are read one behind the other, which the
/// processor sees by itself; and for what lies in several places.
#[derive(Clone, Copy)]
pub(super) struct Nothing;

impl Ask for Nothing {
    const RUN: usize = LEAF;
    const IS_ASKING: bool = false;
    #[inline(always)]
    fn ask(self, _index: u64) {}
}

/// Lengths of two bytes, one behind the other from this address on.
#[derive(Clone, Copy)]
pub(super) struct Narrow(pub(super) usize);

impl Ask for Narrow {
    #[inline(always)]
    fn ask(self, index: u64) {
        memory::prefetch_address((self.0 as *const u16).wrapping_add(index as usize).cast());
    }
}

/// Lengths of one column of the caller's.
impl Ask for Integers<'_> {
    #[inline(always)]
    fn ask(self, index: u64) {
        self.prefetch(index as usize);
    }
}

/// The samples whose lengths are to be asked for.
#[derive(Clone, Copy)]
pub(super) struct Ahead<'i, W, A> {
    pub(super) ask: A,
    pub(super) indices: &'i [W],
}

impl<W> Ahead<'_, W, Nothing> {
    pub(super) fn nothing() -> Self {
        Self { ask: Nothing, indices: &[] }
    }
}

#[cfg(test)]
mod tests {
    use super::super::chunk::{Checks, Source};
    use super::super::distinct::Distinct;
    use super::super::order::Order;
    use super::super::powers::Powers;
    use super::super::serial::Stream;
    use super::super::{Cut, Dataset, Packer, Totals};
    use super::*;
    use crate::array::Array;
    use crate::cell::Cell;
    use crate::crew::Crew;
    use crate::fingerprint::ColumnHash;
    use crate::shuffle::RandomState;
    use crate::sink::MemorySink;
    use crate::watch::{Lookout, Silent};

    /// Runs that end neither with a chunk nor with one another.
    #[derive(Clone, Copy)]
    struct Few;

    impl Ask for Few {
        const RUN: usize = 7;
        fn ask(self, _index: u64) {}
    }

    fn cut<C: Cell>(lengths: &[u64], order: &[u32], max_length: u64, threads: usize, ask: impl Ask) -> [Array<C>; 6] {
        let crew = Crew::new(threads);
        let dataset = Dataset::new(vec![Integers::from(lengths)], 0);
        let tokens: u64 = lengths.iter().sum();
        let packs = tokens / max_length;
        let mut sink = MemorySink::<C>::new(packs, packs + order.len() as u64).unwrap();
        let mut watch = Silent;
        let mut packer = Packer {
            max_length: C::word_of(max_length as usize),
            crew: &crew,
            sink: &mut sink,
            lookout: Lookout::new(&mut watch),
            totals: Totals::default(),
            order_hash: Some(ColumnHash::default()),
            order_checked: true,
        };
        let mut stream =
            Stream { cut: Cut::default(), tokens: 0, limit: tokens, empty_run: 0, last_length: C::word_of(0), id: 0 };
        // Each sample is to be noted once.
        let powers = Powers::new(order.len(), threads).unwrap();
        let checks = Checks { table: None, distinct: Some(Distinct::Powers(powers)), hashing: true };
        let source = Source { dataset: &dataset, order: Order::Given(Integers::from(order)), checks: &checks, ask };
        let is_order = match threads {
            1 => packer.cut_serially(&source, &mut stream),
            _ => packer.cut_in_parallel(&source, &mut stream),
        };
        assert!(is_order.unwrap() && checks.distinct.unwrap().holds());
        sink.into_columns()
    }

    #[test]
    fn runs_of_any_size_are_cut_alike() {
        // More than three threads take in one window.
        let samples = 3 * 8 * LEAF + 12_345;
        let mut random = RandomState::new(1);
        let order = random.shuffled::<u32>(samples, &mut Silent).unwrap();
        for (max_length, longest) in [(1u64, 3u32), (7, 9), (64, 100), (4096, 2000), (1 << 20, 100), (300, 2000)] {
            let lengths: Vec<u64> = (0..samples).map(|_| u64::from(random.next_u32() % (longest + 1))).collect();
            let expected = cut::<i64>(&lengths, &order, max_length, 1, Nothing);
            for threads in [1, 3] {
                assert!(cut::<i64>(&lengths, &order, max_length, threads, Few) == expected, "{max_length}, {threads}");
                let narrow = cut::<i32>(&lengths, &order, max_length, threads, Few);
                let is_same = |(narrow, wide): (&Array<i32>, &Array<i64>)| {
                    narrow.iter().map(|&value| i64::from(value)).eq(wide.iter().copied())
                };
                assert!(narrow.iter().zip(&expected).all(is_same), "{max_length}, {threads} threads");
            }
        }
    }
}

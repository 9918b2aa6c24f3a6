//! Ordered samples in scratch memory: where they come from, and how they are brought there.
//!
//! What always holds: each index and each length is read from the caller's arrays once; everything
//! after works on the copy.

use std::ops::Range;

use super::ahead::{Ahead, Ask};
use super::distinct::Distinct;
use super::order::Order;
use super::scan::Dataset;
use super::table::Table;
use crate::cell::Cell;
use crate::error::PackError;
use crate::fingerprint::{self, LEAF};

/// What is done with an order while it is read.
pub(super) struct Checks {
    /// A copy of the lengths to take them from, which tells in the end whether a sample was named twice.
    pub(super) table: Option<Table>,
    /// What finds one that is named twice otherwise.
    pub(super) distinct: Option<Distinct>,
    /// Whether it is hashed.
    pub(super) hashing: bool,
}

/// Where ordered samples come from.
pub(super) struct Source<'r, C: Cell, A> {
    pub(super) dataset: &'r Dataset<'r>,
    pub(super) order: Order<'r, C>,
    pub(super) checks: &'r Checks,
    /// How to ask for a length before it is gathered.
    pub(super) ask: A,
}

impl<C: Cell, A: Ask> Source<'_, C, A> {
    /// Samples that are gathered at a time.
    pub(super) fn run(&self) -> usize {
        A::RUN
    }

    /// Whether a merge asks for the lengths that are gathered after it: for all but some beside samples that it cuts
    /// one by one, and for none beside very many packs.
    pub(super) fn is_asking(&self) -> bool {
        A::IS_ASKING
    }
}

/// Consecutive ordered samples.
pub(super) struct Chunk<C: Cell> {
    pub(super) indices: Vec<C::Word>,
    pub(super) lengths: Vec<C::Word>,
    /// Tokens of all samples.
    pub(super) tokens: u64,
    /// Whether every index is one of a sample that was not named before, as far as it is known yet. The lengths are
    /// complete only if so. (What a table or powers find, they tell at the end.)
    pub(super) sound: bool,
    /// Hashes of the indices, where the order is hashed.
    pub(super) leaves: Vec<u128>,
    /// Position of the first sample in the order.
    start: usize,
}

impl<C: Cell> Chunk<C> {
    pub(super) fn new(capacity: usize) -> Self {
        Self {
            indices: Vec::with_capacity(capacity),
            lengths: Vec::with_capacity(capacity),
            tokens: 0,
            sound: true,
            leaves: Vec::new(),
            start: 0,
        }
    }

    /// Copy the indices at positions `start` … `start + count` of the order, in place of those before. No length is
    /// known then.
    pub(super) fn read(&mut self, source: &Source<'_, C, impl Ask>, start: usize, count: usize) {
        self.indices.resize(count, C::Word::default());
        self.lengths.resize(count, C::Word::default());
        self.leaves.clear();
        (self.start, self.tokens, self.sound) = (start, 0, true);
        for (start, indices) in (start..).step_by(LEAF).zip(self.indices.chunks_mut(LEAF)) {
            if !source.order.read(start, indices, source.dataset.len()) {
                self.sound = false;
                return;
            }
            if source.checks.hashing {
                self.leaves.push(fingerprint::leaf(indices));
            }
        }
    }

    /// Powers take note of the samples in `run`, once before they are gathered, and ask for their lengths meanwhile;
    /// marks and tables do so as they are gathered. Whether the lengths were asked for.
    pub(super) fn note_and_ask(&self, thread: usize, source: &Source<'_, C, impl Ask>, run: Range<usize>) -> bool {
        let distinct = source.checks.distinct.as_ref().filter(|_| self.sound);
        distinct.is_some_and(|distinct| distinct.note_and_ask(thread, &self.indices[run], source.ask))
    }

    /// As `note_and_ask`, with a merge to come before the gathering: the samples whose lengths it has to ask for.
    pub(super) fn still_to_ask<A: Ask>(
        &self,
        thread: usize,
        source: &Source<'_, C, A>,
        run: Range<usize>,
    ) -> Ahead<'_, C::Word, A> {
        let are_asked = self.note_and_ask(thread, source, run.clone());
        Ahead { ask: source.ask, indices: if are_asked { &[] } else { &self.indices[run] } }
    }

    /// Gather the lengths of the samples in `run`, for which `note_and_ask` was called, and with marks check that none
    /// was named before. `are_asked`: whether the memory was asked for them, then or beside a merge; where it was not
    /// after all, as beside one of very many packs, they take longer to come.
    ///
    /// The scan saw every length; one that is longer now was changed since. Refusing it keeps sums from wrapping.
    pub(super) fn gather(
        &mut self,
        thread: usize,
        source: &Source<'_, C, impl Ask>,
        run: Range<usize>,
        are_asked: bool,
    ) -> Result<(), PackError> {
        if !self.sound {
            return Ok(());
        }
        let (indices, lengths) = (&self.indices[run.clone()], &mut self.lengths[run.clone()]);
        let (seen, distinct) = match (source.order, &source.checks.table, &source.checks.distinct) {
            (Order::Natural(_), ..) => (source.dataset.read(self.start + run.start, lengths), true),
            (_, Some(table), _) => (table.take(indices, lengths, are_asked), true),
            (_, None, Some(Distinct::Marks(marks))) => {
                marks.gather(thread, source.dataset, indices, lengths, are_asked)
            }
            (_, None, _) => (source.dataset.gather_while(indices, lengths, are_asked, |_, _| ()), true),
        };
        if seen > C::LARGEST {
            return Err(PackError::InputChanged);
        }
        self.sound = distinct;
        self.tokens = self.tokens.saturating_add(C::sum(lengths));
        Ok(())
    }

    /// Read indices and gather their lengths, with nothing to do meanwhile.
    pub(super) fn load(
        &mut self,
        thread: usize,
        source: &Source<'_, C, impl Ask>,
        start: usize,
        count: usize,
    ) -> Result<(), PackError> {
        self.read(source, start, count);
        for begin in (0..count).step_by(source.run()) {
            let run = begin..count.min(begin + source.run());
            let are_asked = self.note_and_ask(thread, source, run.clone());
            self.gather(thread, source, run, are_asked)?;
        }
        Ok(())
    }
}

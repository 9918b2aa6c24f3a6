//! The order of the samples of one stream: read a run at a time, and checked.
//!
//! What always holds: an entry is read once for the plan, and only indices of samples come out. Whichever check failed
//! first, and on however many threads, the error names the first entry of the order that is wrong.

use super::distinct::Distinct;
use super::marks::Bits;
use crate::cell::Cell;
use crate::crew::Crew;
use crate::error::PackError;
use crate::fingerprint::LEAF;
use crate::integers::{Integers, Word};
use crate::processor::widest;
use crate::shuffle::Index;
use crate::watch::Watch;

/// Entries that are checked at a time.
const RUN: usize = 4 * LEAF;
/// Runs that a thread checks between two looks at the watch: a few milliseconds.
const RUNS_A_TICK: usize = 16;

/// Where the indices come from.
#[derive(Clone, Copy)]
pub(super) enum Order<'a, C: Cell> {
    /// 0 … n - 1.
    Natural(usize),
    /// As the caller gave it, yet to be checked.
    Given(Integers<'a>),
    /// As drawn from a seed.
    Drawn(&'a [C::Word]),
}

impl<C: Cell> Order<'_, C> {
    pub(super) fn len(&self) -> usize {
        match self {
            Self::Natural(len) => *len,
            Self::Given(order) => order.len(),
            Self::Drawn(order) => order.len(),
        }
    }

    /// Read the indices from position `start` on; whether all of them are below `samples`.
    pub(super) fn read(&self, start: usize, out: &mut [C::Word], samples: usize) -> bool {
        match self {
            Self::Natural(_) => {
                for (offset, slot) in out.iter_mut().enumerate() {
                    *slot = C::Word::from_usize(start + offset);
                }
            }
            Self::Drawn(order) => out.copy_from_slice(&order[start..start + out.len()]),
            Self::Given(order) => {
                // The or of all values has the top bit of a negative one, and what a value lost to become a word. Where
                // it says that there is neither, the words are the values.
                let seen = order.read(start, out);
                let largest = widest(|| out.iter().copied().max());
                return seen <= C::LARGEST && largest.is_none_or(|largest| largest.widen() < samples as u64);
            }
        }
        true
    }
}

/// Check a whole order, which changes nothing.
///
/// # Errors
/// The first entry that is out of range or repeated; an interrupt.
pub(super) fn check<C: Cell>(
    order: &Integers<'_>,
    samples: usize,
    crew: &Crew,
    watch: &mut dyn Watch,
) -> Result<(), PackError> {
    let threads = crew.threads();
    let distinct = Distinct::new(samples, order.len(), threads)?;
    let step = RUN * RUNS_A_TICK * threads;
    for begin in (0..order.len()).step_by(step) {
        watch.tick("checking the order", begin as u64, order.len() as u64)?;
        let mut are_good = vec![true; (order.len() - begin).min(step).div_ceil(RUN)];
        crew.each(&mut are_good, |thread, number, is_good| {
            let start = begin + number * RUN;
            let mut scratch = vec![C::Word::default(); RUN.min(order.len() - start)];
            *is_good = Order::<C>::Given(*order).read(start, &mut scratch, samples) && distinct.note(thread, &scratch);
        });
        if are_good.contains(&false) {
            return Err(first_fault(order, samples, watch));
        }
    }
    if distinct.holds() { Ok(()) } else { Err(first_fault(order, samples, watch)) }
}

/// The error that names the first wrong entry of an order that has one.
#[cold]
pub(super) fn first_fault(order: &Integers<'_>, samples: usize, watch: &mut dyn Watch) -> PackError {
    let mut bits = match Bits::new(samples) {
        Ok(bits) => bits,
        Err(error) => return error,
    };
    for position in 0..order.len() {
        if position.is_multiple_of(RUN * RUNS_A_TICK)
            && let Err(interrupted) = watch.tick("looking for the wrong entry", position as u64, order.len() as u64)
        {
            return interrupted;
        }
        let value = order.get(position);
        if value >= samples as u64 {
            let value = if order.kind().is_signed() { i128::from(value as i64) } else { i128::from(value) };
            return PackError::OrderOutOfRange { position, value, samples };
        }
        if !bits.mark(&[value]) {
            return PackError::OrderRepeated { position, sample: value as usize };
        }
    }
    PackError::InputChanged
}

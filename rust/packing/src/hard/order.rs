//! The order of the samples of one stream: read a run at a time, and checked.
//!
//! What always holds: an entry is read once for the plan, and only indices of samples come out. Whichever check failed
//! first, and on however many threads, the error names the first entry of the order that is wrong.

use rayon::ThreadPool;
use rayon::prelude::*;

use super::marks::{Bits, Marks};
use crate::cell::Cell;
use crate::error::PackError;
use crate::fingerprint::LEAF;
use crate::integers::{Integers, Word};
use crate::shuffle::Index;
use crate::watch::Watch;

/// Leaves that a thread checks between two looks at the watch: a few milliseconds.
const LEAVES_A_TICK: usize = 64;

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
                // The or of all values is at least each of them, and has the top bit of a negative one. Where it is
                // too large, none of the values need be, so they are looked at one by one; those
                // that lost bits show in the or.
                let seen = order.read(start, out);
                return seen < samples as u64
                    || seen <= C::LARGEST && out.iter().all(|index| index.widen() < samples as u64);
            }
        }
        true
    }
}

/// Check a whole order, which changes nothing: on the pool's threads if there is one.
///
/// # Errors
/// The first entry that is out of range or repeated; an interrupt.
pub(super) fn check<C: Cell>(
    order: &Integers<'_>,
    samples: usize,
    pool: Option<&ThreadPool>,
    watch: &mut dyn Watch,
) -> Result<(), PackError> {
    let threads = pool.map_or(1, ThreadPool::current_num_threads);
    let marks = Marks::new(samples, threads)?;
    let step = LEAF * LEAVES_A_TICK * threads;
    let good = |scratch: &mut Vec<C::Word>, start: usize| {
        scratch.resize(LEAF.min(order.len() - start), C::Word::default());
        Order::<C>::Given(*order).read(start, scratch, samples) && marks.mark(scratch)
    };
    let mut scratch = Vec::new();
    for begin in (0..order.len()).step_by(step) {
        watch.tick("checking the order", begin as u64, order.len() as u64)?;
        let leaves = (order.len() - begin).min(step).div_ceil(LEAF);
        let start = |leaf: usize| begin + leaf * LEAF;
        let all_good = match pool {
            Some(pool) => pool.install(|| {
                (0..leaves)
                    .into_par_iter()
                    .map_init(Vec::new, |scratch, leaf| good(scratch, start(leaf)))
                    .all(|good| good)
            }),
            None => (0..leaves).all(|leaf| good(&mut scratch, start(leaf))),
        };
        if !all_good {
            return Err(first_fault(order, samples, watch));
        }
    }
    if marks.are_disjoint() { Ok(()) } else { Err(first_fault(order, samples, watch)) }
}

/// The error that names the first wrong entry of an order that has one.
#[cold]
pub(super) fn first_fault(order: &Integers<'_>, samples: usize, watch: &mut dyn Watch) -> PackError {
    let mut bits = match Bits::new(samples) {
        Ok(bits) => bits,
        Err(error) => return error,
    };
    for position in 0..order.len() {
        if position.is_multiple_of(LEAF * LEAVES_A_TICK)
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

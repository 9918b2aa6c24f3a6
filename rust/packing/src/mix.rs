//! An order over the packs of several plans, in which each plan has the share that its weight says.
//!
//! Turn *n* of a mix takes a pack of one plan. A plan whose weight is the share *w* of all weights is entitled to *w·n*
//! packs after *n* turns. Among the plans that have had fewer, the turn goes to the plan whose next pack is due first.
//! Pack *x* + 1 is due in the first turn in which the plan is entitled to it. So every plan stays within one pack of
//! what it is entitled to: such an order exists (R. Tijdeman, "The chairman assignment problem", 1980), and the earliest
//! due date finds one if there is one (W. A. Horn, "Some simple scheduling algorithms", 1974), because each pack takes
//! one turn.
//!
//! Megatron-LM's `build_blending_indices` takes a pack of the plan that lacks most. This may leave a plan more than a
//! pack behind: with the weights 1, 1, 1, 1, 3, 3, 3, 3, a plan is entitled to 2.06 packs after 11 turns and has one.
//!
//! Invariants:
//! 1. Shares and due dates are exact integers, so the result does not depend on the processor.
//! 2. The order of a plan's packs depends on the seed, the plan's number and the epoch alone. So a mix that goes on
//!    from a beginning repeats no pack before its plan is finished.

use crate::error::PackError;
use crate::integers::Integers;
use crate::memory;
use crate::plan::{Column, PlanInteger};
use crate::progress::Progress;
use crate::shuffle::RandomState;

/// The most packs that a mix may have; no memory holds more.
pub const LARGEST_MIX: u64 = 1 << 48;
/// Turns between two ticks: about a millisecond for ten plans.
const TURNS_A_TICK: usize = 1 << 14;
/// Bits of the fraction of a floating-point number.
const FRACTION_BITS: u32 = 52;

/// What happens when a plan is finished: after as many passes as the mix has epochs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exhausted {
    /// The plan goes on in a new order. The mix ends when all plans are finished.
    Repeat,
    /// The mix ends.
    Stop,
    /// The plan leaves the mix. The mix ends when all plans have left.
    Drop,
}

impl Exhausted {
    /// The value with this name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Some(match name {
            "repeat" => Self::Repeat,
            "stop" => Self::Stop,
            "drop" => Self::Drop,
            _ => return None,
        })
    }
}

/// What to mix.
#[derive(Clone, Copy)]
pub struct MixRequest<'a> {
    /// Packs of each plan.
    pub packs: &'a [u64],
    /// Weight of each plan. A plan of weight 0 takes no part.
    pub weights: &'a [f64],
    /// Seed of the orders of the plans' packs.
    pub seed: u32,
    /// What happens when a plan is finished.
    pub exhausted: Exhausted,
    /// Passes after which a plan is finished; without them it never is.
    pub epochs: Option<u64>,
    /// Packs of the mix at most.
    pub num_packs: Option<u64>,
    /// The packs that the mix begins with, made with the same plans and the same seed. The weights hold from there on.
    pub beginning: Integers<'a>,
}

/// Order the packs of several plans. Packs are numbered through all plans.
///
/// In epoch `e`, the packs of plan `p` come in the order `numpy.random.RandomState([seed, p, e]).shuffle` gives them.
/// Each plan is within one pack of its share of the turns. Shares restart at the end of the beginning, and when a plan
/// leaves.
///
/// # Errors
/// `Invalid` for weights that cannot be used, a plan without packs that has a weight, and a mix that has no end or too
/// many packs. `Mismatch` for a beginning that names a pack that does not exist. `OutOfMemory`. An interrupt.
pub fn mix(request: &MixRequest<'_>, progress: &mut dyn Progress) -> Result<Column, PackError> {
    let shares = checked_shares(request)?;
    let total = request.packs.iter().fold(0u64, |sum, &packs| sum.saturating_add(packs));
    if total <= 1 << 31 {
        return Ok(Column::I32(ordered(request, shares, progress)?));
    }
    if total > LARGEST_MIX {
        return invalid(format!("the plans have {total} packs; a mix numbers up to {LARGEST_MIX}"));
    }
    Ok(Column::I64(ordered(request, shares, progress)?))
}

fn invalid<T>(message: String) -> Result<T, PackError> {
    Err(PackError::Invalid(message))
}

/// The weights as integers.
fn checked_shares(request: &MixRequest<'_>) -> Result<Vec<u64>, PackError> {
    let MixRequest { packs, weights, .. } = request;
    if weights.len() != packs.len() {
        return invalid(format!("there are {} weights for {} plans; give each plan one", weights.len(), packs.len()));
    }
    if let Some(plan) = weights.iter().position(|weight| !weight.is_finite() || *weight < 0.0) {
        return invalid(format!(
            "weights[{plan}] is {}; a weight is a finite number above 0, or 0 to leave the plan out",
            weights[plan]
        ));
    }
    if weights.iter().all(|&weight| weight == 0.0) {
        return invalid("all weights are 0: no plan takes part; give at least one plan a weight above 0".into());
    }
    if let Some(plan) = (0..packs.len()).find(|&plan| packs[plan] == 0 && weights[plan] > 0.0) {
        return invalid(format!(
            "plan {plan} has no packs, and its weight is {}; give it the weight 0, or leave it out",
            weights[plan]
        ));
    }
    Ok(as_integers(weights))
}

/// Weights as integers in the same proportions: exact, but for bits 2⁵³ times smaller than the largest weight.
fn as_integers(weights: &[f64]) -> Vec<u64> {
    let largest = weights.iter().map(|&weight| parts_of(weight).1).max().unwrap_or(0);
    let scaled = |&weight: &f64| {
        let (fraction, exponent) = parts_of(weight);
        let shift = largest.saturating_sub(exponent).min(63);
        let rounded = (fraction >> shift) + if shift > 0 { fraction >> (shift - 1) & 1 } else { 0 };
        // A plan with a weight takes part, however small it is.
        if weight == 0.0 { 0 } else { rounded.max(1) }
    };
    weights.iter().map(scaled).collect()
}

/// The parts of a number that is 0 or more: `fraction * 2^(exponent - c)` with the same `c` for all of them, and bit 52
/// as the highest of the fraction.
fn parts_of(number: f64) -> (u64, u32) {
    let bits = number.to_bits();
    let fraction = bits & ((1 << FRACTION_BITS) - 1);
    // The exponents of 11 bits, moved so that those of the smallest numbers are not negative.
    match (bits >> FRACTION_BITS & 0x7ff) as u32 {
        0 if fraction == 0 => (0, 0),
        0 => {
            let shift = fraction.leading_zeros() - (u64::BITS - 1 - FRACTION_BITS);
            (fraction << shift, FRACTION_BITS + 1 - shift)
        }
        exponent => (fraction | 1 << FRACTION_BITS, FRACTION_BITS + exponent),
    }
}

/// One of the plans, and how far the mix is in it.
struct Source<I> {
    number: u32,
    /// The plan's first pack among those of all plans.
    first: I,
    packs: u64,
    taken: u64,
    /// Packs after which it is through.
    quota: u64,
    /// The packs in the order of this epoch; empty until one of them is needed.
    order: Vec<I>,
}

impl<I: PlanInteger> Source<I> {
    /// Packs that are left until it is through, but no more than a mix may have.
    fn left(&self) -> u64 {
        self.quota.saturating_sub(self.taken).min(LARGEST_MIX + 1)
    }

    fn next(&mut self, seed: u32, progress: &mut dyn Progress) -> Result<I, PackError> {
        let place = (self.taken % self.packs) as usize;
        if place == 0 || self.order.is_empty() {
            // Freed before the next order takes as much.
            self.order = Vec::new();
            let epoch = (self.taken / self.packs) as u32;
            self.order = RandomState::of_words(&[seed, self.number, epoch]).shuffled(self.packs as usize, progress)?;
        }
        self.taken += 1;
        Ok(self.first.plus(self.order[place]))
    }
}

fn ordered<I: PlanInteger>(
    request: &MixRequest<'_>,
    mut shares: Vec<u64>,
    progress: &mut dyn Progress,
) -> Result<Vec<I>, PackError> {
    let MixRequest { exhausted, beginning, .. } = *request;
    let mut sources = sources_of::<I>(request, progress)?;
    if exhausted == Exhausted::Drop {
        leave_out_exhausted(&mut shares, &sources);
    }
    let limit = packs_at_most(request, &shares, &sources)?;
    let bytes = u128::from(limit) * size_of::<I>() as u128;
    if bytes > u128::from(memory::physical_bytes()) {
        return Err(PackError::OutOfMemory { bytes, plan_in_memory: false });
    }
    let mut order = memory::with_capacity::<I>(limit as usize)?;
    for start in (0..beginning.len()).step_by(TURNS_A_TICK) {
        progress.tick("mixing", start as u64, limit)?;
        let stop = beginning.len().min(start + TURNS_A_TICK);
        order.extend((start..stop).map(|position| I::from_usize(beginning.get(position) as usize)));
    }

    let mut unfinished = (0..shares.len()).filter(|&plan| shares[plan] > 0 && sources[plan].left() > 0).count();
    let mut turns = Turns::new(&shares);
    while (order.len() as u64) < limit {
        if order.len().is_multiple_of(TURNS_A_TICK) {
            progress.tick("mixing", order.len() as u64, limit)?;
        }
        let plan = turns.next();
        let source = &mut sources[plan];
        order.push(source.next(request.seed, progress)?);
        if source.taken != source.quota {
            continue;
        }
        unfinished -= 1;
        if unfinished == 0 || exhausted == Exhausted::Stop {
            break;
        }
        if exhausted == Exhausted::Drop {
            source.order = Vec::new();
            shares[plan] = 0;
            turns = Turns::new(&shares);
        }
    }
    order.shrink_to_fit();
    Ok(order)
}

/// The plans, as far as the beginning of the mix has taken their packs.
fn sources_of<I: PlanInteger>(
    request: &MixRequest<'_>,
    progress: &mut dyn Progress,
) -> Result<Vec<Source<I>>, PackError> {
    let mut sources = Vec::with_capacity(request.packs.len());
    let mut firsts = Vec::with_capacity(request.packs.len());
    let mut total = 0u64;
    for (number, &packs) in request.packs.iter().enumerate() {
        let quota = request.epochs.map_or(u64::MAX, |epochs| epochs.saturating_mul(packs));
        let (number, first) = (number as u32, I::from_usize(total as usize));
        sources.push(Source { number, first, packs, taken: 0, quota, order: Vec::new() });
        firsts.push(total);
        total += packs;
    }
    for position in 0..request.beginning.len() {
        if position.is_multiple_of(TURNS_A_TICK) {
            progress.tick("reading the mix", position as u64, request.beginning.len() as u64)?;
        }
        let pack = request.beginning.get(position);
        if pack >= total {
            return Err(PackError::Mismatch(format!(
                "entry {position} of the mix is {}, and its plans have {total} packs: the mix is damaged, make it again",
                pack.cast_signed()
            )));
        }
        // Plans without packs begin where the next plan begins; the last plan that begins there has the pack.
        sources[firsts.partition_point(|&first| first <= pack) - 1].taken += 1;
    }
    Ok(sources)
}

/// Take plans that are through out of the mix.
fn leave_out_exhausted<I: PlanInteger>(shares: &mut [u64], sources: &[Source<I>]) {
    for (share, source) in shares.iter_mut().zip(sources) {
        if source.left() == 0 {
            *share = 0;
        }
    }
}

/// The number of packs that the mix has at most, its beginning included; it may end a few turns earlier.
fn packs_at_most<I: PlanInteger>(
    request: &MixRequest<'_>,
    shares: &[u64],
    sources: &[Source<I>],
) -> Result<u64, PackError> {
    let total = total_of(shares);
    let taking_part = || shares.iter().zip(sources).filter(|(share, _)| **share > 0);
    // Within so many turns the plan is finished.
    let turns = taking_part().map(|(&share, source)| (u128::from(source.left()) * total).div_ceil(share.into()));
    let turns = match request.exhausted {
        Exhausted::Repeat => turns.max(),
        Exhausted::Stop => turns.min(),
        Exhausted::Drop => Some(taking_part().map(|(_, source)| u128::from(source.left())).sum()),
    };
    let beginning = request.beginning.len() as u128;
    let packs = beginning + turns.unwrap_or(0);
    let packs = request.num_packs.map_or(packs, |most| packs.min(most.into())).max(beginning);
    match u64::try_from(packs) {
        Ok(packs) if packs <= LARGEST_MIX => Ok(packs),
        _ if request.epochs.is_none() && request.num_packs.is_none() => {
            invalid("the mix has no end; give epochs or num_packs".into())
        }
        _ => invalid(format!(
            "the mix would have {packs} packs, and may have {LARGEST_MIX}: give num_packs, fewer epochs, or the plan \
             with the smallest weight for its packs a larger weight"
        )),
    }
}

fn total_of(shares: &[u64]) -> u128 {
    shares.iter().map(|&share| u128::from(share)).sum()
}

/// Says which plan takes each turn, while no share changes.
struct Turns {
    /// 0 for a plan that takes no part.
    shares: Vec<u64>,
    total: u128,
    taken: Vec<u64>,
    /// The first and the last turn that each plan's next pack may take.
    windows: Vec<(u64, u64)>,
    turn: u64,
}

impl Turns {
    fn new(shares: &[u64]) -> Self {
        let total = total_of(shares);
        let windows = shares.iter().map(|&share| window(0, share, total)).collect();
        Self { shares: shares.to_vec(), total, taken: vec![0; shares.len()], windows, turn: 0 }
    }

    /// The plan that takes the next turn.
    fn next(&mut self) -> usize {
        self.turn += 1;
        // One of them may take part: together they are entitled to all turns and have had one less.
        let mut chosen = 0;
        let mut due = u64::MAX;
        for (plan, &(first, last)) in self.windows.iter().enumerate() {
            if first <= self.turn && last < due {
                (chosen, due) = (plan, last);
            }
        }
        self.taken[chosen] += 1;
        self.windows[chosen] = window(self.taken[chosen], self.shares[chosen], self.total);
        chosen
    }
}

/// The first and the last turn that a plan's next pack may take when it has had `taken`: with them it is never a whole
/// pack ahead of its share of the turns, or behind.
fn window(taken: u64, share: u64, total: u128) -> (u64, u64) {
    if share == 0 {
        return (u64::MAX, u64::MAX);
    }
    // Below 2¹²⁸: a mix has at most 2⁴⁸ packs, and a share at most 2⁵³.
    let (taken, share) = (u128::from(taken), u128::from(share));
    let turn = |turn: u128| u64::try_from(turn).unwrap_or(u64::MAX).min(u64::MAX - 1);
    (turn(taken * total / share + 1), turn(((taken + 1) * total).div_ceil(share)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_keep_their_proportions() {
        assert_eq!(as_integers(&[3.0, 1.0]), [3 << 51, 1 << 51]);
        assert_eq!(as_integers(&[2f64.powi(1000), 2f64.powi(999), 0.0]), [1 << 52, 1 << 51, 0]);
        let smallest = f64::from_bits(1);
        assert_eq!(as_integers(&[smallest * 4.0, smallest * 3.0]), [1 << 52, 3 << 50]);
        assert_eq!(as_integers(&[1.0, smallest, f64::MIN_POSITIVE]), [1 << 52, 1, 1]);
        assert_eq!(as_integers(&[f64::MAX, f64::MAX]), [(1 << 53) - 1; 2]);
    }

    #[test]
    fn weights_are_rounded_to_the_bits_of_the_largest() {
        let tail = 1.0 + f64::EPSILON * 3.0;
        assert_eq!(as_integers(&[2.0, tail]), [1 << 52, (1 << 51) + 2]);
    }
}

//! Places samples one by one as `best_fit` with costs is defined, and orders the packs as the seed says.

use std::collections::{BTreeMap, BTreeSet};

use super::reference_placement::PlacedPack;
use crate::error::PackError;
use crate::inputs::{RandomState, WINDOW};
use crate::progress::Progress;
use crate::request::WholeOptions;

/// A sample and its cost.
pub(super) type CostlySample = (u64, u64);

/// Draws what is random in `best_fit`: the order of samples of one length, where a seed was given, and that of the packs.
pub(super) struct BestFitOrder {
    random: RandomState,
    is_seeded: bool,
}

impl BestFitOrder {
    pub(super) fn new(seed: Option<u32>) -> Self {
        Self { random: RandomState::new(seed.unwrap_or(0)), is_seeded: seed.is_some() }
    }

    fn shuffled<T: Clone>(&mut self, values: &[T], progress: &mut dyn Progress) -> Result<Vec<T>, PackError> {
        let drawn: Vec<i64> = self.random.shuffled(values.len(), progress)?;
        Ok(drawn.into_iter().map(|at| values[at as usize].clone()).collect())
    }
}

/// The packs of a stream, in the order of the plan.
pub(super) fn cost_fit_packs(
    by_length: &BTreeMap<u64, Vec<CostlySample>>,
    max_length: u64,
    max_cost: u64,
    options: &WholeOptions,
    order: &mut BestFitOrder,
    progress: &mut dyn Progress,
) -> Result<Vec<PlacedPack>, PackError> {
    let mut packs: Vec<PlacedPack> = Vec::new();
    // By room: what each pack with it may cost further, and its number.
    let mut open: BTreeMap<u64, BTreeSet<(u64, usize)>> = BTreeMap::new();
    let mut placed = 0u64;
    for (&length, samples) in by_length.iter().rev() {
        let size = options.aligned(length);
        let samples = if order.is_seeded { &order.shuffled(samples, progress)? } else { samples };
        for &(sample, cost) in samples {
            if placed.is_multiple_of(WINDOW as u64) {
                progress.tick("verifying", placed, 0)?;
            }
            placed += 1;
            let best = open.range(size..).find_map(|(&room, packs)| {
                packs.range((cost, 0)..).next().map(|&(cost_left, number)| (room, cost_left, number))
            });
            let (room, cost_left, number) = best.unwrap_or((max_length, max_cost, packs.len()));
            if number == packs.len() {
                packs.push(PlacedPack { room, cost_left, pieces: Vec::new() });
            } else if let Some(same_room) = open.get_mut(&room) {
                same_room.remove(&(cost_left, number));
                if same_room.is_empty() {
                    open.remove(&room);
                }
            }
            let pack = &mut packs[number];
            pack.room -= size;
            pack.cost_left = pack.cost_left.saturating_sub(cost);
            pack.pieces.push((sample, 0));
            if (pack.pieces.len() as u64) < options.most_pieces() {
                open.entry(pack.room).or_default().insert((pack.cost_left, number));
            }
        }
    }
    order.shuffled(&packs, progress)
}

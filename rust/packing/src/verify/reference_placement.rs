//! Places items one by one, as the modes of whole samples are defined.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use crate::error::PackError;
use crate::inputs::WINDOW;
use crate::progress::Progress;
use crate::request::WholeOptions;

/// Packs by the room that is left in them and their pieces.
pub(super) type PacksByRoom = BTreeMap<(u64, u64), u64>;

/// The packs that best-fit decreasing makes of `sizes`: how many items take so many tokens of a pack.
pub(super) fn best_fit_packs(
    sizes: &BTreeMap<u64, u64>,
    max_length: u64,
    options: &WholeOptions,
    progress: &mut dyn Progress,
) -> Result<PacksByRoom, PackError> {
    let (mut open, mut closed) = (PacksByRoom::new(), PacksByRoom::new());
    let mut placed = 0u64;
    let items = sizes.values().fold(0u64, |sum, &count| sum.saturating_add(count));
    for (&size, &count) in sizes.iter().rev() {
        for _ in 0..count {
            if placed.is_multiple_of(WINDOW as u64) {
                progress.tick("verifying", placed, items)?;
            }
            placed += 1;
            let found = open.range((size, 0)..).next().map(|(&pack, &count)| (pack, count));
            let (room, pieces) = match found {
                Some((pack, 1)) => {
                    open.remove(&pack);
                    pack
                }
                Some((pack, count)) => {
                    open.insert(pack, count - 1);
                    pack
                }
                None => (max_length, 0),
            };
            let packs = if pieces + 1 < options.most_pieces() { &mut open } else { &mut closed };
            *packs.entry((room - size, pieces + 1)).or_default() += 1;
        }
    }
    // None of the closed packs has as many pieces as an open one.
    open.append(&mut closed);
    Ok(open)
}

/// A sample, and the first token that is taken of it.
pub(super) type Piece = (u64, u64);

/// A pack, open or closed.
#[derive(Clone)]
pub(super) struct PlacedPack {
    /// Tokens that its pieces leave.
    pub(super) room: u64,
    /// What it may cost further.
    pub(super) cost_left: u64,
    pub(super) pieces: Vec<Piece>,
}

/// The open packs of the modes that keep the order, the oldest first.
pub(super) struct OpenPacks {
    packs: VecDeque<PlacedPack>,
    /// Number of the oldest.
    oldest: u64,
    /// Room and number of the packs that may take more pieces.
    by_room: BTreeSet<(u64, u64)>,
    window: usize,
    max_length: u64,
    max_cost: u64,
    most_pieces: u64,
}

impl OpenPacks {
    pub(super) fn new(window: u64, max_length: u64, max_cost: u64, options: &WholeOptions) -> Self {
        Self {
            packs: VecDeque::new(),
            oldest: 0,
            by_room: BTreeSet::new(),
            window: window as usize,
            max_length,
            max_cost,
            most_pieces: options.most_pieces(),
        }
    }

    /// Place a piece that takes `size` tokens and costs `cost`; the pack that is closed by that.
    pub(super) fn place(&mut self, piece: Piece, size: u64, cost: u64) -> Option<PlacedPack> {
        let may_cost = |number: u64| self.packs[(number - self.oldest) as usize].cost_left >= cost;
        // Of several packs with the same room, the oldest has the smallest number.
        let best = self.by_room.range((size, 0)..).find(|&&(_, number)| may_cost(number)).copied();
        let number = match best {
            Some(best) => {
                self.by_room.remove(&best);
                best.1
            }
            None => {
                let (room, cost_left) = (self.max_length, self.max_cost);
                self.packs.push_back(PlacedPack { room, cost_left, pieces: Vec::new() });
                self.oldest + self.packs.len() as u64 - 1
            }
        };
        let pack = &mut self.packs[(number - self.oldest) as usize];
        pack.room -= size;
        pack.cost_left = pack.cost_left.saturating_sub(cost);
        pack.pieces.push(piece);
        if (pack.pieces.len() as u64) < self.most_pieces {
            self.by_room.insert((pack.room, number));
        }
        if self.packs.len() > self.window { self.close() } else { None }
    }

    /// Close the oldest pack.
    pub(super) fn close(&mut self) -> Option<PlacedPack> {
        let pack = self.packs.pop_front()?;
        self.by_room.remove(&(pack.room, self.oldest));
        self.oldest += 1;
        Some(pack)
    }
}

//! Places the pieces of a stream one by one, as "ordered" and "sequential" place those of a plan.

use super::pack_window::PackWindow;
use crate::error::PackError;
use crate::request::{Mode, Overlong, Placement, WholeOptions};

/// The open packs of a stream.
///
/// Packs are numbered from 0 in the order in which they are opened. Pack `n` is closed when pack `n + window` is
/// opened.
pub struct StreamWindow {
    packs: PackWindow,
    /// Pieces of the pack in each slot of `packs`.
    pieces: Vec<u64>,
    window: u64,
    max_length: u64,
    options: WholeOptions,
    /// Packs opened so far.
    opened: u64,
}

impl StreamWindow {
    /// No pack is open yet; `window` may be at once. `max_samples` and `align` are those of `WholeOptions`.
    ///
    /// # Errors
    /// `Invalid` for arguments out of range.
    pub fn new(window: u64, max_length: u64, max_samples: Option<u64>, align: u64) -> Result<Self, PackError> {
        let placement = Placement::Ordered { window };
        let options = WholeOptions { placement, overlong: Overlong::Error, max_samples, align };
        Mode::Whole(options).check(max_length).map_err(PackError::Invalid)?;
        let packs = PackWindow::new(window, max_length);
        Ok(Self { packs, pieces: vec![0; window as usize], window, max_length, options, opened: 0 })
    }

    /// Put a piece of `tokens` tokens into a pack; its number.
    ///
    /// # Errors
    /// `Invalid` for a piece that is empty or longer than a pack.
    pub fn place(&mut self, tokens: u64) -> Result<u64, PackError> {
        if tokens == 0 || tokens > self.max_length {
            let max_length = self.max_length;
            return Err(PackError::Invalid(format!("a piece of {tokens} tokens in packs of {max_length}")));
        }
        let placed = self.packs.place(self.options.aligned(tokens) as u32);
        let pieces = &mut self.pieces[placed.slot];
        if placed.is_new {
            self.opened += 1;
            *pieces = 0;
        }
        *pieces += 1;
        if *pieces == self.options.most_pieces() {
            self.packs.fill_up(&placed);
        }
        // The newest pack is in the last place.
        Ok(self.opened + placed.place as u64 - self.window)
    }

    /// Have the packs from `first` on open, each with pieces of these lengths; no other was open before.
    ///
    /// # Errors
    /// `Invalid` for more packs than may be open, and for a pack that is empty or too full.
    pub fn reopen(&mut self, first: u64, packs: &[Vec<u64>]) -> Result<(), PackError> {
        let most = self.options.most_pieces();
        let room = |pieces: &Vec<u64>| {
            let taken = pieces.iter().fold(0u64, |sum, &tokens| sum.saturating_add(self.options.aligned(tokens)));
            let count = pieces.len() as u64;
            let left = self.max_length.checked_sub(taken).filter(|_| taken > 0 && count <= most);
            left.map(|left| if count == most { 0 } else { left })
        };
        let free: Option<Vec<u64>> = packs.iter().map(room).collect();
        let free = free.filter(|free| free.len() as u64 <= self.window);
        let free = free.ok_or_else(|| PackError::Invalid(format!("packs of {packs:?} tokens cannot be open")))?;
        self.packs = PackWindow::new(self.window, self.max_length);
        self.packs.reopen(&free);
        // The slots of a new window are in the order of the packs.
        let unused = self.pieces.len() - packs.len();
        self.pieces[unused..].iter_mut().zip(packs).for_each(|(count, pieces)| *count = pieces.len() as u64);
        self.opened = first + packs.len() as u64;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MAX_LENGTH: u64 = 24;

    /// The number of the pack that takes each piece, by the definition.
    fn numbers(lengths: &[u64], window: usize, most: Option<u64>, align: u64) -> Vec<usize> {
        let mut packs: Vec<(u64, u64)> = Vec::new();
        let place = |&length: &u64| {
            let size = length.div_ceil(align) * align;
            let takes = |&number: &usize| packs[number].0 >= size && most.is_none_or(|most| packs[number].1 < most);
            let open = packs.len().saturating_sub(window)..packs.len();
            let best = open.filter(takes).min_by_key(|&number| (packs[number].0, number));
            let number = best.unwrap_or_else(|| {
                packs.push((MAX_LENGTH, 0));
                packs.len() - 1
            });
            packs[number] = (packs[number].0 - size, packs[number].1 + 1);
            number
        };
        lengths.iter().map(place).collect()
    }

    proptest! {
        #[test]
        fn packs_are_those_of_the_definition_also_after_they_were_reopened(
            lengths in prop::collection::vec(1..=MAX_LENGTH, 0..80),
            window in 1usize..6,
            most in prop::option::of(1u64..4),
            align in prop::sample::select(vec![1u64, 2, 3, 8]),
            reopened in 0usize..80,
        ) {
            let new = || StreamWindow::new(window as u64, MAX_LENGTH, most, align).unwrap();
            let mut stream = new();
            let mut packs: Vec<Vec<u64>> = Vec::new();
            for (sample, (&length, expected)) in lengths.iter().zip(numbers(&lengths, window, most, align)).enumerate() {
                if sample == reopened {
                    let first = packs.len().saturating_sub(window);
                    stream = new();
                    stream.reopen(first as u64, &packs[first..]).unwrap();
                }
                let number = stream.place(length).unwrap() as usize;
                prop_assert_eq!(number, expected);
                if number == packs.len() {
                    packs.push(Vec::new());
                }
                packs[number].push(length);
            }
        }
    }

    #[test]
    fn pieces_and_packs_that_cannot_be_are_refused() {
        let mut stream = StreamWindow::new(2, MAX_LENGTH, Some(2), 8).unwrap();
        assert!(stream.place(0).is_err() && stream.place(MAX_LENGTH + 1).is_err());
        for packs in [vec![vec![1]; 3], vec![vec![]], vec![vec![17, 1]], vec![vec![1, 1, 1]], vec![vec![0]]] {
            assert!(stream.reopen(0, &packs).is_err(), "{packs:?}");
        }
        assert!(StreamWindow::new(0, MAX_LENGTH, None, 1).is_err() && StreamWindow::new(1, 0, None, 1).is_err());
        assert!(StreamWindow::new(1, MAX_LENGTH, None, 7).is_err() && StreamWindow::new(1, 8, Some(0), 1).is_err());
    }
}

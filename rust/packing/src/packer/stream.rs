//! Packs the samples of a stream, which come one after the other, as the plan of the same samples has them.
//!
//! Packs are numbered from 0 in the order in which they are opened.

use super::ordered::PackWindow;
use super::whole::SampleParts;
use crate::error::PackError;
use crate::plan::PlanMetadata;
use crate::request::{Mode, Overlong, PackRequest, Packing, WholeOptions};

/// The packs of a stream that may still take pieces.
pub struct StreamPacker {
    max_length: u64,
    open: OpenPacks,
    /// Packs opened so far.
    opened: u64,
    /// Its options, as `plan.json` has them.
    options: PlanMetadata,
}

enum OpenPacks {
    /// Of hard packing: the tokens of the newest pack.
    Hard {
        filled: u64,
    },
    Whole(WholePacks),
}

/// The packs of whole samples that were opened last.
struct WholePacks {
    options: WholeOptions,
    window: PackWindow,
    /// Pieces of the pack in each slot of `window`.
    pieces: Vec<u64>,
}

/// The tokens `start` … `stop` - 1 of a sample, and the pack that takes them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamPiece {
    /// The number of the pack.
    pub pack: u64,
    /// The first token.
    pub start: u64,
    /// One past the last token.
    pub stop: u64,
}

impl StreamPacker {
    /// No pack is open yet. The request has no lengths.
    ///
    /// # Errors
    /// `Invalid` for options out of range, or that contradict each other, and for a mode that needs all samples.
    pub fn new(request: &PackRequest<'_>) -> Result<Self, PackError> {
        if request.mode == Mode::BestFit {
            return Err(PackError::Invalid(
                "mode 'best_fit' sorts all samples by length, and a stream gives one after the other: choose \
                 mode='ordered', or plan the samples with td.pack"
                    .into(),
            ));
        }
        let (max_length, options) = (request.max_length, PlanMetadata::of_request(request)?);
        let open = match request.check()? {
            Packing::Hard { .. } => OpenPacks::Hard { filled: max_length },
            Packing::Whole(options) => OpenPacks::Whole(WholePacks::new(options, max_length)),
        };
        Ok(Self { max_length, open, opened: 0, options })
    }

    /// The options, checked and complete.
    #[must_use]
    pub fn options(&self) -> &PlanMetadata {
        &self.options
    }

    /// The number of packs that take nothing more. They are the first ones.
    #[must_use]
    pub fn closed(&self) -> u64 {
        match &self.open {
            OpenPacks::Hard { filled } => self.opened - u64::from(*filled < self.max_length),
            OpenPacks::Whole(whole) => self.opened.saturating_sub(whole.pieces.len() as u64),
        }
    }

    /// Put sample `sample` of `tokens` tokens into packs; its pieces, in order.
    ///
    /// # Errors
    /// `Overlong` for a sample that is longer than a pack, where that is refused.
    pub fn place(&mut self, sample: usize, tokens: u64) -> Result<Vec<StreamPiece>, PackError> {
        let max_length = self.max_length;
        let mut pieces = Vec::new();
        let mut start = 0;
        match &mut self.open {
            OpenPacks::Hard { filled } => {
                while start < tokens {
                    if *filled == max_length {
                        (*filled, self.opened) = (0, self.opened + 1);
                    }
                    let stop = tokens.min(start + max_length - *filled);
                    pieces.push(StreamPiece { pack: self.opened - 1, start, stop });
                    *filled += stop - start;
                    start = stop;
                }
            }
            OpenPacks::Whole(whole) => {
                if tokens > max_length && whole.options.overlong == Overlong::Error {
                    return Err(PackError::Overlong { count: 1, dataset: 0, sample, length: tokens, max_length });
                }
                let parts = SampleParts::new(tokens, max_length, whole.options.overlong)?;
                let packed = parts.full * max_length + parts.last;
                while start < packed {
                    let stop = packed.min(start + max_length);
                    let pack = whole.place(stop - start, &mut self.opened);
                    pieces.push(StreamPiece { pack, start, stop });
                    start = stop;
                }
            }
        }
        Ok(pieces)
    }

    /// Go on with the packs from `first` on, each of which has pieces of these lengths; none was open before.
    ///
    /// # Errors
    /// `Invalid` for a pack that is empty, or fuller than a pack can be.
    pub fn reopen(&mut self, first: u64, packs: &[Vec<u64>]) -> Result<(), PackError> {
        let refused = |pieces: &[u64]| PackError::Invalid(format!("no open pack has pieces of {pieces:?} tokens"));
        match &mut self.open {
            OpenPacks::Hard { filled } => {
                for (number, pieces) in packs.iter().enumerate() {
                    let tokens = pieces.iter().fold(0u64, |sum, &tokens| sum.saturating_add(tokens));
                    // Only the newest may be short.
                    let least = if number + 1 == packs.len() { 1 } else { self.max_length };
                    if !(least..=self.max_length).contains(&tokens) {
                        return Err(refused(pieces));
                    }
                    *filled = tokens;
                }
            }
            OpenPacks::Whole(whole) => {
                let room = |pieces: &Vec<u64>| whole.room(pieces, self.max_length).ok_or_else(|| refused(pieces));
                let free: Vec<u64> = packs.iter().map(room).collect::<Result<_, _>>()?;
                whole.reopen(&free, packs);
            }
        }
        self.opened = first.saturating_add(packs.len() as u64);
        Ok(())
    }
}

impl WholePacks {
    fn new(options: WholeOptions, max_length: u64) -> Self {
        let window = options.window.unwrap_or(1);
        Self { options, window: PackWindow::new(window, max_length), pieces: vec![0; window as usize] }
    }

    /// The number of the pack that takes a piece of so many tokens. `opened` counts the packs.
    fn place(&mut self, tokens: u64, opened: &mut u64) -> u64 {
        let placed = self.window.place(self.options.aligned(tokens) as u32);
        let pieces = &mut self.pieces[placed.slot];
        if placed.is_new {
            *opened += 1;
            *pieces = 0;
        }
        *pieces += 1;
        if *pieces == self.options.most_pieces() {
            self.window.fill_up(&placed);
        }
        // The newest pack is in the last place.
        *opened + placed.place as u64 - self.pieces.len() as u64
    }

    /// The room of a pack with pieces of these lengths; none of a pack that cannot be.
    fn room(&self, pieces: &[u64], max_length: u64) -> Option<u64> {
        let (count, most) = (pieces.len() as u64, self.options.most_pieces());
        let mut left = max_length;
        for &tokens in pieces {
            if !(1..=left).contains(&tokens) {
                return None;
            }
            left = left.checked_sub(self.options.aligned(tokens))?;
        }
        if count == 0 || count > most {
            return None;
        }
        Some(if count == most { 0 } else { left })
    }

    /// Have the newest of these packs open, whose room is `free`.
    fn reopen(&mut self, free: &[u64], packs: &[Vec<u64>]) {
        let closed = packs.len().saturating_sub(self.pieces.len());
        self.window.reopen(&free[closed..]);
        // The slots of a new window are in the order of the packs.
        let unused = self.pieces.len() - (packs.len() - closed);
        let open = self.pieces[unused..].iter_mut().zip(&packs[closed..]);
        open.for_each(|(count, pieces)| *count = pieces.len() as u64);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::integers::Integers;
    use crate::progress::NoProgress;
    use crate::{Field, Packer};

    const MAX_LENGTH: u64 = 24;

    /// Options that a stream takes, and how many packs are open at once.
    fn options() -> impl Strategy<Value = PackRequest<'static>> {
        let request = || PackRequest::new(Vec::new(), MAX_LENGTH);
        let overlong = prop_oneof![Just(Overlong::Split), Just(Overlong::Truncate), Just(Overlong::Drop)];
        let align = prop::sample::select(vec![1u64, 2, 3, 8]);
        let whole = (1u64..6, overlong, prop::option::of(1u64..4), align);
        prop_oneof![
            Just(PackRequest { drop_last: Some(false), ..request() }),
            whole.prop_map(move |(window, overlong, max_samples, align)| {
                let (mode, window) = if window == 1 { (Mode::Sequential, None) } else { (Mode::Ordered, Some(window)) };
                PackRequest { mode, window, overlong: Some(overlong), max_samples, align, ..request() }
            })
        ]
    }

    proptest! {
        #[test]
        fn packs_are_those_of_the_plan_also_after_they_were_reopened(
            lengths in prop::collection::vec(0u64..60, 0..60),
            options in options(),
            reopened in 0usize..60,
            given in 0u64..9,
        ) {
            let new = || StreamPacker::new(&options).unwrap();
            let mut stream = new();
            let mut packs: Vec<Vec<(u64, u64)>> = Vec::new();
            for (sample, &length) in lengths.iter().enumerate() {
                if sample == reopened {
                    let first = stream.closed().min(given) as usize;
                    let left: Vec<Vec<u64>> =
                        packs[first..].iter().map(|pack| pack.iter().map(|piece| piece.1).collect()).collect();
                    stream = new();
                    stream.reopen(first as u64, &left).unwrap();
                }
                let closed = stream.closed();
                for piece in stream.place(sample, length).unwrap() {
                    prop_assert!(piece.pack >= closed);
                    packs.resize(packs.len().max(piece.pack as usize + 1), Vec::new());
                    packs[piece.pack as usize].push((sample as u64, piece.stop - piece.start));
                }
            }
            let request = PackRequest { lengths: vec![Integers::from(&lengths[..])], ..options.clone() };
            let plan = Packer::new(request, &mut NoProgress).unwrap().pack(&mut NoProgress).unwrap();
            let (samples, ends) = (plan.column(Field::Indices).to_i64(), plan.column(Field::IndicesCuLen).to_i64());
            prop_assert_eq!(packs.len(), ends.len());
            let mut start = 0;
            for (pack, &end) in packs.iter().zip(&ends) {
                // Hard packing has pieces without tokens, too.
                let planned = samples[start..end as usize].iter().map(|&sample| sample as u64);
                let planned: Vec<u64> = planned.filter(|&sample| lengths[sample as usize] > 0).collect();
                let found: Vec<u64> = pack.iter().map(|piece| piece.0).collect();
                prop_assert_eq!(found, planned);
                start = end as usize;
            }
        }
    }

    #[test]
    fn packs_that_cannot_be_are_refused() {
        let whole = PackRequest {
            mode: Mode::Ordered,
            window: Some(2),
            max_samples: Some(2),
            align: 8,
            ..PackRequest::new(Vec::new(), MAX_LENGTH)
        };
        for packs in [vec![vec![]], vec![vec![17, 1]], vec![vec![1, 1, 1]], vec![vec![0]], vec![vec![u64::MAX]]] {
            assert!(StreamPacker::new(&whole).unwrap().reopen(0, &packs).is_err(), "{packs:?}");
        }
        let hard = PackRequest::new(Vec::new(), MAX_LENGTH);
        for packs in [vec![vec![]], vec![vec![20, 5]], vec![vec![20], vec![3]], vec![vec![u64::MAX, 2]]] {
            assert!(StreamPacker::new(&hard).unwrap().reopen(0, &packs).is_err(), "{packs:?}");
        }
    }
}

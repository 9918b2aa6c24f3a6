//! The modes of whole samples by their definitions, one item after the other.

use std::collections::VecDeque;

use tundish_packing::{Integers, Mode, Overlong, PackRequest};

/// How samples are placed in packs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    BestFit,
    Ordered { window: u64 },
    Sequential,
}

/// The options of whole samples.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WholeOptions {
    pub placement: Placement,
    pub overlong: Overlong,
    pub max_samples: Option<u64>,
    pub align: u64,
}

impl WholeOptions {
    /// A request with these options.
    pub fn request<'a>(&self, lengths: Vec<Integers<'a>>, max_length: u64) -> PackRequest<'a> {
        let (mode, window) = match self.placement {
            Placement::BestFit => (Mode::BestFit, None),
            Placement::Ordered { window } => (Mode::Ordered, Some(window)),
            Placement::Sequential => (Mode::Sequential, None),
        };
        PackRequest {
            mode,
            window,
            overlong: Some(self.overlong),
            max_samples: self.max_samples,
            align: self.align,
            threads: Some(1),
            ..PackRequest::new(lengths, max_length)
        }
    }
}

/// Sample, first token, one past the last token.
pub type Piece = (u64, u64, u64);

/// A pack that is being filled.
struct OpenPack {
    room: u64,
    pieces: Vec<Piece>,
    /// When it was filled last.
    time: u64,
}

/// The pieces that a sample is packed as.
fn pieces_of(sample: u64, length: u64, max_length: u64, overlong: Overlong) -> Vec<Piece> {
    match overlong {
        _ if length == 0 => vec![],
        Overlong::Truncate => vec![(sample, 0, length.min(max_length))],
        Overlong::Drop if length > max_length => vec![],
        _ => (0..length)
            .step_by(max_length as usize)
            .map(|start| (sample, start, length.min(start + max_length)))
            .collect(),
    }
}

/// The packs of the samples in `order`. `shuffle` shuffles the pieces of one length for `best_fit`.
pub fn naive_packs(
    lengths: &[u64],
    order: &[u64],
    max_length: u64,
    options: &WholeOptions,
    shuffle: &mut dyn FnMut(&mut Vec<Piece>),
) -> Vec<Vec<Piece>> {
    let pieces = order
        .iter()
        .flat_map(|&sample| pieces_of(sample, lengths[sample as usize], max_length, options.overlong))
        .collect();
    match options.placement {
        Placement::BestFit => best_fit(pieces, lengths, max_length, options, shuffle),
        Placement::Ordered { window } => ordered(pieces, max_length, options, window as usize),
        Placement::Sequential => sequential(pieces, max_length, options),
    }
}

fn size_of((_, start, stop): Piece, options: &WholeOptions) -> u64 {
    (stop - start).div_ceil(options.align) * options.align
}

fn has_place(pack: &OpenPack, size: u64, options: &WholeOptions) -> bool {
    pack.room >= size && options.max_samples.is_none_or(|most| (pack.pieces.len() as u64) < most)
}

/// Of packs with the same room, those with the fewest pieces first, and of those the one that was filled first.
fn best_fit(
    mut pieces: Vec<Piece>,
    lengths: &[u64],
    max_length: u64,
    options: &WholeOptions,
    shuffle: &mut dyn FnMut(&mut Vec<Piece>),
) -> Vec<Vec<Piece>> {
    // Parts that fill a pack are packs by themselves, whatever the rest does.
    let is_full_part = |&(sample, start, stop): &Piece| {
        options.overlong == Overlong::Split && lengths[sample as usize] > max_length && stop - start == max_length
    };
    let mut done: Vec<Vec<Piece>> =
        pieces.iter().filter(|piece| is_full_part(piece)).map(|&piece| vec![piece]).collect();
    pieces.retain(|piece| !is_full_part(piece));
    pieces.sort_by_key(|(_, start, stop)| std::cmp::Reverse(stop - start));
    let mut packs: Vec<OpenPack> = Vec::new();
    let mut time = 0;
    for run in pieces.chunk_by(|one, other| one.2 - one.1 == other.2 - other.1) {
        let mut run = run.to_vec();
        shuffle(&mut run);
        for piece in run {
            let size = size_of(piece, options);
            let fitting = packs.iter_mut().filter(|pack| has_place(pack, size, options));
            time += 1;
            match fitting.min_by_key(|pack| (pack.room, pack.pieces.len(), pack.time)) {
                Some(pack) => {
                    pack.room -= size;
                    pack.pieces.push(piece);
                    pack.time = time;
                }
                None => packs.push(OpenPack { room: max_length - size, pieces: vec![piece], time }),
            }
        }
    }
    done.extend(packs.into_iter().map(|pack| pack.pieces));
    done
}

fn ordered(pieces: Vec<Piece>, max_length: u64, options: &WholeOptions, window: usize) -> Vec<Vec<Piece>> {
    let mut open: VecDeque<OpenPack> = VecDeque::new();
    let mut closed = Vec::new();
    for piece in pieces {
        let size = size_of(piece, options);
        let mut best: Option<usize> = None;
        for (number, pack) in open.iter().enumerate() {
            if has_place(pack, size, options) && best.is_none_or(|best| pack.room < open[best].room) {
                best = Some(number);
            }
        }
        if let Some(best) = best {
            open[best].room -= size;
            open[best].pieces.push(piece);
            continue;
        }
        if open.len() == window {
            closed.extend(open.pop_front().map(|pack| pack.pieces));
        }
        open.push_back(OpenPack { room: max_length - size, pieces: vec![piece], time: 0 });
    }
    closed.extend(open.into_iter().map(|pack| pack.pieces));
    closed
}

fn sequential(pieces: Vec<Piece>, max_length: u64, options: &WholeOptions) -> Vec<Vec<Piece>> {
    let mut packs: Vec<OpenPack> = Vec::new();
    for piece in pieces {
        let size = size_of(piece, options);
        match packs.last_mut() {
            Some(pack) if has_place(pack, size, options) => {
                pack.room -= size;
                pack.pieces.push(piece);
            }
            _ => packs.push(OpenPack { room: max_length - size, pieces: vec![piece], time: 0 }),
        }
    }
    packs.into_iter().map(|pack| pack.pieces).collect()
}

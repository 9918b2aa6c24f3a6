//! The linear merge that cuts a run of samples into packs of `max_length` tokens.
//!
//! It owns no memory: it reads the samples of one chunk and writes into slices that its caller made
//! large enough. What always holds: `Cut` alone decides what the next sample does, so chunks merge by
//! handing on their `Cut`, and every slice access is bounds-checked.

use super::Cell;

/// Where the cutting stands between two samples.
///
/// `filled` tokens are in the open pack; they are fewer than `max_length`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Cut<W> {
    /// Tokens in the open pack.
    pub filled: W,
    /// First token that the open pack takes from its first sample.
    pub start: W,
    /// Longest piece of the open pack so far.
    pub longest: W,
}

/// What the merge of one chunk wrote.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Written {
    pub pieces: usize,
    pub packs: usize,
    /// Pieces up to the end of the last pack closed here; 0 where none was.
    pub pieces_closed: usize,
    /// Empty samples on a boundary, left out.
    pub skipped: usize,
}

/// Room for the output of one chunk; all but `indices` hold one entry a pack.
pub(crate) struct Room<'a, S> {
    pub indices: &'a mut [S],
    pub indices_cu_len: &'a mut [S],
    pub start_offset: &'a mut [S],
    pub end_offset: &'a mut [S],
    pub longest: &'a mut [S],
}

/// Cut the samples `indices` of `lengths` tokens, going on from `cut`.
///
/// `pieces_before` pieces of the plan precede this chunk's.
pub(crate) fn merge<C: Cell>(
    indices: &[C::Word],
    lengths: &[C::Word],
    max_length: C::Word,
    cut: &mut Cut<C::Word>,
    pieces_before: usize,
    room: &mut Room<'_, C>,
) -> Written {
    let zero = C::Word::default();
    let (mut pieces, mut packs, mut pieces_closed, mut skipped) = (0usize, 0usize, 0usize, 0usize);
    let Cut { mut filled, mut start, mut longest } = *cut;
    // One length for all pack fields lets the compiler check the index once.
    let packs_room = room.indices_cu_len.len();
    let ends = &mut room.end_offset[..packs_room];
    let starts = &mut room.start_offset[..packs_room];
    let longests = &mut room.longest[..packs_room];
    let cumulative = &mut room.indices_cu_len[..packs_room];
    let pieces_out = &mut *room.indices;
    for (&index, &length) in indices.iter().zip(lengths) {
        let sum = C::add(filled, length);
        if sum < max_length {
            if sum == zero {
                // An empty sample on the boundary belongs to neither pack.
                skipped += 1;
                continue;
            }
            pieces_out[pieces] = C::from_word(index);
            pieces += 1;
            longest = longest.max(length);
            filled = sum;
            continue;
        }
        let mut taken = C::sub(max_length, filled);
        let mut rest = C::sub(length, taken);
        longest = longest.max(taken);
        loop {
            pieces_out[pieces] = C::from_word(index);
            pieces += 1;
            starts[packs] = C::from_word(start);
            ends[packs] = C::from_word(taken);
            longests[packs] = C::from_word(longest);
            cumulative[packs] = C::from_word(C::word_of(pieces_before + pieces));
            packs += 1;
            pieces_closed = pieces;
            start = taken;
            longest = max_length;
            if rest < max_length {
                break;
            }
            taken = C::add(taken, max_length);
            rest = C::sub(rest, max_length);
        }
        if rest == zero {
            start = zero;
        } else {
            pieces_out[pieces] = C::from_word(index);
            pieces += 1;
        }
        longest = rest;
        filled = rest;
    }
    *cut = Cut { filled, start, longest };
    Written { pieces, packs, pieces_closed, skipped }
}

/// The packs that lie wholly inside one long sample, written a batch at a time.
///
/// `offset` tokens of the sample are taken already and the open pack is empty; `packs` more are cut.
pub(crate) fn repeat<C: Cell>(
    index: C::Word,
    offset: C::Word,
    max_length: C::Word,
    packs: usize,
    pieces_before: usize,
    room: &mut Room<'_, C>,
) {
    let mut taken = offset;
    for pack in 0..packs {
        room.indices[pack] = C::from_word(index);
        room.start_offset[pack] = C::from_word(taken);
        taken = C::add(taken, max_length);
        room.end_offset[pack] = C::from_word(taken);
        room.longest[pack] = C::from_word(max_length);
        room.indices_cu_len[pack] = C::from_word(C::word_of(pieces_before + pack + 1));
    }
}

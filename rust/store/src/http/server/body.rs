//! What an answer consists of, and how it is put before the socket: texts, and the bytes of shards where they lie.

use std::io::IoSlice;
use std::ops::Range;

use smallvec::SmallVec;

use crate::http::json::{self, Base64};
use crate::passage::Outgoing;

/// Pieces that are handed to the kernel at once.
const MOST_SLICES: usize = 64;

/// Slices for one call of the kernel.
pub(super) type Slices<'a> = SmallVec<[IoSlice<'a>; MOST_SLICES]>;

/// The body of an answer.
#[derive(Debug, Default)]
pub(super) struct Body {
    /// All texts, one behind the other.
    texts: Vec<u8>,
    shards: Vec<Outgoing>,
    pieces: Vec<Piece>,
}

#[derive(Clone, Debug)]
enum Piece {
    Text(Range<usize>),
    /// Bytes of a shard, as they are.
    Bytes(usize, Range<usize>),
    /// All bytes of a shard, in base64.
    Base64(usize, Base64),
}

impl Body {
    pub(super) fn of_text(text: impl Into<Vec<u8>>) -> Self {
        let texts = text.into();
        Body { pieces: vec![Piece::Text(0..texts.len())], texts, shards: Vec::new() }
    }

    /// Goes on with what `write` writes.
    pub(super) fn text(&mut self, write: impl FnOnce(&mut Vec<u8>)) {
        let start = self.texts.len();
        write(&mut self.texts);
        self.pieces.push(Piece::Text(start..self.texts.len()));
    }

    /// How many pieces it has, by which what was added is known.
    pub(super) fn pieces(&self) -> usize {
        self.pieces.len()
    }

    /// Goes on with these pieces once more: nothing of what they say is held twice.
    pub(super) fn again(&mut self, pieces: Range<usize>) {
        self.pieces.extend_from_within(pieces);
    }

    /// Goes on with the bytes of a shard.
    pub(super) fn bytes(&mut self, shard: Outgoing) {
        self.pieces.push(Piece::Bytes(self.shards.len(), 0..shard.bytes().len()));
        self.shards.push(shard);
    }

    /// Goes on with a shard in JSON.
    pub(super) fn json(&mut self, shard: Outgoing) {
        self.text(|texts| texts.extend(json::before(shard.meta()).bytes()));
        self.pieces.push(Piece::Base64(self.shards.len(), Base64::of(shard.meta())));
        self.shards.push(shard);
        self.text(|texts| texts.extend(json::BEHIND.bytes()));
    }

    pub(super) fn len(&self) -> u64 {
        self.pieces.iter().map(|piece| self.piece_len(piece)).sum()
    }

    fn piece_len(&self, piece: &Piece) -> u64 {
        match piece {
            Piece::Text(range) | Piece::Bytes(_, range) => range.len() as u64,
            Piece::Base64(shard, form) => form.len(self.shards[*shard].bytes().len() as u64),
        }
    }

    /// Keeps these bytes of it alone. For what has no base64.
    pub(super) fn cut(&mut self, kept: &Range<u64>) {
        let mut start = 0;
        let pieces = std::mem::take(&mut self.pieces);
        for mut piece in pieces {
            let len = self.piece_len(&piece);
            if let Piece::Text(range) | Piece::Bytes(_, range) = &mut piece {
                let first = kept.start.saturating_sub(start).min(len) as usize;
                let last = kept.end.saturating_sub(start).min(len) as usize;
                *range = range.start + first..range.start + last.max(first);
            }
            start += len;
            self.pieces.push(piece);
        }
    }
}

/// How far the sending of a body has come.
#[derive(Debug, Default)]
pub(super) struct Cursor {
    piece: usize,
    /// Bytes of the piece that are sent; of base64, bytes of the shard that are staged.
    done: usize,
    /// Base64 that is on its way.
    staged: String,
    /// Of that, bytes that are sent.
    staged_done: usize,
}

impl Cursor {
    /// Makes base64 of what comes next, where it is to come in base64.
    pub(super) fn stage(&mut self, body: &Body) {
        if self.staged_done < self.staged.len() {
            return;
        }
        self.staged.clear();
        self.staged_done = 0;
        while let Some(Piece::Base64(shard, form)) = body.pieces.get(self.piece) {
            let bytes = &body.shards[*shard].bytes()[self.done..];
            if bytes.is_empty() {
                self.next();
                continue;
            }
            let some = &bytes[..bytes.len().min(json::STRIDE)];
            form.write(some, &mut self.staged);
            self.done += some.len();
            return;
        }
    }

    /// What comes next, up to about `most` bytes; nothing at the end.
    pub(super) fn slices<'a>(&'a self, body: &'a Body, most: usize, slices: &mut Slices<'a>) {
        let mut rest = most;
        if self.staged_done < self.staged.len() {
            slices.push(IoSlice::new(&self.staged.as_bytes()[self.staged_done..]));
            return;
        }
        let mut done = self.done;
        for piece in &body.pieces[self.piece.min(body.pieces.len())..] {
            let bytes = match piece {
                Piece::Text(range) => &body.texts[range.clone()],
                Piece::Bytes(shard, range) => &body.shards[*shard].bytes()[range.clone()],
                Piece::Base64(..) => return,
            };
            let bytes = &bytes[done..];
            done = 0;
            let some = &bytes[..bytes.len().min(rest)];
            if !some.is_empty() {
                slices.push(IoSlice::new(some));
            }
            rest -= some.len();
            if rest == 0 || slices.len() == MOST_SLICES {
                return;
            }
        }
    }

    /// So many of these bytes are sent.
    pub(super) fn advance(&mut self, body: &Body, mut sent: usize) {
        if self.staged_done < self.staged.len() {
            self.staged_done += sent;
            return;
        }
        while let Some(Piece::Text(range) | Piece::Bytes(_, range)) = body.pieces.get(self.piece) {
            let rest = range.len() - self.done;
            if sent < rest {
                self.done += sent;
                return;
            }
            sent -= rest;
            self.next();
        }
    }

    fn next(&mut self) {
        self.piece += 1;
        self.done = 0;
    }
}

//! The check of a whole plan against the lengths it was made for.
//!
//! It goes the other way round than `hard`: it starts from the packs, adds up the pieces that
//! each one names, and demands that they fill it, follow on from the pack before, use no sample
//! twice and leave out only what may be left out. Nothing of the merge is used.

use rayon::ThreadPool;

use crate::error::PackError;
use crate::hard::{Bits, Dataset, OrderSource, Prepared, Request};
use crate::integers::Integers;
use crate::plan::{Facts, Field, OrderKind, Views};
use crate::shuffle::RandomState;
use crate::watch::Watch;

/// Pieces between two looks at the watch.
const PIECES_A_TICK: u64 = 1 << 16;

/// Check `views` and `facts` against `lengths`, one column a dataset.
///
/// For plans whose order is natural or drawn from a seed the order itself is checked too, and the fingerprint.
///
/// # Errors
/// `Mismatch` with the first pack that does not fit, and why; as `Prepared::new` for lengths that are none.
pub fn verify(
    views: &Views<'_>,
    facts: &Facts,
    lengths: &[Integers<'_>],
    pool: Option<&ThreadPool>,
    watch: &mut dyn Watch,
) -> Result<(), PackError> {
    let given: Vec<u64> = lengths.iter().map(|column| column.len() as u64).collect();
    if given != facts.samples {
        return Err(PackError::Mismatch(format!(
            "the plan was made for {} samples (by dataset: {:?}), but the lengths are of {} (by dataset: {:?})",
            facts.samples.iter().sum::<u64>(),
            &facts.samples[..facts.samples.len().min(8)],
            given.iter().sum::<u64>(),
            &given[..given.len().min(8)],
        )));
    }
    let order = match (facts.order, facts.seed) {
        (OrderKind::Seed, Some(seed)) => OrderSource::Seed(seed),
        _ => OrderSource::Natural,
    };
    let request = Request {
        lengths: lengths.to_vec(),
        order,
        max_length: facts.max_length,
        drop_last: facts.drop_last,
        global_pack: facts.global_pack,
        pool,
    };
    let fingerprint = Prepared::new(request, watch)?.fingerprint(watch)?.to_string();
    let streams: Vec<Dataset<'_>> = if facts.global_pack {
        vec![Dataset::new(lengths.to_vec(), 0)]
    } else {
        lengths.iter().enumerate().map(|(id, &column)| Dataset::new(vec![column], id)).collect()
    };
    let mut random = facts.seed.map(RandomState::new);
    let mut walk = Walk { views, facts, pack: 0, piece: 0, tokens: 0, packed: 0 };
    for (stream, &tail_start) in streams.iter().zip(&facts.tail_start) {
        let shuffled: Option<Vec<u64>> = match (&mut random, facts.order) {
            (Some(random), OrderKind::Seed) => Some(random.shuffled::<u64>(stream.len(), watch)?),
            _ => None,
        };
        let order = match facts.order {
            OrderKind::Natural => KnownOrder::Natural,
            OrderKind::Seed => shuffled.as_deref().map_or(KnownOrder::Unknown, KnownOrder::Drawn),
            OrderKind::Given => KnownOrder::Unknown,
        };
        walk.stream(stream, order, tail_start, watch)?;
    }
    walk.finish()?;
    if facts.order != OrderKind::Given && fingerprint != facts.fingerprint {
        return Err(PackError::Mismatch(format!(
            "the plan's fingerprint is {}, but that of the lengths and parameters is {fingerprint}",
            facts.fingerprint
        )));
    }
    Ok(())
}

/// The order that the samples must come in, where it is known.
#[derive(Clone, Copy)]
enum KnownOrder<'a> {
    Natural,
    Drawn(&'a [u64]),
    Unknown,
}

impl KnownOrder<'_> {
    fn sample_at(&self, position: u64) -> Option<u64> {
        match self {
            Self::Natural => Some(position),
            Self::Drawn(order) => order.get(position as usize).copied(),
            Self::Unknown => None,
        }
    }
}

/// How far the check is.
struct Walk<'a> {
    views: &'a Views<'a>,
    facts: &'a Facts,
    pack: usize,
    piece: u64,
    tokens: u64,
    packed: u64,
}

/// What one stream carries from pack to pack.
struct Progress {
    used: Bits,
    /// Tokens of all samples used so far.
    used_tokens: u64,
    /// The sample that the last pack cut, and where.
    cut: Option<(u64, u64)>,
    /// Position in the known order.
    position: u64,
}

impl Walk<'_> {
    fn wrong<T>(&self, reason: impl core::fmt::Display) -> Result<T, PackError> {
        Err(PackError::Mismatch(format!("pack {}: {reason}", self.pack)))
    }

    fn stream(
        &mut self,
        stream: &Dataset<'_>,
        order: KnownOrder<'_>,
        tail_start: u64,
        watch: &mut dyn Watch,
    ) -> Result<(), PackError> {
        let ids = self.views.column(Field::DatasetId);
        let mut progress = Progress { used: Bits::new(stream.len())?, used_tokens: 0, cut: None, position: 0 };
        let mut packed = 0u64;
        let mut short = false;
        let total = self.views.packs();
        while self.pack < total && ids.get(self.pack) == stream.id() as u64 {
            if short {
                return self.wrong("follows a shorter one; only the last pack of a dataset may be short");
            }
            let tokens = self.one_pack(stream, order, &mut progress, watch)?;
            if tokens != self.facts.max_length {
                if self.facts.drop_last || tokens > self.facts.max_length {
                    return self.wrong(format!("holds {tokens} tokens instead of {}", self.facts.max_length));
                }
                short = true;
            }
            packed += tokens;
            self.pack += 1;
        }
        self.tail(stream, order, &progress, tail_start, packed, short)?;
        self.packed += packed;
        Ok(())
    }

    /// What the packs of a stream leave out must be less than a pack, and nothing where the tail is kept.
    fn tail(
        &mut self,
        stream: &Dataset<'_>,
        order: KnownOrder<'_>,
        progress: &Progress,
        tail_start: u64,
        packed: u64,
        short: bool,
    ) -> Result<(), PackError> {
        let dataset = stream.id();
        let wrong = |reason: String| Err(PackError::Mismatch(format!("dataset {dataset}: {reason}")));
        let max_length = self.facts.max_length;
        let tokens = match order {
            KnownOrder::Unknown => {
                // Which samples were to be used is not known, only how many tokens in all.
                let tokens = self.facts.tokens;
                if tokens < progress.used_tokens {
                    return wrong(format!(
                        "the packs' samples have {} tokens, the plan {tokens}",
                        progress.used_tokens
                    ));
                }
                tokens
            }
            _ => {
                let mut scratch = vec![0u64; 8192];
                let mut tokens = 0u64;
                for start in (0..stream.len()).step_by(scratch.len()) {
                    let values = &mut scratch[..(stream.len() - start).min(8192)];
                    stream.read(start, values);
                    tokens = values.iter().fold(tokens, |sum, &length| sum.saturating_add(length));
                }
                tokens
            }
        };
        self.tokens = self.tokens.saturating_add(tokens);
        let left = tokens.saturating_sub(packed);
        if packed > tokens || (self.facts.drop_last && left >= max_length) || (!self.facts.drop_last && left != 0) {
            return wrong(format!(
                "{packed} of {tokens} tokens are packed, {left} left out, with packs of {max_length}"
            ));
        }
        if short && tokens % max_length == 0 {
            return wrong("the last pack is short though the tokens fill it".into());
        }
        let start = match progress.cut {
            Some((_, at)) if left > 0 => at,
            _ => 0,
        };
        if self.facts.drop_last && left > 0 && tail_start != start {
            return wrong(format!("the tail starts at token {start} of its sample, not at {tail_start}"));
        }
        Ok(())
    }

    /// Check one pack; its tokens.
    fn one_pack(
        &mut self,
        stream: &Dataset<'_>,
        order: KnownOrder<'_>,
        progress: &mut Progress,
        watch: &mut dyn Watch,
    ) -> Result<u64, PackError> {
        let end_piece = self.views.column(Field::IndicesCuLen).get(self.pack);
        let indices = self.views.column(Field::Indices);
        if end_piece <= self.piece || end_piece > indices.len() as u64 {
            return self.wrong(format!("indices_cu_len goes from {} to {end_piece}", self.piece));
        }
        let first = self.piece;
        let start = self.views.column(Field::StartOffset).get(self.pack);
        let end = self.views.column(Field::EndOffset).get(self.pack);
        let (mut tokens, mut longest) = (0u64, 0u64);
        for piece in first..end_piece {
            if piece.is_multiple_of(PIECES_A_TICK) {
                watch.tick("verifying", piece, indices.len() as u64)?;
            }
            let sample = indices.get(piece as usize);
            if sample >= stream.len() as u64 {
                return self.wrong(format!("names sample {sample} of {}", stream.len()));
            }
            let mut length = [0u64];
            stream.gather(&[sample], &mut length);
            let [length] = length;
            let begins = if piece == first { start } else { 0 };
            let stops = if piece + 1 == end_piece { end } else { length };
            if begins > stops || stops > length || (begins == stops && (length != 0 || piece == first)) {
                return self.wrong(format!("takes tokens {begins} to {stops} of sample {sample}, which has {length}"));
            }
            if piece + 1 == end_piece && stops == 0 {
                return self.wrong(format!("ends with the empty sample {sample}, which belongs to no pack"));
            }
            self.follow(stream, order, progress, sample, begins, length, piece == first)?;
            tokens = tokens.saturating_add(stops - begins);
            longest = longest.max(stops - begins);
            progress.cut = (stops < length).then_some((sample, stops));
        }
        let recorded = self.views.column(Field::Longest).get(self.pack);
        if recorded != longest {
            return self.wrong(format!("its longest piece has {longest} tokens, not {recorded}"));
        }
        self.piece = end_piece;
        Ok(tokens)
    }

    /// A piece must go on where the one before stopped, or begin the next sample of the order.
    #[allow(clippy::too_many_arguments)]
    fn follow(
        &self,
        stream: &Dataset<'_>,
        order: KnownOrder<'_>,
        progress: &mut Progress,
        sample: u64,
        begins: u64,
        length: u64,
        first: bool,
    ) -> Result<(), PackError> {
        if let Some((cut, at)) = progress.cut {
            if (cut, at) != (sample, begins) {
                return self.wrong(format!(
                    "takes sample {sample} from token {begins}, but the pack before stopped at token {at} of sample {cut}"
                ));
            }
            return Ok(());
        }
        if begins != 0 {
            return self.wrong(format!("leaves out the first {begins} tokens of sample {sample}"));
        }
        if !progress.used.mark(&[sample]) {
            return self.wrong(format!("uses sample {sample}, which was used before"));
        }
        progress.used_tokens = progress.used_tokens.saturating_add(length);
        if matches!(order, KnownOrder::Unknown) {
            return Ok(());
        }
        loop {
            let Some(expected) = order.sample_at(progress.position) else {
                return self.wrong(format!("uses sample {sample} after the end of the order"));
            };
            progress.position += 1;
            if expected == sample {
                return Ok(());
            }
            let mut skipped = [1u64];
            if expected < stream.len() as u64 {
                stream.gather(&[expected], &mut skipped);
            }
            // Only empty samples on a boundary are passed over.
            if !first || skipped != [0] {
                return self.wrong(format!("uses sample {sample} where the order has sample {expected}"));
            }
        }
    }

    fn finish(&self) -> Result<(), PackError> {
        let total = self.views.packs();
        if self.pack != total {
            return self.wrong(format!(
                "is of dataset {}, out of turn or unknown",
                self.views.column(Field::DatasetId).get(self.pack)
            ));
        }
        if (self.tokens, self.packed) != (self.facts.tokens, self.facts.tokens_packed) {
            return Err(PackError::Mismatch(format!(
                "{} of {} tokens are packed, but {} says {} of {}",
                self.packed,
                self.tokens,
                crate::folder::FACTS_FILE,
                self.facts.tokens_packed,
                self.facts.tokens
            )));
        }
        Ok(())
    }
}

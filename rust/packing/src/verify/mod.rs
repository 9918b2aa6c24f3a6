//! Verifies a plan against the lengths and the order it was made from, by another path than the packers'.
//!
//! `hard` and `whole` walk over the packs of their modes. They use nothing of the packers; the check of the lengths, the
//! shuffle and the hash are those that made the plan.
//!
//! Invariants: in a plan that passes, every value of every column, its width and all metadata were compared with the
//! values that the lengths and the order give, except which samples `best_fit` without costs put together, and in
//! which order it put its packs: their number and the room that is left in them is compared.

mod cost_fit;
mod dropped_packs;
mod hard;
mod reference_placement;
mod repeated_packs;
mod whole;

use crate::error::PackError;
use crate::folder::METADATA_FILE;
use crate::inputs::{
    IntegerKind, Integers, OrderedSamples, RandomState, SampleLengths, SampleOrder, WINDOW, check_order,
};
use crate::packer::unchecked_fingerprint;
use crate::plan::{Column, Field, MultipleMetadata, OrderKind, PlanMetadata, PlanView};
use crate::progress::Progress;
use crate::request::{Mode, PackRequest, Remainder, SampleCosts};

use dropped_packs::DroppedPacks;

/// Check `plan` and `metadata` against `lengths`, one column a dataset, and against the order and the costs, where they
/// were given.
///
/// # Errors
/// `Mismatch` with the first pack that does not fit, and why. `Invalid` where the plan was made with an order
/// that is not given here; `OrderOutOfRange` and `OrderRepeated` for one that is none; as `Packer::new` for lengths.
pub fn verify(
    plan: &PlanView<'_>,
    metadata: &PlanMetadata,
    lengths: &[Integers<'_>],
    order: Option<Integers<'_>>,
    costs: Option<&[Integers<'_>]>,
    threads: usize,
    progress: &mut dyn Progress,
) -> Result<(), PackError> {
    let contradiction = |reason: String| PackError::Mismatch(format!("{METADATA_FILE} contradicts itself: {reason}"));
    metadata.check().map_err(contradiction)?;
    let modes = metadata.modes().map_err(contradiction)?;
    check_counts(plan, metadata, lengths)?;
    let source = order_source(metadata, order)?;
    let costs = costs_of(metadata, costs)?;
    let cost_streams = costs.as_ref().map(|costs| SampleLengths::streams(&costs.columns, metadata.global_pack));
    let request = PackRequest {
        lengths: lengths.to_vec(),
        order: source,
        max_length: metadata.max_length,
        mode: modes.clone(),
        costs,
        multiple: metadata.multiple.as_ref().map(MultipleMetadata::asked),
        global_pack: metadata.global_pack,
        threads,
    };
    let fingerprint = unchecked_fingerprint(request, progress)?.to_string();
    let streams = SampleLengths::streams(lengths, metadata.global_pack);
    let unrepeated = metadata.without_repeated();
    let unrepeated_plan = plan.first(unrepeated.packs, unrepeated.pieces);
    let is_dropped = |multiple: &&MultipleMetadata| multiple.remainder == Remainder::Drop;
    let parts = metadata.as_parts();
    let mut walked =
        Walked { pack: 0, piece: 0, left_out: metadata.multiple.as_ref().filter(is_dropped).map(DroppedPacks::new) };
    let streams_a_part = if metadata.parts.is_empty() { streams.len().max(1) } else { 1 };
    let mut streams_of_parts = streams.chunks(streams_a_part);
    for (part, &mode) in parts.iter().zip(modes.all()) {
        let mut walk: Box<dyn StreamWalk<'_> + '_> = match (mode, &part.hard) {
            (Mode::Whole(options), _) => {
                Box::new(whole::PlanWalk::new(&unrepeated_plan, part, options, cost_streams.as_deref(), walked))
            }
            (Mode::Hard { .. }, hard) => Box::new(hard::PlanWalk::new(
                &unrepeated_plan,
                part,
                hard.as_ref().ok_or_else(|| contradiction("no tails".into()))?,
                walked,
            )),
        };
        let mut random = metadata.seed.map(RandomState::new);
        for stream in streams_of_parts.next().unwrap_or_default() {
            let drawn = match &mut random {
                Some(random) if walk.needs_drawn_order() => Some(Column::shuffled(random, stream.len(), progress)?),
                _ => None,
            };
            let order = match source {
                SampleOrder::Natural => None,
                SampleOrder::Given(order) => {
                    check_order(&order, stream.len(), progress)?;
                    Some(order)
                }
                SampleOrder::Seed(_) => drawn.as_ref().map(Column::view),
            };
            walk.stream(stream, order, progress)?;
        }
        walked = walk.finish()?;
    }
    check_all_walked(&unrepeated_plan, walked.pack)?;
    if let Some(left_out) = &walked.left_out {
        left_out.check()?;
    }
    if let Some(multiple) = metadata.multiple.as_ref().filter(|multiple| !is_dropped(multiple)) {
        repeated_packs::check(plan, unrepeated.packs as usize, multiple, &streams, &modes, progress)?;
    }
    check_widths(plan, progress)?;
    if fingerprint != metadata.fingerprint {
        return Err(PackError::Mismatch(format!(
            "the plan's fingerprint is {}, but that of the lengths, order and parameters is {fingerprint}",
            metadata.fingerprint
        )));
    }
    Ok(())
}

/// How far the check of a plan is, and what it found to be left out.
struct Walked<'a> {
    pack: usize,
    piece: u64,
    left_out: Option<DroppedPacks<'a>>,
}

impl Walked<'_> {
    /// Pieces and tokens that were left out so far.
    fn left_out_so_far(&self) -> (u64, u64) {
        self.left_out.as_ref().map_or((0, 0), |left_out| (left_out.pieces, left_out.tokens))
    }
}

/// Checks the packs of one stream after the other.
trait StreamWalk<'a> {
    /// Whether `stream` takes the order that was drawn from the seed.
    fn needs_drawn_order(&self) -> bool;

    /// Check the packs of the next stream, whose samples are in this order, or in their own.
    fn stream(
        &mut self,
        stream: &SampleLengths<'_>,
        order: Option<Integers<'_>>,
        progress: &mut dyn Progress,
    ) -> Result<(), PackError>;

    /// Check what the streams add up to.
    fn finish(self: Box<Self>) -> Result<Walked<'a>, PackError>;
}

/// The ordered samples of a stream.
fn ordered<'a>(stream: &'a SampleLengths<'a>, order: Option<Integers<'a>>) -> OrderedSamples<'a> {
    OrderedSamples::new("verifying", stream, order)
}

/// The error of a pack.
fn wrong_pack<T>(pack: usize, reason: impl core::fmt::Display) -> Result<T, PackError> {
    Err(PackError::Mismatch(format!("pack {pack}: {reason}")))
}

/// Refuse packs behind those of all streams.
fn check_all_walked(plan: &PlanView<'_>, packs: usize) -> Result<(), PackError> {
    if packs == plan.packs() {
        return Ok(());
    }
    let dataset = plan.column(Field::DatasetId).get(packs);
    wrong_pack(packs, format!("is of dataset {dataset}, out of turn or unknown"))
}

/// Compare what was counted with the metadata: name, counted, said.
fn check_totals(totals: &[(&str, u64, u64)]) -> Result<(), PackError> {
    for (name, counted, said) in totals {
        if counted != said {
            return Err(PackError::Mismatch(format!("{name} is {counted}, but {METADATA_FILE} says {said}")));
        }
    }
    Ok(())
}

fn check_counts(plan: &PlanView<'_>, metadata: &PlanMetadata, lengths: &[Integers<'_>]) -> Result<(), PackError> {
    let given: Vec<u64> = lengths.iter().map(|column| column.len() as u64).collect();
    if given != metadata.samples {
        return Err(PackError::Mismatch(format!(
            "the plan was made for {} samples (by dataset: {:?}), but the lengths are of {} (by dataset: {:?})",
            metadata.samples.iter().sum::<u64>(),
            &metadata.samples[..metadata.samples.len().min(8)],
            given.iter().fold(0u64, |sum, &samples| sum.saturating_add(samples)),
            &given[..given.len().min(8)],
        )));
    }
    if plan.has_piece_ranges() != metadata.has_piece_ranges() {
        return Err(PackError::Mismatch(format!(
            "the plan has {} columns, which {METADATA_FILE} contradicts",
            plan.fields().len()
        )));
    }
    let found = (plan.packs() as u64, plan.column(Field::Indices).len() as u64);
    if found != (metadata.packs, metadata.pieces) {
        return Err(PackError::Mismatch(format!(
            "the columns hold {} packs of {} pieces, but {METADATA_FILE} says {} of {}",
            found.0, found.1, metadata.packs, metadata.pieces
        )));
    }
    Ok(())
}

/// Whether each column is 32 bits wide where all its values fit, and 64 bits else.
fn check_widths(plan: &PlanView<'_>, progress: &mut dyn Progress) -> Result<(), PackError> {
    for &field in plan.fields() {
        let column = plan.column(field);
        let fits = match column.kind() {
            IntegerKind::I32 => continue,
            IntegerKind::I64 => fits_32_bits(&column, progress)?,
            kind => {
                return Err(PackError::Mismatch(format!(
                    "{} is {kind:?}; a plan's columns are int32 or int64",
                    field.name()
                )));
            }
        };
        if fits {
            return Err(PackError::Mismatch(format!(
                "{} is int64, but all of its values fit int32, which a plan then has",
                field.name()
            )));
        }
    }
    Ok(())
}

fn fits_32_bits(column: &Integers<'_>, progress: &mut dyn Progress) -> Result<bool, PackError> {
    let mut values = vec![0u64; column.len().min(WINDOW)];
    for start in (0..column.len()).step_by(WINDOW) {
        progress.tick("verifying", start as u64, column.len() as u64)?;
        let values = &mut values[..(column.len() - start).min(WINDOW)];
        column.read(start, values);
        if values.iter().any(|&value| value > i32::MAX as u64) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// The costs that the plan says it has.
fn costs_of<'a>(metadata: &PlanMetadata, costs: Option<&[Integers<'a>]>) -> Result<Option<SampleCosts<'a>>, PackError> {
    match (metadata.max_cost(), costs) {
        (Some(max_cost), Some(costs)) => Ok(Some(SampleCosts { columns: costs.to_vec(), max_cost })),
        (None, None) => Ok(None),
        (Some(_), None) => Err(PackError::Invalid(format!(
            "{METADATA_FILE} says that the plan was made with costs (costs=): pass the same costs to verify"
        ))),
        (None, Some(_)) => Err(PackError::Mismatch(format!(
            "costs were given, but {METADATA_FILE} says that the plan was made without: leave the costs out, or use the \
             plan made with them"
        ))),
    }
}

/// The order that the plan says it has; one that is given must be what it says.
fn order_source<'a>(metadata: &PlanMetadata, order: Option<Integers<'a>>) -> Result<SampleOrder<'a>, PackError> {
    let given = |says: String| {
        PackError::Mismatch(format!(
            "an order was given, but {METADATA_FILE} says that {says}: leave the order out, or use the plan made with it"
        ))
    };
    match (metadata.order, metadata.seed, order) {
        (OrderKind::Given, _, Some(order)) => Ok(SampleOrder::Given(order)),
        (OrderKind::Given, _, None) => Err(PackError::Invalid(format!(
            "{METADATA_FILE} says that the plan was made with an order (order=): pass the same order to verify, \
             else neither the order of the samples nor the fingerprint can be checked"
        ))),
        (OrderKind::Seed, Some(seed), None) => Ok(SampleOrder::Seed(seed)),
        (OrderKind::Seed, seed, _) => {
            Err(given(format!("the samples were shuffled with the seed {}", seed.unwrap_or_default())))
        }
        (OrderKind::Natural, _, None) => Ok(SampleOrder::Natural),
        (OrderKind::Natural, _, Some(_)) => Err(given("the samples kept their order".into())),
    }
}

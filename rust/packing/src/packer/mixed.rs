//! Packs each dataset in a mode of its own, one after the other.

use super::{PackColumns, PackMeter, PackRows, PackSplitter, Packed, Packer, PlanOutput};
use crate::error::PackError;
use crate::plan::PlanInteger;
use crate::progress::Progress;

/// Append the packs of all datasets to `output`; what each mode reports.
pub(super) fn run<P: PlanInteger>(
    packer: &Packer<'_>,
    output: &mut dyn PlanOutput<P>,
    progress: &mut dyn Progress,
) -> Result<Vec<Packed>, PackError> {
    let mut parts = Vec::new();
    let mut pieces = 0;
    for stream in 0..packer.streams.len() {
        let mut part = PartOutput {
            splitter: PackSplitter::new(),
            meter: PackMeter::new(packer),
            rows: PackRows::new(),
            pieces,
            output: &mut *output,
        };
        parts.push(packer.run_mode::<P>(stream..stream + 1, &mut part, progress)?);
        pieces = part.pieces;
    }
    Ok(parts)
}

/// Hands over the packs of one dataset, behind the pieces of those before, with piece ranges where the plan has them.
struct PartOutput<'r, 'o, P> {
    splitter: PackSplitter<P>,
    meter: PackMeter<'r, P>,
    rows: PackRows<P>,
    /// Pieces of the plan so far.
    pieces: u64,
    output: &'o mut dyn PlanOutput<P>,
}

impl<P: PlanInteger> PlanOutput<P> for PartOutput<'_, '_, P> {
    fn append(&mut self, columns: &PackColumns<'_, P>, progress: &mut dyn Progress) -> Result<(), PackError> {
        let Self { splitter, meter, rows, pieces, .. } = self;
        rows.clear();
        splitter.split(columns, |pack| {
            rows.push(pack, *pieces);
            *pieces += pack.indices.len() as u64;
            if pack.ranges.is_none() && meter.has_piece_ranges() {
                rows.push_ranges(meter.ranges(pack));
            }
            Ok(())
        })?;
        self.output.append(&rows.columns(columns.dataset_id), progress)
    }

    fn remove_last_pieces(&mut self, count: usize) -> Result<(), PackError> {
        self.splitter.remove_last(count);
        Ok(())
    }
}

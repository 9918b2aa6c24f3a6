//! Makes the number of packs a multiple: leaves out the emptiest packs, or repeats the first ones.
//!
//! To leave packs out takes two passes: one finds the emptiest packs, and one appends the others. A pack is emptier than
//! another if its pieces, with the padding of `align`, take less of it. Of packs that are equally full, those of the
//! dataset with the most packs go first, and of one dataset the last. So a small dataset does not vanish for a large one.
//!
//! Working memory: the pieces of one pack, and with "repeat" those of `multiple_of` packs; a few integers for each of
//! `multiple_of` packs of each stream.

mod dropped;
mod repeated;

use crate::error::PackError;
use crate::packer::{Packed, Packer, PlanOutput};
use crate::plan::{MultipleMetadata, PlanInteger};
use crate::progress::Progress;
use crate::request::{PackMultiple, Remainder};

use dropped::{EmptiestPacks, KeptPacks};
use repeated::RepeatedPacks;

/// Append the packs of all streams to `output`, as many as were asked for. What the modes report is of all packs that they
/// made.
///
/// # Errors
/// As the mode; `InputChanged` where two passes found other packs.
pub(super) fn run<P: PlanInteger>(
    packer: &Packer<'_>,
    asked: PackMultiple,
    output: &mut dyn PlanOutput<P>,
    progress: &mut dyn Progress,
) -> Result<(Vec<Packed>, MultipleMetadata), PackError> {
    match asked.remainder {
        Remainder::Repeat => {
            let mut repeated = RepeatedPacks::new(asked, output);
            let packed = packer.run_modes::<P>(&mut repeated, progress)?;
            Ok((packed, repeated.append_again(packer, progress)?))
        }
        Remainder::Drop => {
            let mut emptiest = EmptiestPacks::<P>::new(packer, asked);
            packer.run_modes::<P>(&mut emptiest, progress)?;
            let mut kept = KeptPacks::new(packer, asked, emptiest.numbers(), output);
            let mut packed = packer.run_modes::<P>(&mut kept, progress)?;
            let (multiple, tail_start) = kept.finish()?;
            // The tail of a hard stream begins with the first pack that is left out. There is one part of all streams, or
            // one of each.
            for (part, packed) in packed.iter_mut().enumerate() {
                for (stream, start) in packed.hard.iter_mut().flat_map(|hard| &mut hard.tail_start).enumerate() {
                    *start = tail_start.get(&(part + stream)).copied().unwrap_or(*start);
                }
            }
            Ok((packed, multiple))
        }
    }
}

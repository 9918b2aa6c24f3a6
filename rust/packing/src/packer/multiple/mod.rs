//! Makes the number of packs a multiple: leaves out the emptiest packs, or repeats the first ones.
//!
//! To leave packs out takes two passes: one finds the emptiest packs, and one appends the others. A pack is emptier than
//! another if its pieces, with the padding of `align`, take less of it. Of packs that are equally full, those of the
//! dataset with the most packs go first, and of one dataset the last. So a small dataset does not vanish for a large one.
//!
//! Working memory: the pieces of one pack, and with "repeat" those of `multiple_of` packs; a few integers for each of
//! `multiple_of` packs of each stream.

mod closed_packs;
mod dropped;
mod repeated;

use crate::error::PackError;
use crate::packer::{Packed, Packer, PlanOutput};
use crate::plan::{MultipleMetadata, PlanInteger};
use crate::progress::Progress;
use crate::request::{PackMultiple, Remainder};

use dropped::{EmptiestPacks, KeptPacks};
use repeated::RepeatedPacks;

/// Append the packs of all streams to `output`, as many as were asked for.
///
/// # Errors
/// As the mode; `InputChanged` where two passes found other packs.
pub(super) fn run<P: PlanInteger>(
    packer: &Packer<'_>,
    asked: PackMultiple,
    output: &mut dyn PlanOutput<P>,
    progress: &mut dyn Progress,
) -> Result<(Packed, MultipleMetadata), PackError> {
    match asked.remainder {
        Remainder::Repeat => {
            let mut repeated = RepeatedPacks::new(asked, output);
            let mut packed = packer.run_mode::<P>(&mut repeated, progress)?;
            let multiple = repeated.append_again(packer, progress)?;
            packed.packs += multiple.packs;
            packed.pieces += multiple.pieces;
            Ok((packed, multiple))
        }
        Remainder::Drop => {
            let mut emptiest = EmptiestPacks::<P>::new(packer, asked);
            packer.run_mode::<P>(&mut emptiest, progress)?;
            let mut kept = KeptPacks::new(packer, asked, emptiest.numbers(), output);
            let mut packed = packer.run_mode::<P>(&mut kept, progress)?;
            let (multiple, tail_start) = kept.finish()?;
            // The tail of a hard plan begins with the first pack that is left out.
            if let Some(hard) = &mut packed.hard {
                for (stream, start) in hard.tail_start.iter_mut().enumerate() {
                    *start = tail_start.get(&stream).copied().unwrap_or(*start);
                }
            }
            packed.packs -= multiple.packs;
            packed.pieces -= multiple.pieces;
            packed.tokens_packed = packed.tokens_packed.saturating_sub(multiple.tokens);
            Ok((packed, multiple))
        }
    }
}

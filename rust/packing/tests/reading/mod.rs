//! What reading a plan folder of any content goes through, for the tests and for the fuzz target.

use std::path::Path;

use tundish_packing::folder::MappedColumn;
use tundish_packing::inputs::SampleOrder;
use tundish_packing::megatron_sample_index::{PlanInputs, sample_index};
use tundish_packing::plan::PlanView;
use tundish_packing::plan::{AttachedLengths, lookup};
use tundish_packing::{
    Integers, Mode, Modes, NoProgress, Overlong, PackError, PackMultiple, PackRequest, Placement, Remainder,
    WholeOptions, folder, verify,
};

/// The lengths that the good plan is made for.
pub const LENGTHS: [u64; 12] = [5, 0, 17, 3, 300, 1, 0, 64, 9, 2, 40, 11];

/// The good plan.
pub fn request() -> PackRequest<'static> {
    PackRequest {
        lengths: vec![Integers::from(&LENGTHS[..])],
        order: SampleOrder::Seed(1),
        max_length: 16,
        mode: Mode::Hard { drop_last: true }.into(),
        costs: None,
        multiple: None,
        global_pack: false,
        threads: 1,
    }
}

/// Good plans of the same samples: hard, with columns for parts of samples, with packs that are repeated or left out, and
/// with parts.
pub fn requests() -> Vec<PackRequest<'static>> {
    let options =
        WholeOptions { placement: Placement::BestFit, overlong: Overlong::Split, max_samples: Some(3), align: 2 };
    let whole = Mode::Whole(options);
    let split = PackRequest { mode: whole.into(), ..request() };
    let multiple = |of, remainder| Some(PackMultiple { of, remainder });
    vec![
        request(),
        split.clone(),
        PackRequest { multiple: multiple(7, Remainder::Repeat), ..split.clone() },
        PackRequest { multiple: multiple(5, Remainder::Drop), ..request() },
        PackRequest { mode: Modes::Each(vec![whole]), multiple: multiple(7, Remainder::Drop), ..split },
    ]
}

/// Open a folder and use whatever it holds: packs are looked up and indexed, with and without lengths, and verified.
pub fn use_folder(path: &Path) -> Result<Vec<Vec<i64>>, PackError> {
    let (metadata, columns) = folder::open(path, &mut NoProgress)?;
    let plan = PlanView::new(&columns.iter().map(MappedColumn::view).collect::<Vec<_>>())?;
    let lengths = Integers::from(&LENGTHS[..]);
    let attached = AttachedLengths::new(vec![lengths], metadata.global_pack);
    for pack in 0..plan.packs() as u64 {
        let pack = [pack];
        let _ = lookup::<Integers<'_>>(&plan, &Integers::from(&pack[..]), None, &mut NoProgress);
        let _ = lookup(&plan, &Integers::from(&pack[..]), Some(&attached), &mut NoProgress);
    }
    for lengths in [None, Some(&[lengths][..])] {
        let _ = sample_index(&plan, &metadata, &PlanInputs { lengths, ..PlanInputs::default() }, &mut NoProgress);
    }
    verify::verify(&plan, &metadata, &[lengths], None, None, 1, &mut NoProgress)?;
    Ok(plan.fields().iter().map(|&field| values(&plan.column(field))).collect())
}

/// A column as 64-bit integers.
pub fn values(column: &Integers<'_>) -> Vec<i64> {
    (0..column.len()).map(|index| column.get(index) as i64).collect()
}

//! What reading a plan folder of any content goes through, for the tests and for the fuzz target.

use std::path::Path;

use tundish_packing::ordered_samples::SampleOrder;
use tundish_packing::plan::{AttachedLengths, lookup};
use tundish_packing::{Integers, Mode, NoProgress, Overlong, PackError, PackRequest, Remainder, folder, verify};

/// The lengths that the good plan is made for.
pub const LENGTHS: [u64; 12] = [5, 0, 17, 3, 300, 1, 0, 64, 9, 2, 40, 11];

/// The good plan.
pub fn request() -> PackRequest<'static> {
    let lengths = vec![Integers::from(&LENGTHS[..])];
    PackRequest { order: SampleOrder::Seed(1), threads: Some(1), ..PackRequest::new(lengths, 16) }
}

/// Good plans of the same samples: hard, with columns for parts of samples, with packs that are repeated or left out.
pub fn requests() -> Vec<PackRequest<'static>> {
    let split = PackRequest {
        mode: Mode::BestFit,
        overlong: Some(Overlong::Split),
        max_samples: Some(3),
        align: 2,
        ..request()
    };
    vec![
        request(),
        split.clone(),
        PackRequest { multiple_of: Some(7), remainder: Some(Remainder::Repeat), ..split.clone() },
        PackRequest { multiple_of: Some(5), ..request() },
        PackRequest { multiple_of: Some(7), ..split },
    ]
}

/// Open a folder and use whatever it holds: packs are looked up, with and without lengths, and verified.
pub fn use_folder(path: &Path) -> Result<Vec<Vec<i64>>, PackError> {
    let open = folder::open(path, &mut NoProgress)?;
    let (plan, metadata) = (open.view()?, &open.metadata);
    let lengths = Integers::from(&LENGTHS[..]);
    let attached = AttachedLengths::new(vec![lengths], metadata.global_pack);
    for pack in 0..plan.packs() as u64 {
        let pack = [pack];
        let _ = lookup::<Integers<'_>>(&plan, &Integers::from(&pack[..]), None, &mut NoProgress);
        let _ = lookup(&plan, &Integers::from(&pack[..]), Some(&attached), &mut NoProgress);
    }
    verify::verify(&plan, metadata, &[lengths], None, None, Some(1), &mut NoProgress)?;
    Ok(plan.fields().iter().map(|&field| values(&plan.column(field))).collect())
}

/// A column as 64-bit integers.
pub fn values(column: &Integers<'_>) -> Vec<i64> {
    (0..column.len()).map(|index| column.get(index) as i64).collect()
}

//! What reading a plan folder of any content goes through, for the tests and for the fuzz target.

use std::path::Path;

use tundish_packing::hard::{OrderSource, Request};
use tundish_packing::lookup::{Lengths, lookup};
use tundish_packing::mapping::MappedColumn;
use tundish_packing::plan::Views;
use tundish_packing::sample_index::{Inputs, sample_index};
use tundish_packing::{Field, Integers, PackError, Silent, folder, verify};

/// The lengths that the good plan is made for.
pub const LENGTHS: [u64; 12] = [5, 0, 17, 3, 300, 1, 0, 64, 9, 2, 40, 11];

/// The good plan.
pub fn request() -> Request<'static> {
    Request {
        lengths: vec![Integers::from(&LENGTHS[..])],
        order: OrderSource::Seed(1),
        max_length: 16,
        drop_last: true,
        global_pack: false,
        threads: 1,
    }
}

/// Open a folder and use whatever it holds: packs are looked up and indexed, with and without lengths, and verified.
pub fn use_folder(path: &Path) -> Result<Vec<Vec<i64>>, PackError> {
    let (facts, columns) = folder::open(path, &mut Silent)?;
    let views = Views::new(columns.each_ref().map(MappedColumn::view))?;
    let lengths = Integers::from(&LENGTHS[..]);
    let attached = Lengths::new(vec![lengths], facts.global_pack);
    for pack in 0..views.packs() as u64 {
        let pack = [pack];
        let _ = lookup::<Integers<'_>>(&views, &Integers::from(&pack[..]), None, &mut Silent);
        let _ = lookup(&views, &Integers::from(&pack[..]), Some(&attached), &mut Silent);
    }
    for lengths in [None, Some(&[lengths][..])] {
        let _ = sample_index(&views, &facts, &Inputs { lengths, ..Inputs::default() }, &mut Silent);
    }
    verify::verify(&views, &facts, &[lengths], None, 1, &mut Silent)?;
    Ok(Field::ALL.map(|field| values(&views.column(field))).to_vec())
}

/// A column as 64-bit integers.
pub fn values(column: &Integers<'_>) -> Vec<i64> {
    (0..column.len()).map(|index| column.get(index) as i64).collect()
}

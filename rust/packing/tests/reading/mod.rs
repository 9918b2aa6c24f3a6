//! What reading a plan folder of any content goes through, for the tests and for the fuzz target.

use std::fs;
use std::path::Path;

use tundish_packing::hard::{OrderSource, Request};
use tundish_packing::lookup::{Lengths, lookup};
use tundish_packing::plan::Views;
use tundish_packing::{Integers, PackError, Silent, folder, verify};

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
        pool: None,
    }
}

/// Open a folder and use whatever it holds: every pack is looked up, with and without lengths, and verified.
pub fn use_folder(path: &Path) -> Result<Vec<Vec<i64>>, PackError> {
    let (facts, files) = folder::open(path, &mut Silent)?;
    let columns: Vec<Vec<i64>> = files
        .iter()
        .map(|file| {
            let bytes = fs::read(&file.path).expect("a file that was opened");
            let width = if file.wide { 8 } else { 4 };
            bytes[file.offset as usize..]
                .chunks_exact(width)
                .map(|entry| match *entry {
                    [a, b, c, d] => i64::from(i32::from_le_bytes([a, b, c, d])),
                    _ => i64::from_le_bytes(entry.try_into().expect("eight bytes")),
                })
                .collect()
        })
        .collect();
    let views: Vec<Integers<'_>> = columns.iter().map(|column| Integers::from(&column[..])).collect();
    let views = Views::new(views.try_into().expect("six columns"))?;
    let attached = Lengths { datasets: vec![Integers::from(&LENGTHS[..])], global_pack: facts.global_pack };
    for pack in 0..views.packs() as u64 {
        let _ = lookup(&views, &Integers::from(&[pack][..]), None);
        let _ = lookup(&views, &Integers::from(&[pack][..]), Some(&attached));
    }
    verify::verify(&views, &facts, &attached.datasets, None, &mut Silent)?;
    Ok(columns)
}

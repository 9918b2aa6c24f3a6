//! Reads plan folders made of arbitrary bytes: what `PackPlan.load`, a look-up and `verify` do with them.
//!
//! The input is cut at the marker `\n--\n` into plan.json and the six columns, in the order of
//! `Field::ALL`; parts that are missing are taken from a good plan, so that mutations of one file get past the
//! checks of the others.
#![no_main]

use std::fs;
use std::path::Path;
use std::sync::OnceLock;

use libfuzzer_sys::fuzz_target;
use tundish_packing::hard::{OrderSource, Prepared, Request};
use tundish_packing::lookup::{Lengths, lookup};
use tundish_packing::plan::Views;
use tundish_packing::{Field, Integers, Silent, folder, verify};

const LENGTHS: [u64; 12] = [5, 0, 17, 3, 300, 1, 0, 64, 9, 2, 40, 11];
const MARKER: &[u8] = b"\n--\n";

fn names() -> Vec<String> {
    [folder::FACTS_FILE.to_owned()].into_iter().chain(Field::ALL.map(folder::file_name)).collect()
}

/// The bytes of each file of a good plan.
fn good() -> &'static [Vec<u8>] {
    static GOOD: OnceLock<Vec<Vec<u8>>> = OnceLock::new();
    GOOD.get_or_init(|| {
        let parent = tempfile::tempdir().expect("a temporary folder");
        let target = parent.path().join("plan");
        let request = Request {
            lengths: vec![Integers::from(&LENGTHS[..])],
            order: OrderSource::Seed(1),
            max_length: 16,
            drop_last: true,
            global_pack: false,
            pool: None,
        };
        Prepared::new(request, &mut Silent).and_then(|plan| plan.write(&target, &mut Silent)).expect("a plan");
        names().iter().map(|name| fs::read(target.join(name)).expect("a file")).collect()
    })
}

fn use_folder(path: &Path) -> Option<()> {
    let (facts, files) = folder::open(path, &mut Silent).ok()?;
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
    let views = Views::new(views.try_into().ok()?).ok()?;
    let attached = Lengths { datasets: vec![Integers::from(&LENGTHS[..])], global_pack: facts.global_pack };
    for pack in 0..views.packs() as u64 {
        let _ = lookup(&views, &Integers::from(&[pack][..]), None);
        let _ = lookup(&views, &Integers::from(&[pack][..]), Some(&attached));
    }
    verify::verify(&views, &facts, &attached.datasets, None, &mut Silent).ok()
}

fuzz_target!(|data: &[u8]| {
    let parent = tempfile::tempdir().expect("a temporary folder");
    let mut parts = Vec::new();
    let mut rest = data;
    while let Some(at) = rest.windows(MARKER.len()).position(|window| window == MARKER) {
        parts.push(&rest[..at]);
        rest = &rest[at + MARKER.len()..];
    }
    parts.push(rest);
    for (number, (name, good)) in names().iter().zip(good()).enumerate() {
        let bytes = match parts.get(number) {
            Some(part) if !part.is_empty() => part,
            _ => &good[..],
        };
        fs::write(parent.path().join(name), bytes).expect("a write");
    }
    use_folder(parent.path());
});

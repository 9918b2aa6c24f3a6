//! Plan folders of any content: reading them gives a plan or an error, never a panic or a hang.
#![expect(clippy::disallowed_methods, reason = "the test damages files on purpose")]

use std::fs;
use std::path::Path;

use proptest::prelude::*;
use tundish_packing::hard::{OrderSource, Prepared, Request};
use tundish_packing::lookup::{Lengths, lookup};
use tundish_packing::plan::Views;
use tundish_packing::{Integers, PackError, Silent, folder, verify};

const LENGTHS: [u64; 12] = [5, 0, 17, 3, 300, 1, 0, 64, 9, 2, 40, 11];

fn request() -> Request<'static> {
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
fn use_folder(path: &Path) -> Result<Vec<Vec<i64>>, PackError> {
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

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn damaged_bytes_are_an_error_or_change_nothing(
        file in 0usize..7,
        damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
        length in prop::option::of(0usize..600),
    ) {
        let parent = tempfile::tempdir().expect("a temporary folder");
        let target = parent.path().join("plan");
        Prepared::new(request(), &mut Silent).and_then(|p| p.write(&target, &mut Silent)).expect("a plan");
        let whole = use_folder(&target).expect("an undamaged plan");
        let mut names: Vec<_> =
            fs::read_dir(&target).expect("a folder").map(|entry| entry.expect("a name").path()).collect();
        names.sort();
        let mut bytes = fs::read(&names[file]).expect("a file");
        for (position, value) in damage {
            let position = position.index(bytes.len());
            bytes[position] = value;
        }
        if let Some(length) = length {
            bytes.resize(length, 0);
        }
        fs::write(&names[file], &bytes).expect("a write");
        // Blanks in a header may change, and a byte may be overwritten with itself; values may not change.
        if let Ok(columns) = use_folder(&target) {
            prop_assert_eq!(columns, whole);
        }
    }
}

#[test]
fn a_pipe_in_place_of_a_file_is_refused_and_not_waited_for() {
    let parent = tempfile::tempdir().expect("a temporary folder");
    let target = parent.path().join("plan");
    Prepared::new(request(), &mut Silent).and_then(|p| p.write(&target, &mut Silent)).expect("a plan");
    for name in ["plan.json", "longest.npy"] {
        let file = target.join(name);
        let kept = fs::read(&file).expect("a file");
        fs::remove_file(&file).expect("a removal");
        rustix::fs::mknodat(rustix::fs::CWD, &file, rustix::fs::FileType::Fifo, 0o600.into(), 0).expect("a pipe");
        assert!(matches!(folder::open(&target, &mut Silent), Err(PackError::Format { .. })));
        fs::remove_file(&file).expect("a removal");
        fs::write(&file, kept).expect("a write");
    }
}

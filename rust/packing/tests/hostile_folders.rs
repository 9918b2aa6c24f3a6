//! Plan folders of any content: reading them gives a plan or an error, never a panic or a hang.
#![expect(clippy::disallowed_methods, reason = "the test damages files on purpose")]

use std::fs;

use proptest::prelude::*;
use tundish_packing::hard::Prepared;
use tundish_packing::{PackError, Silent, folder};

mod reading;
use reading::{request, use_folder};

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

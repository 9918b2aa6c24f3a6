//! Plan folders of any content: reading them gives a plan or an error, never a panic or a hang.
#![expect(clippy::disallowed_methods, reason = "the test damages files on purpose")]

use std::fs;

use std::path::{Path, PathBuf};

use proptest::prelude::*;
use tundish_packing::hard::Prepared;
use tundish_packing::mapping::MappedColumn;
use tundish_packing::{Field, PackError, Silent, Watch, folder};

mod reading;
use reading::{request, use_folder, values};

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
        // A byte may be overwritten with itself, and blanks of plan.json may change; values may not.
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

/// Changes a folder as soon as `open` looks around, which it does when every file is checked but the offsets.
struct Meanwhile<F: FnMut()>(F);

impl<F: FnMut()> Watch for Meanwhile<F> {
    fn tick(&mut self, _phase: &'static str, _done: u64, _total: u64) -> Result<(), PackError> {
        (self.0)();
        Ok(())
    }
}

/// Two plans of the same size with other values, in one folder.
fn two_plans(parent: &Path) -> (PathBuf, PathBuf) {
    let targets = (parent.join("plan"), parent.join("other"));
    for (target, seed) in [(&targets.0, 1), (&targets.1, 2)] {
        let request =
            tundish_packing::hard::Request { order: tundish_packing::hard::OrderSource::Seed(seed), ..request() };
        Prepared::new(request, &mut Silent).and_then(|p| p.write(target, &mut Silent)).expect("a plan");
    }
    targets
}

fn mapped(columns: &[MappedColumn; 6]) -> Vec<Vec<i64>> {
    columns.iter().map(|column| values(&column.view())).collect()
}

#[test]
fn what_takes_the_place_of_a_file_after_its_check_is_never_mapped() {
    for field in Field::ALL {
        let parent = tempfile::tempdir().expect("a temporary folder");
        let (target, other) = two_plans(parent.path());
        let (_, columns) = folder::open(&target, &mut Silent).expect("a plan");
        let before = mapped(&columns);
        let name = folder::file_name(field);
        // Cut to its header: mapped as long as the one that was checked, it would end the process.
        let mut bytes = fs::read(other.join(&name)).expect("a file");
        bytes.truncate(128);
        fs::write(other.join(&name), bytes).expect("a write");
        let mut swap = Meanwhile(|| {
            let _ = fs::rename(other.join(&name), target.join(&name));
        });
        let (_, columns) = folder::open(&target, &mut swap).expect("a plan");
        assert!(!other.join(&name).exists(), "nothing was swapped; the test shows nothing");
        assert_eq!(mapped(&columns), before, "{name}");
    }
}

#[test]
fn a_plan_removed_after_its_check_stays_readable() {
    let parent = tempfile::tempdir().expect("a temporary folder");
    let (target, _) = two_plans(parent.path());
    let (_, columns) = folder::open(&target, &mut Silent).expect("a plan");
    let before = mapped(&columns);
    let mut remove = Meanwhile(|| fs::remove_dir_all(&target).unwrap_or_default());
    let (_, columns) = folder::open(&target, &mut remove).expect("a plan");
    assert!(!target.exists());
    assert_eq!(mapped(&columns), before);
}

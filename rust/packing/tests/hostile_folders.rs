//! Plan folders of any content: reading them gives a plan or an error, never a panic or a hang.
#![expect(clippy::disallowed_methods, reason = "the test damages files on purpose")]

use std::fs;

use std::path::{Path, PathBuf};

use proptest::prelude::*;
use tundish_packing::folder::MappedColumn;
use tundish_packing::ordered_samples::SampleOrder;
use tundish_packing::plan::lookup;
use tundish_packing::{Field, Integers, NoProgress, PackError, PackRequest, Packer, Progress, folder};

mod reading;
use reading::{request, requests, use_folder, values};

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn damaged_bytes_are_an_error_or_change_nothing(
        file in any::<prop::sample::Index>(),
        request in prop::sample::select((0..requests().len()).collect::<Vec<_>>()),
        damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
        length in prop::option::of(0usize..600),
    ) {
        let parent = tempfile::tempdir().expect("a temporary folder");
        let target = parent.path().join("plan");
        let request = requests().swap_remove(request);
        Packer::new(request, &mut NoProgress).and_then(|p| p.write(&target, &mut NoProgress)).expect("a plan");
        let whole = use_folder(&target).expect("an undamaged plan");
        let mut names: Vec<_> =
            fs::read_dir(&target).expect("a folder").map(|entry| entry.expect("a name").path()).collect();
        names.sort();
        let file = file.index(names.len());
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
    Packer::new(request(), &mut NoProgress).and_then(|p| p.write(&target, &mut NoProgress)).expect("a plan");
    for name in ["plan.json", "longest.npy"] {
        let file = target.join(name);
        let kept = fs::read(&file).expect("a file");
        fs::remove_file(&file).expect("a removal");
        rustix::fs::mknodat(rustix::fs::CWD, &file, rustix::fs::FileType::Fifo, 0o600.into(), 0).expect("a pipe");
        assert!(matches!(folder::open(&target, &mut NoProgress), Err(PackError::Format { .. })));
        fs::remove_file(&file).expect("a removal");
        fs::write(&file, kept).expect("a write");
    }
}

#[test]
fn no_flipped_byte_is_read_and_the_error_names_the_file() {
    for request in requests().into_iter().take(2) {
        let parent = tempfile::tempdir().expect("a temporary folder");
        let target = parent.path().join("plan");
        Packer::new(request, &mut NoProgress).and_then(|p| p.write(&target, &mut NoProgress)).expect("a plan");
        let files: Vec<PathBuf> =
            fs::read_dir(&target).expect("a folder").map(|entry| entry.expect("a name").path()).collect();
        for file in files {
            let good = fs::read(&file).expect("a file");
            for position in 0..good.len() {
                let mut bytes = good.clone();
                bytes[position] ^= 1 << (position % 8);
                fs::write(&file, &bytes).expect("a write");
                let found = looked_up(&target);
                let is_named = matches!(&found, Err(error) if error.to_string().contains(file.to_str().unwrap()));
                assert!(is_named, "{} at {position}: {found:?}", file.display());
            }
            fs::write(&file, &good).expect("a write");
        }
        looked_up(&target).expect("an undamaged plan");
    }
}

/// Look all packs up, as training does.
fn looked_up(target: &Path) -> Result<(), PackError> {
    let open = folder::open(target, &mut NoProgress)?;
    let plan = open.view()?;
    let packs: Vec<u64> = (0..plan.packs() as u64).collect();
    lookup::<Integers<'_>>(&plan, &Integers::from(&packs[..]), None, &mut NoProgress).map(drop)
}

#[test]
fn a_damaged_plan_is_not_saved_anew_and_the_good_blocks_are_read() {
    let parent = tempfile::tempdir().expect("a temporary folder");
    let target = parent.path().join("plan");
    let lengths = vec![3u64; 200_000];
    let request = PackRequest::new(vec![Integers::from(&lengths[..])], 4);
    Packer::new(request, &mut NoProgress).and_then(|p| p.write(&target, &mut NoProgress)).expect("a plan");
    let file = target.join("indices.npy");
    let mut bytes = fs::read(&file).expect("a file");
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    fs::write(&file, &bytes).expect("a write");
    let open = folder::open(&target, &mut NoProgress).expect("small files that are whole");
    let plan = open.view().expect("columns that agree");
    let look_up =
        |pack: u64| lookup::<Integers<'_>>(&plan, &Integers::from(&[pack][..]), None, &mut NoProgress).map(drop);
    look_up(0).expect("a block that is not damaged");
    for _ in 0..2 {
        let damaged = look_up(plan.packs() as u64 - 1);
        assert!(matches!(damaged, Err(PackError::Format { path, .. }) if path == file));
    }
    let saved = folder::save(&plan, &open.metadata, &parent.path().join("copy"), &mut NoProgress);
    assert!(matches!(saved, Err(PackError::Format { path, .. }) if path == file));
    assert_eq!(fs::read_dir(parent.path()).expect("a folder").count(), 1);
}

/// Changes a folder as soon as `open` looks around, which it does when every file is checked but the offsets.
struct Meanwhile<F: FnMut()>(F);

impl<F: FnMut()> Progress for Meanwhile<F> {
    fn tick(&mut self, _phase: &'static str, _done: u64, _total: u64) -> Result<(), PackError> {
        (self.0)();
        Ok(())
    }
}

/// Two plans of the same size with other values, in one folder.
fn two_plans(parent: &Path) -> (PathBuf, PathBuf) {
    let targets = (parent.join("plan"), parent.join("other"));
    for (target, seed) in [(&targets.0, 1), (&targets.1, 2)] {
        let request = PackRequest { order: SampleOrder::Seed(seed), ..request() };
        Packer::new(request, &mut NoProgress).and_then(|p| p.write(target, &mut NoProgress)).expect("a plan");
    }
    targets
}

fn mapped(columns: &[MappedColumn]) -> Vec<Vec<i64>> {
    columns.iter().map(|column| values(&column.view())).collect()
}

#[test]
fn what_takes_the_place_of_a_file_after_its_check_is_never_mapped() {
    for field in Field::REQUIRED {
        let parent = tempfile::tempdir().expect("a temporary folder");
        let (target, other) = two_plans(parent.path());
        let columns = folder::open(&target, &mut NoProgress).expect("a plan").columns;
        let before = mapped(&columns);
        let name = folder::file_name(field);
        // Cut to its header: mapped as long as the one that was checked, it would end the process.
        let mut bytes = fs::read(other.join(&name)).expect("a file");
        bytes.truncate(128);
        fs::write(other.join(&name), bytes).expect("a write");
        let mut swap = Meanwhile(|| {
            let _ = fs::rename(other.join(&name), target.join(&name));
        });
        let columns = folder::open(&target, &mut swap).expect("a plan").columns;
        assert!(!other.join(&name).exists(), "nothing was swapped; the test shows nothing");
        assert_eq!(mapped(&columns), before, "{name}");
    }
}

#[test]
fn a_plan_removed_after_its_check_stays_readable() {
    let parent = tempfile::tempdir().expect("a temporary folder");
    let (target, _) = two_plans(parent.path());
    let columns = folder::open(&target, &mut NoProgress).expect("a plan").columns;
    let before = mapped(&columns);
    let mut remove = Meanwhile(|| fs::remove_dir_all(&target).unwrap_or_default());
    let columns = folder::open(&target, &mut remove).expect("a plan").columns;
    assert!(!target.exists());
    assert_eq!(mapped(&columns), before);
}

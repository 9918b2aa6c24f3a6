//! Plan folders of any content: reading them gives a plan or an error, never a panic or a hang.
#![expect(clippy::disallowed_methods, reason = "the test damages files on purpose")]

use std::fs;

use std::path::{Path, PathBuf};

use proptest::prelude::*;
use tundish_packing::folder::MappedColumn;
use tundish_packing::inputs::SampleOrder;
use tundish_packing::plan::{HardMetadata, PlanMetadata};
use tundish_packing::{Field, Integers, Mode, NoProgress, PackError, PackRequest, Packer, Progress, folder};

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

/// Two datasets and a tail in each: 5 packs of 8 tokens and a shorter one; then 2 and a shorter one.
const TWO: [&[u64]; 2] = [&[20, 0, 7, 16], &[18, 1, 0]];

fn two_datasets(drop_last: bool, global_pack: bool) -> PackRequest<'static> {
    PackRequest {
        lengths: TWO.iter().map(|&column| Integers::from(column)).collect(),
        order: SampleOrder::Natural,
        max_length: 8,
        mode: Mode::Hard { drop_last }.into(),
        costs: None,
        multiple: None,
        global_pack,
        threads: 1,
    }
}

/// What `open` says of a plan one of whose metadata is changed.
fn opened(request: PackRequest<'_>, change: impl Fn(&mut PlanMetadata)) -> Result<(), PackError> {
    let parent = tempfile::tempdir().expect("a temporary folder");
    let target = parent.path().join("plan");
    let mut metadata =
        Packer::new(request, &mut NoProgress).and_then(|p| p.write(&target, &mut NoProgress)).expect("a plan");
    change(&mut metadata);
    fs::write(target.join("plan.json"), metadata.to_json().expect("JSON")).expect("a write");
    folder::open(&target, &mut NoProgress).map(drop)
}

fn hard(metadata: &mut PlanMetadata) -> &mut HardMetadata {
    metadata.hard.as_mut().expect("a hard plan")
}

fn is_refused_by_its_file(name: &str, outcome: Result<(), PackError>) {
    match outcome {
        Err(PackError::Format { path, .. }) => assert!(path.ends_with("plan/plan.json"), "{name}: {}", path.display()),
        outcome => panic!("{name}: {outcome:?}"),
    }
}

#[test]
fn numbers_that_no_plan_can_have_are_refused() {
    type Change = fn(&mut PlanMetadata);
    // Each of them keeps what the columns hold: the numbers of packs and pieces.
    let changes: [(&str, Change); 12] = [
        ("more tokens than the packs hold and a tail", |metadata| metadata.tokens += 16),
        ("fewer tokens than are packed", |metadata| metadata.tokens = metadata.tokens_packed - 1),
        ("more tokens than fit the packs", |metadata| metadata.tokens_packed = metadata.packs * 8 + 1),
        ("packs that are not full", |metadata| {
            metadata.tokens_packed -= 16;
            metadata.tokens -= 16;
        }),
        ("packs that are nearly empty", |metadata| metadata.max_length = 800),
        ("more pieces than samples and cuts", |metadata| metadata.samples[0] = 0),
        ("more empty samples than samples", |metadata| hard(metadata).empty_on_boundary += 7),
        ("no samples", |metadata| metadata.samples.iter_mut().for_each(|samples| *samples = 0)),
        ("a tail that starts behind all tokens", |metadata| hard(metadata).tail_start[0] = metadata.tokens),
        ("tails of nothing", |metadata| {
            metadata.tokens = metadata.packs * 8;
            metadata.tokens_packed = metadata.tokens;
            hard(metadata).tail_start[0] = 1;
        }),
        ("a tail too many", |metadata| hard(metadata).tail_start.push(0)),
        ("no tail", |metadata| hard(metadata).tail_start.clear()),
    ];
    for (drop_last, global_pack) in [(true, false), (true, true), (false, false), (false, true)] {
        opened(two_datasets(drop_last, global_pack), |_| {}).expect("nothing was changed");
        for (name, change) in changes {
            let case = format!("{name}, drop_last {drop_last}, global_pack {global_pack}");
            is_refused_by_its_file(&case, opened(two_datasets(drop_last, global_pack), change));
        }
    }
}

#[test]
fn a_plan_that_keeps_the_tail_has_packed_all_tokens() {
    for global_pack in [true, false] {
        let changed = |change: fn(&mut PlanMetadata)| opened(two_datasets(false, global_pack), change);
        is_refused_by_its_file("one more", changed(|metadata| metadata.tokens += 1));
        is_refused_by_its_file("one less", changed(|metadata| metadata.tokens_packed -= 1));
    }
    // Of one stream, only the last pack is short.
    let changed = |tokens: u64| {
        opened(two_datasets(false, true), |metadata| (metadata.tokens, metadata.tokens_packed) = (tokens, tokens))
    };
    assert_eq!(TWO.concat().iter().sum::<u64>(), 62);
    for tokens in [0, 1, 55, 56, 65] {
        is_refused_by_its_file(&format!("{tokens} tokens in 8 packs"), changed(tokens));
    }
    // Of 64 nothing is left that could start within a sample.
    is_refused_by_its_file("64 tokens in 8 packs", changed(64));
    for tokens in [57, 63] {
        changed(tokens).expect("8 packs, and maybe the last one is short: what the columns say is not looked at");
    }
}

#[test]
fn a_dropped_tail_is_shorter_than_a_pack() {
    let changed = |global_pack: bool, left: u64| {
        opened(two_datasets(true, global_pack), |metadata| metadata.tokens = metadata.tokens_packed + left)
    };
    changed(true, 7).expect("as much as one stream leaves out");
    is_refused_by_its_file("one stream", changed(true, 8));
    changed(false, 14).expect("as much as two streams leave out");
    is_refused_by_its_file("two streams", changed(false, 15));
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
        let (_, columns) = folder::open(&target, &mut NoProgress).expect("a plan");
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
    let (_, columns) = folder::open(&target, &mut NoProgress).expect("a plan");
    let before = mapped(&columns);
    let mut remove = Meanwhile(|| fs::remove_dir_all(&target).unwrap_or_default());
    let (_, columns) = folder::open(&target, &mut remove).expect("a plan");
    assert!(!target.exists());
    assert_eq!(mapped(&columns), before);
}

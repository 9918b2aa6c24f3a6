//! Long calls look at the progress often, and end when it says so.

use std::fs;
use std::path::Path;

use tundish_packing::ordered_samples::SampleOrder;
use tundish_packing::plan::{AttachedLengths, lookup};
use tundish_packing::{Integers, Mode, NoProgress, Overlong, PackError, PackRequest, Packer, Plan, Progress, verify};

/// Interrupts at the tick number `stop_at`, which counts from 0.
struct Stop {
    stop_at: u64,
    ticks: u64,
}

impl Progress for Stop {
    fn tick(&mut self, _phase: &'static str, _done: u64, _total: u64) -> Result<(), PackError> {
        self.ticks += 1;
        if self.ticks > self.stop_at { Err(PackError::Interrupted) } else { Ok(()) }
    }
}

/// Run `work` to its end, which takes `at_least` ticks, then interrupt it at several of them.
fn ends_at_any_tick(at_least: u64, work: impl Fn(&mut dyn Progress) -> Result<(), PackError>) {
    let mut progress = Stop { stop_at: u64::MAX, ticks: 0 };
    work(&mut progress).unwrap();
    let total = progress.ticks;
    assert!(total >= at_least, "{total} ticks instead of {at_least}");
    for step in 0..10 {
        let stop_at = (total - 1) * step / 9;
        let mut progress = Stop { stop_at, ticks: 0 };
        assert!(matches!(work(&mut progress), Err(PackError::Interrupted)), "tick {stop_at} of {total}");
        assert_eq!(progress.ticks, stop_at + 1, "went on after it was interrupted");
    }
}

fn request(lengths: &[i64], max_length: u64) -> PackRequest<'_> {
    PackRequest { threads: Some(1), ..PackRequest::new(vec![Integers::from(lengths)], max_length) }
}

fn plan(lengths: &[i64], max_length: u64) -> Plan {
    Packer::new(request(lengths, max_length), &mut NoProgress).unwrap().pack(&mut NoProgress).unwrap()
}

#[test]
fn packing_samples_of_many_packs() {
    // Each sample makes thousands of packs, or one makes them all.
    for lengths in [vec![5_000i64; 2200], vec![11_000_000]] {
        for threads in [1, 2] {
            let request = PackRequest { threads: Some(threads), ..request(&lengths, 1) };
            let prepared = Packer::new(request, &mut NoProgress).unwrap();
            ends_at_any_tick(11_000_000 / (1 << 20), |progress| prepared.pack(progress).map(drop));
        }
    }
}

#[test]
fn packing_and_verifying_whole_samples() {
    let lengths: Vec<i64> = (0..1 << 18).map(|sample| sample % 1000).collect();
    let order: Vec<u32> = (0..1 << 18).rev().collect();
    for (mode, window) in [(Mode::BestFit, None), (Mode::Ordered, Some(8)), (Mode::Sequential, None)] {
        let request = PackRequest {
            order: SampleOrder::Given(Integers::from(&order[..])),
            mode,
            window,
            overlong: Some(Overlong::Split),
            ..request(&lengths, 700)
        };
        let prepared = Packer::new(request, &mut NoProgress).unwrap();
        ends_at_any_tick((1 << 18) / 8192, |progress| prepared.pack(progress).map(drop));
        let plan = prepared.pack(&mut NoProgress).unwrap();
        let (columns, order) = ([Integers::from(&lengths[..])], Some(Integers::from(&order[..])));
        ends_at_any_tick((1 << 18) / 1024, |progress| {
            verify::verify(&plan.view(), &plan.metadata, &columns, order, None, Some(1), progress)
        });
    }
}

#[test]
fn packing_one_sample_of_many_parts() {
    let request = PackRequest { mode: Mode::Sequential, overlong: Some(Overlong::Split), ..request(&[5_000_000], 1) };
    let prepared = Packer::new(request, &mut NoProgress).unwrap();
    ends_at_any_tick(5_000_000 / (1 << 20), |progress| prepared.pack(progress).map(drop));
}

/// Weighs what lies in the only folder of `parent`, and the most that came between two ticks.
struct Weigh<'a> {
    parent: &'a Path,
    before: u64,
    most: u64,
}

impl Progress for Weigh<'_> {
    fn tick(&mut self, _phase: &'static str, _done: u64, _total: u64) -> Result<(), PackError> {
        let folder = fs::read_dir(self.parent).unwrap().next().unwrap().unwrap();
        let files = fs::read_dir(folder.path()).unwrap();
        let bytes: u64 = files.map(|file| file.unwrap().metadata().unwrap().len()).sum();
        self.most = self.most.max(bytes - self.before);
        self.before = bytes;
        Ok(())
    }
}

/// The disk may be slow, and each file waits for it when so much was written.
#[test]
#[expect(clippy::disallowed_methods, reason = "the test removes what it published, for the next plan")]
fn writing_files_is_looked_after_one_by_one() {
    let parent = tempfile::tempdir().unwrap();
    let target = parent.path().join("plan");
    for (lengths, threads) in [(vec![1i64; 4_000_000], 1), (vec![1i64; 4_000_000], 2), (vec![4_000_000], 1)] {
        let prepared =
            Packer::new(PackRequest { threads: Some(threads), ..request(&lengths, 1) }, &mut NoProgress).unwrap();
        let mut progress = Weigh { parent: parent.path(), before: 0, most: 0 };
        prepared.write(&target, &mut progress).unwrap();
        assert!(progress.before > 6 * 4 * 3_900_000, "{} bytes", progress.before);
        // One column of what is gathered: of a window of two threads, or of a sample that makes very many packs.
        assert!(progress.most <= 4 << 20, "{} bytes between two looks", progress.most);
        fs::remove_dir_all(&target).unwrap();
        ends_at_any_tick(100, |progress| {
            let outcome = prepared.write(&target, progress).map(drop);
            let left = fs::read_dir(parent.path()).unwrap().count();
            assert_eq!(left, usize::from(outcome.is_ok()));
            if left > 0 {
                fs::remove_dir_all(&target).unwrap();
            }
            outcome
        });
    }
}

#[test]
fn looking_up_many_packs() {
    let lengths = vec![3i64; 40_000];
    let plan = plan(&lengths, 2);
    let packs: Vec<u64> = (0..plan.metadata.counts.packs).collect();
    let attached = AttachedLengths::new(vec![Integers::from(&lengths[..])], true);
    // Once to find the packs, once to read them.
    ends_at_any_tick(2 * plan.metadata.counts.packs / 1024, |progress| {
        lookup(&plan.view(), &Integers::from(&packs[..]), Some(&attached), progress).map(drop)
    });
}

#[test]
fn looking_up_one_pack_of_many_pieces() {
    let lengths = vec![1i64; 300_000];
    let plan = plan(&lengths, 300_000);
    let attached = AttachedLengths::new(vec![Integers::from(&lengths[..])], false);
    ends_at_any_tick(300_000 / 1024, |progress| {
        lookup(&plan.view(), &Integers::from(&[0u8][..]), Some(&attached), progress).map(drop)
    });
}

#[test]
fn verifying_what_no_pack_holds() {
    // Nothing but a tail, then nothing but empty samples on the boundary.
    for length in [1i64, 0] {
        let lengths = vec![length; 300_000];
        let plan = plan(&lengths, 1_000_000);
        assert_eq!(plan.metadata.counts.packs, 0);
        ends_at_any_tick(300_000 / 1024, |progress| {
            verify::verify(&plan.view(), &plan.metadata, &[Integers::from(&lengths[..])], None, None, Some(1), progress)
        });
    }
}

#[test]
fn verifying_one_sample_of_many_packs() {
    let lengths = [300_000i64];
    let plan = plan(&lengths, 1);
    ends_at_any_tick(300_000 / 1024, |progress| {
        verify::verify(&plan.view(), &plan.metadata, &[Integers::from(&lengths[..])], None, None, Some(1), progress)
    });
}

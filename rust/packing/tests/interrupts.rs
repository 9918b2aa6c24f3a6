//! Long calls look at the watch often, and end when it says so.

use std::fs;
use std::path::Path;

use tundish_packing::hard::{OrderSource, Prepared, Request};
use tundish_packing::lookup::{Lengths, lookup};
use tundish_packing::plan::Column;
use tundish_packing::sample_index::{Inputs, sample_index};
use tundish_packing::{Field, Integers, PackError, Plan, Silent, Watch, verify};

/// Interrupts at the tick number `stop_at`, which counts from 0.
struct Stop {
    stop_at: u64,
    ticks: u64,
}

impl Watch for Stop {
    fn tick(&mut self, _phase: &'static str, _done: u64, _total: u64) -> Result<(), PackError> {
        self.ticks += 1;
        if self.ticks > self.stop_at { Err(PackError::Interrupted) } else { Ok(()) }
    }
}

/// Run `work` to its end, which takes `at_least` ticks, then interrupt it at several of them.
fn ends_at_any_tick(at_least: u64, work: impl Fn(&mut dyn Watch) -> Result<(), PackError>) {
    let mut watch = Stop { stop_at: u64::MAX, ticks: 0 };
    work(&mut watch).unwrap();
    let total = watch.ticks;
    assert!(total >= at_least, "{total} ticks instead of {at_least}");
    for step in 0..10 {
        let stop_at = (total - 1) * step / 9;
        let mut watch = Stop { stop_at, ticks: 0 };
        assert!(matches!(work(&mut watch), Err(PackError::Interrupted)), "tick {stop_at} of {total}");
        assert_eq!(watch.ticks, stop_at + 1, "went on after it was interrupted");
    }
}

fn request(lengths: &[i64], max_length: u64) -> Request<'_> {
    Request {
        lengths: vec![Integers::from(lengths)],
        order: OrderSource::Natural,
        max_length,
        drop_last: true,
        global_pack: false,
        threads: 1,
    }
}

fn plan(lengths: &[i64], max_length: u64) -> Plan {
    Prepared::new(request(lengths, max_length), &mut Silent).unwrap().pack(&mut Silent).unwrap()
}

#[test]
fn packing_samples_of_many_packs() {
    // Each sample makes thousands of packs, or one makes them all.
    for lengths in [vec![5_000i64; 4000], vec![20_000_000]] {
        for threads in [1, 2] {
            let request = Request { threads, ..request(&lengths, 1) };
            let prepared = Prepared::new(request, &mut Silent).unwrap();
            ends_at_any_tick(20_000_000 / (1 << 20), |watch| prepared.pack(watch).map(drop));
        }
    }
}

/// Weighs what lies in the only folder of `parent`, and the most that came between two ticks.
struct Weigh<'a> {
    parent: &'a Path,
    before: u64,
    most: u64,
}

impl Watch for Weigh<'_> {
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
        let prepared = Prepared::new(Request { threads, ..request(&lengths, 1) }, &mut Silent).unwrap();
        let mut watch = Weigh { parent: parent.path(), before: 0, most: 0 };
        prepared.write(&target, &mut watch).unwrap();
        assert!(watch.before > 6 * 4 * 3_900_000, "{} bytes", watch.before);
        // One column of what is gathered: of a window of two threads, or of a sample that makes very many packs.
        assert!(watch.most <= 4 << 20, "{} bytes between two looks", watch.most);
        fs::remove_dir_all(&target).unwrap();
        ends_at_any_tick(100, |watch| {
            let outcome = prepared.write(&target, watch).map(drop);
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
    let packs: Vec<u64> = (0..plan.facts.packs).collect();
    let attached = Lengths::new(vec![Integers::from(&lengths[..])], true);
    // Once to find the packs, once to read them.
    ends_at_any_tick(2 * plan.facts.packs / 1024, |watch| {
        lookup(&plan.views(), &Integers::from(&packs[..]), Some(&attached), watch).map(drop)
    });
}

#[test]
fn looking_up_one_pack_of_many_pieces() {
    let lengths = vec![1i64; 300_000];
    let plan = plan(&lengths, 300_000);
    let attached = Lengths::new(vec![Integers::from(&lengths[..])], false);
    ends_at_any_tick(300_000 / 1024, |watch| {
        lookup(&plan.views(), &Integers::from(&[0u8][..]), Some(&attached), watch).map(drop)
    });
}

#[test]
fn verifying_what_no_pack_holds() {
    // Nothing but a tail, then nothing but empty samples on the boundary.
    for length in [1i64, 0] {
        let lengths = vec![length; 300_000];
        let plan = plan(&lengths, 1_000_000);
        assert_eq!(plan.facts.packs, 0);
        ends_at_any_tick(300_000 / 1024, |watch| {
            verify::verify(&plan.views(), &plan.facts, &[Integers::from(&lengths[..])], None, 1, watch)
        });
    }
}

#[test]
fn verifying_one_sample_of_many_packs() {
    let lengths = [300_000i64];
    let plan = plan(&lengths, 1);
    ends_at_any_tick(300_000 / 1024, |watch| {
        verify::verify(&plan.views(), &plan.facts, &[Integers::from(&lengths[..])], None, 1, watch)
    });
}

#[test]
fn indexing_many_packs() {
    let lengths = vec![3i64; 100_000];
    let plan = plan(&lengths, 1);
    ends_at_any_tick(300_000 / 1024, |watch| {
        sample_index(&plan.views(), &plan.facts, &Inputs::default(), watch).map(drop)
    });
}

#[test]
fn indexing_many_samples_of_few_packs() {
    // An empty sample on a boundary, so that the lengths are gone through; the tail has the second row.
    let mut lengths = vec![1i64; 300_000];
    lengths[0] = 0;
    let plan = plan(&lengths, 299_990);
    let columns = [Integers::from(&lengths[..])];
    let inputs = Inputs { lengths: Some(&columns), ..Inputs::default() };
    ends_at_any_tick(300_000 / 1024, |watch| sample_index(&plan.views(), &plan.facts, &inputs, watch).map(drop));
}

#[test]
fn checking_the_order_of_an_index() {
    let lengths = vec![1i64; 300_000];
    let order: Vec<u32> = (0..300_000).rev().collect();
    let order = Integers::from(&order[..]);
    let with_order = Request { order: OrderSource::Given(order), ..request(&lengths, 300_000) };
    let plan = Prepared::new(with_order, &mut Silent).unwrap().pack(&mut Silent).unwrap();
    let inputs = Inputs { order: Some(order), ..Inputs::default() };
    ends_at_any_tick(300_000 / 1024, |watch| sample_index(&plan.views(), &plan.facts, &inputs, watch).map(drop));
    let columns = [Integers::from(&lengths[..])];
    let inputs = Inputs { lengths: Some(&columns), ..inputs };
    // Lengths and order are hashed.
    ends_at_any_tick(3, |watch| sample_index(&plan.views(), &plan.facts, &inputs, watch).map(drop));
}

#[test]
fn narrowing_the_columns_of_a_plan_in_64_bit_arithmetic() {
    let mut lengths = vec![1i64; 2_000_000];
    lengths.push(1 << 33);
    let prepared = Prepared::new(request(&lengths, 1 << 20), &mut Silent).unwrap();
    let plan = prepared.pack(&mut Silent).unwrap();
    assert!(matches!(plan.column(Field::Indices), Column::I32(_)));
    assert!(matches!(plan.column(Field::EndOffset), Column::I64(_)));
    // Once to see that all indices fit, once to narrow them.
    ends_at_any_tick(2 * (2_000_000 / 65_536), |watch| prepared.pack(watch).map(drop));
}

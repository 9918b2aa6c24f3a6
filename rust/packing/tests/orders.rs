//! Orders, good and bad. Of a bad one the first wrong entry is named, by every way to make a plan and on any number of
//! threads, and nothing is written before; one so large that its check is another one is no different.

use std::path::Path;

use tundish_packing::hard::{OrderSource, Prepared, Request};
use tundish_packing::plan::{Column, Plan};
use tundish_packing::{Field, Integers, PackError, Silent, Watch};

const SAMPLES: usize = 300_000;

/// Fails the test as soon as anything lies in the folder.
struct Untouched<'a>(&'a Path);

impl Watch for Untouched<'_> {
    fn tick(&mut self, phase: &'static str, _done: u64, _total: u64) -> Result<(), PackError> {
        assert_eq!(std::fs::read_dir(self.0).unwrap().count(), 0, "written while {phase}");
        Ok(())
    }
}

/// The position that the error names, and whether it is said to be out of range.
fn named(error: &PackError) -> (usize, bool) {
    match error {
        PackError::OrderOutOfRange { position, .. } => (*position, true),
        PackError::OrderRepeated { position, .. } => (*position, false),
        other => panic!("{other}"),
    }
}

fn request<'a, T>(lengths: &'a [T], order: OrderSource<'a>, threads: usize) -> Request<'a>
where
    Integers<'a>: From<&'a [T]>,
{
    Request {
        lengths: vec![Integers::from(lengths)],
        order,
        max_length: 64,
        drop_last: true,
        global_pack: false,
        threads,
    }
}

#[test]
fn the_first_wrong_entry_is_named_and_nothing_is_written() {
    let mut lengths = vec![10u16; SAMPLES];
    // Enough samples that several threads share a copy of their lengths.
    let more = SAMPLES + 400_000;
    // Named twice, these alone have more tokens than all samples together should have.
    for sample in [1, 3, 5, 7] {
        lengths[sample] = 60_000;
    }
    let parent = tempfile::tempdir().unwrap();
    // Positions and values of two wrong entries; the position of the first, and whether it is out of range.
    let cases = [
        ([(0, -1), (5, 7)], (0, true)),
        ([(70_000, 3), (199_999, SAMPLES as i64)], (70_000, false)),
        ([(150_000, i64::MAX), (150_001, 3)], (150_000, true)),
        ([(199_998, 1), (199_999, i64::MIN)], (199_998, false)),
        ([(100_000, 5), (130_000, 5)], (100_000, false)),
        // Tokens tell nothing where the part that is left out has more.
        ([(100_000, 11), (130_000, 11)], (100_000, false)),
    ];
    for (faults, expected) in cases {
        let mut order: Vec<i64> = (0..more as i64).collect();
        for (position, value) in faults {
            order[position] = value;
        }
        let (few, many) = (&lengths[..], &[&lengths[..], &vec![10; more - SAMPLES]].concat()[..]);
        // The whole of the samples, a part, and the whole of more.
        for (order, lengths) in
            [(&order[..SAMPLES], few), (&order[..SAMPLES], &[few, &[60_000; 3]].concat()[..]), (&order[..], many)]
        {
            for threads in 1..5 {
                let order = OrderSource::Given(Integers::from(order));
                let target = parent.path().join("plan");
                // The first plan of the same request may read the lengths elsewhere than the second.
                for is_first_written in [false, true] {
                    let prepared = Prepared::new(request(lengths, order, threads), &mut Silent).unwrap();
                    for is_written in [is_first_written, !is_first_written] {
                        let error = match is_written {
                            true => prepared.write(&target, &mut Untouched(parent.path())).map(|_| ()).unwrap_err(),
                            false => prepared.pack(&mut Silent).map(|_| ()).unwrap_err(),
                        };
                        assert_eq!(named(&error), expected, "{faults:?}, written: {is_written}, {threads} threads");
                    }
                }
                assert_eq!(std::fs::read_dir(parent.path()).unwrap().count(), 0);
            }
        }
    }
}

#[test]
fn a_large_order_is_cut_and_checked_like_any_other() {
    // More than a table of lengths is made for, and more than are marked with a bit each.
    let samples = (1usize << 24) + 9;
    let length = |sample: usize| (sample * 37 % 101) as u8;
    let lengths: Vec<u8> = (0..samples).map(length).collect();
    // Coprime, so that all samples are named.
    let sample = |place: usize| place * 6_700_417 % samples;
    let mut order: Vec<i32> = (0..samples).map(|place| sample(place) as i32).collect();
    let ordered: Vec<u8> = (0..samples).map(|place| length(sample(place))).collect();
    let plan = |request| Prepared::new(request, &mut Silent).unwrap().pack(&mut Silent);
    let expected = plan(request(&ordered, OrderSource::Natural, 2)).unwrap();
    for threads in [1, 3] {
        let found = plan(request(&lengths, OrderSource::Given(Integers::from(&order[..])), threads)).unwrap();
        assert_is_that_of(&expected, &found, &order, &format!("{threads} threads"));
    }
    let good = tempfile::tempdir().unwrap();
    let request_of_few = Request {
        // Few boundaries, which are cut another way.
        max_length: 1 << 20,
        ..request(&lengths, OrderSource::Given(Integers::from(&order[..])), 2)
    };
    let target = good.path().join("plan");
    let written = Prepared::new(request_of_few, &mut Silent).unwrap().write(&target, &mut Silent).unwrap();
    assert_eq!(written.packs, expected.facts.tokens >> 20);
    let parent = tempfile::tempdir().unwrap();
    let (wrong, before) = (samples - 70_000, samples / 2);
    order[wrong] = order[before];
    for threads in [1, 3] {
        let request = request(&lengths, OrderSource::Given(Integers::from(&order[..])), threads);
        let prepared = Prepared::new(request, &mut Silent).unwrap();
        assert_eq!(named(&prepared.pack(&mut Silent).unwrap_err()), (wrong, false));
        let to_files = prepared.write(&parent.path().join("plan"), &mut Untouched(parent.path())).unwrap_err();
        assert_eq!(named(&to_files), (wrong, false));
    }
}

/// The plan of `ordered`, lengths in the order that is given, is that of the order but for the indices.
fn assert_is_that_of(expected: &Plan, found: &Plan, order: &[i32], what: &str) {
    for (field, (found, expected)) in Field::ALL.into_iter().zip(found.columns.iter().zip(&expected.columns)) {
        let (Column::I32(found), Column::I32(expected)) = (found, expected) else { panic!("{field:?} has 32 bits") };
        match field {
            Field::Indices => {
                let is_same = |(found, &place): (&i32, &i32)| *found == order[place as usize];
                assert!(found.len() == expected.len() && found.iter().zip(&expected[..]).all(is_same), "{what}");
            }
            _ => assert!(found[..] == expected[..], "{field:?}, {what}"),
        }
    }
}

#[test]
fn a_plan_that_is_computed_again_is_the_same() {
    // More than are scanned between two looks at the watch, on one thread and on two; and one too long for two bytes.
    for (samples, longest) in [((1usize << 22) + 12_345, 60_000usize), (300_000, 70_000)] {
        let length = |sample: usize| if sample == 3 { longest } else { sample * 37 % 2001 };
        let lengths: Vec<i32> = (0..samples).map(|sample| length(sample) as i32).collect();
        let sample = |place: usize| place * 670_417 % samples;
        let order: Vec<i32> = (0..samples).map(|place| sample(place) as i32).collect();
        let ordered: Vec<i32> = (0..samples).map(|place| lengths[sample(place)]).collect();
        let natural = request(&ordered, OrderSource::Natural, 2);
        let expected = Prepared::new(natural, &mut Silent).unwrap().pack(&mut Silent).unwrap();
        for threads in [1, 2] {
            let request = request(&lengths, OrderSource::Given(Integers::from(&order[..])), threads);
            let prepared = Prepared::new(request, &mut Silent).unwrap();
            for time in ["first", "second"] {
                let found = prepared.pack(&mut Silent).unwrap();
                assert_is_that_of(&expected, &found, &order, &format!("{time}, {longest}, {threads} threads"));
            }
        }
    }
}

#[test]
fn no_plan_is_made_in_the_place_of_the_one_that_is_expected() {
    let (lengths, changed) = (vec![10u16, 70, 3, 40], vec![10u16, 70, 4, 40]);
    let order = [3i64, 1, 2, 0];
    for source in [OrderSource::Natural, OrderSource::Seed(1), OrderSource::Given(Integers::from(&order[..]))] {
        let fingerprint = request(&lengths, source, 1).fingerprint(&mut Silent).unwrap().to_string();
        let expecting = |lengths| Prepared::new(request(lengths, source, 1), &mut Silent)?.expecting(&fingerprint);
        let plan = expecting(&lengths).unwrap().pack(&mut Silent).unwrap();
        assert_eq!(plan.facts.fingerprint, fingerprint);

        let parent = tempfile::tempdir().unwrap();
        let target = parent.path().join("plan");
        let in_memory = expecting(&changed).and_then(|prepared| prepared.pack(&mut Silent).map(|plan| plan.facts));
        let to_files = expecting(&changed).and_then(|prepared| prepared.write(&target, &mut Silent));
        assert!(matches!(in_memory, Err(PackError::InputChanged)));
        assert!(matches!(to_files, Err(PackError::InputChanged)));
        assert_eq!(std::fs::read_dir(parent.path()).unwrap().count(), 0);
    }
}

//! Orders, good and bad: the error names the first wrong entry of a bad one, for a plan in memory and in a folder, on any
//! number of threads, and nothing is left behind.

use tundish_packing::ordered_samples::SampleOrder;
use tundish_packing::plan::{Column, Plan};
use tundish_packing::{Field, Integers, NoProgress, PackError, PackRequest, Packer, plan_fingerprint};

const SAMPLES: usize = 300_000;

/// The position that the error names, and whether it is said to be out of range.
fn named(error: &PackError) -> (usize, bool) {
    match error {
        PackError::OrderOutOfRange { position, .. } => (*position, true),
        PackError::OrderRepeated { position, .. } => (*position, false),
        other => panic!("{other}"),
    }
}

fn request<'a, T>(lengths: &'a [T], order: SampleOrder<'a>, threads: usize) -> PackRequest<'a>
where
    Integers<'a>: From<&'a [T]>,
{
    let lengths = vec![Integers::from(lengths)];
    PackRequest { order, threads: Some(threads as u64), ..PackRequest::new(lengths, 64) }
}

#[test]
fn the_first_wrong_entry_is_named_and_nothing_is_left_behind() {
    let mut lengths = vec![10u16; SAMPLES];
    // A larger dataset, on several threads.
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
                let order = SampleOrder::Given(Integers::from(order));
                let target = parent.path().join("plan");
                let packer = Packer::new(request(lengths, order, threads), &mut NoProgress).unwrap();
                for is_written in [false, true] {
                    let error = match is_written {
                        true => packer.write(&target, &mut NoProgress).map(|_| ()).unwrap_err(),
                        false => packer.pack(&mut NoProgress).map(|_| ()).unwrap_err(),
                    };
                    assert_eq!(named(&error), expected, "{faults:?}, written: {is_written}, {threads} threads");
                }
                assert_eq!(std::fs::read_dir(parent.path()).unwrap().count(), 0);
            }
        }
    }
}

#[test]
fn a_large_order_is_cut_and_checked_like_any_other() {
    // Many windows of chunks on any number of threads.
    let samples = (1usize << 21) + 9;
    let length = |sample: usize| (sample * 37 % 101) as u8;
    let lengths: Vec<u8> = (0..samples).map(length).collect();
    // Coprime, so that all samples are named.
    let sample = |place: usize| place * 670_421 % samples;
    let mut order: Vec<i32> = (0..samples).map(|place| sample(place) as i32).collect();
    let ordered: Vec<u8> = (0..samples).map(|place| length(sample(place))).collect();
    let plan = |request| Packer::new(request, &mut NoProgress).unwrap().pack(&mut NoProgress);
    let expected = plan(request(&ordered, SampleOrder::Natural, 2)).unwrap();
    for threads in [1, 3] {
        let found = plan(request(&lengths, SampleOrder::Given(Integers::from(&order[..])), threads)).unwrap();
        assert_is_that_of(&expected, &found, &order, &format!("{threads} threads"));
    }
    let good = tempfile::tempdir().unwrap();
    let request_of_few =
        PackRequest { max_length: 1 << 20, ..request(&lengths, SampleOrder::Given(Integers::from(&order[..])), 2) };
    let target = good.path().join("plan");
    let written = Packer::new(request_of_few, &mut NoProgress).unwrap().write(&target, &mut NoProgress).unwrap();
    assert_eq!(written.counts.packs, expected.metadata.counts.tokens >> 20);
    let parent = tempfile::tempdir().unwrap();
    let (wrong, before) = (samples - 70_000, samples / 2);
    order[wrong] = order[before];
    for threads in [1, 3] {
        let request = request(&lengths, SampleOrder::Given(Integers::from(&order[..])), threads);
        let packer = Packer::new(request, &mut NoProgress).unwrap();
        assert_eq!(named(&packer.pack(&mut NoProgress).unwrap_err()), (wrong, false));
        let to_files = packer.write(&parent.path().join("plan"), &mut NoProgress).unwrap_err();
        assert_eq!(named(&to_files), (wrong, false));
    }
}

/// The plan of `ordered`, lengths in the order that is given, is that of the order but for the indices.
fn assert_is_that_of(expected: &Plan, found: &Plan, order: &[i32], what: &str) {
    for (field, (found, expected)) in Field::REQUIRED.into_iter().zip(found.columns.iter().zip(&expected.columns)) {
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
    for (samples, longest) in [((1usize << 20) + 12_345, 60_000usize), (300_000, 70_000)] {
        let length = |sample: usize| if sample == 3 { longest } else { sample * 37 % 2001 };
        let lengths: Vec<i32> = (0..samples).map(|sample| length(sample) as i32).collect();
        let sample = |place: usize| place * 670_421 % samples;
        let order: Vec<i32> = (0..samples).map(|place| sample(place) as i32).collect();
        let ordered: Vec<i32> = (0..samples).map(|place| lengths[sample(place)]).collect();
        let natural = request(&ordered, SampleOrder::Natural, 2);
        let expected = Packer::new(natural, &mut NoProgress).unwrap().pack(&mut NoProgress).unwrap();
        for threads in [1, 2] {
            let request = request(&lengths, SampleOrder::Given(Integers::from(&order[..])), threads);
            let packer = Packer::new(request, &mut NoProgress).unwrap();
            for time in ["first", "second"] {
                let found = packer.pack(&mut NoProgress).unwrap();
                assert_is_that_of(&expected, &found, &order, &format!("{time}, {longest}, {threads} threads"));
            }
        }
    }
}

#[test]
fn no_plan_is_made_in_the_place_of_the_one_that_is_expected() {
    let (lengths, changed) = (vec![10u16, 70, 3, 40], vec![10u16, 70, 4, 40]);
    let order = [3i64, 1, 2, 0];
    for source in [SampleOrder::Natural, SampleOrder::Seed(1), SampleOrder::Given(Integers::from(&order[..]))] {
        let fingerprint = plan_fingerprint(request(&lengths, source, 1), &mut NoProgress).unwrap().to_string();
        let expecting =
            |lengths| Packer::new(request(lengths, source, 1), &mut NoProgress)?.expect_fingerprint(&fingerprint);
        let plan = expecting(&lengths).unwrap().pack(&mut NoProgress).unwrap();
        assert_eq!(plan.metadata.fingerprint, fingerprint);

        let parent = tempfile::tempdir().unwrap();
        let target = parent.path().join("plan");
        let in_memory = expecting(&changed).and_then(|packer| packer.pack(&mut NoProgress).map(|plan| plan.metadata));
        let to_files = expecting(&changed).and_then(|packer| packer.write(&target, &mut NoProgress));
        assert!(matches!(in_memory, Err(PackError::InputChanged)));
        assert!(matches!(to_files, Err(PackError::InputChanged)));
        assert_eq!(std::fs::read_dir(parent.path()).unwrap().count(), 0);
    }
}

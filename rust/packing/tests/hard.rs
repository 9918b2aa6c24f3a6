//! Hard packing against its definition, by brute force: nothing here uses the crate's algorithms.

use proptest::prelude::*;
use tundish_packing::ordered_samples::SampleOrder;
use tundish_packing::plan::{self, AttachedLengths, Column, TO_THE_END};
use tundish_packing::{Field, Integers, NoProgress, PackError, PackRequest, Packer, Plan, verify};

/// The six columns, by the definition over cumulative lengths.
#[derive(Debug, Default, PartialEq, Eq)]
struct Expected {
    columns: [Vec<i64>; 6],
}

fn oracle(lengths: &[u64], order: &[usize], max_length: u64, drop_last: bool, dataset: i64, out: &mut Expected) {
    let mut cumulative = vec![0u64];
    for &sample in order {
        cumulative.push(cumulative[cumulative.len() - 1] + lengths[sample]);
    }
    let total = cumulative[order.len()];
    let packs = if drop_last { total / max_length } else { total.div_ceil(max_length) };
    let mut pieces = out.columns[1].len();
    for pack in 0..packs {
        let from = pack * max_length;
        let to = ((pack + 1) * max_length).min(total);
        let first = (0..order.len()).rev().find(|&s| cumulative[s] <= from).unwrap();
        let last = (0..order.len()).rev().find(|&e| cumulative[e] < to).unwrap();
        let longest = (first..=last).map(|s| cumulative[s + 1].min(to) - cumulative[s].max(from)).max().unwrap();
        pieces += last - first + 1;
        out.columns[0].push(dataset);
        out.columns[1].extend(order[first..=last].iter().map(|&sample| sample as i64));
        out.columns[2].push(pieces as i64);
        out.columns[3].push((from - cumulative[first]) as i64);
        out.columns[4].push((to - cumulative[last]) as i64);
        out.columns[5].push(longest as i64);
    }
}

fn columns(plan: &Plan) -> Expected {
    Expected { columns: Field::REQUIRED.map(|field| plan.column(field).to_i64()) }
}

fn pack(
    lengths: &[&[u64]],
    order: SampleOrder<'_>,
    max_length: u64,
    (drop_last, global_pack): (bool, bool),
    threads: usize,
) -> Result<Plan, PackError> {
    let request = PackRequest {
        drop_last: Some(drop_last),
        order,
        global_pack,
        threads: Some(threads as u64),
        ..PackRequest::new(lengths.iter().map(|&column| Integers::from(column)).collect(), max_length)
    };
    Packer::new(request, &mut NoProgress)?.pack(&mut NoProgress)
}

/// The counts of a plan, by a walk over its pieces: samples in packs, and those of them that are cut.
fn samples_and_cut(plan: &Plan, lengths: &[u64]) -> (u64, u64) {
    let [_, indices, ends, starts, stops, _] = columns(plan).columns;
    let mut tokens = std::collections::BTreeMap::new();
    let mut first = 0;
    for (pack, &end) in ends.iter().enumerate() {
        for piece in first..end {
            let sample = indices[piece as usize];
            let start = if piece == first { starts[pack] } else { 0 };
            let stop = if piece + 1 == end { stops[pack] } else { lengths[sample as usize] as i64 };
            let (pieces, packed) = tokens.entry(sample).or_insert((0, 0));
            (*pieces, *packed) = (*pieces + 1, *packed + stop - start);
        }
        first = end;
    }
    let is_cut =
        |&(&sample, &(pieces, packed)): &(&i64, &(u64, i64))| pieces > 1 || packed < lengths[sample as usize] as i64;
    (tokens.len() as u64, tokens.iter().filter(is_cut).count() as u64)
}

/// Verify a plan of which nothing was changed.
fn check(plan: &Plan, lengths: &[&[u64]], order: Option<Integers<'_>>) {
    let lengths: Vec<Integers<'_>> = lengths.iter().map(|&column| Integers::from(column)).collect();
    verify::verify(&plan.view(), &plan.metadata, &lengths, order, None, Some(1), &mut NoProgress).unwrap();
}

/// Lengths with many zeros, ones and exact multiples, where boundaries fall on samples.
fn length() -> impl Strategy<Value = u64> {
    prop_oneof![3 => 0u64..4, 4 => 0u64..40, 1 => 40u64..400, 1 => (0u64..8).prop_map(|n| n * 16)]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn agrees_with_the_definition(
        lengths in prop::collection::vec(length(), 0..60),
        keys in prop::collection::vec(any::<u32>(), 60),
        used in 0usize..=60,
        max_length in prop_oneof![1u64..50, Just(16u64), Just(1u64)],
        drop_last in any::<bool>(),
        given in any::<bool>(),
    ) {
        let mut order: Vec<usize> = (0..lengths.len()).collect();
        if given {
            order.sort_by_key(|&sample| keys[sample]);
            order.truncate(used);
        }
        let mut expected = Expected::default();
        oracle(&lengths, &order, max_length, drop_last, 0, &mut expected);
        let wide: Vec<i64> = order.iter().map(|&sample| sample as i64).collect();
        let source = if given { SampleOrder::Given(Integers::from(&wide[..])) } else { SampleOrder::Natural };
        let plan = pack(&[&lengths], source, max_length, (drop_last, false), 1).unwrap();
        prop_assert_eq!(&columns(&plan), &expected);
        let total: u64 = order.iter().map(|&sample| lengths[sample]).sum();
        let counts = &plan.metadata.counts;
        prop_assert_eq!(counts.tokens, total);
        let full = total / max_length * max_length;
        prop_assert_eq!(counts.tokens_packed, if drop_last { full } else { total });
        prop_assert_eq!(counts.samples_empty, order.iter().filter(|&&sample| lengths[sample] == 0).count() as u64);
        prop_assert_eq!((counts.samples, counts.samples_cut), samples_and_cut(&plan, &lengths));
        prop_assert_eq!(counts.longest as i64, expected.columns[5].iter().copied().max().unwrap_or(0));
        check(&plan, &[&lengths], given.then(|| Integers::from(&wide[..])));
    }

    #[test]
    fn several_datasets(
        datasets in prop::collection::vec(prop::collection::vec(length(), 0..20), 0..5),
        max_length in 1u64..50,
        drop_last in any::<bool>(),
        global_pack in any::<bool>(),
    ) {
        let views: Vec<&[u64]> = datasets.iter().map(|column| &column[..]).collect();
        let mut expected = Expected::default();
        if global_pack {
            let all = datasets.concat();
            oracle(&all, &(0..all.len()).collect::<Vec<_>>(), max_length, drop_last, 0, &mut expected);
        } else {
            for (id, column) in datasets.iter().enumerate() {
                oracle(column, &(0..column.len()).collect::<Vec<_>>(), max_length, drop_last, id as i64, &mut expected);
            }
        }
        let plan = pack(&views, SampleOrder::Natural, max_length, (drop_last, global_pack), 1).unwrap();
        prop_assert_eq!(&columns(&plan), &expected);
        for seed in [0, 7] {
            let plan = pack(&views, SampleOrder::Seed(seed), max_length, (drop_last, global_pack), 1).unwrap();
            check(&plan, &views, None);
        }
    }

    #[test]
    fn lookup_gives_the_pieces(
        lengths in prop::collection::vec(length(), 1..60),
        max_length in 1u64..50,
        drop_last in any::<bool>(),
    ) {
        let plan = pack(&[&lengths], SampleOrder::Seed(3), max_length, (drop_last, false), 1).unwrap();
        let all: Vec<u64> = (0..plan.metadata.counts.packs).collect();
        let attached = AttachedLengths::new(vec![Integers::from(&lengths[..])], false);
        let with = plan::lookup(&plan.view(), &Integers::from(&all[..]), Some(&attached), &mut NoProgress).unwrap();
        let without = plan::lookup::<Integers<'_>>(&plan.view(), &Integers::from(&all[..]), None, &mut NoProgress).unwrap();
        prop_assert_eq!(&with.sample, &without.sample);
        for pack in 0..all.len() {
            let range = with.piece_cu[pack] as usize..with.piece_cu[pack + 1] as usize;
            let sizes: Vec<i64> = range.clone().map(|piece| with.stop[piece] - with.start[piece]).collect();
            let tokens: i64 = sizes.iter().sum();
            prop_assert!(tokens == max_length as i64 || (!drop_last && pack + 1 == all.len()));
            prop_assert_eq!(*sizes.iter().max().unwrap(), plan.column(Field::Longest).to_i64()[pack]);
            for piece in range.start..range.end - 1 {
                prop_assert_eq!(without.stop[piece], TO_THE_END);
            }
            prop_assert_eq!(without.stop[range.end - 1], with.stop[range.end - 1]);
        }
    }
}

/// A generator that owes nothing to the crate's.
fn pseudo_random(seed: u64) -> impl FnMut() -> u64 {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    }
}

#[test]
fn any_number_of_threads_gives_the_same_plan() {
    for (case, max_length) in [(1u64, 7u64), (2, 4096), (3, 100_000_000), (4, 1)] {
        let mut random = pseudo_random(case);
        let samples = 300_001;
        let lengths: Vec<u64> = (0..samples)
            .map(|_| match random() % 8 {
                0 => 0,
                1 => max_length.min(64),
                2 => random() % 4,
                3 if max_length > 1 => random() % 3000,
                _ => random() % 40,
            })
            .collect();
        let mut order: Vec<u32> = (0..lengths.len() as u32).collect();
        for last in (1..order.len()).rev() {
            order.swap(last, (random() % (last as u64 + 1)) as usize);
        }
        order.truncate(lengths.len() - (case as usize % 2) * 777);
        for drop_last in [false, true] {
            for source in [SampleOrder::Given(Integers::from(&order[..])), SampleOrder::Natural, SampleOrder::Seed(9)] {
                let one = pack(&[&lengths], source, max_length, (drop_last, false), 1).unwrap();
                let threads = if drop_last { 2 } else { 3 };
                let many = pack(&[&lengths], source, max_length, (drop_last, false), threads).unwrap();
                assert!(one == many, "case {case}, {threads} threads, drop_last {drop_last}");
                let given = matches!(source, SampleOrder::Given(_)).then(|| Integers::from(&order[..]));
                check(&one, &[&lengths], given);
            }
        }
    }
}

#[test]
fn wide_values_are_kept() {
    let lengths = [1u64 << 40, 5, (1 << 33) + 7];
    let max_length = 1u64 << 39;
    let mut expected = Expected::default();
    oracle(&lengths, &[2, 0, 1], max_length, false, 0, &mut expected);
    let order = [2i8, 0, 1];
    let plan =
        pack(&[&lengths], SampleOrder::Given(Integers::from(&order[..])), max_length, (false, false), 1).unwrap();
    assert_eq!(columns(&plan), expected);
    assert!(matches!(plan.column(Field::Indices), Column::I32(_)));
    assert!(matches!(plan.column(Field::EndOffset), Column::I64(_)));
}

#[test]
fn a_sample_of_very_many_packs() {
    let lengths = [3u64, 1_000_003, 5, 0, 2_000_000];
    for max_length in [1u64, 2, 7] {
        let plan = pack(&[&lengths], SampleOrder::Natural, max_length, (false, false), 1).unwrap();
        let total: u64 = lengths.iter().sum();
        assert_eq!(plan.metadata.counts.packs, total.div_ceil(max_length));
        check(&plan, &[&lengths], None);
    }
}

#[test]
fn bad_orders_and_lengths_are_refused() {
    let lengths = vec![10u64; 300_000];
    for threads in [1, 2] {
        for (position, value) in [(0usize, -1i64), (150_000, 300_000), (299_999, i64::MAX), (70_000, 3)] {
            let mut order: Vec<i64> = (0..300_000).collect();
            order[position] = value;
            let source = SampleOrder::Given(Integers::from(&order[..]));
            match pack(&[&lengths], source, 64, (true, false), threads) {
                Err(PackError::OrderOutOfRange { position: at, value: found, .. }) => {
                    assert_eq!((at, found), (position, i128::from(value)));
                }
                Err(PackError::OrderRepeated { position: at, sample }) => assert_eq!((at, sample), (position, 3)),
                other => panic!("{other:?}"),
            }
        }
    }
    let negative = [4i64, 7, -2];
    let request = |lengths| PackRequest { threads: Some(1), ..PackRequest::new(vec![lengths], 4) };
    assert!(matches!(
        Packer::new(request(Integers::from(&negative[..])), &mut NoProgress),
        Err(PackError::NegativeLength { sample: 2, value: -2, .. })
    ));
    let large = [1u64 << 62, 1 << 62, 1];
    assert!(matches!(
        Packer::new(request(Integers::from(&large[..])), &mut NoProgress),
        Err(PackError::TotalTooLarge { sample: 1, .. })
    ));
    assert!(matches!(
        Packer::new(request(Integers::from(&[1u64 << 62][..])), &mut NoProgress).unwrap().pack(&mut NoProgress),
        Err(PackError::TooLarge { .. })
    ));
}

#[test]
fn a_plan_that_no_disk_has_room_for_is_refused_before_it_is_made() {
    let folder = tempfile::tempdir().unwrap();
    let lengths = [1i64 << 60];
    let request = PackRequest { threads: Some(1), ..PackRequest::new(vec![Integers::from(&lengths[..])], 1) };
    let target = folder.path().join("plan");
    match Packer::new(request, &mut NoProgress).unwrap().write(&target, &mut NoProgress) {
        Err(PackError::NoRoom { path, needed, packs, pieces, .. }) => {
            // With the headers of six files.
            assert_eq!((path, needed), (target, (24 << 60) + 6 * 128));
            assert_eq!((packs, pieces), (1 << 60, 1 << 60));
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}

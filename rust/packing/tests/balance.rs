//! Balanced parts and micro-batches against brute force and against differencing as it is published, on lists of lists:
//! nothing here uses the crate's algorithms.

use proptest::prelude::*;
use tundish_packing::balance::{Cost, balanced_parts, micro_batches};
use tundish_packing::{Integers, NoProgress, PackError, Progress};

fn parts_of(lengths: &[u64], parts: usize, cost: Cost<'_>, equal_counts: bool) -> Result<Vec<Vec<i64>>, PackError> {
    balanced_parts(Integers::from(lengths), parts, cost, equal_counts, &mut NoProgress)
}

fn batches_of(lengths: &[u64], max_tokens: u64, count: Option<usize>) -> Result<Vec<Vec<i64>>, PackError> {
    micro_batches(Integers::from(lengths), max_tokens, count, &mut NoProgress)
}

fn sums(groups: &[Vec<i64>], costs: &[u64]) -> Vec<u64> {
    groups.iter().map(|group| group.iter().map(|&sample| costs[sample as usize]).sum()).collect()
}

/// Each sample is in one group, and the groups are in their order.
fn check(groups: &[Vec<i64>], costs: &[u64]) {
    let mut all = groups.concat();
    all.sort_unstable();
    assert_eq!(all, (0..costs.len() as i64).collect::<Vec<_>>());
    assert!(groups.iter().all(|group| !group.is_empty() && group.is_sorted()), "{groups:?}");
    let keys: Vec<_> = sums(groups, costs).into_iter().map(std::cmp::Reverse).zip(groups).collect();
    assert!(keys.is_sorted(), "{groups:?}");
}

/// Differencing on lists of samples, in which parts without samples are lists, too.
fn differencing(costs: &[u64], parts: usize, equal_counts: bool) -> Vec<Vec<i64>> {
    type Lists = Vec<Vec<usize>>;
    let key = |list: &Vec<usize>| (list.iter().map(|&s| costs[s]).sum::<u64>(), list.len(), list.first().copied());
    let heaviest_first = |mut lists: Lists| {
        lists.sort_by_key(|list| std::cmp::Reverse(key(list)));
        lists
    };
    let mut order: Vec<usize> = (0..costs.len()).collect();
    order.sort_by_key(|&sample| (costs[sample], sample));
    let mut partitions: Vec<Lists> = order
        .chunks(if equal_counts { parts } else { 1 })
        .map(|chunk| {
            let mut lists: Lists = chunk.iter().map(|&sample| vec![sample]).collect();
            lists.resize(parts, Vec::new());
            heaviest_first(lists)
        })
        .collect();
    while partitions.len() > 1 {
        partitions.sort_by_cached_key(|lists| (key(&lists[0]).0 - key(&lists[parts - 1]).0, key(&lists[0])));
        let (first, second) = (partitions.pop().unwrap(), partitions.pop().unwrap());
        let joined = first.into_iter().zip(second.into_iter().rev()).map(|(left, right)| [left, right].concat());
        partitions.push(heaviest_first(joined.collect()));
    }
    let mut groups: Vec<Vec<i64>> =
        partitions.remove(0).into_iter().map(|list| list.into_iter().map(|sample| sample as i64).collect()).collect();
    groups.iter_mut().for_each(|group| group.sort_unstable());
    groups.sort_by_key(|group| (std::cmp::Reverse(sums(std::slice::from_ref(group), costs)[0]), group[0]));
    groups
}

/// The sums of batches that are filled longest first, each sample into the fullest batch that has room.
fn best_fit_decreasing(lengths: &[u64], limit: u64) -> Vec<u64> {
    let mut order = lengths.to_vec();
    order.sort_unstable();
    let mut batches: Vec<u64> = Vec::new();
    for length in order.into_iter().rev() {
        match batches.iter_mut().filter(|sum| **sum + length <= limit).max() {
            Some(sum) => *sum += length,
            None => batches.push(length),
        }
    }
    batches
}

/// The loads of every way to put the samples into at most `parts` parts.
fn every_way(costs: &[u64], parts: usize, visit: &mut impl FnMut(&[u64])) {
    fn place(costs: &[u64], loads: &mut Vec<u64>, parts: usize, visit: &mut impl FnMut(&[u64])) {
        let Some((&cost, rest)) = costs.split_first() else {
            return visit(loads);
        };
        for part in 0..loads.len() {
            loads[part] += cost;
            place(rest, loads, parts, visit);
            loads[part] -= cost;
        }
        if loads.len() < parts {
            loads.push(cost);
            place(rest, loads, parts, visit);
            loads.pop();
        }
    }
    place(costs, &mut Vec::new(), parts, visit);
}

/// The heaviest part of the best split.
fn least_heaviest(costs: &[u64], parts: usize) -> u64 {
    let mut least = u64::MAX;
    every_way(costs, parts, &mut |loads| least = least.min(*loads.iter().max().unwrap()));
    least
}

/// The number of batches of the best split.
fn least_batches(lengths: &[u64], max_tokens: u64) -> usize {
    (1..lengths.len()).find(|&count| least_heaviest(lengths, count) <= max_tokens).unwrap_or(lengths.len())
}

proptest! {
    #[test]
    fn parts_equal_those_of_published_differencing(
        lengths in prop_oneof![
            prop::collection::vec(0u64..6, 1..60),
            prop::collection::vec(0u64..5000, 1..120),
        ],
        parts in 1usize..20,
    ) {
        let parts = parts.min(lengths.len());
        let found = parts_of(&lengths, parts, Cost::Tokens, false).unwrap();
        check(&found, &lengths);
        prop_assert_eq!(found, differencing(&lengths, parts, false));

        let whole = &lengths[..lengths.len() / parts * parts];
        let found = parts_of(whole, parts, Cost::Tokens, true).unwrap();
        check(&found, whole);
        prop_assert!(found.iter().all(|part| part.len() == whole.len() / parts));
        prop_assert_eq!(found, differencing(whole, parts, true));
    }

    #[test]
    fn other_costs_are_balanced_alike(lengths in prop::collection::vec(0u64..40_000, 1..60), parts in 1usize..9) {
        let parts = parts.min(lengths.len());
        let work: Vec<u64> = lengths.iter().map(|&length| length * length + 24_576 * length).collect();
        let expected = differencing(&work, parts, false);
        prop_assert_eq!(&parts_of(&lengths, parts, Cost::Attention, false).unwrap(), &expected);
        let given = Cost::Given(Integers::from(&work[..]));
        prop_assert_eq!(parts_of(&lengths, parts, given, false).unwrap(), expected);
    }

    #[test]
    fn the_heaviest_part_is_near_the_least_possible(
        lengths in prop::collection::vec(1u64..30, 1..9),
        parts in 1usize..5,
    ) {
        let parts = parts.min(lengths.len());
        let heaviest = sums(&parts_of(&lengths, parts, Cost::Tokens, false).unwrap(), &lengths)[0];
        let least = least_heaviest(&lengths, parts);
        // Michiels, Korst and Aarts, Performance ratios for the Karmarkar-Karp differencing method.
        let (over, under) = match parts as u64 {
            1 => (1, 1),
            2 => (7, 6),
            parts => (4 * (parts - 1) - 1, 3 * (parts - 1)),
        };
        prop_assert!(heaviest * under <= least * over, "{heaviest} instead of {least}");
    }

    #[test]
    fn batches_keep_the_limit_for_every_count(
        lengths in prop::collection::vec(0u64..30, 1..9),
        more in 1u64..40,
    ) {
        let limit = lengths.iter().max().unwrap() + more;
        let few = batches_of(&lengths, limit, None).unwrap();
        let least = least_batches(&lengths, limit);
        prop_assert!(few.len() >= least);
        // Best-fit decreasing opens two batches too many only for more samples than these.
        prop_assert!(few.len() <= least + 1);
        for count in few.len()..=lengths.len() {
            let batches = batches_of(&lengths, limit, Some(count)).unwrap();
            check(&batches, &lengths);
            prop_assert_eq!(batches.len(), count);
            prop_assert!(sums(&batches, &lengths).iter().all(|&sum| sum <= limit));
        }
        for count in [few.len() - 1, lengths.len() + 1] {
            prop_assert!(matches!(batches_of(&lengths, limit, Some(count)), Err(PackError::Invalid(_))));
        }
    }

    #[test]
    fn batches_are_as_few_as_those_of_best_fit_decreasing(
        lengths in prop::collection::vec(0u64..1000, 1..120),
        limit in 1000u64..3000,
    ) {
        let batches = batches_of(&lengths, limit, None).unwrap();
        check(&batches, &lengths);
        prop_assert!(sums(&batches, &lengths)[0] <= limit);
        prop_assert!(batches.len() as u64 >= lengths.iter().sum::<u64>().div_ceil(limit));
        prop_assert!(batches.len() <= best_fit_decreasing(&lengths, limit).len());
        // One more batch may be too few for differencing, too.
        if batches.len() < lengths.len() {
            let more = batches_of(&lengths, limit, Some(batches.len() + 1)).unwrap();
            check(&more, &lengths);
            prop_assert_eq!(more.len(), batches.len() + 1);
            prop_assert!(sums(&more, &lengths)[0] <= limit);
        }
        // Differencing keeps the limit where it can.
        let differenced = differencing(&lengths, batches.len(), false);
        if sums(&differenced, &lengths)[0] <= limit {
            prop_assert_eq!(batches, differenced);
        }
    }
}

#[test]
fn fewer_batches_than_differencing_into_them_would_fill() {
    // Differencing into two parts gives 9 and 7.
    let lengths = [3, 3, 4, 4, 2];
    assert_eq!(sums(&differencing(&lengths, 2, false), &lengths)[0], 9);
    assert_eq!(sums(&batches_of(&lengths, 8, None).unwrap(), &lengths), [8, 8]);
}

#[test]
fn batches_are_split_where_differencing_into_more_is_above_the_limit() {
    let lengths = [
        18, 13, 55, 19, 13, 16, 24, 29, 23, 22, 25, 29, 35, 30, 28, 22, 19, 19, 21, 16, 13, 18, 26, 19, 21, 26, 24, 38,
        17, 21, 35,
    ];
    assert_eq!(batches_of(&lengths, 55, None).unwrap().len(), 14);
    assert!(sums(&differencing(&lengths, 15, false), &lengths)[0] > 55);
    for count in 15..=lengths.len() {
        let batches = batches_of(&lengths, 55, Some(count)).unwrap();
        check(&batches, &lengths);
        assert_eq!(batches.len(), count);
        assert!(sums(&batches, &lengths)[0] <= 55);
    }
}

#[test]
fn bad_input_is_refused() {
    let three = [4u64, 2, 6];
    let most = [u64::MAX >> 1; 5];
    let cases = [
        (parts_of(&three, 0, Cost::Tokens, false), "parts is 0, and there are 3 samples"),
        (parts_of(&three, 4, Cost::Tokens, false), "a sample for each part"),
        (parts_of(&[], 1, Cost::Tokens, false), "there are 0 samples"),
        (parts_of(&three, 2, Cost::Tokens, true), "3 samples cannot be split into 2 parts of one count; leave out 1"),
        (parts_of(&most, 2, Cost::Attention, false), "samples 0 … 3 add up to 2^128 or more"),
        (parts_of(&three, 2, Cost::Given(Integers::from(&most[..])), false), "cost has 5 entries, and lengths has 3"),
        (
            parts_of(&three, 2, Cost::Given(Integers::from(&[1i64, -7, 3][..])), false),
            "cost[1] is -7; it must be at least 0",
        ),
        (
            balanced_parts(Integers::from(&[1i8, -1][..]), 1, Cost::Tokens, false, &mut NoProgress),
            "lengths[1] is -1; it must be at least 0",
        ),
        (batches_of(&[], 4, None), "there are 0 samples"),
        (batches_of(&three, 0, None), "max_tokens is 0"),
        (batches_of(&three, 5, None), "lengths[2] is 6, above max_tokens=5 (1 of 3 samples are, the longest has 6"),
    ];
    for (result, text) in cases {
        match result {
            Err(PackError::Invalid(message)) => assert!(message.contains(text), "{message}"),
            other => panic!("{other:?} instead of {text}"),
        }
    }
    // Sums beyond 64 bits are exact.
    assert_eq!(parts_of(&[u64::MAX; 4], 2, Cost::Tokens, false).unwrap(), [[0, 3], [1, 2]]);
}

#[test]
fn every_phase_can_be_interrupted() {
    struct Stop(&'static str);
    impl Progress for Stop {
        fn tick(&mut self, phase: &'static str, _done: u64, _total: u64) -> Result<(), PackError> {
            if phase == self.0 { Err(PackError::Interrupted) } else { Ok(()) }
        }
    }
    let lengths = [3u64, 3, 4, 4, 2];
    for phase in ["reading", "balancing", "filling batches"] {
        let result = micro_batches(Integers::from(&lengths[..]), 8, None, &mut Stop(phase));
        assert!(matches!(result, Err(PackError::Interrupted)), "{phase}: {result:?}");
    }
}

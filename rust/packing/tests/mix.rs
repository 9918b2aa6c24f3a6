//! Mixes against their promises, turn by turn: nothing here uses the crate's algorithm.

use proptest::prelude::*;
use tundish_packing::mix::{Exhausted, MixRequest, mix};
use tundish_packing::shuffle::RandomState;
use tundish_packing::{Integers, NoProgress, PackError};

fn request<'a>(packs: &'a [u64], weights: &'a [f64], exhausted: Exhausted) -> MixRequest<'a> {
    let beginning = Integers::from(&[] as &[i32]);
    MixRequest { packs, weights, seed: 7, exhausted, epochs: Some(1), num_packs: None, beginning }
}

fn mixed(request: &MixRequest<'_>) -> Vec<u64> {
    let order = mix(request, &mut NoProgress).expect("a mix");
    order.to_i64().into_iter().map(i64::cast_unsigned).collect()
}

/// The plan of each pack, and the pack in it.
fn located(packs: &[u64], order: &[u64]) -> Vec<(usize, u64)> {
    let numbered: Vec<(usize, u64)> =
        packs.iter().enumerate().flat_map(|(plan, &packs)| (0..packs).map(move |pack| (plan, pack))).collect();
    order.iter().map(|&pack| numbered[pack as usize]).collect()
}

/// Whether every plan is within one pack of its share after each of these turns.
fn keeps_shares(plans: &[usize], weights: &[u64]) -> bool {
    let total: u64 = weights.iter().sum();
    let mut taken = vec![0u64; weights.len()];
    (1u64..).zip(plans).all(|(turn, &plan)| {
        taken[plan] += 1;
        taken.iter().zip(weights).all(|(&taken, &weight)| (weight * turn).abs_diff(taken * total) < total)
    })
}

/// The plan that lacks most takes each turn, as in Megatron-LM.
fn largest_lack(weights: &[u64], turns: u64) -> Vec<usize> {
    let total: u64 = weights.iter().sum();
    let mut taken = vec![0u64; weights.len()];
    let mut order = Vec::new();
    for turn in 1..=turns {
        let lack = |plan: usize| (weights[plan] * turn).cast_signed() - (taken[plan] * total).cast_signed();
        let chosen = (0..weights.len()).rev().max_by_key(|&plan| lack(plan)).expect("a plan");
        taken[chosen] += 1;
        order.push(chosen);
    }
    order
}

fn as_floats(weights: &[u64]) -> Vec<f64> {
    weights.iter().map(|&weight| weight as f64).collect()
}

#[test]
fn shares_are_kept_where_the_largest_lack_does_not_keep_them() {
    let weights = [1, 1, 1, 1, 3, 3, 3, 3];
    assert!(!keeps_shares(&largest_lack(&weights, 16), &weights));
    let floats = as_floats(&weights);
    let order =
        mixed(&MixRequest { epochs: None, num_packs: Some(1000), ..request(&[5; 8], &floats, Exhausted::Repeat) });
    let plans: Vec<usize> = located(&[5; 8], &order).into_iter().map(|(plan, _)| plan).collect();
    assert!(plans.len() == 1000 && keeps_shares(&plans, &weights));
}

#[test]
fn an_epoch_is_in_the_order_of_numpy() {
    let weights = [1.0, 1.0];
    let order = mixed(&MixRequest { epochs: Some(2), ..request(&[9, 6], &weights, Exhausted::Drop) });
    let of_second: Vec<u64> =
        located(&[9, 6], &order).into_iter().filter(|(plan, _)| *plan == 1).map(|(_, pack)| pack).collect();
    let epoch =
        |epoch| RandomState::of_words(&[7, 1, epoch]).shuffled::<u64>(6, &mut NoProgress).expect("a permutation");
    assert_eq!(of_second, [epoch(0), epoch(1)].concat());
}

proptest! {
    #[test]
    fn every_prefix_keeps_the_shares(
        weights in prop::collection::vec(0u64..50, 1..12).prop_filter("all are 0", |w| w.iter().any(|&w| w > 0)),
        num_packs in 1u64..400,
    ) {
        let (packs, floats) = (vec![3; weights.len()], as_floats(&weights));
        let request = request(&packs, &floats, Exhausted::Repeat);
        let order = mixed(&MixRequest { epochs: None, num_packs: Some(num_packs), ..request });
        let plans: Vec<usize> = located(&packs, &order).into_iter().map(|(plan, _)| plan).collect();
        prop_assert_eq!(plans.len() as u64, num_packs);
        prop_assert!(keeps_shares(&plans, &weights));
    }

    #[test]
    fn a_mix_ends_as_it_says(
        plans in prop::collection::vec((1u64..20, 1u64..9), 1..6),
        epochs in 1u64..4,
        exhausted in prop::sample::select(vec![Exhausted::Repeat, Exhausted::Stop, Exhausted::Drop]),
    ) {
        let (packs, weights): (Vec<u64>, Vec<u64>) = plans.into_iter().unzip();
        let floats = as_floats(&weights);
        let order = mixed(&MixRequest { epochs: Some(epochs), ..request(&packs, &floats, exhausted) });
        let found = located(&packs, &order);
        let taken = |plan: usize| found.iter().filter(|(of, _)| *of == plan).count() as u64;
        let quotas: Vec<u64> = packs.iter().map(|packs| packs * epochs).collect();
        let (last, _) = *found.last().expect("packs");
        prop_assert_eq!(taken(last), quotas[last]);
        for (plan, &quota) in quotas.iter().enumerate() {
            match exhausted {
                Exhausted::Repeat => prop_assert!(taken(plan) >= quota),
                Exhausted::Stop => prop_assert!(taken(plan) < quota || plan == last),
                Exhausted::Drop => prop_assert_eq!(taken(plan), quota),
            }
        }
    }
}

#[test]
fn what_cannot_be_mixed_is_refused() {
    let refused = |request: MixRequest<'_>, text: &str| match mix(&request, &mut NoProgress) {
        Err(error) => assert!(error.to_string().contains(text), "{error}"),
        Ok(_) => panic!("{text}"),
    };
    for (weights, text) in [
        (vec![1.0], "1 weights for 2 plans"),
        (vec![1.0, -0.5], "weights[1] is -0.5"),
        (vec![f64::NAN, 1.0], "weights[0] is NaN"),
        (vec![1.0, f64::INFINITY], "weights[1] is inf"),
        (vec![0.0, -0.0], "all weights are 0"),
    ] {
        refused(request(&[3, 3], &weights, Exhausted::Stop), text);
    }
    refused(request(&[3, 0], &[1.0, 0.1], Exhausted::Stop), "plan 1 has no packs");
    assert_eq!(mixed(&request(&[3, 0], &[1.0, 0.0], Exhausted::Stop)).len(), 3);
    refused(MixRequest { epochs: None, ..request(&[3], &[1.0], Exhausted::Repeat) }, "no end");
    refused(request(&[3, 3], &[1.0, 1e-300], Exhausted::Repeat), "may have 281474976710656");
    refused(request(&[1 << 48, 3], &[1.0, 1.0], Exhausted::Drop), "281474976710659 packs");
    let beginning: &[i64] = &[2, -1];
    refused(
        MixRequest { beginning: Integers::from(beginning), ..request(&[3], &[1.0], Exhausted::Stop) },
        "entry 1 of the mix is -1",
    );
    let all = MixRequest { num_packs: Some(1 << 47), epochs: None, ..request(&[3], &[1.0], Exhausted::Repeat) };
    assert!(matches!(mix(&all, &mut NoProgress), Err(PackError::OutOfMemory { .. })));
}

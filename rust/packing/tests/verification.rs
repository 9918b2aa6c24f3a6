//! What `verify` finds: a token that is in two pieces or in none, a pack beyond its limits, and a count, a length or an
//! order that is another one.

mod verifying;

use tundish_packing::ordered_samples::SampleOrder;
use tundish_packing::plan::{Column, OrderKind, PlanCounts};
use tundish_packing::{
    Field, Integers, Mode, NoProgress, Overlong, PackError, PackRequest, Packer, Plan, Remainder, verify,
};
use verifying::{Case, MAX_LENGTH};

const FIRST: [u64; 15] = [5, 11, 16, 3, 40, 7, 1, 2, 13, 50, 6, 4, 32, 9, 0];
const SECOND: [u64; 5] = [12, 0, 16, 10, 23];
/// Of the first dataset: some of the samples.
const ORDER: [i16; 12] = [9, 2, 1, 0, 3, 4, 5, 8, 7, 6, 12, 11];

fn hard(drop_last: bool) -> PackRequest<'static> {
    PackRequest { drop_last: Some(drop_last), threads: Some(1), ..PackRequest::new(Vec::new(), MAX_LENGTH) }
}

fn whole(mode: Mode, overlong: Overlong) -> PackRequest<'static> {
    PackRequest {
        mode,
        window: (mode == Mode::Ordered).then_some(3),
        overlong: Some(overlong),
        max_samples: Some(3),
        align: 2,
        drop_last: None,
        ..hard(true)
    }
}

fn cases() -> Vec<Case> {
    let mut requests = vec![hard(true), hard(false)];
    for mode in [Mode::BestFit, Mode::Ordered, Mode::Sequential] {
        for overlong in [Overlong::Split, Overlong::Truncate, Overlong::Drop] {
            requests.push(whole(mode, overlong));
        }
    }
    let repeated = requests.iter().map(|request| PackRequest {
        multiple_of: Some(7),
        remainder: Some(Remainder::Repeat),
        ..request.clone()
    });
    let dropped = requests.iter().filter(|request| request.drop_last != Some(false));
    let dropped = dropped.map(|request| PackRequest { multiple_of: Some(4), ..request.clone() });
    let all: Vec<PackRequest<'static>> = requests.iter().cloned().chain(repeated).chain(dropped).collect();
    let mut cases = Vec::new();
    for request in &all {
        cases.push(Case::new(&[&FIRST], SampleOrder::Given(Integers::from(&ORDER[..])), request));
        for order in [SampleOrder::Natural, SampleOrder::Seed(3)] {
            cases.push(Case::new(&[&FIRST, &SECOND], order, request));
            cases.push(Case::new(&[&FIRST, &SECOND], order, &PackRequest { global_pack: true, ..request.clone() }));
        }
    }
    cases
}

#[test]
fn nothing_changed_is_fine() {
    let cases = cases();
    for case in &cases {
        case.verify(&case.plan).unwrap();
    }
    // The cases show something about all counts.
    let sum = |count: fn(&PlanCounts) -> u64| cases.iter().map(|case| count(&case.plan.metadata.counts)).sum::<u64>();
    let counts: [fn(&PlanCounts) -> u64; 6] = [
        |counts| counts.samples_cut,
        |counts| counts.tokens_truncated,
        |counts| counts.packs_dropped,
        |counts| counts.tokens_repeated,
        |counts| counts.padding_align,
        |counts| counts.samples_empty,
    ];
    assert!(counts.into_iter().all(|count| sum(count) > 0));
}

#[test]
fn any_changed_offset_is_found() {
    for case in cases() {
        for field in 0..case.plan.columns.len() {
            if field == Field::Indices as usize {
                continue;
            }
            for entry in 0..case.plan.columns[field].len() {
                for change in [-1, 1] {
                    let mut broken = case.plan.clone();
                    let Column::I32(values) = &mut broken.columns[field] else { panic!("values fit 32 bits") };
                    values[entry] += change;
                    let found = case.verify(&broken);
                    let mode = case.plan.metadata.mode.name();
                    assert!(matches!(found, Err(PackError::Mismatch(_))), "{mode} {field} {entry}: {found:?}");
                }
            }
        }
    }
}

#[test]
fn a_sample_that_is_taken_twice_or_left_out_is_found() {
    for case in cases() {
        // In one stream, a sample has one index.
        let is_one_stream = case.lengths.len() == 1 || case.plan.metadata.global_pack;
        let counts = &case.plan.metadata.counts;
        // A part that was left out may take the place of another.
        if !is_one_stream || counts.packs_repeated > 0 || counts.packs_dropped > 0 {
            continue;
        }
        let indices = case.plan.column(Field::Indices).to_i64();
        for (left, right) in (0..indices.len()).flat_map(|left| (0..indices.len()).map(move |right| (left, right))) {
            if indices[left] == indices[right] {
                continue;
            }
            let mut broken = case.plan.clone();
            let Column::I32(values) = &mut broken.columns[Field::Indices as usize] else { panic!("32 bits") };
            values[left] = values[right];
            let found = case.verify(&broken);
            assert!(matches!(found, Err(PackError::Mismatch(_))), "{left} and {right}: {found:?}");
        }
    }
}

#[test]
fn columns_too_many_or_too_few_are_found() {
    for case in cases() {
        let mut broken = case.plan.clone();
        if broken.columns.len() == 8 {
            broken.columns.truncate(6);
        } else {
            let indices = broken.column(Field::Indices).clone();
            broken.columns.extend([indices.clone(), indices]);
        }
        assert!(matches!(case.verify(&broken), Err(PackError::Mismatch(_))));
    }
}

#[test]
fn any_changed_fact_is_found() {
    type Change = fn(&mut Plan);
    let changes: [(&str, Change); 24] = [
        ("mode", |plan| {
            plan.metadata.mode = if plan.metadata.mode == Mode::BestFit { Mode::Sequential } else { Mode::BestFit };
        }),
        ("max_length", |plan| plan.metadata.max_length += 2),
        ("global_pack", |plan| plan.metadata.global_pack ^= true),
        ("seed", |plan| plan.metadata.seed = plan.metadata.seed.map_or(Some(3), |seed| Some(seed + 1))),
        ("samples of a dataset", |plan| plan.metadata.samples[0] += 1),
        ("datasets", |plan| plan.metadata.samples.push(0)),
        ("max_samples", |plan| plan.metadata.max_samples = Some(2)),
        ("align", |plan| plan.metadata.align = 4),
        ("multiple_of", |plan| plan.metadata.multiple_of = Some(5)),
        ("remainder", |plan| {
            let is_repeat = plan.metadata.remainder == Some(Remainder::Repeat);
            plan.metadata.remainder = Some(if is_repeat { Remainder::Drop } else { Remainder::Repeat });
        }),
        ("packs_dropped", |plan| plan.metadata.counts.packs_dropped += 7),
        ("tokens", |plan| plan.metadata.counts.tokens += 1),
        ("tokens_packed", |plan| plan.metadata.counts.tokens_packed -= 1),
        ("tokens_truncated", |plan| plan.metadata.counts.tokens_truncated += 1),
        ("tokens_repeated", |plan| plan.metadata.counts.tokens_repeated += 1),
        ("packs", |plan| plan.metadata.counts.packs -= 1),
        ("packs_repeated", |plan| plan.metadata.counts.packs_repeated += 1),
        ("pieces", |plan| plan.metadata.counts.pieces += 1),
        ("samples", |plan| plan.metadata.counts.samples -= 1),
        ("samples_cut", |plan| plan.metadata.counts.samples_cut += 1),
        ("samples_overlong", |plan| plan.metadata.counts.samples_overlong += 1),
        ("padding_align", |plan| plan.metadata.counts.padding_align += 1),
        ("max_pieces_per_pack", |plan| plan.metadata.counts.max_pieces_per_pack += 1),
        ("longest", |plan| plan.metadata.counts.longest += 1),
    ];
    for case in cases() {
        for (name, change) in changes {
            let mut broken = case.plan.clone();
            change(&mut broken);
            let found = case.verify(&broken);
            let mode = case.plan.metadata.mode.name();
            assert!(matches!(found, Err(PackError::Mismatch(_))), "{name}, {mode}: {found:?}");
        }
        let mut broken = case.plan.clone();
        broken.metadata.fingerprint = "0".repeat(32);
        assert!(matches!(case.verify(&broken), Err(PackError::Mismatch(text)) if text.contains("fingerprint")));
    }
}

#[test]
fn a_plan_cannot_talk_itself_out_of_the_check_of_its_order() {
    for case in cases() {
        for kind in [OrderKind::Natural, OrderKind::Seed, OrderKind::Given] {
            let mut broken = case.plan.clone();
            broken.metadata.order = kind;
            broken.metadata.seed = (kind == OrderKind::Seed).then_some(3);
            if broken.metadata != case.plan.metadata {
                match case.verify(&broken) {
                    Err(PackError::Mismatch(_)) => {}
                    // No order was given: it is asked for.
                    Err(PackError::Invalid(text)) if kind == OrderKind::Given => {
                        assert!(text.contains("order"), "{text}")
                    }
                    found => panic!("{kind:?}: {found:?}"),
                }
            }
        }
    }
}

#[test]
fn other_lengths_and_another_order_are_found() {
    for case in cases() {
        if case.order.is_none() {
            continue;
        }
        let verify = |lengths: &[u64], order: Option<&[i16]>| {
            let (lengths, order) = ([Integers::from(lengths)], order.map(Integers::from));
            verify::verify(&case.plan.view(), &case.plan.metadata, &lengths, order, None, Some(1), &mut NoProgress)
        };
        for sample in 0..FIRST.len() {
            let mut other = FIRST;
            other[sample] += 1;
            assert!(matches!(verify(&other, Some(&ORDER)), Err(PackError::Mismatch(_))), "sample {sample}");
        }
        for (left, right) in (0..ORDER.len()).flat_map(|left| (0..left).map(move |right| (left, right))) {
            let mut order = ORDER;
            order.swap(left, right);
            let found = verify(&FIRST, Some(&order));
            assert!(matches!(found, Err(PackError::Mismatch(_))), "{left} and {right} swapped: {found:?}");
            order[left] = order[right];
            match verify(&FIRST, Some(&order)) {
                Err(PackError::OrderRepeated { position, .. }) => assert_eq!(position, left.max(right)),
                found => panic!("{found:?}"),
            }
            order[left] = if left % 2 == 0 { -1 } else { FIRST.len() as i16 };
            match verify(&FIRST, Some(&order)) {
                Err(PackError::OrderOutOfRange { position, value, .. }) => {
                    assert_eq!((position, value), (left, order[left].into()));
                }
                found => panic!("{found:?}"),
            }
        }
        assert!(matches!(verify(&FIRST, Some(&ORDER[1..])), Err(PackError::Mismatch(_))));
        assert!(matches!(verify(&FIRST, None), Err(PackError::Invalid(_))));
    }
}

#[test]
fn columns_that_need_64_bits_are_fine() {
    // The large offsets lie behind many small ones.
    let mut lengths = vec![16u64; 5000];
    lengths.push(1 << 40);
    let lengths = vec![Integers::from(&lengths[..])];
    let request = PackRequest { drop_last: Some(false), ..PackRequest::new(lengths.clone(), 1 << 35) };
    let plan = Packer::new(request, &mut NoProgress).and_then(|packer| packer.pack(&mut NoProgress)).unwrap();
    assert!(matches!(plan.column(Field::EndOffset), Column::I64(_)));
    assert!(matches!(plan.column(Field::Indices), Column::I32(_)));
    verify::verify(&plan.view(), &plan.metadata, &lengths, None, None, Some(1), &mut NoProgress).unwrap();
}

//! What `verify` finds in plans of whole samples: whatever is changed in a plan, in its metadata, in the lengths or in
//! the order.

mod verifying;

use tundish_packing::inputs::SampleOrder;
use tundish_packing::plan::{Column, OrderKind, WholeMetadata};
use tundish_packing::{Field, Integers, Mode, NoProgress, Overlong, PackError, Placement, Plan, WholeOptions, verify};
use verifying::Case;

const FIRST: [u64; 16] = [0, 5, 11, 16, 3, 40, 7, 1, 2, 13, 0, 50, 6, 4, 32, 9];
const SECOND: [u64; 5] = [2, 0, 16, 10, 23];
/// Of the first dataset: some of the samples.
const ORDER: [i16; 12] = [9, 2, 1, 0, 3, 4, 5, 8, 7, 6, 12, 11];

fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for placement in [Placement::BestFit, Placement::Ordered { window: 3 }, Placement::Sequential] {
        for overlong in [Overlong::Split, Overlong::Truncate, Overlong::Drop] {
            let mode = Mode::Whole(WholeOptions { placement, overlong, max_samples: Some(3), align: 2 });
            let given = SampleOrder::Given(Integers::from(&ORDER[..]));
            cases.push(Case::new(&[&FIRST], given, mode, false));
            for order in [SampleOrder::Natural, SampleOrder::Seed(3)] {
                cases.push(Case::new(&[&FIRST, &SECOND], order, mode, false));
                cases.push(Case::new(&[&FIRST, &SECOND], order, mode, true));
            }
        }
    }
    cases
}

fn whole(plan: &mut Plan) -> &mut WholeMetadata {
    plan.metadata.whole.as_mut().expect("a plan of whole samples")
}

#[test]
fn nothing_changed_is_fine() {
    for case in cases() {
        case.verify(&case.plan).unwrap();
        let whole = case.plan.metadata.whole.as_ref().unwrap();
        assert!(whole.samples_empty > 0 && whole.samples_overlong > 0 && whole.padding_align > 0);
    }
}

#[test]
fn any_changed_value_of_a_column_is_found() {
    for case in cases() {
        case.assert_changed_values_are_found();
    }
}

#[test]
fn columns_of_another_width_are_found() {
    for case in cases() {
        case.assert_other_widths_are_found();
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

type Change = fn(&mut Plan);

#[test]
fn any_changed_fact_is_found() {
    let changes: [(&str, Change); 20] = [
        ("mode", |plan| plan.metadata.mode = "soft".into()),
        ("mode hard", |plan| plan.metadata.mode = "hard".into()),
        ("max_length", |plan| plan.metadata.max_length += 2),
        ("global_pack", |plan| plan.metadata.global_pack ^= true),
        ("seed", |plan| plan.metadata.seed = plan.metadata.seed.map_or(Some(3), |seed| Some(seed + 1))),
        ("samples", |plan| plan.metadata.samples[0] += 1),
        ("tokens", |plan| plan.metadata.tokens += 1),
        ("tokens and cut", |plan| {
            plan.metadata.tokens += 1;
            whole(plan).tokens_overlong_cut += 1;
        }),
        ("tokens_packed", |plan| plan.metadata.tokens_packed -= 1),
        ("packs", |plan| plan.metadata.packs -= 1),
        ("pieces", |plan| plan.metadata.pieces += 1),
        ("no hard, no whole", |plan| plan.metadata.whole = None),
        ("overlong", |plan| whole(plan).overlong = Overlong::Error),
        ("window", |plan| whole(plan).window = whole(plan).window.map_or(Some(1), |window| Some(window + 1))),
        ("max_samples", |plan| whole(plan).max_samples = Some(2)),
        ("any max_samples", |plan| whole(plan).max_samples = None),
        ("align", |plan| whole(plan).align = 4),
        ("samples_empty and _packed", |plan| {
            whole(plan).samples_empty -= 1;
            whole(plan).samples_packed += 1;
        }),
        ("samples_overlong", |plan| whole(plan).samples_overlong += 1),
        ("padding_align", |plan| whole(plan).padding_align -= 1),
    ];
    for case in cases() {
        for (name, change) in changes {
            let mut broken = case.plan.clone();
            change(&mut broken);
            let found = case.verify(&broken);
            assert!(matches!(found, Err(PackError::Mismatch(_))), "{name}, {}: {found:?}", case.plan.metadata.mode);
        }
        let mut broken = case.plan.clone();
        broken.metadata.fingerprint = "0".repeat(32);
        assert!(matches!(case.verify(&broken), Err(PackError::Mismatch(text)) if text.contains("fingerprint")));
    }
}

#[test]
fn two_packs_that_trade_pieces_are_found() {
    for case in cases() {
        if case.plan.metadata.mode == "best_fit" {
            continue;
        }
        let indices = case.plan.column(Field::Indices).to_i64();
        for (left, right) in (0..indices.len()).flat_map(|left| (0..left).map(move |right| (left, right))) {
            if indices[left] == indices[right] {
                continue;
            }
            let mut broken = case.plan.clone();
            for column in &mut broken.columns {
                let Column::I32(values) = column else { panic!("values fit 32 bits") };
                if values.len() == indices.len() {
                    values.swap(left, right);
                }
            }
            assert!(matches!(case.verify(&broken), Err(PackError::Mismatch(_))), "{left} and {right}");
        }
    }
}

#[test]
fn more_packs_than_best_fit_makes_are_found() {
    let options =
        WholeOptions { placement: Placement::BestFit, overlong: Overlong::Error, max_samples: None, align: 1 };
    let case = Case::new(&[&[8, 8]], SampleOrder::Natural, Mode::Whole(options), false);
    let mut broken = case.plan.clone();
    broken.metadata.packs = 2;
    for (field, values) in [
        (Field::DatasetId, vec![0, 0]),
        (Field::IndicesCuLen, vec![1, 2]),
        (Field::StartOffset, vec![0, 0]),
        (Field::EndOffset, vec![8, 8]),
        (Field::Longest, vec![8, 8]),
    ] {
        broken.columns[field as usize] = Column::I32(values);
    }
    match case.verify(&broken) {
        Err(PackError::Mismatch(text)) => assert!(text.contains("2 packs, but best_fit makes 1"), "{text}"),
        found => panic!("{found:?}"),
    }
}

#[test]
fn other_lengths_and_another_order_are_found() {
    for case in cases() {
        let Some(order) = case.order else { continue };
        for sample in 0..FIRST.len() {
            let mut other = FIRST;
            other[sample] += 1;
            let lengths = [Integers::from(&other[..])];
            let found =
                verify::verify(&case.plan.view(), &case.plan.metadata, &lengths, Some(order), None, 1, &mut NoProgress);
            assert!(matches!(found, Err(PackError::Mismatch(_))), "sample {sample}: {found:?}");
        }
        for (left, right) in (0..ORDER.len()).flat_map(|left| (0..left).map(move |right| (left, right))) {
            let mut order = ORDER;
            order.swap(left, right);
            let order = Some(Integers::from(&order[..]));
            let found =
                verify::verify(&case.plan.view(), &case.plan.metadata, &case.lengths, order, None, 1, &mut NoProgress);
            assert!(matches!(found, Err(PackError::Mismatch(_))), "{left} and {right} swapped: {found:?}");
        }
        let mut broken = case.plan.clone();
        broken.metadata.order = OrderKind::Natural;
        assert!(matches!(case.verify(&broken), Err(PackError::Mismatch(_))));
    }
}

//! What `verify` finds in hard plans: whatever is changed in a plan, in its metadata, in the lengths or in the order.

mod verifying;

use tundish_packing::inputs::SampleOrder;
use tundish_packing::plan::{Column, HardMetadata, OrderKind};
use tundish_packing::{Field, Integers, Mode, NoProgress, PackError, PackRequest, Packer, Plan, verify};
use verifying::Case;

/// Empty samples everywhere, on boundaries too; the second dataset has no tail.
const FIRST: [u64; 24] = [0, 5, 11, 0, 0, 16, 0, 3, 40, 0, 5, 0, 0, 1, 2, 0, 13, 0, 0, 50, 0, 7, 0, 2];
const SECOND: [u64; 4] = [0, 16, 0, 32];
/// Of the first dataset: some of the samples.
const ORDER: [i16; 20] = [9, 2, 1, 0, 3, 4, 20, 19, 7, 8, 12, 11, 10, 5, 6, 21, 22, 23, 13, 14];

fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for drop_last in [true, false] {
        let mode = Mode::Hard { drop_last };
        let given = SampleOrder::Given(Integers::from(&ORDER[..]));
        cases.push(Case::new(&[&FIRST], given, mode, false));
        for order in [SampleOrder::Natural, SampleOrder::Seed(3)] {
            cases.push(Case::new(&[&FIRST], order, mode, false));
            cases.push(Case::new(&[&FIRST, &SECOND], order, mode, false));
            cases.push(Case::new(&[&FIRST, &SECOND], order, mode, true));
        }
    }
    cases
}

#[test]
fn nothing_changed_is_fine() {
    for case in cases() {
        case.verify(&case.plan).unwrap();
        assert!(
            case.plan.metadata.hard.as_ref().unwrap().empty_on_boundary > 0,
            "the case shows nothing about empty samples"
        );
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
    let none = Case::new(&[&[]], SampleOrder::Natural, Mode::Hard { drop_last: true }, false);
    let mut broken = none.plan.clone();
    broken.columns = broken.columns.iter().map(|column| Column::I64(column.to_i64())).collect();
    assert!(matches!(none.verify(&broken), Err(PackError::Mismatch(_))));
    none.verify(&none.plan).unwrap();
}

#[test]
fn columns_that_need_64_bits_are_fine() {
    // The large offsets lie behind many small ones.
    let mut lengths = vec![16u64; 5000];
    lengths.push(1 << 40);
    let request = PackRequest {
        lengths: vec![Integers::from(&lengths[..])],
        order: SampleOrder::Natural,
        max_length: 1 << 35,
        mode: Mode::Hard { drop_last: false }.into(),
        costs: None,
        multiple: None,
        global_pack: false,
        threads: 1,
    };
    let plan = Packer::new(request, &mut NoProgress).and_then(|packer| packer.pack(&mut NoProgress)).unwrap();
    assert!(matches!(plan.column(Field::EndOffset), Column::I64(_)));
    let lengths = [Integers::from(&lengths[..])];
    verify::verify(&plan.view(), &plan.metadata, &lengths, None, None, 1, &mut NoProgress).unwrap();
}

type Change = fn(&mut Plan);

fn hard(plan: &mut Plan) -> &mut HardMetadata {
    plan.metadata.hard.as_mut().expect("a hard plan")
}

#[test]
fn any_changed_fact_is_found() {
    let changes: [(&str, Change); 16] = [
        ("format_version", |plan| plan.metadata.format_version += 1),
        ("mode", |plan| plan.metadata.mode = "soft".into()),
        ("max_length", |plan| plan.metadata.max_length += 1),
        ("drop_last", |plan| hard(plan).drop_last ^= true),
        ("global_pack", |plan| plan.metadata.global_pack ^= true),
        ("seed", |plan| plan.metadata.seed = plan.metadata.seed.map_or(Some(3), |seed| Some(seed + 1))),
        ("samples", |plan| plan.metadata.samples[0] += 1),
        ("samples of one more", |plan| plan.metadata.samples.push(0)),
        ("tokens", |plan| plan.metadata.tokens += 1),
        ("tokens_packed", |plan| plan.metadata.tokens_packed -= 1),
        ("packs", |plan| plan.metadata.packs -= 1),
        ("pieces", |plan| plan.metadata.pieces += 1),
        ("empty_on_boundary", |plan| hard(plan).empty_on_boundary -= 1),
        ("tail_start", |plan| hard(plan).tail_start[0] += 1),
        ("tails", |plan| hard(plan).tail_start.clear()),
        ("fingerprint", |plan| plan.metadata.fingerprint = "0".repeat(32)),
    ];
    for case in cases() {
        for (name, change) in changes {
            let mut broken = case.plan.clone();
            change(&mut broken);
            let found = case.verify(&broken);
            assert!(matches!(found, Err(PackError::Mismatch(_))), "{name}: {found:?}");
        }
    }
}

#[test]
fn a_plan_cannot_talk_itself_out_of_the_check_of_its_order() {
    for case in cases() {
        let one_dataset = case.lengths.len() == 1;
        for kind in [OrderKind::Natural, OrderKind::Seed, OrderKind::Given] {
            let mut broken = case.plan.clone();
            broken.metadata.order = kind;
            broken.metadata.seed = (kind == OrderKind::Seed).then_some(3);
            if broken.metadata != case.plan.metadata {
                match case.verify(&broken) {
                    Err(PackError::Mismatch(_)) => {}
                    // No order was given: it is asked for.
                    Err(PackError::Invalid(text)) if kind == OrderKind::Given && one_dataset => {
                        assert!(text.contains("order"), "{text}");
                    }
                    found => panic!("{kind:?}: {found:?}"),
                }
            }
        }
    }
}

#[test]
fn another_order_is_found_and_one_that_is_none_refused() {
    let case =
        Case::new(&[&FIRST], SampleOrder::Given(Integers::from(&ORDER[..])), Mode::Hard { drop_last: true }, false);
    let verify = |order: &[i16]| {
        let order = Some(Integers::from(order));
        verify::verify(&case.plan.view(), &case.plan.metadata, &case.lengths, order, None, 1, &mut NoProgress)
    };
    verify(&ORDER).unwrap();
    for (left, right) in (0..ORDER.len()).flat_map(|left| (0..left).map(move |right| (left, right))) {
        let mut order = ORDER;
        order.swap(left, right);
        assert!(matches!(verify(&order), Err(PackError::Mismatch(_))), "{left} and {right} swapped");
        order[left] = order[right];
        match verify(&order) {
            Err(PackError::OrderRepeated { position, .. }) => assert_eq!(position, left.max(right)),
            found => panic!("{found:?}"),
        }
        order[left] = if left % 2 == 0 { -1 } else { FIRST.len() as i16 };
        match verify(&order) {
            Err(PackError::OrderOutOfRange { position, value, .. }) => {
                assert_eq!((position, value), (left, order[left].into()));
            }
            found => panic!("{found:?}"),
        }
    }
    assert!(matches!(verify(&ORDER[1..]), Err(PackError::Mismatch(_))));
    assert!(matches!(verify(&[0; 25]), Err(PackError::Invalid(_))));
}

#[test]
fn other_lengths_are_found() {
    for drop_last in [true, false] {
        let case = Case::new(&[&FIRST], SampleOrder::Seed(3), Mode::Hard { drop_last }, false);
        for sample in 0..FIRST.len() {
            let mut other = FIRST;
            other[sample] += 1;
            let lengths = [Integers::from(&other[..])];
            let found =
                verify::verify(&case.plan.view(), &case.plan.metadata, &lengths, None, None, 1, &mut NoProgress);
            assert!(matches!(found, Err(PackError::Mismatch(_))), "sample {sample}: {found:?}");
        }
    }
}

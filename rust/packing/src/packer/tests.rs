//! The bounds that memory and disk space are checked by.

use proptest::prelude::*;

use super::*;
use crate::integers::Integers;
use crate::progress::NoProgress;
use crate::request::{Mode, Overlong};

/// A request without lengths, and what `max_length` is a multiple of.
fn options() -> impl Strategy<Value = PackRequest<'static>> {
    let mode = prop_oneof![
        Just((Mode::BestFit, None)),
        Just((Mode::Sequential, None)),
        (1u64..5).prop_map(|window| (Mode::Ordered, Some(window)))
    ];
    let overlong = prop_oneof![Just(Overlong::Split), Just(Overlong::Truncate), Just(Overlong::Drop)];
    let whole = (mode, overlong, prop::option::of(1u64..5), 1u64..5);
    let request = || PackRequest { threads: Some(1), ..PackRequest::new(Vec::new(), 1) };
    prop_oneof![
        any::<bool>().prop_map(move |drop_last| PackRequest { drop_last: Some(drop_last), ..request() }),
        whole.prop_map(move |((mode, window), overlong, max_samples, align)| {
            PackRequest { mode, window, overlong: Some(overlong), max_samples, align, ..request() }
        })
    ]
}

proptest! {
    #[test]
    fn a_plan_is_never_smaller_than_the_least_and_never_larger_than_the_most(
        lengths in prop::collection::vec(prop_oneof![0u64..3, 0u64..90], 0..60),
        more in prop::collection::vec(0u64..5, 0..9),
        used in 0usize..=60,
        units in 1u64..40,
        is_shifted in any::<bool>(),
        options in options(),
        multiple in prop::option::of((1u64..9, prop_oneof![Just(Remainder::Drop), Just(Remainder::Repeat)])),
        global_pack in any::<bool>(),
    ) {
        let multiple = multiple.filter(|(_, remainder)| {
            *remainder == Remainder::Repeat || options.drop_last != Some(false)
        });
        // Modes of whole samples have packs of 2^28 tokens at most.
        let shift = if is_shifted && options.mode == Mode::Hard { 32 } else { 0 };
        let lengths: Vec<u64> = lengths.iter().map(|length| length << shift).collect();
        let order: Vec<i64> = (0..lengths.len() as i64).rev().take(used).collect();
        let (one, two) = (vec![&lengths[..]], vec![&lengths[..], &more[..]]);
        let given = SampleOrder::Given(Integers::from(&order[..]));
        for (datasets, order) in [(&one, given), (&two, SampleOrder::Natural), (&two, SampleOrder::Seed(3))] {
            let request = PackRequest {
                lengths: datasets.iter().map(|&lengths| Integers::from(lengths)).collect(),
                order,
                max_length: (units * options.align) << shift,
                multiple_of: multiple.map(|(of, _)| of),
                remainder: multiple.map(|(_, remainder)| remainder),
                global_pack,
                ..options.clone()
            };
            let packer = Packer::new(request, &mut NoProgress).unwrap();
            let PlanCounts { packs, pieces, .. } = match packer.pack(&mut NoProgress) {
                Ok(plan) => plan.metadata.counts,
                // All packs of a dataset would be left out.
                Err(PackError::Invalid(_)) if multiple.is_some() => continue,
                Err(error) => panic!("{error}"),
            };
            let (least, most, repeated) = (packer.least(), packer.most(), packer.most_repeated());
            prop_assert!(least.0 <= packs && packs <= most.0 + repeated.0);
            prop_assert!(least.1 <= pieces && pieces <= most.1 + repeated.1);
        }
    }
}

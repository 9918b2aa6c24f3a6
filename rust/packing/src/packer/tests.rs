//! The bounds that memory and disk space are checked by.

use proptest::prelude::*;

use super::*;
use crate::inputs::Integers;
use crate::progress::NoProgress;
use crate::request::{Overlong, Placement};

fn mode() -> impl Strategy<Value = (Mode, u64)> {
    let placement = prop_oneof![
        Just(Placement::BestFit),
        Just(Placement::Sequential),
        (1u64..5).prop_map(|window| Placement::Ordered { window })
    ];
    let overlong = prop_oneof![Just(Overlong::Split), Just(Overlong::Truncate), Just(Overlong::Drop)];
    let whole = (placement, overlong, prop::option::of(1u64..5), 1u64..5);
    prop_oneof![
        any::<bool>().prop_map(|drop_last| (Mode::Hard { drop_last }, 1)),
        whole.prop_map(|(placement, overlong, max_samples, align)| {
            (Mode::Whole(WholeOptions { placement, overlong, max_samples, align }), align)
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
        (mode, align) in mode(),
        multiple in prop::option::of((1u64..9, prop_oneof![Just(Remainder::Drop), Just(Remainder::Repeat)])),
        global_pack in any::<bool>(),
    ) {
        let multiple = multiple.map(|(of, remainder)| PackMultiple { of, remainder });
        let multiple = multiple.filter(|multiple| multiple.check(&mode.into()).is_ok());
        // Modes of whole samples have packs of 2^28 tokens at most.
        let shift = if is_shifted && matches!(mode, Mode::Hard { .. }) { 32 } else { 0 };
        let lengths: Vec<u64> = lengths.iter().map(|length| length << shift).collect();
        let order: Vec<i64> = (0..lengths.len() as i64).rev().take(used).collect();
        let (one, two) = (vec![&lengths[..]], vec![&lengths[..], &more[..]]);
        let given = SampleOrder::Given(Integers::from(&order[..]));
        for (datasets, order) in [(&one, given), (&two, SampleOrder::Natural), (&two, SampleOrder::Seed(3))] {
            let request = PackRequest {
                lengths: datasets.iter().map(|&lengths| Integers::from(lengths)).collect(),
                order,
                max_length: (units * align) << shift,
                mode: mode.into(),
                costs: None,
                multiple,
                global_pack,
                threads: 1,
            };
            let packer = Packer::new(request, &mut NoProgress).unwrap();
            let PlanMetadata { packs, pieces, .. } = packer.pack(&mut NoProgress).unwrap().metadata;
            let (least, most, repeated) = (packer.least(), packer.most(), packer.most_repeated());
            prop_assert!(least.0 <= packs && packs <= most.0 + repeated.0);
            prop_assert!(least.1 <= pieces && pieces <= most.1 + repeated.1);
        }
    }
}

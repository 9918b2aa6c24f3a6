//! Packs of whole samples against their definitions, sample by sample: nothing here uses the crate's algorithms.

use proptest::prelude::*;
use tundish_packing::ordered_samples::SampleOrder;
use tundish_packing::plan::{AttachedLengths, Column, TO_THE_END, lookup};
use tundish_packing::shuffle::RandomState;
use tundish_packing::{
    Field, Integers, NoProgress, Overlong, PackError, PackRequest, Packer, Plan, folder, plan_fingerprint, verify,
};

mod naive;
use naive::{Piece, Placement, WholeOptions, naive_packs};

/// One set of arguments.
#[derive(Clone, Debug)]
struct Case {
    datasets: Vec<Vec<u64>>,
    max_length: u64,
    options: WholeOptions,
    seed: Option<u32>,
    order: Option<Vec<i64>>,
    global_pack: bool,
    threads: usize,
}

impl Case {
    fn request(&self) -> PackRequest<'_> {
        PackRequest {
            order: match (&self.order, self.seed) {
                (Some(order), _) => SampleOrder::Given(Integers::from(&order[..])),
                (None, Some(seed)) => SampleOrder::Seed(seed),
                (None, None) => SampleOrder::Natural,
            },
            global_pack: self.global_pack,
            threads: Some(self.threads as u64),
            ..self.options.request(self.lengths(), self.max_length)
        }
    }

    fn lengths(&self) -> Vec<Integers<'_>> {
        self.datasets.iter().map(|column| Integers::from(&column[..])).collect()
    }

    fn pack(&self) -> Result<Plan, PackError> {
        Packer::new(self.request(), &mut NoProgress)?.pack(&mut NoProgress)
    }

    /// The lengths that are packed as one stream, for each stream.
    fn streams(&self) -> Vec<Vec<u64>> {
        if self.global_pack { vec![self.datasets.concat()] } else { self.datasets.clone() }
    }

    /// The packs of each stream by the definition; those of `best_fit` in any order.
    fn expected(&self) -> Vec<Vec<Vec<Piece>>> {
        let mut random = RandomState::new(self.seed.unwrap_or(0));
        let draw = |random: &mut RandomState, len| random.shuffled::<u64>(len, &mut NoProgress).unwrap();
        let mut streams = Vec::new();
        for lengths in self.streams() {
            let order: Vec<u64> = match (&self.order, self.seed, self.options.placement) {
                (Some(order), ..) => order.iter().map(|&sample| sample as u64).collect(),
                (None, Some(_), Placement::Ordered { .. } | Placement::Sequential) => draw(&mut random, lengths.len()),
                _ => (0..lengths.len() as u64).collect(),
            };
            let mut shuffle = |run: &mut Vec<Piece>| {
                if self.seed.is_some() {
                    let drawn = draw(&mut random, run.len());
                    *run = drawn.iter().map(|&at| run[at as usize]).collect();
                }
            };
            let packs = naive_packs(&lengths, &order, self.max_length, &self.options, &mut shuffle);
            if self.options.placement == Placement::BestFit {
                draw(&mut random, packs.len());
            }
            streams.push(packs);
        }
        streams
    }

    fn verify(&self, plan: &Plan) -> Result<(), PackError> {
        let order = self.order.as_ref().map(|order| Integers::from(&order[..]));
        verify::verify(&plan.view(), &plan.metadata, &self.lengths(), order, None, Some(1), &mut NoProgress)
    }
}

/// The packs of each stream, read from the columns.
fn packs_of(plan: &Plan, streams: &[Vec<u64>]) -> Vec<Vec<Vec<Piece>>> {
    let values: Vec<Vec<i64>> = plan.columns.iter().map(|column| column.to_i64()).collect();
    let mut packs = vec![Vec::new(); streams.len()];
    let mut begin = 0;
    for (pack, &end) in values[Field::IndicesCuLen as usize].iter().enumerate() {
        let dataset = values[Field::DatasetId as usize][pack] as usize;
        let pieces: Vec<Piece> = (begin..end as usize)
            .map(|piece| {
                let sample = values[Field::Indices as usize][piece] as u64;
                match (values.get(Field::PieceStart as usize), values.get(Field::PieceStop as usize)) {
                    (Some(starts), Some(stops)) => (sample, starts[piece] as u64, stops[piece] as u64),
                    _ => (sample, 0, streams[dataset][sample as usize]),
                }
            })
            .collect();
        assert!(!pieces.is_empty(), "pack {pack} is empty");
        assert_eq!(values[Field::StartOffset as usize][pack] as u64, pieces[0].1);
        assert_eq!(values[Field::EndOffset as usize][pack] as u64, pieces[pieces.len() - 1].2);
        let longest = pieces.iter().map(|(_, start, stop)| stop - start).max();
        assert_eq!(Some(values[Field::Longest as usize][pack] as u64), longest);
        packs[dataset].push(pieces);
        begin = end as usize;
    }
    assert!(values[Field::DatasetId as usize].is_sorted());
    packs
}

fn options() -> impl Strategy<Value = (WholeOptions, u64)> {
    let placement = prop_oneof![
        3 => Just(Placement::BestFit),
        1 => Just(Placement::Sequential),
        2 => (1u64..6).prop_map(|window| Placement::Ordered { window }),
    ];
    let overlong =
        prop_oneof![Just(Overlong::Error), Just(Overlong::Split), Just(Overlong::Truncate), Just(Overlong::Drop)];
    let align = prop_oneof![2 => Just(1u64), 1 => 2u64..6];
    (placement, overlong, prop::option::of(1u64..6), align, 1u64..24).prop_map(
        |(placement, overlong, max_samples, align, multiple)| {
            (WholeOptions { placement, overlong, max_samples, align }, multiple * align)
        },
    )
}

fn case() -> impl Strategy<Value = Case> {
    let length = prop_oneof![1 => Just(0u64), 4 => 1u64..6, 6 => 1u64..40, 1 => 1u64..200];
    let datasets = prop::collection::vec(prop::collection::vec(length, 0..50), 1..4);
    let order = prop::option::of((prop::collection::vec(any::<u32>(), 150), 0usize..=50));
    (datasets, options(), prop::option::of(any::<u32>()), order, any::<bool>(), 1usize..4).prop_map(
        |(mut datasets, (options, max_length), seed, order, global_pack, threads)| {
            let order = order.map(|(keys, used)| {
                datasets.truncate(1);
                let mut order: Vec<i64> = (0..datasets[0].len() as i64).collect();
                order.sort_by_key(|&sample| keys[sample as usize]);
                order.truncate(used);
                order
            });
            if options.overlong == Overlong::Error {
                // Only samples that the order leaves out may be too long.
                let is_used = |sample: usize| order.as_ref().is_none_or(|order| order.contains(&(sample as i64)));
                for column in &mut datasets {
                    let clipped = |(sample, length): (usize, &mut u64)| {
                        if is_used(sample) {
                            *length = (*length).min(max_length);
                        }
                    };
                    column.iter_mut().enumerate().for_each(clipped);
                }
            }
            let seed = if order.is_some() { None } else { seed };
            Case { datasets, max_length, options, seed, order, global_pack, threads }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1024, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn agrees_with_the_definition(case in case()) {
        let plan = case.pack().unwrap();
        let streams = case.streams();
        let mut found = packs_of(&plan, &streams);
        let mut expected = case.expected();
        if case.options.placement == Placement::BestFit {
            found.iter_mut().chain(&mut expected).for_each(|packs| packs.sort());
        }
        prop_assert_eq!(&found, &expected);
        case.verify(&plan).unwrap();
        prop_assert_eq!(
            plan_fingerprint(case.request(), &mut NoProgress).unwrap().to_string(), plan.metadata.fingerprint.clone()
        );
        check_counts(&case, &plan, &streams);
    }

    #[test]
    fn lookup_gives_the_pieces(case in case()) {
        let plan = case.pack().unwrap();
        let packs: Vec<u64> = (0..plan.metadata.counts.packs).rev().collect();
        let attached = AttachedLengths::new(case.lengths(), case.global_pack);
        let numbers = Integers::from(&packs[..]);
        let with = lookup(&plan.view(), &numbers, Some(&attached), &mut NoProgress).unwrap();
        let without = lookup::<Integers<'_>>(&plan.view(), &numbers, None, &mut NoProgress).unwrap();
        let expected: Vec<Vec<Piece>> = packs_of(&plan, &case.streams()).concat();
        for (row, &pack) in packs.iter().enumerate() {
            let range = with.piece_cu[row] as usize..with.piece_cu[row + 1] as usize;
            let piece = |at: usize| (with.sample[at] as u64, with.start[at] as u64, with.stop[at] as u64);
            prop_assert_eq!(range.clone().map(piece).collect::<Vec<_>>(), expected[pack as usize].clone());
            for at in range.clone() {
                let is_known = plan.columns.len() == 8 || at + 1 == range.end;
                prop_assert_eq!(without.stop[at], if is_known { with.stop[at] } else { TO_THE_END });
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_folder_holds_the_same_plan(case in case()) {
        let parent = tempfile::tempdir().unwrap();
        let target = parent.path().join("plan");
        let packer = Packer::new(case.request(), &mut NoProgress).unwrap();
        let written = packer.write(&target, &mut NoProgress).unwrap();
        let plan = packer.pack(&mut NoProgress).unwrap();
        prop_assert_eq!(&written, &plan.metadata);
        let folder::OpenPlan { metadata, columns, .. } = folder::open(&target, &mut NoProgress).unwrap();
        prop_assert_eq!(&metadata, &plan.metadata);
        prop_assert_eq!(columns.len(), plan.columns.len());
        for (mapped, column) in columns.iter().zip(&plan.columns) {
            prop_assert_eq!(mapped.view().kind(), column.view().kind());
            let values: Vec<i64> = (0..column.len()).map(|at| mapped.view().get(at) as i64).collect();
            prop_assert_eq!(values, column.to_i64());
        }
    }
}

/// The counts in the metadata, from the lengths.
fn check_counts(case: &Case, plan: &Plan, streams: &[Vec<u64>]) {
    let used: Vec<u64> = match &case.order {
        Some(order) => order.iter().map(|&sample| streams[0][sample as usize]).collect(),
        None => streams.concat(),
    };
    let pieces = packs_of(plan, streams).concat().concat();
    let tokens: u64 = pieces.iter().map(|(_, start, stop)| stop - start).sum();
    let align = case.options.align;
    let padding: u64 = pieces.iter().map(|(_, start, stop)| (align - (stop - start) % align) % align).sum();
    let overlong = used.iter().filter(|&&length| length > case.max_length).count();
    let empty = used.iter().filter(|&&length| length == 0).count();
    let dropped = if case.options.overlong == Overlong::Drop { overlong } else { 0 };
    let counts = &plan.metadata.counts;
    assert_eq!(counts.tokens, used.iter().sum::<u64>());
    assert_eq!((counts.tokens_packed, counts.padding_align), (tokens, padding));
    let truncated = if case.options.overlong == Overlong::Truncate { counts.tokens - tokens } else { 0 };
    assert_eq!(counts.tokens_truncated, truncated);
    assert_eq!((counts.samples_overlong, counts.samples_empty), (overlong as u64, empty as u64));
    assert_eq!(counts.samples, (used.len() - empty - dropped) as u64);
    assert_eq!(counts.samples_cut, (overlong - dropped) as u64);
    let packs = packs_of(plan, streams).concat();
    let longest = pieces.iter().map(|(_, start, stop)| stop - start).max().unwrap_or(0);
    let most = packs.iter().map(Vec::len).max().unwrap_or(0);
    assert_eq!((counts.longest, counts.max_pieces_per_pack), (longest, most as u64));
}

fn options_of(placement: Placement, overlong: Overlong) -> WholeOptions {
    WholeOptions { placement, overlong, max_samples: None, align: 1 }
}

const PLACEMENTS: [Placement; 3] = [Placement::BestFit, Placement::Ordered { window: 16 }, Placement::Sequential];

/// So many samples that they are read and written in many chunks, on several threads.
fn large_case(placement: Placement, overlong: Overlong, max_length: u64) -> Case {
    let samples = 300_001u64;
    let lengths = (0..samples).map(|sample| sample * 2_654_435_761 % 4_294_967_291 % 997).collect();
    Case {
        datasets: vec![lengths],
        max_length,
        options: options_of(placement, overlong),
        seed: None,
        order: None,
        global_pack: false,
        threads: 1,
    }
}

#[test]
fn any_number_of_threads_gives_the_same_plan() {
    for placement in PLACEMENTS {
        for (overlong, max_length) in [(Overlong::Error, 4096), (Overlong::Split, 100)] {
            let mut case = large_case(placement, overlong, max_length);
            for (seed, is_given) in [(Some(5), false), (None, true)] {
                case.seed = seed;
                case.order =
                    is_given.then(|| (0..300_001).map(|place| place * 670_421 % 300_001).take(290_000).collect());
                case.threads = 1;
                let one = case.pack().unwrap();
                case.threads = if is_given { 3 } else { 2 };
                assert!(case.pack().unwrap() == one, "{placement:?}, {overlong:?}, {} threads", case.threads);
                if is_given {
                    case.verify(&one).unwrap();
                }
            }
        }
    }
}

#[test]
fn neither_length_nor_position_follows_the_order_of_best_fit_packs() {
    let mut case = large_case(Placement::BestFit, Overlong::Error, 4096);
    for seed in [None, Some(1)] {
        case.seed = seed;
        let plan = case.pack().unwrap();
        let packs = packs_of(&plan, &case.streams()).concat();
        let half = packs.len() / 2;
        let mean = |packs: &[Vec<Piece>], value: fn(&Piece) -> u64| {
            let pieces: Vec<u64> = packs.iter().flatten().map(value).collect();
            pieces.iter().sum::<u64>() as f64 / pieces.len() as f64
        };
        for value in [(|&(_, start, stop)| stop - start) as fn(&Piece) -> u64, |&(sample, ..)| sample] {
            let (early, late) = (mean(&packs[..half], value), mean(&packs[half..], value));
            assert!((early / late - 1.0).abs() < 0.01, "{early} then {late}");
        }
    }
    let order = |seed| Case { seed, ..case.clone() }.pack().unwrap().column(Field::Indices).to_i64();
    assert_ne!(order(Some(1)), order(Some(2)));
    assert_ne!(order(Some(1)), order(None));
    assert_eq!(order(None), order(None));
}

#[test]
fn samples_that_are_too_long_are_refused_before_any_work() {
    let lengths: [&[u16]; 3] = [&[3, 9], &[], &[4, 12, 8, 12]];
    for global_pack in [false, true] {
        let lengths = lengths.iter().map(|&column| Integers::from(column)).collect();
        let options = options_of(Placement::BestFit, Overlong::Error);
        let request = PackRequest { global_pack, ..options.request(lengths, 8) };
        match Packer::new(request, &mut NoProgress).map(|_| ()) {
            Err(error @ PackError::Overlong { count: 3, dataset: 2, sample: 1, length: 12, max_length: 8 }) => {
                let text = error.to_string();
                assert!(["split", "truncate", "drop"].iter().all(|choice| text.contains(choice)), "{text}");
            }
            found => panic!("{found:?}"),
        }
    }
}

#[test]
fn options_that_no_plan_can_have_are_refused() {
    let lengths = [1u8];
    let refused = |max_length, options: WholeOptions| {
        let request = options.request(vec![Integers::from(&lengths[..])], max_length);
        Packer::new(request, &mut NoProgress).map(|_| ()).unwrap_err().to_string()
    };
    let good = options_of(Placement::BestFit, Overlong::Error);
    assert!(refused((1 << 28) + 1, good).contains("2**28"));
    assert!(refused(0, good).contains("max_length is 0"));
    assert!(refused(8, WholeOptions { align: 3, ..good }).contains("multiple of align=3"));
    assert!(refused(8, WholeOptions { align: 0, ..good }).contains("align is 0"));
    assert!(refused(8, WholeOptions { max_samples: Some(0), ..good }).contains("max_samples is 0"));
    for window in [0, 1 << 20] {
        let options = WholeOptions { placement: Placement::Ordered { window }, ..good };
        assert!(refused(8, options).contains(&format!("window is {window}")));
    }
    let wide = WholeOptions { placement: Placement::Ordered { window: 33 }, ..good };
    assert!(refused(1 << 25, wide).contains("below 2^31"));
}

#[test]
fn the_largest_packs_of_a_window_are_filled() {
    let max_length = (1u64 << 25) - 1;
    let case = Case {
        datasets: vec![(0..200).map(|sample| [max_length, 1, max_length - 1, max_length / 2][sample % 4]).collect()],
        max_length,
        options: options_of(Placement::Ordered { window: 64 }, Overlong::Error),
        seed: None,
        order: None,
        global_pack: false,
        threads: 1,
    };
    case.verify(&case.pack().unwrap()).unwrap();
}

#[test]
fn offsets_beyond_32_bits_are_kept() {
    for placement in PLACEMENTS {
        let max_length = 1u64 << 22;
        let case = Case {
            datasets: vec![vec![5, (1 << 33) + 7, 0]],
            max_length,
            options: options_of(placement, Overlong::Split),
            ..large_case(placement, Overlong::Split, max_length)
        };
        let plan = case.pack().unwrap();
        let mut found = packs_of(&plan, &case.streams());
        found[0].sort();
        let mut expected = case.expected();
        expected[0].sort();
        assert_eq!(found, expected);
        assert!(plan.metadata.counts.packs > 2048);
        assert!(matches!(plan.column(Field::PieceStop), Column::I64(_)));
        assert!(matches!(plan.column(Field::Longest), Column::I32(_)));
        case.verify(&plan).unwrap();
    }
}

#[test]
fn a_bad_order_is_refused_by_its_first_wrong_entry() {
    for placement in PLACEMENTS {
        for (value, position) in [(7i64, 4usize), (-1, 4), (2, 4), (i64::MAX, 0)] {
            let mut order: Vec<i64> = (0..6).collect();
            order[position] = value;
            let mut case = large_case(placement, Overlong::Drop, 1000);
            case.datasets[0].truncate(7);
            case.order = Some(order);
            match case.pack() {
                Err(
                    PackError::OrderOutOfRange { position: at, .. } | PackError::OrderRepeated { position: at, .. },
                ) => {
                    assert_eq!(at, position);
                }
                found => panic!("{found:?}"),
            }
        }
    }
}

//! An arena keeps its promises for all calls in all orders.

use std::collections::HashMap;

use proptest::prelude::*;

use super::*;
use crate::segment::attachment::Lease;

#[derive(Clone, Debug)]
enum Step {
    Take(usize),
    GiveBack(usize),
    Lease(usize),
    EndLease(usize),
    Limit(usize),
    Trim(usize),
    Look,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        4 => (0usize..300_000).prop_map(Step::Take),
        4 => any::<usize>().prop_map(Step::GiveBack),
        2 => any::<usize>().prop_map(Step::Lease),
        2 => any::<usize>().prop_map(Step::EndLease),
        1 => (0usize..2_000_000).prop_map(Step::Limit),
        1 => (0usize..2_000_000).prop_map(Step::Trim),
        1 => Just(Step::Look),
    ];
    prop::collection::vec(step, 1..60)
}

fn take(arena: &Arena, len: usize) -> Segment {
    let mut segment = arena.take(len, &mut || Ok(())).unwrap();
    segment.publish(len, &[]).unwrap();
    segment
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// In any order of taking, giving back and leasing: no segment has two users, none that has a lease is
    /// used again, each use has a generation of its own, and no more is kept than may be.
    #[test]
    fn segments_are_used_by_one_at_a_time_and_kept_within_the_limit(
        steps in steps(), purpose in prop_oneof![Just(ArenaPurpose::Arrays), Just(ArenaPurpose::Messages), Just(ArenaPurpose::Slabs)],
    ) {
        let arena = Arena::new(purpose, 1 << 20);
        let (mut limit, mut used) = (1 << 20, Vec::<Segment>::new());
        let mut leases = Vec::<(u64, Lease)>::new();
        let mut generations = HashMap::<u64, u64>::new();
        for step in steps {
            match step {
                Step::Take(len) => {
                    let segment = take(&arena, len);
                    let address = segment.address();
                    prop_assert!(segment.capacity() >= len);
                    prop_assert!(used.iter().all(|other| other.address().identity != address.identity));
                    prop_assert!(leases.iter().all(|(identity, _)| *identity != address.identity));
                    let before = generations.insert(address.identity, address.generation);
                    prop_assert!(before.is_none_or(|before| before < address.generation));
                    used.push(segment);
                }
                Step::GiveBack(which) if !used.is_empty() => arena.give_back(used.swap_remove(which % used.len())),
                Step::Lease(which) if !used.is_empty() => {
                    let segment = &used[which % used.len()];
                    leases.push((segment.address().identity, segment.lease().unwrap()));
                }
                Step::EndLease(which) if !leases.is_empty() => drop(leases.swap_remove(which % leases.len())),
                Step::Limit(bytes) => {
                    limit = bytes;
                    arena.set_limit(bytes);
                }
                Step::Trim(bytes) => {
                    arena.trim(bytes);
                    prop_assert!(arena.last_stats().cached_bytes <= bytes);
                }
                _ => {}
            }
            let stats = arena.stats();
            prop_assert!(stats.cached_bytes + stats.escaped_bytes <= limit, "{stats:?} with a limit of {limit}");
            prop_assert_eq!(stats.in_use_bytes, used.iter().map(Segment::size).sum::<usize>());
            prop_assert!(stats.peak_bytes >= stats.in_use_bytes + stats.cached_bytes + stats.escaped_bytes);
            prop_assert!(!leases.is_empty() || stats.escaped_bytes == 0);
        }
    }
}

#[test]
fn arrays_fit_tightly_and_messages_use_segments_of_other_sizes() {
    let arena = Arena::new(ArenaPurpose::Arrays, 1 << 30);
    let first = take(&arena, 10_000_000);
    assert!(first.size() <= 10_000_000 + 2 * DATA_START);
    let identity = first.address().identity;
    arena.give_back(first);
    let smaller = take(&arena, 9_000_000);
    assert_ne!(smaller.address().identity, identity);
    assert_eq!(take(&arena, 9_990_000).address().identity, identity);

    let arena = Arena::new(ArenaPurpose::Messages, 1 << 30);
    let first = take(&arena, 1_000_000);
    let identity = first.address().identity;
    arena.give_back(first);
    assert_eq!(take(&arena, 900_000).address().identity, identity);

    let arena = Arena::new(ArenaPurpose::Slabs, 1 << 30);
    let first = take(&arena, 10_000_000);
    assert!(first.size() <= 10_000_000 + 2 * DATA_START);
    let identity = first.address().identity;
    arena.give_back(first);
    assert_ne!(take(&arena, 7_900_000).address().identity, identity);
    assert_eq!(take(&arena, 8_100_000).address().identity, identity);
}

#[test]
#[allow(unsafe_code)]
fn a_segment_is_filled_in_parts_and_writes_to_private_mappings_stay_private() {
    let arena = Arena::new(ArenaPurpose::Slabs, 1 << 30);
    // Fresh pages, and used ones.
    for generation in 1..3 {
        let mut segment = arena.take(1 << 20, &mut || Ok(())).unwrap();
        assert_eq!(segment.address().generation, generation);
        for (at, byte) in [(0, 1u8), (300_000, 2), ((1 << 20) - 7, 3)] {
            // SAFETY: seven bytes that live.
            unsafe { segment.fill_at(at, [byte; 7].as_ptr(), 7, &mut || Ok(())) }.unwrap();
        }
        segment.publish(1 << 20, &[]).unwrap();
        let views: Vec<_> = (0..2).map(|_| segment.private(0..400_000).unwrap()).collect();
        // SAFETY: within the data, which live as long as the segment and the views.
        unsafe {
            views[0].data().add(300_000).write(9);
            let at = |data: *mut u8| [data.read(), data.add(300_000).read(), data.add(300_006).read()];
            assert_eq!(at(views[0].data()), [1, 9, 2]);
            assert_eq!(at(views[1].data()), [1, 2, 2]);
            assert_eq!(at(segment.data()), [1, 2, 2]);
            assert_eq!(segment.data().add((1 << 20) - 1).read(), 3);
        }
        arena.give_back(segment);
        assert!(arena.stats().escaped_bytes > 0, "a private mapping is a lease");
        drop(views);
        assert!(arena.stats().cached_bytes > 0 && arena.stats().escaped_bytes == 0);
    }
}

#[test]
fn of_those_that_fit_the_one_used_last_is_taken() {
    let arena = Arena::new(ArenaPurpose::Messages, 1 << 30);
    let segments: Vec<_> = (0..4).map(|_| take(&arena, 1000)).collect();
    let identities: Vec<_> = segments.iter().map(|segment| segment.address().identity).collect();
    segments.into_iter().for_each(|segment| arena.give_back(segment));
    assert_eq!(take(&arena, 1000).address().identity, identities[3]);
}

#[test]
fn kept_segments_make_way_for_a_new_one() {
    let arena = Arena::new(ArenaPurpose::Arrays, 1 << 30);
    let (idle, escaped) = (take(&arena, 1 << 20), take(&arena, 1 << 20));
    let _view = escaped.lease().unwrap();
    arena.give_back(idle);
    arena.give_back(escaped);
    let error = arena.take(1 << 60, &mut || Ok(())).unwrap_err();
    assert!(matches!(error, ShmError::NoHeadroom { .. }), "{error}");
    assert_eq!(arena.stats(), ArenaStats { peak_bytes: arena.stats().peak_bytes, ..ArenaStats::default() });
}

#[test]
fn slabs_with_a_view_are_not_forgotten_if_memory_is_missing() {
    let arena = Arena::new(ArenaPurpose::Slabs, 1 << 30);
    let (idle, escaped) = (take(&arena, 1 << 20), take(&arena, 2 << 20));
    let (view, bytes) = (escaped.lease().unwrap(), escaped.size());
    arena.give_back(idle);
    arena.give_back(escaped);
    let error = arena.take(1 << 60, &mut || Ok(())).unwrap_err();
    assert!(matches!(error, ShmError::NoHeadroom { .. }), "{error}");
    let stats = arena.stats();
    assert_eq!(
        (stats.cached_bytes, stats.escaped_bytes),
        (0, bytes),
        "what is idle makes way; what has a view takes memory still"
    );
    drop(view);
    assert_eq!(arena.stats().cached_bytes, bytes);
}

#[test]
fn an_interrupted_take_leaves_nothing() {
    let arena = Arena::new(ArenaPurpose::Arrays, 1 << 30);
    let error = arena.take(1 << 20, &mut || Err(ShmError::Interrupted)).unwrap_err();
    assert!(matches!(error, ShmError::Interrupted), "{error}");
    assert_eq!(arena.stats(), ArenaStats::default());
}

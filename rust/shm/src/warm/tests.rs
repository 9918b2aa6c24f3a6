//! What mappings that are kept promise, whatever their users did to them.
#![allow(unsafe_code)]

use std::sync::Arc;

use proptest::prelude::*;

use super::*;
use crate::arena::{Arena, Use};

const PAGE: usize = 4096;

fn warm(limit: usize) -> &'static Warm {
    Box::leak(Box::new(Warm { limit, ..Warm::new() }))
}

fn slabs() -> Arena {
    Arena::new(Use::Slabs, 1 << 30)
}

/// A segment whose bytes depend on where they are and on `mark`.
fn filled(arena: &Arena, len: usize, mark: u8) -> Segment {
    let mut segment = arena.take(len, false, &mut || Ok(())).unwrap();
    let bytes = pattern(len, mark);
    // SAFETY: as many bytes as live.
    unsafe { segment.fill(bytes.as_ptr(), len, &mut || Ok(())) }.unwrap();
    segment.publish(len, &[]).unwrap();
    segment
}

fn pattern(len: usize, mark: u8) -> Vec<u8> {
    (0..len).map(|at| ((at % 251) as u8).wrapping_mul(31).wrapping_add(mark)).collect()
}

fn bytes(copy: &WarmCopy, len: usize) -> &[u8] {
    // SAFETY: within the segment, mapped as long as the copy, and written to by this thread alone.
    unsafe { std::slice::from_raw_parts(copy.data(), len) }
}

fn write(copy: &WarmCopy, range: Range<usize>) {
    // SAFETY: within the segment; nobody reads it meanwhile.
    unsafe { copy.data().add(range.start).write_bytes(0xee, range.len()) };
}

/// Lengths of some pages, and now and then of some huge ones.
fn lengths(most: usize) -> impl Strategy<Value = usize> {
    prop_oneof![8 => 1..most, 1 => (2usize << 20)..(5 << 20)]
}

/// As `mlockall` and `munlockall` do it: every page of the mapping is the process's own from here on.
fn lock_for_a_moment(map: &Mapping) {
    // SAFETY: the mapping's own range; no byte changes.
    let is_done =
        unsafe { libc::mlock(map.start().cast(), map.len()) == 0 && libc::munlock(map.start().cast(), map.len()) == 0 };
    assert!(is_done);
}

fn minor_faults() -> i64 {
    // SAFETY: all zero is a value of it, and the call fills it in.
    unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        assert_eq!(libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage), 0);
        usage.ru_minflt
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Whatever users write to mappings that live at the same time or one after the other, wherever, each finds the
    /// owner's bytes at first, and its own as long as it has the mapping; in every use of the segment.
    #[test]
    fn everybody_finds_the_owners_bytes_and_then_his_own(
        len in lengths(900_000),
        uses in prop::collection::vec(
            prop::collection::vec((any::<usize>(), 1usize..3 * PAGE, any::<bool>()), 0..30), 1..6,
        ),
    ) {
        let (home, arena) = (warm(1 << 30), slabs());
        for (mark, writes) in (0u8..).zip(uses) {
            let segment = filled(&arena, len, mark);
            let expected = pattern(len, mark);
            let loan = home.open(&segment.address()).unwrap();
            let mut copies = vec![loan.copy(0..len).unwrap(), home.copy_of(&segment, 0..len).unwrap()];
            for (start, length, is_over) in writes {
                let start = start % len;
                let range = start..(start + length).min(len);
                let mut own = expected.clone();
                own[range.clone()].fill(0xee);
                let copy = copies.pop().unwrap();
                prop_assert!(bytes(&copy, len) == expected);
                write(&copy, range);
                prop_assert!(bytes(&copy, len) == own);
                if is_over {
                    drop(copy);
                }
                copies.insert(0, loan.copy(0..len).unwrap());
            }
            prop_assert!(copies.iter().all(|copy| bytes(copy, len) == expected));
            drop((copies, loan));
            arena.give_back(segment);
            prop_assert_eq!(arena.stats().escaped, 0);
        }
    }

    /// Whose bytes are a part of a segment may write to all of them.
    #[test]
    fn of_a_part_every_byte_is_given_back(len in lengths(100_000), from: usize, to: usize) {
        let (home, segment) = (warm(1 << 30), filled(&slabs(), len, 1));
        let (from, to) = (from % len, to % len);
        let range = from.min(to)..from.max(to) + 1;
        for _ in 0..2 {
            let copy = home.copy_of(&segment, range.clone()).unwrap();
            prop_assert!(bytes(&copy, len) == pattern(len, 1));
            write(&copy, range.clone());
        }
        prop_assert!(bytes(&home.copy_of(&segment, 0..len).unwrap(), len) == pattern(len, 1));
    }
}

#[test]
fn the_next_use_of_a_segment_is_read_without_a_fault() {
    const LEN: usize = 8 << 20;
    let (home, arena) = (warm(1 << 30), slabs());
    for mark in 0..4 {
        let segment = filled(&arena, LEN, mark);
        let loan = home.open(&segment.address()).unwrap();
        let copy = loan.copy(0..LEN).unwrap();
        let before = minor_faults();
        let sum: u64 = bytes(&copy, LEN).iter().step_by(PAGE).map(|byte| u64::from(*byte)).sum();
        let faults = minor_faults() - before;
        let expected = match mark {
            // One a huge page, at least.
            0 => 4..i64::MAX,
            1 | 2 => 0..4,
            // Of sixteen pages at once, in two huge ones, where these were taken to pieces.
            _ => 1..80,
        };
        assert!(expected.contains(&faults), "{faults} faults, {sum}");
        assert!(bytes(&copy, LEN) == pattern(LEN, mark));
        if mark == 2 {
            // What is near them, in whole huge pages, alone is found anew.
            (0..4).for_each(|number| write(&copy, number * 1_000_000..number * 1_000_000 + 1));
        }
        drop((copy, loan));
        arena.give_back(segment);
    }
}

#[test]
fn what_is_kept_is_no_lease_and_what_is_used_is_one() {
    let (home, arena) = (warm(1 << 30), slabs());
    let segment = filled(&arena, 100_000, 1);
    let address = segment.address();
    let loan = home.open(&address).unwrap();
    let copy = loan.copy(0..100_000).unwrap();
    drop(loan);
    arena.give_back(segment);
    assert!(arena.stats().escaped > 0, "a mapping in use is a lease");
    drop(copy);
    assert_eq!(home.lock().kept.iter().map(|kept| kept.idle.len()).sum::<usize>(), 1);
    assert!(arena.stats().escaped == 0 && arena.stats().cached > 0, "one that is kept is none");
    // Who comes late is told so, through what is kept, too.
    assert!(matches!(home.open(&address).unwrap_err(), ShmError::Gone { .. }));
    let again = filled(&arena, 100_000, 2);
    assert_eq!(again.address().identity, address.identity);
    assert!(matches!(home.open(&address).unwrap_err(), ShmError::Gone { .. }));
    assert!(bytes(&home.open(&again.address()).unwrap().copy(0..100_000).unwrap(), 100_000) == pattern(100_000, 2));
}

#[test]
fn memory_that_its_owner_gives_up_is_the_systems_though_somebody_has_it_mapped() {
    let (home, arena) = (warm(1 << 30), slabs());
    let segment = filled(&arena, 1 << 20, 1);
    let address = segment.address();
    let loan = home.open(&address).unwrap();
    assert!(bytes(&loan.copy(0..1 << 20).unwrap(), 1 << 20) == pattern(1 << 20, 1));
    let file = file::reopen(segment.file(), OFlags::RDONLY).unwrap();
    let blocks = || file::status(file.as_fd()).unwrap().st_blocks;
    // Not as long as somebody has a lease.
    arena.give_back(segment);
    drop(arena);
    assert!(blocks() * 512 > 1 << 20);
    // SAFETY: mapped as long as the loan, and written to by nobody.
    assert!(unsafe { std::slice::from_raw_parts(loan.data(), 1 << 20) } == pattern(1 << 20, 1));
    drop(loan);
    home.look();
    assert!(home.lock().kept.is_empty(), "of what was given up nothing is kept");

    let arena = slabs();
    let segment = filled(&arena, 1 << 20, 2);
    let address = Address { identity: segment.address().identity, ..address };
    let loan = home.open(&segment.address()).unwrap();
    let late = segment.address();
    let file = file::reopen(segment.file(), OFlags::RDONLY).unwrap();
    drop((loan.copy(0..1 << 20).unwrap(), loan));
    assert_eq!(home.lock().kept.len(), 1);
    drop(segment);
    assert!(file::status(file.as_fd()).unwrap().st_blocks * 512 <= PAGE as i64, "the header is left");
    for address in [address, late] {
        assert!(matches!(home.open(&address).unwrap_err(), ShmError::Gone { .. }));
    }
}

#[test]
fn what_is_kept_is_bounded_in_bytes_mappings_and_segments() {
    let arena = slabs();
    let kept = |home: &Warm| home.lock().kept.iter().map(|kept| kept.idle.len()).sum::<usize>();
    let segments: Vec<_> = (0..MOST_SEGMENTS as u8 + 10).map(|mark| filled(&arena, 50_000, mark)).collect();
    let home = warm(10 * segments[0].size());
    let copies: Vec<_> = (0..20).map(|_| home.copy_of(&segments[0], 0..50_000).unwrap()).collect();
    drop(copies);
    assert_eq!(kept(home), 10);
    segments.iter().for_each(|segment| drop(home.copy_of(segment, 0..50_000).unwrap()));
    assert_eq!(kept(home), 10);
    let newest = home.lock().kept.last().map(|kept| kept.source.identity);
    assert_eq!(newest, segments.last().map(|segment| segment.address().identity));
    let home = warm(1 << 30);
    segments.iter().for_each(|segment| drop(home.copy_of(segment, 0..50_000).unwrap()));
    assert_eq!((kept(home), home.lock().kept.len()), (MOST_SEGMENTS, MOST_SEGMENTS));
    let copies: Vec<_> = (0..MOST_MAPPINGS + 5).map(|_| home.copy_of(&segments[0], 0..50_000).unwrap()).collect();
    drop(copies);
    assert!(kept(home) <= MOST_MAPPINGS, "{}", kept(home));
    let home = warm(1000);
    drop(home.copy_of(&segments[0], 0..50_000).unwrap());
    assert_eq!(kept(home), 0);
}

#[test]
fn what_is_of_no_use_any_more_is_let_go_of() {
    let (home, arena) = (warm(1 << 30), slabs());
    let (old, orphan, given_up, good) =
        (filled(&arena, 50_000, 1), filled(&arena, 50_000, 2), filled(&arena, 50_000, 3), filled(&arena, 50_000, 4));
    let identities: Vec<_> =
        [&old, &orphan, &given_up, &good].iter().map(|segment| segment.address().identity).collect();
    for segment in [&old, &orphan, &given_up, &good] {
        drop(home.copy_of(segment, 0..50_000).unwrap());
    }
    let mut state = home.lock();
    state.kept[0].used = Instant::now().checked_sub(QUIET).unwrap();
    let source = Arc::clone(&state.kept[1].source);
    let owner = Owner { started: source.owner.started + 1, ..source.owner };
    let file = file::reopen(source.file.as_fd(), OFlags::RDONLY).unwrap();
    let map = Mapping::new(&file, source.map.len(), Access::Read).unwrap();
    state.kept[1].source = Arc::new(Source { map, file, page: PAGE, identity: source.identity, owner });
    drop(state);
    drop(given_up);
    home.look();
    let left: Vec<_> = home.lock().kept.iter().map(|kept| kept.source.identity).collect();
    assert_eq!(left, identities[3..]);
}

#[test]
fn what_the_file_says_of_itself_is_compared() {
    let home = warm(1 << 30);
    let segment = filled(&slabs(), 5000, 1);
    let good = segment.address();
    for wrong in [
        Address { identity: good.identity ^ 1, ..good },
        Address { descriptor: 0, ..good },
        Address { generation: good.generation + 1, ..good },
    ] {
        assert!(home.open(&wrong).is_err());
    }
    let loan = home.open(&good).unwrap();
    assert_eq!(loan.facts().data_len, 5000);
    // What was refused before is no better now that the segment is known.
    assert!(home.open(&Address { generation: good.generation + 1, ..good }).is_err());
}

#[test]
fn what_the_process_locked_in_memory_meanwhile_is_not_used_again() {
    let (home, segment) = (warm(1 << 30), filled(&slabs(), 50_000, 1));
    drop(home.copy_of(&segment, 0..50_000).unwrap());
    lock_for_a_moment(&home.lock().kept[0].idle[0]);
    // SAFETY: within the data; nobody reads them meanwhile.
    unsafe { segment.data().write_bytes(0x77, 50_000) };
    let copy = home.copy_of(&segment, 0..50_000).unwrap();
    // SAFETY: within the data of the copy, which lives.
    assert!(unsafe { std::slice::from_raw_parts(copy.data(), 50_000) }.iter().all(|byte| *byte == 0x77));
}

#[test]
fn what_the_process_locked_in_memory_while_it_was_used_is_not_used_again() {
    const LEN: usize = 5 << 20;

    let (home, segment) = (warm(1 << 30), filled(&slabs(), LEN, 1));
    let copy = home.copy_of(&segment, 0..5000).unwrap();
    lock_for_a_moment(copy.map.as_ref().unwrap());
    write(&copy, 0..5000);
    drop(copy);
    // SAFETY: within the data; nobody reads them meanwhile.
    unsafe { segment.data().write_bytes(0x77, LEN) };
    let copy = home.copy_of(&segment, 0..LEN).unwrap();
    assert!(bytes(&copy, LEN).iter().all(|byte| *byte == 0x77));
}

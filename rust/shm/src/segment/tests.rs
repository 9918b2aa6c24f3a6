use proptest::prelude::*;

use super::*;
use crate::memory::HUGE_PAGE;

fn create(len: usize) -> Segment {
    Segment::create(len, Writers::Present, &mut || Ok(())).unwrap()
}

fn data(segment: &Segment) -> &[u8] {
    // SAFETY: its own memory, which no thread writes to meanwhile.
    unsafe { std::slice::from_raw_parts(segment.data(), segment.capacity()) }
}

#[test]
fn all_pages_of_a_segment_are_there_whatever_their_size() {
    for len in [1, HUGE_PAGE - DATA_START, HUGE_PAGE, 2 * HUGE_PAGE + 5000] {
        let segment = create(len);
        let reserved = memory::status(segment.file()).unwrap().st_blocks.unsigned_abs() * 512;
        assert!(reserved >= segment.size() as u64, "{reserved} of {}", segment.size());
        assert!(segment.cleared <= segment.size() && segment.cleared.is_multiple_of(HUGE_PAGE));
        assert!(data(&segment).iter().all(|&byte| byte == 0));
    }
}

#[test]
fn mappings_with_room_for_a_huge_page_are_aligned_to_one() {
    let segment = create(3 * HUGE_PAGE);
    let other = Mapping::new(segment.file(), segment.size(), Access::Private).unwrap();
    for start in [segment.map.start(), other.start()] {
        assert!(start.addr().is_multiple_of(HUGE_PAGE), "{start:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// For any ranges, on huge pages or behind them: the bytes that were filled last are there, and zeros elsewhere.
    #[test]
    fn filled_bytes_are_there(
        pieces in prop::collection::vec((0..3 * HUGE_PAGE, 1..HUGE_PAGE, any::<u8>()), 1..6), seal in any::<bool>(),
    ) {
        let mut segment = create(3 * HUGE_PAGE + 9000);
        if seal {
            segment.seal().unwrap();
        }
        let mut expected = vec![0; segment.capacity()];
        for (at, len, byte) in pieces {
            let len = len.min(segment.capacity() - at);
            let source: Vec<u8> = (0..len).map(|place| byte.wrapping_add(place as u8)).collect();
            // SAFETY: the source lives until then.
            unsafe { segment.fill_at(at, source.as_ptr(), len, &mut || Ok(())) }.unwrap();
            expected[at..at + len].copy_from_slice(&source);
        }
        prop_assert!(data(&segment) == expected);
    }
}

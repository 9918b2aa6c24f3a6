//! Which pages of a private mapping its process has written to, and giving these back.
//!
//! It owns nothing. What always holds: when [`give_back`] says that it did, every page of the range is the file's own,
//! as for a mapping that was just made; where that cannot be told for certain it says no.
//!
//! Whoever writes to a page of a private mapping gets a copy of it, which is no file's: the kernel tells that of each
//! page (bit 61 of the entries of `/proc/self/pagemap`, proc(5)), of one that was swapped out, too.
#![allow(unsafe_code)]

use std::ops::Range;
use std::sync::atomic::{AtomicU8, Ordering};

use crate::file::HUGE_PAGE;
use crate::mapping::Mapping;

/// An entry's bits: the page is in memory; it is swapped out, or on its way; it is a file's.
const IS_PRESENT: u64 = 1 << 63;
const IS_SWAPPED: u64 = 1 << 62;
const IS_FILES: u64 = 1 << 61;

/// Entries that are read at once.
const AT_ONCE: usize = 8192;

/// Runs of written pages that are given back one by one. To unmap all takes no longer than more of them.
const MOST_RUNS: usize = 64;

/// Whether the kernel tells the truth here: looked at once, for there are systems that only look like Linux. No lock is
/// held meanwhile that a child made by `fork` would find held.
static IS_TOLD: AtomicU8 = AtomicU8::new(UNKNOWN);

const UNKNOWN: u8 = 0;
const TOLD: u8 = 1;
const NOT_TOLD: u8 = 2;

fn is_told() -> bool {
    if IS_TOLD.load(Ordering::Relaxed) == UNKNOWN {
        let is_told = try_out().unwrap_or(false);
        IS_TOLD.store(if is_told { TOLD } else { NOT_TOLD }, Ordering::Relaxed);
    }
    IS_TOLD.load(Ordering::Relaxed) == TOLD
}

/// Gives back all pages of a private mapping that were written to within `bytes`, whole pages, so that it shows the
/// file's again.
///
/// `false` where that was not done, or not for all of them: the mapping is then good for nothing but to be unmapped.
pub(crate) fn give_back(map: &Mapping, bytes: Range<usize>) -> bool {
    is_told() && written(map, bytes).is_some_and(|runs| runs.into_iter().all(|run| map.drop_pages(around(map, run))))
}

/// A run of pages, with all of the huge page that the file may have there: that one was taken to pieces in the mapping
/// when a part of it was written to, and is found whole again only where nothing of it is left.
fn around(map: &Mapping, run: Range<usize>) -> Range<usize> {
    if map.len() < HUGE_PAGE {
        return run;
    }
    run.start / HUGE_PAGE * HUGE_PAGE..run.end.next_multiple_of(HUGE_PAGE).min(map.len())
}

/// Whether the first page of a private mapping, which nobody writes to, is the file's own. `mlockall` makes every page
/// that can be written to the process's own, wherever it is, this one among them; nothing else does.
pub(crate) fn is_left_alone(map: &Mapping) -> bool {
    is_told() && written(map, 0..rustix::param::page_size()).is_some_and(|runs| runs.is_empty())
}

/// Those of these bytes of the mapping whose pages were written to, in whole pages; `None` where that is not known, or
/// they lie in too many places.
#[cfg(target_os = "linux")]
fn written(map: &Mapping, bytes: Range<usize>) -> Option<Vec<Range<usize>>> {
    use rustix::fs::{Mode, OFlags};
    use rustix::io::{pread, retry_on_intr};

    let page = rustix::param::page_size();
    // Not kept open: in a child it would be the parent's.
    let open = || rustix::fs::open("/proc/self/pagemap", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty());
    let pagemap = retry_on_intr(open).ok()?;
    let (first, mut at, end) = (map.start().addr() / page, bytes.start / page, bytes.end / page);
    let mut words = vec![[0u8; 8]; AT_ONCE.min(end - at)];
    let mut runs: Vec<Range<usize>> = Vec::new();
    while at < end {
        let room = words.len().min(end - at);
        let entries = words[..room].as_flattened_mut();
        let read = retry_on_intr(|| pread(&pagemap, &mut *entries, ((first + at) * 8) as u64)).ok()?;
        if read == 0 || !read.is_multiple_of(8) {
            return None;
        }
        for word in words[..read / 8].iter().map(|word| u64::from_ne_bytes(*word)) {
            if word & (IS_PRESENT | IS_SWAPPED) != 0 && word & IS_FILES == 0 {
                if let Some(run) = runs.last_mut().filter(|run| run.end == at * page) {
                    run.end += page;
                } else if runs.len() < MOST_RUNS {
                    runs.push(at * page..(at + 1) * page);
                } else {
                    return None;
                }
            }
            at += 1;
        }
    }
    Some(runs)
}

/// Elsewhere nothing tells.
#[cfg(not(target_os = "linux"))]
fn written(_map: &Mapping, _bytes: Range<usize>) -> Option<Vec<Range<usize>>> {
    None
}

/// Whether of pages that were read, written to and left alone those that were written to are found, and whether these
/// are the file's again when they were given back.
fn try_out() -> Option<bool> {
    use std::os::fd::AsFd;

    use crate::file;
    use crate::mapping::Access;

    let page = rustix::param::page_size();
    let file = file::create(false).ok()?;
    file::reserve(file.as_fd(), 4 * page, file::Writers::Present, &mut || Ok(())).ok()?;
    let map = Mapping::new(&file, 4 * page, Access::Private).ok()?;
    let at = |number: usize| map.start().wrapping_add(number * page);
    // SAFETY: within the mapping, which nobody else knows.
    let is_clear = unsafe {
        at(2).write_volatile(1);
        at(3).write_volatile(1);
        at(0).read_volatile() == 0
    };
    let finds = |run: Range<usize>| Some(written(&map, 0..map.len())? == std::slice::from_ref(&run));
    let is_found = finds(2 * page..4 * page)?;
    let is_done = map.drop_pages(2 * page..3 * page);
    // SAFETY: as above.
    let is_back = unsafe { (at(2).read_volatile(), at(3).read_volatile()) == (0, 1) };
    Some(is_clear && is_found && is_done && is_back && finds(3 * page..4 * page)?)
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::os::fd::{AsFd, OwnedFd};

    use proptest::prelude::*;

    use super::*;
    use crate::file;
    use crate::mapping::Access;

    const PAGE: usize = 4096;

    /// A file of so many pages, each full of its number.
    fn numbered(pages: usize) -> OwnedFd {
        let file = file::create(false).unwrap();
        file::reserve(file.as_fd(), pages * PAGE, file::Writers::Present, &mut || Ok(())).unwrap();
        let bytes: Vec<u8> = (0..pages * PAGE).map(|at| (at / PAGE) as u8).collect();
        assert_eq!(rustix::io::pwrite(&file, &bytes, 0).unwrap(), bytes.len());
        file
    }

    fn bytes(map: &Mapping) -> &[u8] {
        // SAFETY: the mapping's own range, which is written to by this thread alone.
        unsafe { std::slice::from_raw_parts(map.start(), map.len()) }
    }

    fn write(map: &Mapping, at: Range<usize>, byte: u8) {
        // SAFETY: within the mapping, which this test alone uses.
        unsafe { map.start().add(at.start).write_bytes(byte, at.len()) };
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(200))]

        /// Whatever was read, written, swapped out or given up by hand before: afterwards all of it is the file's, also
        /// what the file's owner wrote meanwhile.
        #[test]
        fn what_was_written_is_gone_and_everything_else_is_the_files(
            pages in 1usize..1200,
            touched in prop::collection::vec((any::<usize>(), 1usize..3 * PAGE, 0u8..4), 0..40),
        ) {
            let file = numbered(pages);
            let owners = Mapping::new(&file, pages * PAGE, Access::Write).unwrap();
            let map = Mapping::new(&file, pages * PAGE, Access::Private).unwrap();
            for (start, len, how) in touched {
                let start = start % (pages * PAGE);
                let range = start..(start + len).min(pages * PAGE);
                match how {
                    0 => drop(bytes(&map)[range].to_vec()),
                    // Out of memory, as far as the system has a place for it.
                    1 => {
                        let first = range.start / PAGE * PAGE;
                        // SAFETY: within the mapping; no byte changes.
                        unsafe { libc::madvise(map.start().add(first).cast(), range.end - first, libc::MADV_PAGEOUT) };
                    }
                    _ => write(&map, range, 0xee),
                }
            }
            write(&owners, 0..owners.len(), 0x55);
            prop_assert!(give_back(&map, 0..map.len()));
            prop_assert!(bytes(&map).iter().all(|byte| *byte == 0x55));
            write(&owners, 0..owners.len(), 0x66);
            prop_assert!(bytes(&map).iter().all(|byte| *byte == 0x66));
        }
    }

    #[test]
    fn pages_are_found_to_the_byte() {
        let map = Mapping::new(numbered(600), 600 * PAGE, Access::Private).unwrap();
        assert!(bytes(&map).len() == 600 * PAGE && written(&map, 0..map.len()).unwrap().is_empty());
        // Over the bounds of a page and of a huge page, and the first and the last byte.
        for range in [0..1, 3 * PAGE - 1..3 * PAGE + 1, 512 * PAGE - 1..513 * PAGE, 600 * PAGE - 1..600 * PAGE] {
            write(&map, range, 1);
        }
        let expected = [0..1, 2..4, 511..513, 599..600].map(|run| run.start * PAGE..run.end * PAGE);
        assert_eq!(written(&map, 0..map.len()).unwrap(), expected);
    }

    #[test]
    fn what_was_written_all_over_is_not_given_back_page_by_page() {
        let map = Mapping::new(numbered(400), 400 * PAGE, Access::Private).unwrap();
        (0..=MOST_RUNS).for_each(|number| write(&map, 2 * number * PAGE..2 * number * PAGE + 1, 1));
        assert!(!give_back(&map, 0..map.len()));
    }

    #[test]
    fn a_process_that_locks_all_its_memory_has_left_no_mapping_alone() {
        let map = Mapping::new(numbered(4), 4 * PAGE, Access::Private).unwrap();
        assert!(is_left_alone(&map) && bytes(&map)[3 * PAGE] == 3);
        assert!(is_left_alone(&map));
        // As `mlockall` does, of this mapping alone.
        // SAFETY: the mapping's own range; no byte changes.
        let done = unsafe {
            libc::mlock(map.start().cast(), map.len()) == 0 && libc::munlock(map.start().cast(), map.len()) == 0
        };
        assert!(done && !is_left_alone(&map));
    }

    #[test]
    fn what_is_locked_in_memory_is_not_given_back() {
        let map = Mapping::new(numbered(4), 4 * PAGE, Access::Private).unwrap();
        // SAFETY: the mapping's own range; no byte changes.
        assert_eq!(unsafe { libc::mlock(map.start().cast(), map.len()) }, 0);
        write(&map, 0..1, 9);
        assert!(!give_back(&map, 0..map.len()));
    }
}

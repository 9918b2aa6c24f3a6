//! Stores in several processes: children made by `fork`, and consumers that read an owner's memory and are killed.
#![cfg(target_os = "linux")]
#![allow(unsafe_code, reason = "it forks")]

mod common;

use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use common::{LIMITS, LocalTransport, OWNER, SendAs, bytes_meta, fetch, overwrite, pattern, put, whole, within};
use tundish_shm::SegmentAddress;
use tundish_store::{
    FetchReceiver, FetchedTensor, SegmentRange, Selection, ShardId, ShardRows, StoreError, TensorStore, TimeLimit,
    Transport,
};

const LEN: usize = 300_000;

/// A child process, killed at the end at the latest.
struct Child(libc::pid_t);

impl Child {
    fn start(life: impl FnOnce()) -> Self {
        // SAFETY: the child runs `life` alone and ends itself; memory may be asked for after a fork by glibc's promise.
        match unsafe { libc::fork() } {
            0 => {
                let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(life));
                // SAFETY: ends the child without running the parent's code in it.
                unsafe { libc::_exit(i32::from(outcome.is_err())) }
            }
            pid => Child(pid),
        }
    }

    /// Waits for its own end: its status.
    fn join(self) -> i32 {
        let mut status = 0;
        // SAFETY: a child of this process that nobody else waits for.
        assert_eq!(unsafe { libc::waitpid(self.0, &raw mut status, 0) }, self.0);
        std::mem::forget(self);
        status
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        // SAFETY: a child that was not waited for, so its number is its own.
        unsafe {
            libc::kill(self.0, libc::SIGKILL);
            libc::waitpid(self.0, std::ptr::null_mut(), 0);
        }
    }
}

/// For one test at a time: children have what the others have at the fork, and count it.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Mappings and descriptors that this process has of memory without a name.
fn held() -> (usize, usize) {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let descriptors = std::fs::read_dir("/proc/self/fd").unwrap().filter_map(|entry| {
        std::fs::read_link(entry.ok()?.path()).ok().filter(|path| path.to_string_lossy().contains("memfd:tundish"))
    });
    (maps.lines().filter(|line| line.contains("memfd:tundish")).count(), descriptors.count())
}

#[test]
fn a_child_makes_a_store_of_its_own_and_its_parent_notices_nothing() {
    let _alone = alone();
    let store = TensorStore::new(LIMITS);
    let owner = TensorStore::new(LIMITS);
    let transport = LocalTransport::new(SendAs::Bytes);
    transport.add(OWNER, &owner);
    let lent = put(&owner, &[pattern(2, LEN)]).unwrap();
    let held_by_owner = held();
    let stored = put(&store, &[pattern(1, LEN)]).unwrap();
    store.begin_step(1, 0).unwrap();
    let views = fetch(&store, &[whole(OWNER, &lent[0], LEN as u64)], &transport).unwrap();
    let before = store.stats();
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        // A lock that this thread holds at the fork stays locked in the child.
        scope.spawn(|| {
            while !is_over.load(Ordering::SeqCst) {
                let ids = put(&store, &[vec![3; 1000]]).unwrap();
                store.remove(&ids);
            }
        });
        for _ in 0..20 {
            let child = Child::start(|| {
                store.forget_inherited();
                let own = TensorStore::new(LIMITS);
                assert!(matches!(own.look_up(&[select(&stored[0])]), Err(StoreError::Missing { .. })));
                let ids = put(&own, &[pattern(4, LEN)]).unwrap();
                assert_eq!(own.look_up(&[select(&ids[0])]).unwrap()[0].bytes(), pattern(4, LEN));
                // The child may read and write tensors that the parent handed out; no other process sees its writes.
                assert_eq!(views[0].bytes(), pattern(2, LEN));
                overwrite(&views[0], 9);
                assert_eq!(own.remove(&ids).cleared_count, 1);
            });
            assert_eq!(child.join(), 0);
        }
        is_over.store(true, Ordering::SeqCst);
    });
    assert_eq!(views[0].bytes(), pattern(2, LEN));
    let after = store.stats();
    assert_eq!((after.storage.num_entries, after.buffer), (before.storage.num_entries, before.buffer));
    // With nobody at the locks, a child lets go of what its parent's store has.
    let child = Child::start(|| {
        assert!(held().1 >= held_by_owner.1 + 2);
        store.forget_inherited();
        // Of the store one mapping is left: that of the view that was handed out.
        assert_eq!(held(), (held_by_owner.0 + 1, held_by_owner.1));
    });
    assert_eq!(child.join(), 0);
    store.end_step(1);
    drop(views);
    store.clear_all();
    assert_eq!(store.stats().storage.memory.used_bytes, 0);
    wait_for_the_last_view(&store);
}

fn select(id: &ShardId) -> ShardRows {
    ShardRows { id: id.clone(), rows: Selection::All }
}

/// The references that an owner answers with to a consumer on its node.
struct Answer(Vec<SegmentRange>);

impl Transport for Answer {
    fn fetch(
        &self,
        _owner: &Arc<str>,
        wanted: &[ShardRows],
        receiver: &mut FetchReceiver<'_>,
        _: &mut TimeLimit<'_>,
    ) -> Result<(), StoreError> {
        assert_eq!(wanted.len(), self.0.len());
        for (index, reference) in self.0.iter().enumerate() {
            receiver.attach(index, &bytes_meta(LEN as u64), reference)?;
        }
        Ok(())
    }
}

fn references(owner: &TensorStore, ids: &[ShardId]) -> Answer {
    let outgoing = owner.look_up(&ids.iter().map(select).collect::<Vec<_>>()).unwrap();
    Answer(outgoing.iter().map(|outgoing| outgoing.reference().unwrap()).collect())
}

fn fetch_by(store: &TensorStore, ids: &[ShardId], answer: &Answer) -> Result<Vec<FetchedTensor>, StoreError> {
    let wanted: Vec<_> = ids.iter().map(|id| whole(OWNER, id, LEN as u64)).collect();
    within(20.0, |time_limit| store.fetch(&wanted, answer, time_limit))
}

/// Also of children that other tests have forked meanwhile.
fn wait_for_the_last_view(owner: &TensorStore) {
    let begin = Instant::now();
    while owner.stats().storage.memory.escaped_bytes > 0 {
        // time: the kernel unmaps memory in milliseconds; what does not come never comes
        assert!(begin.elapsed() < Duration::from_secs(10), "{:?}", owner.stats().storage.memory);
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_consumer_that_is_killed_holds_nothing_any_more() {
    let _alone = alone();
    let owner = TensorStore::new(LIMITS);
    let ids = put(&owner, &[pattern(1, LEN), pattern(2, LEN)]).unwrap();
    let answer = references(&owner, &ids);
    let mut pipe = [0; 2];
    // SAFETY: an array of two.
    assert_eq!(unsafe { libc::pipe(pipe.as_mut_ptr()) }, 0);
    let child = Child::start(|| {
        let consumer = TensorStore::new(LIMITS);
        let views = fetch_by(&consumer, &ids, &answer).unwrap();
        assert_eq!((views[0].bytes(), views[1].bytes()), (&pattern(1, LEN)[..], &pattern(2, LEN)[..]));
        overwrite(&views[0], 0);
        assert_eq!(consumer.stats().buffer.memory.used_bytes, 0, "it is the owner's memory");
        // SAFETY: one byte, and then to be killed.
        unsafe {
            libc::write(pipe[1], [1u8].as_ptr().cast(), 1);
            libc::sleep(60);
        }
    });
    let mut byte = [0u8; 1];
    // SAFETY: one byte, and the pipe's ends are this test's.
    unsafe {
        assert_eq!(libc::read(pipe[0], byte.as_mut_ptr().cast(), 1), 1);
        pipe.iter().for_each(|descriptor| assert_eq!(libc::close(*descriptor), 0));
    }
    assert_eq!(owner.look_up(&[select(&ids[0])]).unwrap()[0].bytes(), pattern(1, LEN));
    owner.remove(&ids);
    let memory = owner.stats().storage.memory;
    assert!(memory.used_bytes == 0 && memory.escaped_bytes >= 2 * LEN as u64, "{memory:?}");
    drop(child);
    wait_for_the_last_view(&owner);
    assert!(owner.stats().storage.memory.idle_bytes >= 2 * LEN as u64);
}

/// Two processes that wait for each other: a byte each way.
struct Line([i32; 2]);

impl Line {
    /// The two ends.
    fn new() -> (Self, Self) {
        let (mut there, mut back) = ([0; 2], [0; 2]);
        // SAFETY: arrays of two.
        assert_eq!(unsafe { libc::pipe(there.as_mut_ptr()) + libc::pipe(back.as_mut_ptr()) }, 0);
        (Line([there[0], back[1]]), Line([back[0], there[1]]))
    }

    fn say(&self, words: &[u64]) {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        // SAFETY: as many bytes as live; less than a pipe holds.
        assert_eq!(unsafe { libc::write(self.0[1], bytes.as_ptr().cast(), bytes.len()) }, bytes.len() as isize);
    }

    fn hear<const N: usize>(&self) -> [u64; N] {
        let mut words = [0u64; N];
        // SAFETY: space for as many bytes.
        assert_eq!(unsafe { libc::read(self.0[0], words.as_mut_ptr().cast(), 8 * N) }, 8 * N as isize);
        words
    }
}

fn say_where(line: &Line, reference: &SegmentRange) {
    let SegmentAddress { process, descriptor, identity, generation } = reference.address;
    line.say(&[u64::from(process), descriptor as u64, identity, generation, reference.offset, reference.len]);
}

fn hear_where(line: &Line) -> Answer {
    let [process, descriptor, identity, generation, offset, len] = line.hear();
    let address = SegmentAddress { process: process as u32, descriptor: descriptor as i32, identity, generation };
    Answer(vec![SegmentRange { address, offset, len }])
}

/// Mappings that this process has of a segment that it reaches.
fn mappings_of(reference: &SegmentRange) -> impl Fn() -> usize + use<> {
    let SegmentAddress { process, descriptor, .. } = reference.address;
    let inode = std::fs::metadata(format!("/proc/{process}/fd/{descriptor}")).unwrap().ino().to_string();
    move || {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        maps.lines().filter(|line| line.split_ascii_whitespace().nth(4) == Some(&inode)).count()
    }
}

#[test]
fn entries_of_a_killed_owner_can_be_dropped() {
    let _alone = alone();
    let (ours, theirs) = Line::new();
    let named: ShardId = "a".parse().unwrap();
    let child = Child::start(|| {
        let owner = TensorStore::new(LIMITS);
        let ids = put(&owner, &[pattern(1, LEN)]).unwrap();
        say_where(&theirs, &references(&owner, &ids).0[0]);
        theirs.hear::<1>();
    });
    let consumer = TensorStore::new(LIMITS);
    let answer = hear_where(&ours);
    let mappings = mappings_of(&answer.0[0]);
    let views = fetch_by(&consumer, std::slice::from_ref(&named), &answer).unwrap();
    drop(child);
    // Tensors in use stay valid after the death of their owner.
    assert_eq!(views[0].bytes(), pattern(1, LEN));
    consumer.clear_buffer(Some(&[named]));
    drop(views);
    let begin = Instant::now();
    while mappings() > 0 {
        // time: the kernel unmaps memory in milliseconds; what does not come never comes
        assert!(begin.elapsed() < Duration::from_secs(30), "{}", mappings());
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn views_at_a_fork_are_good_on_both_sides_and_both_sides_hold_them() {
    let _alone = alone();
    let owner = TensorStore::new(LIMITS);
    let consumer = TensorStore::new(LIMITS);
    let (ours, theirs) = Line::new();
    let ids = put(&owner, &[pattern(1, LEN)]).unwrap();
    let view = fetch_by(&consumer, &ids, &references(&owner, &ids)).unwrap().remove(0);
    consumer.clear_buffer(Some(&ids));
    overwrite(&view, 7);
    let mut view = Some(view);
    let child = Child::start(|| {
        theirs.hear::<1>();
        let view = view.take().unwrap();
        assert_eq!(view.bytes(), vec![7; LEN]);
        overwrite(&view, 8);
        theirs.say(&[1]);
        theirs.hear::<1>();
        assert_eq!(view.bytes(), vec![8; LEN]);
        drop(view);
        theirs.say(&[2]);
        theirs.hear::<1>();
    });
    // Here it is kept, and there in use.
    drop(view.take());
    owner.remove(&ids);
    assert!(owner.stats().storage.memory.escaped_bytes >= LEN as u64, "the child has it");
    ours.say(&[0]);
    ours.hear::<1>();
    let others = put(&owner, &[pattern(2, LEN)]).unwrap();
    let again = fetch_by(&consumer, &others, &references(&owner, &others)).unwrap();
    assert_eq!(again[0].bytes(), pattern(2, LEN));
    ours.say(&[0]);
    ours.hear::<1>();
    wait_for_the_last_view(&owner);
    // Now the first memory is used again, and what was kept of it shows that.
    drop(again);
    owner.remove(&others);
    let both = put(&owner, &[pattern(3, LEN), pattern(4, LEN)]).unwrap();
    let views = fetch_by(&consumer, &both, &references(&owner, &both)).unwrap();
    assert_eq!((views[0].bytes(), views[1].bytes()), (&pattern(3, LEN)[..], &pattern(4, LEN)[..]));
    ours.say(&[0]);
    assert_eq!(child.join(), 0);
}

#[test]
fn a_reference_that_is_old_or_wrong_leads_to_nothing() {
    let _alone = alone();
    let owner = TensorStore::new(LIMITS);
    let ids = put(&owner, &[pattern(1, LEN)]).unwrap();
    let good = references(&owner, &ids).0[0];
    let consumer = TensorStore::new(LIMITS);
    let refused = |reference: SegmentRange| {
        let error = fetch_by(&consumer, &ids, &Answer(vec![reference])).unwrap_err();
        assert!(matches!(error, StoreError::Memory(_) | StoreError::Corrupt { .. }), "{error}");
        assert_eq!(consumer.stats().buffer.num_entries, 0);
    };
    // As long as nothing is known of the segment. Later it is found, and is what was meant.
    let mut elsewhere = good;
    elsewhere.address.descriptor = 0;
    refused(elsewhere);
    refused(SegmentRange { offset: 1 << 40, ..good });
    refused(SegmentRange { offset: u64::MAX - 5, ..good });
    refused(SegmentRange { len: LEN as u64 + 1, ..good });
    elsewhere = good;
    elsewhere.address.identity += 1;
    refused(elsewhere);
    drop(fetch_by(&consumer, &ids, &Answer(vec![good])).unwrap());
    consumer.clear_buffer(None);
    // Removed, and then its memory used again.
    owner.remove(&ids);
    wait_for_the_last_view(&owner);
    refused(good);
    put(&owner, &[pattern(2, LEN)]).unwrap();
    refused(good);
}

//! The life of a named segment, and the races between processes that create, attach, drop and sweep.
#![expect(clippy::disallowed_methods, reason = "the tests put in the folder what others would")]

use std::os::fd::AsFd;
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::sync::atomic::AtomicU64;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use super::*;
use crate::memory::DATA_START;
use crate::memory::{Access, Mapping};
use crate::segment::header::SegmentHeader;

/// Long enough for a thread to reach its wait.
const A_WHILE: Duration = Duration::from_millis(50);

const BYTES: usize = DATA_START + 100;

struct TestFolder {
    _temporary: tempfile::TempDir,
    folder: Arc<SegmentFolder>,
}

impl TestFolder {
    fn new() -> Self {
        let temporary = tempfile::tempdir().unwrap();
        let folder = Arc::new(SegmentFolder::at(temporary.path()).unwrap());
        Self { _temporary: temporary, folder }
    }

    fn draft(&self, name: &str) -> Result<(OwnedFd, NameClaim), ShmError> {
        let claim = NameClaim::new(self.folder.clone(), named(name), &mut || Ok(()))?;
        let (file, _) = claim.make_file(BYTES, &mut || Ok(()))?;
        let map = Mapping::new(&file, BYTES, Access::Write)?;
        static MADE: AtomicU64 = AtomicU64::new(1);
        let (identity, maker) = (MADE.fetch_add(1, Ordering::Relaxed), std::process::id());
        SegmentHeader { identity, generation: 1, data_len: 100, maker, layout: Vec::new() }.write(&map);
        Ok((file, claim))
    }

    fn create(&self, name: &str) -> Result<NamedFile, ShmError> {
        let (file, claim) = self.draft(name)?;
        let hold = claim.publish(file.as_fd(), &mut || Ok(()))?;
        Ok(NamedFile { file, hold })
    }

    fn attach(&self, name: &str) -> Result<NamedFile, ShmError> {
        attach(self.folder.clone(), named(name), &mut || Ok(()))
    }

    /// A draft that takes the name once the present segment is removed.
    fn draft_of_tokens(&self) -> (OwnedFd, NameClaim) {
        let (file, claim) = self.draft("spare").unwrap();
        (file, NameClaim { name: named("tokens"), ..claim })
    }

    /// The state that a killed creator leaves: the kernel has dropped its locks.
    fn leave(&self, name: &str) -> u64 {
        let NamedFile { file, hold } = self.create(name).unwrap();
        let identity = identity_of(&file);
        drop(file);
        std::mem::forget(hold);
        identity
    }

    fn path_of(&self, name: &str) -> PathBuf {
        self.folder.path_of(&named(name))
    }

    fn sweep(&self) -> (Vec<String>, Vec<String>) {
        let report = sweep(&self.folder, false, &mut || Ok(())).unwrap();
        assert!(report.failed.is_empty(), "{:?}", report.failed);
        (names(&report.dead), names(&report.live))
    }
}

/// The number that tells a segment from any other, also from one with the same inode number.
fn identity_of(file: &OwnedFd) -> u64 {
    SegmentHeader::read(file.as_fd(), BYTES, "a segment").unwrap().identity
}

fn named(name: &str) -> SegmentName {
    SegmentName::new(name).unwrap()
}

fn names(segments: &[NamedSegment]) -> Vec<String> {
    segments.iter().map(|segment| segment.name.as_str().to_owned()).collect()
}

fn is_missing<T>(outcome: Result<T, ShmError>) -> bool {
    matches!(outcome, Err(ShmError::Missing { .. }))
}

#[test]
fn a_segment_is_there_until_the_last_holder_lets_go() {
    let test = TestFolder::new();
    assert!(is_missing(test.attach("tokens")));
    let creator = test.create("tokens").unwrap();
    let reader = test.attach("tokens").unwrap();
    assert_eq!(reader.hold.file, creator.hold.file);
    assert!(matches!(test.create("tokens"), Err(ShmError::Exists { holder, .. }) if holder.contains("process")));
    drop(creator);
    let second = test.attach("tokens").unwrap();
    drop(reader);
    assert!(test.path_of("tokens").exists());
    drop(second);
    assert!(!test.path_of("tokens").exists());
}

#[test]
fn a_map_holds_without_a_descriptor() {
    let test = TestFolder::new();
    let NamedFile { file, hold } = test.create("tokens").unwrap();
    let map = Mapping::new(&file, DATA_START, Access::Write).unwrap();
    drop(file);
    drop(hold);
    assert_eq!(test.sweep(), (vec![], vec!["tokens".to_owned()]));
    drop(map);
    assert_eq!(test.sweep(), (vec!["tokens".to_owned()], vec![]));
    assert!(!test.path_of("tokens").exists());
}

#[test]
fn a_reader_gets_no_map_to_write() {
    let test = TestFolder::new();
    let _held = test.create("tokens").unwrap();
    let reader = test.attach("tokens").unwrap();
    assert!(Mapping::new(&reader.file, DATA_START, Access::Write).is_err());
    let mode = std::os::unix::fs::MetadataExt::mode(&test.path_of("tokens").metadata().unwrap());
    assert_eq!(mode & 0o777, 0o600);
}

#[test]
fn a_draft_has_no_name_and_leaves_nothing() {
    let test = TestFolder::new();
    let (file, claim) = test.draft("tokens").unwrap();
    assert_eq!(std::fs::read_dir(&test.folder.path).unwrap().count(), 0);
    assert!(is_missing(test.attach("tokens")));
    // Meanwhile another may be faster.
    let _other = test.create("tokens").unwrap();
    assert!(matches!(claim.publish(file.as_fd(), &mut || Ok(())), Err(ShmError::Exists { .. })));
    test.attach("tokens").unwrap();
}

#[test]
fn a_dead_segment_is_not_found_and_makes_room_for_the_next() {
    let test = TestFolder::new();
    let dead = test.leave("tokens");
    assert!(is_missing(test.attach("tokens")));
    assert_ne!(identity_of(&test.create("tokens").unwrap().file), dead);
}

#[test]
fn a_sweep_removes_dead_segments_and_a_dry_run_lists_them() {
    let test = TestFolder::new();
    for name in ["b", "a", "c"] {
        test.leave(name);
    }
    let _held = test.create("living").unwrap();
    let seen = sweep(&test.folder, true, &mut || Ok(())).unwrap();
    assert_eq!(names(&seen.dead), ["a", "b", "c"]);
    assert_eq!((seen.dead[0].bytes, seen.dead[0].maker), (BYTES, std::process::id()));
    let dead = ["a", "b", "c"].map(str::to_owned).to_vec();
    assert_eq!(test.sweep(), (dead, vec!["living".to_owned()]));
    assert_eq!(test.sweep(), (vec![], vec!["living".to_owned()]));
}

#[test]
fn foreign_files_are_neither_locked_nor_removed_nor_attached_to() {
    let test = TestFolder::new();
    let theirs = [b"short".to_vec(), Vec::new(), vec![b'x'; 2 * DATA_START]];
    for (number, content) in theirs.iter().enumerate() {
        std::fs::write(test.path_of(&format!("file{number}")), content).unwrap();
    }
    std::fs::create_dir(test.path_of("folder")).unwrap();
    test.leave("dead");
    symlink(test.path_of("dead"), test.path_of("link")).unwrap();
    let elsewhere = test.folder.path.join("tundish-other-dead");
    std::fs::copy(test.path_of("dead"), &elsewhere).unwrap();
    assert_eq!(test.sweep(), (vec!["dead".to_owned()], vec![]));
    for name in ["file0", "file1", "file2", "folder", "link"] {
        assert!(test.path_of(name).symlink_metadata().is_ok(), "{name}");
        assert!(is_missing(test.attach(name)), "{name}");
        assert!(matches!(test.create(name), Err(ShmError::Exists { .. })), "{name}");
    }
    assert!(elsewhere.exists());
}

#[test]
fn names_that_could_lead_elsewhere_are_refused() {
    for name in ["", "a/b", "../a", "ä", "a b", "a\0", &"a".repeat(201)] {
        assert!(matches!(SegmentName::new(name), Err(ShmError::Invalid(_))), "{name:?}");
    }
    let test = TestFolder::new();
    for name in [".", "..", "-", &"a".repeat(200)] {
        test.create(name).unwrap();
    }
}

#[test]
fn a_probe_that_is_over_locks_nothing_even_where_a_child_inherited_it() {
    let test = TestFolder::new();
    let _held = test.create("tokens").unwrap();
    let name = named("tokens");
    let probe = ProbedFile::take(&test.folder, &name, &mut || Ok(())).unwrap().unwrap();
    // As fork leaves it to a child: another descriptor of the same description.
    let inherited = probe.descriptor().try_clone_to_owned().unwrap();
    drop(probe);
    test.attach("tokens").unwrap();
    drop(inherited);
}

#[test]
fn a_wait_for_a_probe_can_be_interrupted() {
    let test = TestFolder::new();
    let _held = test.create("tokens").unwrap();
    let name = named("tokens");
    let _probe = ProbedFile::take(&test.folder, &name, &mut || Ok(())).unwrap().unwrap();
    let stop = || Err(ShmError::Invalid("stop".to_owned()));
    let outcome = attach(test.folder.clone(), named("tokens"), &mut { stop }).map(|_| ());
    assert!(matches!(outcome, Err(ShmError::Invalid(_))));
}

/// Runs `work` on a thread while a probe of the name is held, which `then` ends.
fn meanwhile<T: Send>(test: &TestFolder, work: impl FnOnce() -> T + Send, then: impl FnOnce(ProbedFile<'_>)) -> T {
    let name = named("tokens");
    let probe = ProbedFile::take(&test.folder, &name, &mut || Ok(())).unwrap().unwrap();
    thread::scope(|scope| {
        let (sender, receiver) = mpsc::channel();
        let waiting = scope.spawn(move || {
            let outcome = work();
            sender.send(()).unwrap();
            outcome
        });
        assert!(receiver.recv_timeout(A_WHILE).is_err(), "it has to wait for the probe");
        then(probe);
        receiver.recv_timeout(Duration::from_secs(10)).unwrap();
        waiting.join().unwrap()
    })
}

#[test]
fn a_create_during_the_sweep_of_a_dead_segment_gets_the_name() {
    let test = TestFolder::new();
    let dead = test.leave("tokens");
    let created = meanwhile(&test, || test.create("tokens"), |sweeper| sweeper.remove().unwrap());
    let created = created.unwrap();
    assert_ne!(identity_of(&created.file), dead);
    drop(created);
    assert!(!test.path_of("tokens").exists(), "the last holder has ended");
}

#[test]
fn a_sweep_leaves_a_segment_that_replaced_the_dead_one_meanwhile() {
    let test = TestFolder::new();
    test.leave("tokens");
    let (file, claim) = test.draft_of_tokens();
    let mut kept = None;
    let swept = meanwhile(
        &test,
        || test.sweep(),
        |other| {
            other.remove().unwrap();
            kept = Some(claim.publish(file.as_fd(), &mut || Ok(())).unwrap());
        },
    );
    // Between the removal and the new one there is none for an instant, which is found on a busy machine.
    assert!(swept.0.is_empty() && swept.1.len() <= 1, "{swept:?}");
    assert_eq!(test.sweep(), (vec![], vec!["tokens".to_owned()]));
    assert!(test.folder.leads_to(&named("tokens"), kept.unwrap().file).unwrap());
}

#[test]
fn an_attach_during_a_replacement_gets_the_new_segment() {
    let test = TestFolder::new();
    test.leave("tokens");
    let (file, claim) = test.draft_of_tokens();
    let mut kept = None;
    let attached = meanwhile(
        &test,
        // Between the removal and the new one there is none for an instant, which is found on a busy machine.
        || (0..10_000).map(|_| test.attach("tokens")).find(|found| !matches!(found, Err(ShmError::Missing { .. }))),
        |other| {
            other.remove().unwrap();
            kept = Some(claim.publish(file.as_fd(), &mut || Ok(())).unwrap());
        },
    );
    assert_eq!(attached.unwrap().unwrap().hold.file, kept.unwrap().file);
}

#[test]
fn an_attach_while_the_last_holder_lets_go_gets_all_or_nothing() {
    let test = TestFolder::new();
    let NamedFile { file, hold } = test.create("tokens").unwrap();
    // The holder has unmapped and waits for the probe lock to take the name away; the reader has the lock.
    let reader = {
        let name = named("tokens");
        let probe = ProbedFile::take(&test.folder, &name, &mut || Ok(())).unwrap().unwrap();
        assert!(probe.is_held().unwrap());
        let (reading, _) = test.folder.open(&name, OFlags::RDONLY).unwrap().unwrap();
        drop(file);
        memory::lock_shared(reading.as_fd()).unwrap();
        reading
    };
    drop(hold);
    assert!(test.path_of("tokens").exists(), "a reader holds it");
    drop(reader);
    assert_eq!(test.sweep().0, ["tokens"]);
}

#[test]
fn in_any_order_a_held_name_leads_to_the_held_segment() {
    let test = TestFolder::new();
    let held = |hold: &NameHold| assert!(test.folder.leads_to(&hold.name, hold.file).unwrap());
    thread::scope(|scope| {
        for seed in 1..=6_u32 {
            let (test, held) = (&test, &held);
            scope.spawn(move || {
                let mut random = seed.wrapping_mul(0x9e37_79b9);
                for _ in 0..400 {
                    // The generator of "Xorshift RNGs" (Marsaglia, 2003).
                    random ^= random << 13;
                    random ^= random >> 17;
                    random ^= random << 5;
                    let name = ["a", "b"][(random >> 8) as usize % 2];
                    match random % 5 {
                        0 | 1 => match test.create(name) {
                            Ok(NamedFile { file, hold }) => {
                                held(&hold);
                                thread::yield_now();
                                held(&hold);
                                drop(file);
                                // Some are killed.
                                if random & 64 == 0 { std::mem::forget(hold) } else { drop(hold) }
                            }
                            Err(ShmError::Exists { .. }) => {}
                            Err(error) => panic!("{error}"),
                        },
                        2 | 3 => match test.attach(name) {
                            Ok(reader) => {
                                held(&reader.hold);
                                thread::yield_now();
                                held(&reader.hold);
                            }
                            Err(ShmError::Missing { .. }) => {}
                            Err(error) => panic!("{error}"),
                        },
                        _ => {
                            test.sweep();
                        }
                    }
                }
            });
        }
    });
    test.sweep();
    assert_eq!(std::fs::read_dir(&test.folder.path).unwrap().count(), 0);
}

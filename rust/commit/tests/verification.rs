//! Every change of a checkpoint is found: by its manifest, its sizes and every byte of its files.

#![expect(clippy::disallowed_methods, reason = "the tests damage what was written")]

#[path = "support/common/mod.rs"]
mod common;

use std::collections::BTreeSet;
use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use common::crc64;
use tundish_commit::root::{read_lock_at, verify_checkpoint};
use tundish_commit::{CommitError, RealDisk, add_manifest_checksum, checksum_file, write_small_file};

const FILES: [(&str, usize); 5] =
    [("model.safetensors", 20_000_003), ("config.json", 700), ("a/b/deep", 4096), ("a/flat", 9000), ("empty", 0)];

fn bytes(length: usize, seed: usize) -> Vec<u8> {
    (0..length).map(|i| (i ^ ((i >> 8) * 5) ^ ((i >> 16) * 11) ^ seed) as u8).collect()
}

/// A checkpoint as it is published.
fn checkpoint() -> (tempfile::TempDir, PathBuf) {
    let parent = tempfile::tempdir().unwrap();
    let folder = parent.path().join("hf-7");
    fs::create_dir(&folder).unwrap();
    let mut entries = Vec::new();
    for (seed, (name, length)) in FILES.into_iter().enumerate() {
        let metadata = write_small_file(&folder, name, &bytes(length, seed)).unwrap();
        let checksum = metadata.checksum.unwrap().to_string();
        assert_eq!(checksum, format!("crc64nvme:{:016x}", crc64(&bytes(length, seed))));
        entries.push(format!(r#"{{"name": "{name}", "size": {length}, "checksum": "{checksum}"}}"#));
    }
    let files = entries.join(",\n");
    let manifest = format!(r#"{{"format_version": 1, "kind": "hf", "step": 7, "files": [{files}]}}"#);
    fs::write(folder.join("tundish.json"), add_manifest_checksum(&manifest).unwrap()).unwrap();
    (parent, folder)
}

fn verify(folder: &Path) -> Result<Vec<String>, CommitError> {
    verify_checkpoint(folder, &mut |_, _| ControlFlow::Continue(()))
}

/// The files that a verification complains of.
fn damage(folder: &Path) -> Vec<String> {
    match verify(folder) {
        Err(CommitError::Corrupt { path, reason, files }) => {
            assert_eq!(path, folder);
            assert!(reason.contains(&files[0]), "{reason}");
            files
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_written_checkpoint_verifies() {
    let (_parent, folder) = checkpoint();
    assert_eq!(verify(&folder).unwrap(), [] as [String; 0]);
    let total: u64 = FILES.iter().map(|(_, length)| *length as u64).sum();
    let mut seen = (0, 0);
    verify_checkpoint(&folder, &mut |read, of| {
        assert!(read >= seen.0, "progress goes back");
        seen = (read, of);
        ControlFlow::Continue(())
    })
    .unwrap();
    assert_eq!(seen, (total, total));
}

#[test]
fn flipped_bits_zeroed_pages_and_truncations_are_found_in_every_file() {
    let (_parent, folder) = checkpoint();
    let names = FILES.iter().map(|(name, _)| *name).chain(["tundish.json"]);
    let mut changes = 0;
    for name in names.filter(|name| *name != "empty") {
        let path = folder.join(name);
        let whole = fs::read(&path).unwrap();
        let mut found = |changed: &[u8], what: &str| {
            fs::write(&path, changed).unwrap();
            assert_eq!(damage(&folder), [name], "{what}");
            changes += 1;
        };
        let length = whole.len();
        for at in [0, length / 3, length / 2, length - 1] {
            let mut changed = whole.clone();
            changed[at] ^= 1 << (at % 8);
            found(&changed, &format!("a bit of byte {at} of {name}"));
            let page = at / 4096 * 4096;
            let mut changed = whole.clone();
            changed[page..length.min(page + 4096)].fill(0);
            found(&changed, &format!("the page at {page} of {name}"));
            found(&whole[..at], &format!("{name} cut to {at}"));
        }
        found(&[&whole[..], b"x"].concat(), &format!("a byte more in {name}"));
        fs::write(&path, &whole).unwrap();
        verify(&folder).unwrap();
    }
    assert_eq!(changes, 5 * 13);
}

#[test]
fn all_missing_foreign_and_changed_files_are_named_at_once() {
    let (parent, folder) = checkpoint();
    fs::write(folder.join("config.json"), bytes(700, 99)).unwrap();
    fs::write(folder.join("a/flat"), b"short").unwrap();
    fs::remove_file(folder.join("empty")).unwrap();
    fs::remove_file(folder.join("a/b/deep")).unwrap();
    fs::create_dir(folder.join("a/b/deep")).unwrap();
    fs::write(folder.join("extra"), b"").unwrap();
    fs::create_dir(folder.join("more")).unwrap();
    fs::write(folder.join("more/extra"), b"").unwrap();
    std::os::unix::fs::symlink("config.json", folder.join("link")).unwrap();
    let expected = ["a/b/deep", "a/flat", "config.json", "empty", "extra", "link", "more/extra"];
    assert_eq!(damage(&folder), expected);
    // A link that leads to the very bytes is not the file.
    let (elsewhere, whole) = checkpoint();
    let model = elsewhere.path().join("model");
    fs::rename(whole.join("model.safetensors"), &model).unwrap();
    std::os::unix::fs::symlink(&model, whole.join("model.safetensors")).unwrap();
    assert_eq!(damage(&whole), ["model.safetensors"]);
    drop(parent);
}

#[test]
fn only_the_named_files_are_verified() {
    let (_parent, folder) = checkpoint();
    let lock = read_lock_at(&RealDisk, &folder).unwrap();
    let look = |names: &[&str], every_byte| {
        let names = names.iter().map(|name| (*name).to_owned()).collect::<BTreeSet<_>>();
        let damaged = lock.verify_files(&names, every_byte, &mut |_, _| ControlFlow::Continue(())).unwrap();
        damaged.into_iter().map(|damage| (damage.name, damage.is_changed)).collect::<Vec<_>>()
    };
    let all = FILES.map(|(name, _)| name);
    assert!(look(&all, true).is_empty());
    assert!(lock.foreign_files().unwrap().is_empty());
    fs::write(folder.join("config.json"), bytes(700, 99)).unwrap();
    fs::write(folder.join("a/flat"), b"short").unwrap();
    fs::remove_file(folder.join("empty")).unwrap();
    fs::write(folder.join("a/mine"), b"").unwrap();
    assert!(look(&["model.safetensors", "a/b/deep"], true).is_empty());
    let found = |name: &str, is_changed| (name.to_owned(), is_changed);
    // A missing or shorter file may be so for this reader alone; other bytes are damage for all.
    assert_eq!(look(&all, false), [found("a/flat", false), found("empty", false)]);
    assert_eq!(look(&all, true), [found("a/flat", false), found("empty", false), found("config.json", true)]);
    assert_eq!(look(&["a/mine", "config.json"], false), [found("a/mine", false)]);
    assert_eq!(lock.foreign_files().unwrap(), ["a/mine"]);
    let names = all.map(str::to_owned).into();
    let error = lock.verify_files(&names, true, &mut |_, _| ControlFlow::Break(())).unwrap_err();
    assert!(matches!(error, CommitError::Interrupted { .. }), "{error}");
}

#[test]
fn a_file_is_read_as_it_was_written() {
    let (_parent, folder) = checkpoint();
    let lock = read_lock_at(&RealDisk, &folder).unwrap();
    let (_, files, _) = lock.describe().unwrap();
    for file in &files {
        let read = lock.read_file(&file.name, file.size, file.checksum.as_deref()).unwrap();
        assert_eq!(read, fs::read(folder.join(&file.name)).unwrap());
        assert_eq!(lock.read_file(&file.name, file.size, None).unwrap(), read);
    }
    let refused = |name: &str, size: u64, checksum: Option<&str>| match lock.read_file(name, size, checksum) {
        Err(CommitError::Corrupt { reason, files, .. }) => {
            assert_eq!(files, [name]);
            reason
        }
        other => panic!("{other:?}"),
    };
    let checksum = |name: &str| files.iter().find(|file| file.name == name).unwrap().checksum.as_deref();
    assert!(refused("config.json", 700, checksum("a/flat")).contains("has the checksum"));
    assert!(refused("config.json", 701, checksum("config.json")).contains("has 700 bytes in the place of 701"));
    assert!(refused("missing", 1, None).contains("is missing"));
    for outside in ["../hf-7/config.json", "/etc/hostname", "a/../config.json", "tundish.json", ""] {
        assert!(refused(outside, 700, None).contains("is foreign"), "{outside}");
    }
    fs::remove_file(folder.join("config.json")).unwrap();
    std::os::unix::fs::symlink("a/flat", folder.join("config.json")).unwrap();
    assert!(refused("config.json", 9000, None).contains("is no plain file"));
}

#[test]
fn a_folder_without_a_manifest_is_no_checkpoint() {
    let (_parent, folder) = checkpoint();
    let manifest = fs::read_to_string(folder.join("tundish.json")).unwrap();
    fs::remove_file(folder.join("tundish.json")).unwrap();
    assert_eq!(damage(&folder), ["tundish.json"]);
    // One that is right but for its own checksum.
    let (body, _) = manifest.rsplit_once(",\n  \"checksum\"").unwrap();
    fs::write(folder.join("tundish.json"), format!("{body}}}")).unwrap();
    assert_eq!(damage(&folder), ["tundish.json"]);
    // One of a kind of checksum that there is not.
    let other = body.replacen("crc64nvme:", "md5:", 1);
    fs::write(folder.join("tundish.json"), add_manifest_checksum(&format!("{other}}}")).unwrap()).unwrap();
    assert_eq!(damage(&folder), ["model.safetensors"]);
    let missing = verify(&folder.join("missing")).unwrap_err();
    assert!(matches!(missing, CommitError::NoSuchCheckpoint { .. }), "{missing}");
}

#[test]
fn a_file_without_a_checksum_is_compared_by_size() {
    let parent = tempfile::tempdir().unwrap();
    let folder = parent.path().join("dcp-1");
    fs::create_dir(&folder).unwrap();
    fs::write(folder.join("file"), b"12345").unwrap();
    let manifest = r#"{"format_version": 1, "kind": "dcp", "step": 1, "files": [{"name": "file", "size": 5}]}"#;
    fs::write(folder.join("tundish.json"), add_manifest_checksum(manifest).unwrap()).unwrap();
    // Verification reports it.
    assert_eq!(verify(&folder).unwrap(), ["file"]);
    fs::write(folder.join("file"), b"12354").unwrap();
    assert_eq!(verify(&folder).unwrap(), ["file"]);
    fs::write(folder.join("file"), b"123456").unwrap();
    assert_eq!(damage(&folder), ["file"]);
}

#[test]
fn an_interrupted_verification_reports_that() {
    let (_parent, folder) = checkpoint();
    let error = verify_checkpoint(&folder, &mut |_, _| ControlFlow::Break(())).unwrap_err();
    assert!(matches!(error, CommitError::Interrupted { .. }), "{error}");
}

#[test]
fn foreign_files_are_summed_and_made_durable() {
    let folder = tempfile::tempdir().unwrap();
    let mut on_progress = |_, _| ControlFlow::Continue(());
    for length in [0, 1, 4096, 8 << 20, (17 << 20) + 3] {
        let path = folder.path().join(format!("file-{length}"));
        fs::write(&path, bytes(length, 3)).unwrap();
        let metadata = checksum_file(&path, &mut on_progress).unwrap();
        assert_eq!((metadata.name, metadata.size), (format!("file-{length}"), length as u64));
        assert_eq!(metadata.checksum.unwrap().to_string(), format!("crc64nvme:{:016x}", crc64(&bytes(length, 3))));
    }
    std::os::unix::fs::symlink("file-1", folder.path().join("link")).unwrap();
    for other in ["missing", "link", "."] {
        assert!(checksum_file(folder.path().join(other), &mut on_progress).is_err(), "{other}");
    }
    let error = checksum_file(folder.path(), &mut on_progress).unwrap_err();
    assert_eq!(error.path(), folder.path());
}

#[test]
fn a_small_file_replaces_nothing() {
    let folder = tempfile::tempdir().unwrap();
    write_small_file(folder.path(), "a/config.json", b"{}").unwrap();
    assert_eq!(fs::read(folder.path().join("a/config.json")).unwrap(), b"{}");
    let error = write_small_file(folder.path(), "a/config.json", b"[]").unwrap_err();
    assert!(matches!(error, CommitError::FileExists { .. }), "{error}");
    assert_eq!(fs::read(folder.path().join("a/config.json")).unwrap(), b"{}");
    for name in ["../b", "/b", "tundish.json", ""] {
        let error = write_small_file(folder.path(), name, b"").unwrap_err();
        assert!(matches!(error, CommitError::InvalidWrite { .. }), "{error}");
    }
}

//! Helpers: a folder with known contents, and writers in processes of their own.
//!
//! A test executable starts itself again as the writer: the test called `child` returns at once unless
//! `TUNDISH_TEST_ROLE` says what it is to do.

// Each test executable uses its own part.
#![allow(dead_code)]
#![allow(clippy::disallowed_methods)]

use std::cell::Cell;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tundish_commit::staging::FileImage;
use tundish_commit::{AtomicFolder, CommitError};

pub const ROLE: &str = "TUNDISH_TEST_ROLE";
pub const TARGET: &str = "TUNDISH_TEST_TARGET";
pub const MARK: &str = "TUNDISH_TEST_MARK";
/// The file to which skipped tests are appended.
const SKIPS: &str = "TUNDISH_TEST_SKIPS";

/// Prints why this test, or a part of it, cannot run here. Appends it to the file of `SKIPS` too, because the output of
/// passing tests is not shown.
pub fn skip(reason: &str) {
    // One line for each: the first line of a program's message says enough.
    let reason = reason.lines().next().unwrap_or_default();
    let line = format!("skipped: {}: {reason}\n", std::thread::current().name().unwrap_or("a test"));
    print!("{line}");
    if let Some(path) = std::env::var_os(SKIPS) {
        let mut file = fs::File::options().append(true).create(true).open(path).unwrap();
        // In one call, because other tests write there too.
        file.write_all(line.as_bytes()).unwrap();
    }
}

/// Names and bytes of a small folder; `mark` tells one writer's from another's.
pub fn contents(mark: u8) -> Vec<(&'static str, Vec<u8>)> {
    let bytes = |seed: usize, length: usize| -> Vec<u8> {
        (0..length).map(|i| (i * 31 + i / 251 + seed) as u8 ^ mark).collect()
    };
    vec![
        ("plan.json", bytes(1, 211)),
        ("indices.npy", bytes(2, 70_000)),
        ("empty.npy", Vec::new()),
        ("longest.npy", bytes(3, 4096)),
    ]
}

/// Writes the folder without publishing it: each file in two appends, its first bytes last.
pub fn fill(folder: &AtomicFolder, mark: u8) -> Result<(), CommitError> {
    for (name, bytes) in contents(mark) {
        let mut file = folder.create_file(name)?;
        if !bytes.is_empty() {
            let header = bytes.len().min(16);
            let middle = bytes.len() / 2;
            file.append(&vec![0; header])?;
            file.append(&bytes[header..middle])?;
            file.append(&bytes[middle..])?;
            file.write_at(0, &bytes[..header])?;
        }
        file.finish()?;
    }
    Ok(())
}

pub fn publish(target: &Path, mark: u8) -> Result<(), CommitError> {
    let folder = AtomicFolder::create(target)?;
    fill(&folder, mark)?;
    folder.publish()
}

/// Asserts that the folder holds exactly the bytes of `contents(mark)`.
pub fn assert_complete(target: &Path, mark: u8) {
    let expected = contents(mark);
    let mut names: Vec<_> = expected.iter().map(|(name, _)| *name).collect();
    names.sort_unstable();
    assert_eq!(entries(target), names);
    for (name, bytes) in expected {
        assert!(fs::read(target.join(name)).unwrap() == bytes, "{name} holds other bytes");
    }
}

/// CRC-64/NVME byte by byte, from the definition: the polynomial of the NVM Express specification, reflected.
pub fn crc64(bytes: &[u8]) -> u64 {
    let table: Vec<u64> = (0..256u64)
        .map(|byte| (0..8).fold(byte, |value, _| (value >> 1) ^ if value & 1 == 1 { 0x9a6c_9329_ac4b_c9b5 } else { 0 }))
        .collect();
    !bytes.iter().fold(!0, |sum, byte| table[((sum ^ u64::from(*byte)) & 0xff) as usize] ^ (sum >> 8))
}

/// An image that holds `bytes`.
#[allow(unsafe_code)]
pub fn image(bytes: &[u8]) -> Arc<FileImage> {
    let image = FileImage::new(bytes.len()).unwrap();
    // SAFETY: the image is new, as long as the bytes, and nobody else has it.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), image.as_ptr(), bytes.len()) };
    Arc::new(image)
}

/// The names in a directory, sorted.
pub fn entries(directory: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort_unstable();
    names
}

/// Makes a folder with the mark that writers give theirs: the sticky bit.
pub fn leave_folder(path: &Path) {
    fs::create_dir(path).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o1700)).unwrap();
}

/// The only unfinished folder in a directory.
pub fn only_leftover(directory: &Path) -> PathBuf {
    let hidden: Vec<_> = entries(directory).into_iter().filter(|name| name.ends_with(".incomplete")).collect();
    assert_eq!(hidden.len(), 1, "{hidden:?}");
    directory.join(&hidden[0])
}

/// The role of this process, where it was started as a writer.
pub fn role() -> Option<(String, PathBuf, u8)> {
    let role = std::env::var(ROLE).ok()?;
    let target = PathBuf::from(std::env::var_os(TARGET).expect("a role comes with a target"));
    let mark = std::env::var(MARK).expect("a role comes with a mark").parse().expect("a mark is a byte");
    Some((role, target, mark))
}

/// This test executable, to be started as a writer.
pub fn child(role: &str, target: &Path, mark: u8) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["child", "--exact", "--nocapture", "--test-threads=1"])
        .env(ROLE, role)
        .env(TARGET, target)
        .env(MARK, mark.to_string())
        .env_remove("TUNDISH_FAILPOINT")
        .env_remove("TUNDISH_FAILPOINT_OF")
        .env_remove("TUNDISH_FAILPOINT_TRACE");
    command
}

/// A writer that waits until the test lets it continue or kills it. Dropping this kills it.
pub struct Waiting {
    process: Child,
    output: BufReader<ChildStdout>,
}

impl Waiting {
    /// Starts a writer and waits for it to print the line `ready`.
    pub fn start(mut command: Command) -> Self {
        let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let output = BufReader::new(process.stdout.take().unwrap());
        let mut waiting = Waiting { process, output };
        waiting.expect_line("ready");
        waiting
    }

    fn expect_line(&mut self, expected: &str) {
        let mut line = String::new();
        // The test harness prints its own lines around ours, and begins ours with its own words.
        while !line.trim_end().ends_with(expected) {
            line.clear();
            let read = self.output.read_line(&mut line).unwrap();
            assert!(read > 0, "the writer ended before it printed {expected:?}");
        }
    }

    /// Lets the writer go on; returns whether it ended well.
    pub fn resume(mut self) -> bool {
        drop(self.process.stdin.take());
        // Read to the end, so that the writer cannot stand still before a full pipe.
        std::io::copy(&mut self.output, &mut std::io::sink()).unwrap();
        self.process.wait().unwrap().success()
    }

    /// SIGKILL, and wait until the process is gone.
    pub fn kill(mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// In a writer: prints `ready`, then waits for [`Waiting::resume`].
pub fn wait_for_resume() {
    println!("ready");
    let mut nothing = String::new();
    std::io::stdin().read_line(&mut nothing).unwrap();
}

/// A file system mounted for one test.
pub struct Mount {
    pub path: PathBuf,
    _folder: tempfile::TempDir,
    /// Last of all: it ends when the umount has.
    _turn: Turn,
}

/// Lets one test of a process mount at a time. A starting `mount` inherits the open files of other tests: removed files
/// would still take room, and locks of dead writers would still be held.
struct Turn {
    taken: Option<MutexGuard<'static, ()>>,
}

static TURN: Mutex<()> = Mutex::new(());

thread_local! {
    static HAS_TURN: Cell<bool> = const { Cell::new(false) };
}

impl Turn {
    fn take() -> Self {
        // A test may mount more than once.
        let has_turn = HAS_TURN.replace(true);
        Turn { taken: (!has_turn).then(|| TURN.lock().unwrap_or_else(PoisonError::into_inner)) }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        if self.taken.is_some() {
            HAS_TURN.set(false);
        }
    }
}

impl Mount {
    /// `None` where this user may not mount; `skip` reports that.
    pub fn new(kind: &str, options: &str) -> Option<Self> {
        let turn = Turn::take();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("mounted");
        fs::create_dir(&path).unwrap();
        let output = Command::new("mount").args(["-t", kind, "-o", options, "none"]).arg(&path).output();
        match output {
            Ok(output) if output.status.success() => Some(Mount { path, _folder: folder, _turn: turn }),
            Ok(output) => {
                let reason = String::from_utf8_lossy(&output.stderr).into_owned();
                skip(&format!("{kind} cannot be mounted here: {reason}"));
                None
            }
            Err(error) => {
                skip(&format!("the command mount cannot be run: {error}"));
                None
            }
        }
    }

    pub fn remount(&self, options: &str) {
        let status =
            Command::new("mount").args(["-o", &format!("remount,{options}")]).arg(&self.path).status().unwrap();
        assert!(status.success());
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        // Lazily: a test that failed may still hold a file open.
        let status = Command::new("umount").arg("-l").arg(&self.path).status();
        assert!(status.is_ok_and(|status| status.success()) || std::thread::panicking());
    }
}

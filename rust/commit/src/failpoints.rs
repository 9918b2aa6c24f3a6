//! Failpoints, compiled into test builds only (feature `failpoints`).
//!
//! The system calls of `real_disk.rs` are numbered from 0 over the life of the process. Environment variables, read
//! once, say what happens:
//!
//! `TUNDISH_FAILPOINT`
//! : `kill N`: SIGKILL at the Nth hit; call number k is hit number 2k before it is made and 2k + 1 after.
//! : `fail N ERRNO`: call number N is not made and returns the error number.
//! : `fail-after N ERRNO`: call number N is made, and its outcome is replaced by the error number.
//! : `panic N`: the thread that makes call number N panics instead.
//! : `short N BYTES`: call number N, where it is a write, stops soon after that many bytes and returns that number.
//! : `slow MILLISECONDS`: every call takes that much longer.
//!
//! `TUNDISH_FAILPOINT_OF`
//! : `operation TAB path`: only such calls are numbered, so that a number means the same call whatever other threads do.
//!   A `*` in the path stands for a part that differs from run to run.
//!
//! `TUNDISH_FAILPOINT_TRACE`
//! : a file to which each call appends the line `operation TAB path TAB outcome` once it was made. Twice the number
//!   of lines is the number of hits.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::Path;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use rustix::io::Errno;
use rustix::process::{Signal, getpid, kill_process};

#[derive(Debug, PartialEq)]
enum Fault {
    None,
    Kill(usize),
    Fail(usize, Errno),
    FailAfter(usize, Errno),
    Panic(usize),
    Short(usize, usize),
    Slow(Duration),
}

struct Setting {
    fault: Fault,
    /// The operation and the path of the calls that are numbered; `None` for all.
    only: Option<Only>,
    trace: Option<File>,
}

struct Only {
    operation: String,
    /// The beginning of the path and, after a `*`, its end.
    path: (String, Option<String>),
}

impl Setting {
    fn is_numbered(&self, operation: &str, path: &Path) -> bool {
        let Some(only) = &self.only else {
            return true;
        };
        let path = path.to_string_lossy();
        only.operation == operation
            && match &only.path {
                (whole, None) => *whole == path,
                (start, Some(end)) => path.strip_prefix(start.as_str()).is_some_and(|rest| rest.ends_with(end)),
            }
    }
}

static CALLS: AtomicUsize = AtomicUsize::new(0);
static SETTING: OnceLock<Setting> = OnceLock::new();

/// Makes one system call between its two failpoints.
pub(crate) fn around<T>(
    operation: &str,
    path: &Path,
    system_call: impl FnOnce() -> rustix::io::Result<T>,
) -> rustix::io::Result<T> {
    let setting = SETTING.get_or_init(read_setting);
    // No setting names the number of a call that is not numbered.
    let is_numbered = setting.is_numbered(operation, path);
    let number = if is_numbered { CALLS.fetch_add(1, Ordering::SeqCst) } else { usize::MAX / 2 };
    hit(setting, 2 * number);
    let outcome = match setting.fault {
        Fault::Fail(at, errno) if at == number => Err(errno),
        Fault::FailAfter(at, errno) if at == number => system_call().and(Err(errno)),
        Fault::Panic(at) if at == number => panic!("told to at call {number}"),
        Fault::Slow(time) if is_numbered => {
            std::thread::sleep(time);
            system_call()
        }
        _ => system_call(),
    };
    if let Some(mut trace) = setting.trace.as_ref() {
        let result = match &outcome {
            Ok(_) => "ok".to_owned(),
            Err(errno) => errno.to_string(),
        };
        let line = format!("{operation}\t{}\t{result}\n", path.display());
        trace.write_all(line.as_bytes()).expect("the trace file can be written");
    }
    hit(setting, 2 * number + 1);
    outcome
}

/// For the next call, a write of `bytes` to `path`: what to pass to the system, in whole pages where possible, and how
/// many bytes to report as written at most.
pub(crate) fn shortened<'b>(bytes: &'b [u8], path: &Path) -> (&'b [u8], usize) {
    let setting = SETTING.get_or_init(read_setting);
    match setting.fault {
        Fault::Short(at, length) if setting.is_numbered("write", path) && at == CALLS.load(Ordering::SeqCst) => {
            (&bytes[..length.next_multiple_of(4096).min(bytes.len())], length)
        }
        _ => (bytes, bytes.len()),
    }
}

fn hit(setting: &Setting, number: usize) {
    if setting.fault == Fault::Kill(number) {
        kill_process(getpid(), Signal::KILL).expect("a process may kill itself");
        // The signal is delivered on the way back from the system call; nothing may run until then.
        loop {
            std::thread::park();
        }
    }
}

fn read_setting() -> Setting {
    let fault = match std::env::var("TUNDISH_FAILPOINT") {
        Ok(text) => parse(&text).unwrap_or_else(|| panic!("TUNDISH_FAILPOINT={text:?} is not understood")),
        Err(_) => Fault::None,
    };
    let trace = std::env::var_os("TUNDISH_FAILPOINT_TRACE")
        .map(|path| OpenOptions::new().create(true).append(true).open(path).expect("the trace file can be opened"));
    let only = std::env::var("TUNDISH_FAILPOINT_OF").ok().map(|text| {
        let (operation, path) = text.split_once('\t').expect("TUNDISH_FAILPOINT_OF is an operation, a tab and a path");
        let path = path.split_once('*').map_or((path, None), |(start, end)| (start, Some(end.to_owned())));
        Only { operation: operation.to_owned(), path: (path.0.to_owned(), path.1) }
    });
    Setting { fault, only, trace }
}

fn parse(text: &str) -> Option<Fault> {
    let mut words = text.split(' ');
    let kind = words.next()?;
    let number = words.next()?.parse().ok()?;
    let errno = |word: Option<&str>| Some(Errno::from_raw_os_error(word?.parse().ok()?));
    match kind {
        "kill" => Some(Fault::Kill(number)),
        "panic" => Some(Fault::Panic(number)),
        "slow" => Some(Fault::Slow(Duration::from_millis(number as u64))),
        "short" => Some(Fault::Short(number, words.next()?.parse().ok()?)),
        "fail" => Some(Fault::Fail(number, errno(words.next())?)),
        "fail-after" => Some(Fault::FailAfter(number, errno(words.next())?)),
        _ => None,
    }
}

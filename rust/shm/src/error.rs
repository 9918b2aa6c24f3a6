//! The error of this crate. Every variant names its segment, file or process.

use std::io;
use std::path::PathBuf;

use rustix::io::Errno;

/// Why shared memory could not be made, reached or used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ShmError {
    /// A system call failed.
    #[error("cannot {operation} {object}: {source}")]
    Io {
        /// A verb phrase such as `"map"`.
        operation: &'static str,
        /// The object of the verb: a path, or words such as `a segment of 4096 bytes`.
        object: String,
        /// The operating system's answer.
        source: io::Error,
    },
    /// The memory that is left does not hold the segment.
    #[error(
        "a segment of {asked} bytes does not fit: {available} bytes are left {bound}; share less at once, or give the \
         process more memory"
    )]
    NoHeadroom {
        /// The bytes that were asked for.
        asked: u64,
        /// The bytes that are left.
        available: u64,
        /// The limit, such as `on this machine`.
        bound: String,
    },
    /// The file system of named segments is full.
    #[error(
        "{} of {asked} bytes does not fit: {free} bytes are free there; make that file system larger, or free some of \
         it (`tundish shm sweep` removes what killed processes left)", path.display()
    )]
    NoSpace {
        /// The segment's file.
        path: PathBuf,
        /// The bytes that were asked for.
        asked: u64,
        /// The bytes that are free.
        free: u64,
    },
    /// The segment behind a handle was given back.
    #[error("{segment} is gone: {reason}")]
    Gone {
        /// Which segment.
        segment: String,
        /// Why it is gone.
        reason: String,
    },
    /// The segment behind a handle cannot be opened.
    #[error("cannot reach {segment}; its owner has to live and to keep it open. Tried: {}", tried.join("; "))]
    Unreached {
        /// Which segment.
        segment: String,
        /// The error of each attempt.
        tried: Vec<String>,
    },
    /// No segment has this name.
    #[error("there is no segment {}", path.display())]
    Missing {
        /// Where it would be.
        path: PathBuf,
    },
    /// A living process holds a segment of this name.
    #[error("{} exists already and is held by {holder}; use another name, or attach to it", path.display())]
    Exists {
        /// The segment's file.
        path: PathBuf,
        /// The process that holds it.
        holder: String,
    },
    /// The file is no segment of this library and version.
    #[error("{segment} cannot be used: {reason}")]
    NotASegment {
        /// The file or segment.
        segment: String,
        /// The reason.
        reason: String,
    },
    /// An argument that cannot be used.
    #[error("{0}")]
    Invalid(String),
    /// The caller interrupted the work.
    #[error("interrupted")]
    Interrupted,
    /// The timeout ended.
    #[error("timed out while waiting for {what}")]
    TimedOut {
        /// The awaited thing.
        what: &'static str,
    },
}

impl ShmError {
    /// Returns the error of a failed system call.
    pub fn io(operation: &'static str, object: impl Into<String>, errno: Errno) -> Self {
        ShmError::Io { operation, object: object.into(), source: errno.into() }
    }

    /// Returns whether the process or the system has no descriptors or addresses left, which is temporary.
    pub fn is_shortage(&self) -> bool {
        const SHORTAGES: [Errno; 3] = [Errno::MFILE, Errno::NFILE, Errno::NOMEM];

        let ShmError::Io { source, .. } = self else { return false };
        SHORTAGES.iter().any(|errno| source.raw_os_error() == Some(errno.raw_os_error()))
    }
}

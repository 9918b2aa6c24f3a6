//! Everything that can go wrong with a plan.

use std::path::PathBuf;

use tundish_commit::CommitError;

/// An error of this crate. Positions count from 0.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PackError {
    /// A length below zero.
    #[error("lengths of dataset {dataset}: sample {sample} has the negative length {value}; lengths are token counts")]
    NegativeLength {
        /// Which dataset.
        dataset: usize,
        /// Which sample in it.
        sample: usize,
        /// The length found.
        value: i64,
    },
    /// A cost below zero, or of 2⁶³ or more.
    #[error("costs of dataset {dataset}: sample {sample} has the cost {value}; costs are 0 to 2^63 - 1")]
    BadCost {
        /// Which dataset.
        dataset: usize,
        /// Which sample in it.
        sample: usize,
        /// The cost, as it was given.
        value: i128,
    },
    /// Samples that cost more than a pack may.
    #[error(
        "{count} {} more than max_cost={max_cost}; the worst is sample {sample} of dataset {dataset} with {cost}: raise max_cost, or leave such samples out",
        if *count == 1 { "sample costs" } else { "samples cost" }
    )]
    TooCostly {
        /// How many there are.
        count: u64,
        /// The dataset of the worst.
        dataset: usize,
        /// The worst, or the first of several.
        sample: usize,
        /// Its cost.
        cost: u64,
        /// What a pack may cost.
        max_cost: u64,
    },
    /// Lengths that add up to 2⁶³ or more.
    #[error(
        "all lengths up to sample {sample} of dataset {dataset} add up to 2^63 tokens or more; such a total cannot be planned"
    )]
    TotalTooLarge {
        /// Which dataset.
        dataset: usize,
        /// Which sample in it.
        sample: usize,
    },
    /// Samples longer than a pack, where they are refused.
    #[error(
        "{}: pass overlong='split' to cut such samples into parts, overlong='truncate' to keep their first {max_length} tokens, or overlong='drop' to leave them out",
        too_long(*count, *dataset, *sample, *length, *max_length)
    )]
    Overlong {
        /// How many there are.
        count: u64,
        /// The dataset of the longest.
        dataset: usize,
        /// The longest, or the first of several.
        sample: usize,
        /// Its length.
        length: u64,
        /// Tokens a pack.
        max_length: u64,
    },
    /// An entry of the order that names no sample.
    #[error("order[{position}] is {value}, but the dataset has {samples} samples, counted from 0")]
    OrderOutOfRange {
        /// Where in the order.
        position: usize,
        /// The entry, as it was given.
        value: i128,
        /// How many samples there are.
        samples: usize,
    },
    /// A sample named twice by the order.
    #[error("order[{position}] names sample {sample} again; each sample may be used at most once")]
    OrderRepeated {
        /// Where in the order the repetition is.
        position: usize,
        /// The sample.
        sample: usize,
    },
    /// An argument that cannot be used.
    #[error("{0}")]
    Invalid(String),
    /// The system gave no more memory.
    #[error(
        "cannot allocate {bytes} bytes of memory{}",
        if *plan_in_memory { "; a plan can be written to a folder, with out= or cache_dir=" } else { "" }
    )]
    OutOfMemory {
        /// What was asked for last, in bytes.
        bytes: u128,
        /// Whether a plan that was to lie in memory takes some of it, which is then not needed in a folder.
        plan_in_memory: bool,
    },
    /// A plan that needs more memory than the machine has.
    #[error(
        "the plan takes {bytes} bytes ({packs} packs, up to {pieces} pieces), more than this machine's {available} bytes of memory; write it to a folder with out= or cache_dir=, or raise max_length"
    )]
    TooLarge {
        /// Bytes of its arrays.
        bytes: u128,
        /// Packs of the plan.
        packs: u64,
        /// Pieces of the plan at most.
        pieces: u64,
        /// Physical memory, in bytes.
        available: u64,
    },
    /// More bytes than the file system has left.
    #[error(
        "the plan takes {needed} bytes or more ({packs} packs, {pieces} pieces), and the file system of {} has {free} bytes free; make room, write it elsewhere, or raise max_length",
        path.display()
    )]
    NoRoom {
        /// Where the plan was to appear.
        path: PathBuf,
        /// Bytes of its files at least.
        needed: u128,
        /// Packs of the plan at least.
        packs: u64,
        /// Pieces of the plan at least.
        pieces: u64,
        /// Bytes that are free.
        free: u64,
    },
    /// The lengths or the order were written to while they were read.
    #[error("lengths or order changed while they were being packed; give pack arrays that nobody writes to")]
    InputChanged,
    /// A plan folder that is damaged, incomplete or of another version.
    #[error("{}: {reason}", path.display())]
    Format {
        /// The file or folder at fault.
        path: PathBuf,
        /// What is wrong with it, and what to do.
        reason: String,
    },
    /// A plan folder or one of its files is not there.
    #[error("{}: {reason}", path.display())]
    Missing {
        /// The file or folder.
        path: PathBuf,
        /// What was expected.
        reason: String,
    },
    /// A plan that does not belong to the lengths it is checked against.
    #[error("{0}")]
    Mismatch(String),
    /// A pack number out of range.
    #[error("pack {index} does not exist: the plan has {packs} packs")]
    NoSuchPack {
        /// The number asked for, as it was given.
        index: i128,
        /// Packs of the plan.
        packs: usize,
    },
    /// Reading a file failed.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// Publishing the folder failed.
    #[error(transparent)]
    Commit(#[from] CommitError),
    /// The caller's `Progress` asked to stop.
    #[error("interrupted")]
    Interrupted,
}

fn too_long(count: u64, dataset: usize, sample: usize, length: u64, max_length: u64) -> String {
    if count == 1 {
        return format!(
            "sample {sample} of dataset {dataset} has {length} tokens, longer than max_length={max_length}"
        );
    }
    format!(
        "{count} samples are longer than max_length={max_length}; the longest, sample {sample} of dataset {dataset}, has \
         {length} tokens"
    )
}

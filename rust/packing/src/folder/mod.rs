//! A plan as a folder: `plan.json`, and one `.npy` file a field.
//!
//! `plan.json` ends with the checksum of all that stands before it, and holds the checksums of the columns' blocks.

mod mapped_column;
mod npy;
mod reader;
mod writer;

use std::borrow::Cow;

use crate::checksums::checksum;
use crate::plan::Field;

pub use mapped_column::MappedColumn;
pub use reader::{OpenPlan, open};
pub use writer::save;
pub(crate) use writer::{FolderWriter, check_disk_space};

/// The file that holds the metadata.
pub const METADATA_FILE: &str = "plan.json";
/// The largest `plan.json` that is read: a million datasets fit.
const LARGEST_METADATA: u64 = 64 << 20;
/// Bytes that are written or checked between two ticks.
const BUFFER_BYTES: usize = 1 << 20;

/// The name of a field's file.
#[must_use]
pub fn file_name(field: Field) -> String {
    format!("{}.npy", field.name())
}

/// The text between the content of `METADATA_FILE` and its checksum, and the text that ends the file.
const CHECKSUM_KEY: &str = ",\n  \"checksum\": \"";
const CHECKSUM_END: &str = "\"\n}\n";

/// The content of `METADATA_FILE`: a JSON object, and the checksum of its text as the last entry.
fn with_checksum(json: &str) -> String {
    let body = json.strip_suffix("\n}").unwrap_or(json);
    format!("{body}{CHECKSUM_KEY}{:016x}{CHECKSUM_END}", checksum(body.as_bytes()))
}

/// The JSON object in the content of `METADATA_FILE`, and whether it agrees with its checksum.
fn split_checksum(text: &str) -> (Cow<'_, str>, bool) {
    let Some((body, end)) = text.rsplit_once(CHECKSUM_KEY) else { return (Cow::Borrowed(text), false) };
    let is_intact = end == format!("{:016x}{CHECKSUM_END}", checksum(body.as_bytes()));
    (Cow::Owned(format!("{body}\n}}")), is_intact)
}

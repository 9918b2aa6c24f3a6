//! A plan as a folder: `plan.json`, and one `.npy` file a field.

mod disk_space;
mod mapped_column;
mod npy;
mod reader;
mod writer;

use crate::plan::Field;

pub use mapped_column::MappedColumn;
pub use reader::open;
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

//! What a plan is made from: lengths, and the order of the samples.

mod integers;
mod order;
mod ordered_samples;
mod sample_lengths;
mod shuffle;

pub use integers::{ColumnWord, IntegerKind, Integers};
pub use order::SampleOrder;
pub(crate) use order::check_order;
pub(crate) use ordered_samples::{OrderedSamples, WINDOW};
pub(crate) use sample_lengths::SampleLengths;
pub use shuffle::{Index, RandomState};

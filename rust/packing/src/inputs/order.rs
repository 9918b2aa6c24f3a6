//! Where the order of the samples comes from, and the exact check of an order that the caller gives.

use super::integers::Integers;
use super::ordered_samples::WINDOW;
use crate::error::PackError;
use crate::memory;
use crate::progress::Progress;

/// Where the order of the samples comes from.
#[derive(Clone, Copy, Debug)]
pub enum SampleOrder<'a> {
    /// The samples keep their order.
    Natural,
    /// Indices of the samples of one dataset, each at most once.
    Given(Integers<'a>),
    /// The order of numpy's `RandomState(seed).shuffle`, dataset after dataset in one random stream.
    Seed(u32),
}

/// Check that every entry of an order names one of `samples` samples, and no two entries the same.
///
/// # Errors
/// `OrderOutOfRange` or `OrderRepeated` with the first wrong entry; an interrupt.
pub(crate) fn check_order(order: &Integers<'_>, samples: usize, progress: &mut dyn Progress) -> Result<(), PackError> {
    let mut used = memory::zeroed::<u64>(samples.div_ceil(64))?;
    let mut entries = vec![0u64; order.len().min(WINDOW)];
    for start in (0..order.len()).step_by(WINDOW) {
        progress.tick("checking the order", start as u64, order.len() as u64)?;
        let entries = &mut entries[..(order.len() - start).min(WINDOW)];
        order.read(start, entries);
        for (position, &sample) in (start..).zip(&*entries) {
            if sample >= samples as u64 {
                return Err(PackError::OrderOutOfRange { position, value: order.as_given(sample), samples });
            }
            let (word, bit) = (&mut used[(sample / 64) as usize], 1u64 << (sample % 64));
            if *word & bit != 0 {
                return Err(PackError::OrderRepeated { position, sample: sample as usize });
            }
            *word |= bit;
        }
    }
    Ok(())
}

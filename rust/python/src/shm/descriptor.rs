//! Descriptors that Python gives as numbers.
#![allow(unsafe_code)]

use std::os::fd::{BorrowedFd, RawFd};

use tundish_shm::ShmError;

use crate::error::BindingError;

/// What `number` is, for the time of a call. Python keeps it open meanwhile; if it does not, calls on it fail or meet
/// what was opened in its place, as with every number of a descriptor.
pub(crate) fn borrow<'a>(number: RawFd) -> Result<BorrowedFd<'a>, BindingError> {
    if number < 0 {
        return Err(ShmError::Invalid(format!("{number} is not the number of a descriptor")).into());
    }
    // SAFETY: not -1, and nothing but system calls is done with it.
    Ok(unsafe { BorrowedFd::borrow_raw(number) })
}

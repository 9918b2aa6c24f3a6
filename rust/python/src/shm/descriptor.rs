//! Descriptors that Python gives as numbers.
#![allow(unsafe_code)]

use std::os::fd::{BorrowedFd, RawFd};

use tundish_shm::ShmError;

use crate::error::BindingError;

/// Borrows descriptor `number` for the time of a call. Python keeps it open meanwhile; else calls on it fail, or use
/// another file that got the number.
pub(crate) fn borrow<'a>(number: RawFd) -> Result<BorrowedFd<'a>, BindingError> {
    if number < 0 {
        return Err(ShmError::Invalid(format!("{number} is not the number of a descriptor")).into());
    }
    // SAFETY: not -1, and used for system calls only.
    Ok(unsafe { BorrowedFd::borrow_raw(number) })
}

//! `Refusal`: the status and the message of a request that is refused.

use crate::error::StoreError;

/// The status and the message of a request that is refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The status.
    pub status: u16,
    /// The message: the error and its remedy.
    pub reason: String,
}

impl Refusal {
    /// A refusal with this status.
    pub fn new(status: u16, reason: impl Into<String>) -> Self {
        Refusal { status, reason: reason.into() }
    }
}

impl From<StoreError> for Refusal {
    fn from(error: StoreError) -> Self {
        let status = match &error {
            StoreError::Invalid(_) => 400,
            StoreError::Missing { .. } => 404,
            StoreError::Exists { .. } | StoreError::StepEnded { .. } | StoreError::StepTaken { .. } => 409,
            StoreError::TooLarge { .. } => 413,
            StoreError::Full { .. } => 507,
            _ => 500,
        };
        Refusal::new(status, error.to_string())
    }
}

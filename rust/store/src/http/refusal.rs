//! Answers to requests that are not done.

use crate::error::StoreError;

/// Why a request is not done: a status of HTTP, and words for who asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The status.
    pub status: u16,
    /// What was wrong, and what to do.
    pub reason: String,
    /// Methods that the target has, with status 405.
    pub allowed: Option<&'static str>,
}

impl Refusal {
    /// A refusal with this status.
    pub fn new(status: u16, reason: impl Into<String>) -> Self {
        Refusal { status, reason: reason.into(), allowed: None }
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

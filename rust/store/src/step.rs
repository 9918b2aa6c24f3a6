//! `Step`: the name of a step.

use std::fmt;
use std::hash::{Hash, Hasher};

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A step. Two steps are equal if their ids are.
///
/// Messages and counts show its number: the caller's own if there is one, else the id.
#[derive(Clone, Copy, Debug, Default)]
pub struct Step {
    /// Given by its controller. No other step has it.
    pub id: u64,
    /// The caller's own number. Several steps may have it.
    pub number: Option<u64>,
}

impl Step {
    fn shown(self) -> u64 {
        self.number.unwrap_or(self.id)
    }
}

impl From<u64> for Step {
    fn from(id: u64) -> Self {
        Step { id, number: None }
    }
}

impl PartialEq for Step {
    fn eq(&self, other: &Self) -> bool {
        self.id == other.id
    }
}

impl Eq for Step {}

impl PartialEq<u64> for Step {
    fn eq(&self, id: &u64) -> bool {
        self.id == *id
    }
}

impl Hash for Step {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.id.hash(state);
    }
}

impl fmt::Display for Step {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.shown().fmt(formatter)
    }
}

impl Serialize for Step {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u64(self.shown())
    }
}

impl<'de> Deserialize<'de> for Step {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        u64::deserialize(deserializer).map(Step::from)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_callers_number_is_shown_and_the_id_compared() {
        let step = Step { id: 7, number: Some(120) };
        assert_eq!((step.to_string(), serde_json::to_string(&step).unwrap()), ("120".into(), "120".into()));
        assert_eq!(Step::from(7).to_string(), "7");
        assert!(step == Step::from(7) && step == 7 && step != Step { id: 8, number: Some(120) });
    }
}

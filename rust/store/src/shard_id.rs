//! Names of shards.
//!
//! A name is text that can stand in a URL and in a header. The names that a [`TensorStore`](crate::TensorStore) gives
//! are made of a number drawn once a process and a counter. They are held as these two, in 24 bytes. Any other text is
//! held as it is.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize, Serializer};

/// Bytes of the longest name.
const LONGEST: usize = 128;

/// Between the process's number and the shard's.
const SEPARATOR: char = '-';

/// Digits of the process's number.
const NONCE_DIGITS: usize = 16;

/// The name of a shard: up to 128 characters out of `A-Z a-z 0-9 . _ : -`. The same text is always equal.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Deserialize)]
#[serde(try_from = "String")]
pub struct ShardId(Repr);

#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Repr {
    Numbered { nonce: u64, counter: u64 },
    Text(Box<str>),
}

impl ShardId {
    /// The name that the process with this number gives its shard `counter`.
    pub fn numbered(nonce: u64, counter: u64) -> Self {
        ShardId(Repr::Numbered { nonce, counter })
    }

    /// The process's number and the shard's, of a name that a process gave.
    pub fn as_numbered(&self) -> Option<(u64, u64)> {
        match self.0 {
            Repr::Numbered { nonce, counter } => Some((nonce, counter)),
            Repr::Text(_) => None,
        }
    }
}

/// Why a text is not a [`ShardId`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct InvalidShardId(String);

impl FromStr for ShardId {
    type Err = InvalidShardId;

    /// # Errors
    /// [`InvalidShardId`] where the text is empty, too long or has other characters.
    fn from_str(text: &str) -> Result<Self, InvalidShardId> {
        if let Some(found) = parse_numbered(text) {
            return Ok(found);
        }
        if text.is_empty() || text.len() > LONGEST {
            let long = text.len();
            return Err(InvalidShardId(format!("a shard id has 1 to {LONGEST} characters, and this one {long}")));
        }
        let is_allowed = |byte: &u8| byte.is_ascii_alphanumeric() || b"._:-".contains(byte);
        if let Some(place) = text.bytes().position(|byte| !is_allowed(&byte)) {
            return Err(InvalidShardId(format!(
                "a shard id is made of A-Z, a-z, 0-9, '.', '_', ':' and '-'; character {place} of {text:?} is none of these"
            )));
        }
        Ok(ShardId(Repr::Text(text.into())))
    }
}

impl TryFrom<String> for ShardId {
    type Error = InvalidShardId;

    fn try_from(text: String) -> Result<Self, InvalidShardId> {
        text.parse()
    }
}

impl Serialize for ShardId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// Parses only the text of [`ShardId::numbered`], so that each name has one form.
fn parse_numbered(text: &str) -> Option<ShardId> {
    let (nonce, counter) = text.split_at_checked(NONCE_DIGITS)?;
    let counter = counter.strip_prefix(SEPARATOR)?;
    let is_lower_hex = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    let is_canonical = counter == "0" || !counter.starts_with('0');
    if !nonce.bytes().all(is_lower_hex) || !counter.bytes().all(|byte| byte.is_ascii_digit()) || !is_canonical {
        return None;
    }
    Some(ShardId::numbered(u64::from_str_radix(nonce, 16).ok()?, counter.parse().ok()?))
}

impl fmt::Display for ShardId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Repr::Numbered { nonce, counter } => write!(formatter, "{nonce:016x}{SEPARATOR}{counter}"),
            Repr::Text(text) => formatter.write_str(text),
        }
    }
}

impl fmt::Debug for ShardId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, formatter)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_name_of_a_process_takes_24_bytes() {
        assert_eq!(size_of::<ShardId>(), 24);
    }

    #[test]
    fn names_that_cannot_stand_in_a_url_are_refused() {
        for text in ["", "a/b", "a b", "ü", "a\n", "a%20", &"a".repeat(129)] {
            let InvalidShardId(reason) = text.parse::<ShardId>().unwrap_err();
            assert!(reason.starts_with("a shard id "), "{text:?}: {reason}");
        }
        assert_eq!("a".repeat(128).parse::<ShardId>().unwrap().to_string(), "a".repeat(128));
    }

    #[test]
    fn text_that_only_resembles_a_nodes_name_stays_text() {
        let name = "00000000000000ff-7";
        assert_eq!(name.parse::<ShardId>().unwrap(), ShardId::numbered(255, 7));
        let resembling = [
            "00000000000000FF-7",
            "00000000000000ff-07",
            "00000000000000ff-",
            "g0000000000000ff-7",
            "00000000000000ff-18446744073709551616",
            "0000000000000ff-7",
        ];
        for text in resembling {
            let id: ShardId = text.parse().unwrap();
            assert_eq!((id.as_numbered(), id.to_string().as_str()), (None, text));
        }
    }

    proptest! {
        #[test]
        fn a_name_is_the_text_that_it_is_written_as(nonce: u64, counter: u64, text in "[A-Za-z0-9._:-]{1,128}") {
            let id = ShardId::numbered(nonce, counter);
            prop_assert_eq!(&id.to_string().parse::<ShardId>().unwrap(), &id);
            prop_assert_eq!(text.parse::<ShardId>().unwrap().to_string(), text);
        }
    }
}

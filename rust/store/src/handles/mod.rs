//! Nested containers of handles in few bytes, and back.
//!
//! A value is a byte that says its kind, and its content; a container says how many values follow. Numbers are LEB128,
//! signed ones in zigzag. Owners, types and shapes, the numbers of nodes and short texts are written once and referred
//! to by their place from then on. A handle of the shard that follows the previous one is a single byte.
//!
//! Invariants, for bytes that anybody may have made:
//!
//! - Every length is compared with the bytes that are left before anything is allocated for it.
//! - A value takes at least a byte, and containers nest at most [`DEEPEST`] deep.
//! - Reading looks no name up anywhere.

mod reader;
mod writer;

use std::sync::Arc;

pub use self::reader::Reader;
pub use self::writer::Writer;
use crate::error::StoreError;
use crate::meta::Meta;
use crate::shard_id::{Rows, ShardId};

/// Containers in one another.
pub const DEEPEST: usize = 500;

/// How the bytes begin: what they are, and the version of their form.
const MAGIC: &[u8; 4] = b"tdh\x01";

/// Longer texts, and more of them, are told each time.
const LONGEST_KNOWN: usize = 64;
const MOST_KNOWN: usize = 4096;

/// An owner's address is no longer than this: a name of a host and a port.
const LONGEST_OWNER: usize = 300;

/// Whether a handle may name this as the address of its owner: the same for all who make, write or read one, since what
/// one accepts another has to.
///
/// # Errors
/// [`StoreError::Invalid`] where it may not.
pub fn check_owner(address: &str) -> Result<(), StoreError> {
    let refuse = |why: String| {
        let rule =
            format!("an address of an owner is host:port, up to {LONGEST_OWNER} ASCII characters without spaces");
        Err(StoreError::Invalid(format!("{rule}; {why}")))
    };
    if let Some((place, _)) = address.char_indices().find(|(_, character)| !character.is_ascii_graphic()) {
        return refuse(format!("character {place} of {address:?} is none of these"));
    }
    if address.len() > LONGEST_OWNER {
        return refuse(format!("this one has {}", address.len()));
    }
    Ok(())
}

const NONE: u8 = 0;
const FALSE: u8 = 1;
const TRUE: u8 = 2;
const INTEGER: u8 = 3;
const LARGE_INTEGER: u8 = 4;
const FLOAT: u8 = 5;
const TEXT: u8 = 6;
const KNOWN_TEXT: u8 = 7;
const BYTES: u8 = 8;
const LIST: u8 = 9;
const TUPLE: u8 = 10;
const DICT: u8 = 11;
const HANDLE: u8 = 12;
const NAMED_HANDLE: u8 = 13;
const ROWS: u8 = 14;
/// A numbered shard of the owner, type and shape of the handle before, and the next number.
const NEXT_HANDLE: u8 = 15;

/// Leads to a shard, or to some of its rows. Takes 40 bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Handle {
    /// Which shard.
    pub id: ShardId,
    /// What it has in common with others.
    pub kind: Arc<Kind>,
    /// Which rows are meant; all where `None`.
    pub rows: Option<Box<Rows>>,
}

/// What many handles have in common.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Kind {
    /// Where the owner of the shard serves it.
    pub owner: Arc<str>,
    /// What the whole shard is.
    pub meta: Arc<Meta>,
}

/// One value, or the beginning of a container.
#[derive(Debug, PartialEq)]
pub enum Value<'a> {
    /// Nothing.
    None,
    /// A truth value.
    Bool(bool),
    /// An integer.
    Integer(i64),
    /// A longer one: two's complement, the least significant byte first.
    LargeInteger(&'a [u8]),
    /// A number of double precision.
    Float(f64),
    /// A text; `known` is its place among the texts that are told once.
    Text {
        /// The text.
        text: &'a str,
        /// Equal for equal texts.
        known: Option<usize>,
    },
    /// Bytes.
    Bytes(&'a [u8]),
    /// So many values follow.
    List(usize),
    /// So many values follow.
    Tuple(usize),
    /// So many pairs of values follow.
    Dict(usize),
    /// A handle.
    Handle(Handle),
}

#[cfg(test)]
mod tests;

//! Nested containers of handles in few bytes, and back.
//!
//! A value is a byte that says its kind, and its content; a container says how many values follow. Numbers are LEB128,
//! signed ones in zigzag. Owners, types and shapes, and the numbers of processes are written once and referred to by
//! their place from then on. A handle of the shard that follows the previous one is a single byte.
//!
//! Invariants, for bytes that anybody may have made:
//!
//! - Every length is compared with the bytes that are left before anything is allocated for it.
//! - A value takes at least a byte, and containers nest at most [`DEEPEST`] deep.
//! - Reading looks no name up anywhere.

mod reader;
mod writer;

use std::sync::Arc;

pub use self::reader::HandleReader;
pub use self::writer::HandleWriter;
use crate::error::StoreError;
use crate::shard_id::{Rows, ShardId};
use crate::tensor_meta::TensorMeta;

/// The deepest nesting of containers.
pub const DEEPEST: usize = 500;

/// The first bytes: the format and its version.
const MAGIC: &[u8; 4] = b"tdh\x01";

/// An owner's address is no longer than this: a name of a host and a port.
const LONGEST_OWNER: usize = 300;

/// Checks the address of an owner. Making, writing and reading a handle accept the same addresses.
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
const BYTES: u8 = 8;
const LIST: u8 = 9;
const TUPLE: u8 = 10;
const DICT: u8 = 11;
const HANDLE: u8 = 12;
const NAMED_HANDLE: u8 = 13;
const ROWS: u8 = 14;
/// A numbered shard of the owner, type and shape of the handle before, and the next number.
const NEXT_HANDLE: u8 = 15;

/// Names a shard, or some of its rows. Takes 40 bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShardHandle {
    /// The shard.
    pub id: ShardId,
    /// The fields that it shares with other handles.
    pub shared: Arc<SharedFields>,
    /// The rows; all if `None`.
    pub rows: Option<Box<Rows>>,
}

/// The fields that many handles share.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct SharedFields {
    /// The address that the owner of the shard serves at.
    pub owner: Arc<str>,
    /// Element type and shape of the whole shard.
    pub meta: Arc<TensorMeta>,
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
    /// A text.
    Text(&'a str),
    /// Bytes.
    Bytes(&'a [u8]),
    /// So many values follow.
    List(usize),
    /// So many values follow.
    Tuple(usize),
    /// So many pairs of values follow.
    Dict(usize),
    /// A handle.
    Handle(ShardHandle),
}

#[cfg(test)]
mod tests;

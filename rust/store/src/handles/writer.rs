//! Writes values as bytes.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::Arc;

use super::{
    BYTES, DICT, FALSE, FLOAT, HANDLE, INTEGER, LARGE_INTEGER, LIST, MAGIC, NAMED_HANDLE, NEXT_HANDLE, NONE, ROWS,
    ShardHandle, SharedFields, TEXT, TRUE, TUPLE, Value, check_owner,
};
use crate::error::StoreError;
use crate::tensor_meta::TensorMeta;

/// Writes values one after the other.
#[derive(Default)]
pub struct HandleWriter {
    out: Vec<u8>,
    owners: HashMap<Arc<str>, usize>,
    metas: HashMap<Arc<TensorMeta>, usize>,
    nonces: HashMap<u64, usize>,
    before: Option<(usize, usize, usize, u64)>,
}

/// The place of `item` among those that were told, and whether it is new.
fn place<T: Clone + Eq + Hash>(places: &mut HashMap<T, usize>, item: &T) -> (usize, bool) {
    let next = places.len();
    let place = *places.entry(item.clone()).or_insert(next);
    (place, place == next)
}

impl HandleWriter {
    /// Nothing is written yet.
    pub fn new() -> Self {
        HandleWriter { out: MAGIC.to_vec(), ..HandleWriter::default() }
    }

    /// The bytes.
    pub fn finish(self) -> Vec<u8> {
        self.out
    }

    /// Writes a value. For a container this is its beginning: the caller writes its items next.
    ///
    /// # Errors
    /// [`StoreError::Invalid`] for an owner whose address can be none.
    pub fn write(&mut self, value: &Value<'_>) -> Result<(), StoreError> {
        match value {
            Value::None => self.out.push(NONE),
            Value::Bool(value) => self.out.push(if *value { TRUE } else { FALSE }),
            Value::Integer(value) => {
                self.out.push(INTEGER);
                self.signed(*value);
            }
            Value::LargeInteger(bytes) => self.counted(LARGE_INTEGER, bytes),
            Value::Float(value) => {
                self.out.push(FLOAT);
                self.out.extend_from_slice(&value.to_le_bytes());
            }
            Value::Text(text) => self.counted(TEXT, text.as_bytes()),
            Value::Bytes(bytes) => self.counted(BYTES, bytes),
            Value::List(length) => self.container(LIST, *length),
            Value::Tuple(length) => self.container(TUPLE, *length),
            Value::Dict(length) => self.container(DICT, *length),
            Value::Handle(handle) => self.handle(handle)?,
        }
        Ok(())
    }

    /// Writes a handle.
    ///
    /// # Errors
    /// As [`write`](HandleWriter::write).
    pub fn handle(&mut self, handle: &ShardHandle) -> Result<(), StoreError> {
        let SharedFields { owner: address, meta: what } = &*handle.shared;
        check_owner(address)?;
        if let Some(rows) = &handle.rows {
            self.out.push(ROWS);
            self.unsigned(rows.start);
            self.unsigned(rows.end);
        }
        let (owner, is_new_owner) = place(&mut self.owners, address);
        let (meta, is_new_meta) = place(&mut self.metas, what);
        let numbered =
            handle.id.as_numbered().map(|(nonce, counter)| (place(&mut self.nonces, &nonce), nonce, counter));
        let tag = match (numbered, self.before) {
            (Some(((place, false), _, counter)), Some(before))
                if before.3.checked_add(1) == Some(counter) && before == (owner, meta, place, before.3) =>
            {
                self.before = Some((owner, meta, place, counter));
                self.out.push(NEXT_HANDLE);
                return Ok(());
            }
            (Some(_), _) => HANDLE,
            (None, _) => NAMED_HANDLE,
        };
        self.out.push(tag);
        self.length(owner);
        if is_new_owner {
            self.plain_text(address);
        }
        self.length(meta);
        if is_new_meta {
            self.out.push(what.dtype().code());
            self.length(what.shape().len());
            for &size in what.shape() {
                self.unsigned(size);
            }
        }
        match numbered {
            Some(((place, is_new), nonce, counter)) => {
                self.length(place);
                if is_new {
                    self.out.extend_from_slice(&nonce.to_le_bytes());
                }
                let last = self.before.map_or(0, |(_, _, _, last)| last);
                self.signed(counter.wrapping_sub(last).cast_signed());
                self.before = Some((owner, meta, place, counter));
            }
            None => self.plain_text(&handle.id.to_string()),
        }
        Ok(())
    }

    fn plain_text(&mut self, text: &str) {
        self.length(text.len());
        self.out.extend_from_slice(text.as_bytes());
    }

    fn counted(&mut self, tag: u8, bytes: &[u8]) {
        self.container(tag, bytes.len());
        self.out.extend_from_slice(bytes);
    }

    fn container(&mut self, tag: u8, length: usize) {
        self.out.push(tag);
        self.length(length);
    }

    fn length(&mut self, length: usize) {
        self.unsigned(length as u64);
    }

    fn signed(&mut self, value: i64) {
        self.unsigned(((value << 1) ^ (value >> 63)).cast_unsigned());
    }

    fn unsigned(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.out.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.out.push(value as u8);
    }
}

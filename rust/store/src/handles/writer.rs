//! From values to bytes.

use std::collections::HashMap;
use std::sync::Arc;

use super::{
    BYTES, DICT, FALSE, FLOAT, HANDLE, Handle, INTEGER, KNOWN_TEXT, Kind, LARGE_INTEGER, LIST, LONGEST_KNOWN, MAGIC,
    MOST_KNOWN, NAMED_HANDLE, NEXT_HANDLE, NONE, ROWS, TEXT, TRUE, TUPLE, Value, check_owner,
};
use crate::error::StoreError;
use crate::meta::Meta;

/// Writes values one after the other.
#[derive(Default)]
pub struct Writer {
    out: Vec<u8>,
    owners: Table<Arc<str>>,
    metas: Table<Arc<Meta>>,
    nonces: Table<u64>,
    texts: HashMap<Box<str>, usize>,
    before: Option<(usize, usize, usize, u64)>,
    /// That of the handle before, and the places of what it says.
    kind: Option<(Arc<Kind>, usize, usize)>,
}

/// What was told already, by place; most often it is the one that was told last.
struct Table<T> {
    places: HashMap<T, usize>,
    last: Option<(T, usize)>,
}

impl<T> Default for Table<T> {
    fn default() -> Self {
        Table { places: HashMap::new(), last: None }
    }
}

impl<T: Clone + Eq + std::hash::Hash> Table<T> {
    /// The place of `item`, and whether it is new.
    fn place(&mut self, item: &T) -> (usize, bool) {
        if let Some((last, place)) = &self.last
            && last == item
        {
            return (*place, false);
        }
        let next = self.places.len();
        let place = *self.places.entry(item.clone()).or_insert(next);
        self.last = Some((item.clone(), place));
        (place, place == next && self.places.len() > next)
    }
}

impl Writer {
    /// Nothing is written yet.
    pub fn new() -> Self {
        Writer { out: MAGIC.to_vec(), ..Writer::default() }
    }

    /// The bytes.
    pub fn finish(self) -> Vec<u8> {
        self.out
    }

    /// Writes a value. What follows the beginning of a container is the caller's to write.
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
            Value::Text { text, .. } => self.text(text),
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
    /// As [`write`](Writer::write).
    pub fn handle(&mut self, handle: &Handle) -> Result<(), StoreError> {
        let Kind { owner: address, meta: what } = &*handle.kind;
        let is_as_before = self.kind.as_ref().is_some_and(|(kind, ..)| Arc::ptr_eq(kind, &handle.kind));
        if !is_as_before {
            check_owner(address)?;
        }
        if let Some(rows) = &handle.rows {
            self.out.push(ROWS);
            self.unsigned(rows.start);
            self.unsigned(rows.end);
        }
        let before = self.kind.take_if(|(kind, ..)| Arc::ptr_eq(kind, &handle.kind));
        let (owner, meta, is_new_owner, is_new_meta) = match before {
            Some((_, owner, meta)) => (owner, meta, false, false),
            None => {
                let (owner, is_new_owner) = self.owners.place(address);
                let (meta, is_new_meta) = self.metas.place(what);
                (owner, meta, is_new_owner, is_new_meta)
            }
        };
        self.kind = Some((Arc::clone(&handle.kind), owner, meta));
        let numbered = handle.id.as_numbered().map(|(nonce, counter)| (self.nonces.place(&nonce), nonce, counter));
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

    fn text(&mut self, text: &str) {
        if let Some(&place) = self.texts.get(text) {
            self.out.push(KNOWN_TEXT);
            self.length(place);
            return;
        }
        if text.len() <= LONGEST_KNOWN && self.texts.len() < MOST_KNOWN {
            self.texts.insert(text.into(), self.texts.len());
        }
        self.counted(TEXT, text.as_bytes());
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

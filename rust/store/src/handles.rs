//! Nested containers of handles in few bytes, and back.
//!
//! A value is a byte that says what it is, and what belongs to it; a container says how many values follow. Numbers are
//! LEB128, signed ones in zigzag. Owners, types and shapes, the numbers of nodes and short texts are told once and named by
//! their place from then on. A handle like the one before it, of the next shard, is a single byte.
//!
//! What always holds of bytes that anybody may have made: every length is held against the bytes that are left before
//! anything is allocated for it; a value takes at least a byte; containers lie at most [`DEEPEST`] in one another; what was
//! read means nothing but itself: no name is looked up anywhere.

use std::collections::HashMap;
use std::sync::Arc;

use crate::error::StoreError;
use crate::meta::{Dtype, Meta, Shape};
use crate::shard::{Rows, ShardId};

/// Containers in one another.
pub const DEEPEST: usize = 500;

/// How the bytes begin: what they are, and the version of their form.
const MAGIC: &[u8; 4] = b"tdh\x01";

/// Longer texts, and more of them, are told each time.
const LONGEST_KNOWN: usize = 64;
const MOST_KNOWN: usize = 4096;

/// An owner's address is no longer than this: a name of a host and a port.
const LONGEST_OWNER: usize = 300;

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
    /// [`StoreError::Invalid`] for an owner whose address is too long.
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
        if address.len() > LONGEST_OWNER {
            let long = address.len();
            return Err(StoreError::Invalid(format!("an address has at most {LONGEST_OWNER} characters, not {long}")));
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

/// Reads values one after the other, from bytes that anybody may have made.
pub struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
    owners: Vec<Arc<str>>,
    metas: Vec<Arc<Meta>>,
    kinds: HashMap<(usize, usize), Arc<Kind>>,
    /// That of the handle before.
    kind: Option<(usize, usize, Arc<Kind>)>,
    nonces: Vec<u64>,
    texts: Vec<&'a str>,
    before: Option<(usize, usize, usize, u64)>,
}

impl<'a> Reader<'a> {
    /// Reads `bytes`, which begin as [`Writer`]'s do.
    ///
    /// # Errors
    /// [`StoreError::Invalid`] where they do not.
    pub fn new(bytes: &'a [u8]) -> Result<Self, StoreError> {
        match bytes.strip_prefix(MAGIC) {
            Some(bytes) => Ok(Reader {
                bytes,
                at: 0,
                owners: Vec::new(),
                metas: Vec::new(),
                kinds: HashMap::new(),
                kind: None,
                nonces: Vec::new(),
                texts: Vec::new(),
                before: None,
            }),
            None => Err(StoreError::Invalid(
                "these are no handles that this version of tundish wrote: they begin otherwise".to_owned(),
            )),
        }
    }

    /// The next value.
    ///
    /// # Errors
    /// [`StoreError::Invalid`] where there is none, or none that can be.
    pub fn read(&mut self) -> Result<Value<'a>, StoreError> {
        Ok(match self.byte()? {
            NONE => Value::None,
            FALSE => Value::Bool(false),
            TRUE => Value::Bool(true),
            INTEGER => Value::Integer(self.signed()?),
            LARGE_INTEGER => Value::LargeInteger(self.counted()?),
            FLOAT => {
                let bytes = self.take(8)?;
                Value::Float(f64::from_le_bytes(bytes.try_into().expect("eight bytes were taken")))
            }
            TEXT => {
                let text = self.text()?;
                let known = (text.len() <= LONGEST_KNOWN && self.texts.len() < MOST_KNOWN).then(|| {
                    self.texts.push(text);
                    self.texts.len() - 1
                });
                Value::Text { text, known }
            }
            KNOWN_TEXT => {
                let place = self.length()?;
                let text = *self.texts.get(place).ok_or_else(|| self.wrong("a text that was not told"))?;
                Value::Text { text, known: Some(place) }
            }
            BYTES => Value::Bytes(self.counted()?),
            LIST => Value::List(self.count(1)?),
            TUPLE => Value::Tuple(self.count(1)?),
            DICT => Value::Dict(self.count(2)?),
            ROWS => {
                let rows = self.unsigned()?..self.unsigned()?;
                let tag = self.byte()?;
                let handle = self.handle(tag)?;
                handle.kind.meta.cut(Some(&rows)).map_err(|error| self.wrong(&error.to_string()))?;
                Value::Handle(Handle { rows: Some(Box::new(rows)), ..handle })
            }
            tag => Value::Handle(self.handle(tag)?),
        })
    }

    /// There is nothing more.
    ///
    /// # Errors
    /// [`StoreError::Invalid`] where there is.
    pub fn finish(self) -> Result<(), StoreError> {
        if self.at == self.bytes.len() { Ok(()) } else { Err(self.wrong("more than one value")) }
    }

    fn handle(&mut self, tag: u8) -> Result<Handle, StoreError> {
        if tag == NEXT_HANDLE {
            let before =
                self.before.and_then(|(owner, meta, nonce, last)| Some((owner, meta, nonce, last.checked_add(1)?)));
            let (owner, meta, nonce, counter) = before.ok_or_else(|| self.wrong("a handle after none"))?;
            self.before = before;
            return Ok(self.numbered(owner, meta, nonce, counter));
        }
        if tag != HANDLE && tag != NAMED_HANDLE {
            return Err(self.wrong(&format!("a value of the unknown kind {tag}")));
        }
        let owner = self.place(self.owners.len())?;
        if owner == self.owners.len() {
            let address = self.text()?;
            if address.len() > LONGEST_OWNER || !address.bytes().all(|byte| byte.is_ascii_graphic()) {
                return Err(self.wrong("an address that can be none"));
            }
            self.owners.push(address.into());
        }
        let meta = self.place(self.metas.len())?;
        if meta == self.metas.len() {
            let made = self.meta()?;
            self.metas.push(Arc::new(made));
        }
        if tag == NAMED_HANDLE {
            let id = self.text()?.parse::<ShardId>().map_err(|error| self.wrong(&error.to_string()))?;
            return Ok(Handle { id, kind: self.kind(owner, meta), rows: None });
        }
        let nonce = self.place(self.nonces.len())?;
        if nonce == self.nonces.len() {
            let bytes = self.take(8)?;
            self.nonces.push(u64::from_le_bytes(bytes.try_into().expect("eight bytes were taken")));
        }
        let last = self.before.map_or(0, |(_, _, _, last)| last);
        let counter = last.wrapping_add_signed(self.signed()?);
        self.before = Some((owner, meta, nonce, counter));
        Ok(self.numbered(owner, meta, nonce, counter))
    }

    fn numbered(&mut self, owner: usize, meta: usize, nonce: usize, counter: u64) -> Handle {
        Handle { id: ShardId::numbered(self.nonces[nonce], counter), kind: self.kind(owner, meta), rows: None }
    }

    /// The one that handles of this owner, type and shape share.
    fn kind(&mut self, owner: usize, meta: usize) -> Arc<Kind> {
        if let Some((last_owner, last_meta, kind)) = &self.kind
            && (*last_owner, *last_meta) == (owner, meta)
        {
            return Arc::clone(kind);
        }
        let (owners, metas) = (&self.owners, &self.metas);
        let make = || Arc::new(Kind { owner: Arc::clone(&owners[owner]), meta: Arc::clone(&metas[meta]) });
        let kind = Arc::clone(self.kinds.entry((owner, meta)).or_insert_with(make));
        self.kind = Some((owner, meta, Arc::clone(&kind)));
        kind
    }

    fn meta(&mut self) -> Result<Meta, StoreError> {
        let code = self.byte()?;
        let dtype = Dtype::from_code(code).map_err(|error| self.wrong(&error.to_string()))?;
        let dimensions = self.count(1)?;
        let mut shape = Shape::new();
        for _ in 0..dimensions {
            shape.push(self.unsigned()?);
        }
        Meta::new(dtype, shape).map_err(|error| self.wrong(&error.to_string()))
    }

    /// A place in a table of `length` items, or the one behind its end.
    fn place(&mut self, length: usize) -> Result<usize, StoreError> {
        let place = self.length()?;
        if place <= length { Ok(place) } else { Err(self.wrong("a place in a table that is not there")) }
    }

    fn text(&mut self) -> Result<&'a str, StoreError> {
        let bytes = self.counted()?;
        std::str::from_utf8(bytes).map_err(|_| self.wrong("a text that is not UTF-8"))
    }

    fn counted(&mut self) -> Result<&'a [u8], StoreError> {
        let length = self.length()?;
        self.take(length)
    }

    /// A number of things of at least `least` bytes each, which are still to come.
    fn count(&mut self, least: usize) -> Result<usize, StoreError> {
        let count = self.length()?;
        if count > (self.bytes.len() - self.at) / least { Err(self.cut_short()) } else { Ok(count) }
    }

    fn length(&mut self) -> Result<usize, StoreError> {
        usize::try_from(self.unsigned()?).map_err(|_| self.cut_short())
    }

    fn signed(&mut self) -> Result<i64, StoreError> {
        let value = self.unsigned()?;
        Ok((value >> 1).cast_signed() ^ -((value & 1).cast_signed()))
    }

    fn unsigned(&mut self) -> Result<u64, StoreError> {
        let mut value = 0;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            let bits = u64::from(byte & 0x7f);
            if shift == 63 && bits > 1 {
                break;
            }
            value |= bits << shift;
            if byte < 0x80 {
                return Ok(value);
            }
        }
        Err(self.wrong("a number of more than 64 bits"))
    }

    fn byte(&mut self) -> Result<u8, StoreError> {
        Ok(self.take(1)?[0])
    }

    fn take(&mut self, length: usize) -> Result<&'a [u8], StoreError> {
        let taken = self.bytes[self.at..].get(..length).ok_or_else(|| self.cut_short())?;
        self.at += length;
        Ok(taken)
    }

    fn cut_short(&self) -> StoreError {
        let (at, all) = (self.at + MAGIC.len(), self.bytes.len() + MAGIC.len());
        StoreError::Invalid(format!(
            "these handles were cut short: more is announced at byte {at} than their {all} bytes hold"
        ))
    }

    fn wrong(&self, what: &str) -> StoreError {
        StoreError::Invalid(format!("these handles are damaged: {what}, before byte {}", self.at + MAGIC.len()))
    }
}

#[cfg(test)]
mod tests;

//! Reads values from untrusted bytes.

use std::collections::HashMap;
use std::sync::Arc;

use super::{
    BYTES, DICT, FALSE, FLOAT, HANDLE, INTEGER, LARGE_INTEGER, LIST, MAGIC, NAMED_HANDLE, NEXT_HANDLE, NONE, ROWS,
    ShardHandle, SharedFields, TEXT, TRUE, TUPLE, Value, check_owner,
};
use crate::error::StoreError;
use crate::shard_id::ShardId;
use crate::tensor_meta::{Dtype, Shape, TensorMeta};

/// Reads values one after the other from untrusted bytes.
pub struct HandleReader<'a> {
    pub(super) bytes: &'a [u8],
    pub(super) at: usize,
    owners: Vec<Arc<str>>,
    metas: Vec<Arc<TensorMeta>>,
    shared: HashMap<(usize, usize), Arc<SharedFields>>,
    nonces: Vec<u64>,
    before: Option<(usize, usize, usize, u64)>,
}

impl<'a> HandleReader<'a> {
    /// Reads `bytes`, which begin as [`HandleWriter`](super::HandleWriter)'s do.
    ///
    /// # Errors
    /// [`StoreError::Invalid`] where they do not.
    pub fn new(bytes: &'a [u8]) -> Result<Self, StoreError> {
        match bytes.strip_prefix(MAGIC) {
            Some(bytes) => Ok(HandleReader {
                bytes,
                at: 0,
                owners: Vec::new(),
                metas: Vec::new(),
                shared: HashMap::new(),
                nonces: Vec::new(),
                before: None,
            }),
            None => Err(StoreError::Invalid(
                "data is not handles of this version of tundish: give the bytes that dumps returned".to_owned(),
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
            TEXT => Value::Text(self.text()?),
            BYTES => Value::Bytes(self.counted()?),
            LIST => Value::List(self.count(1)?),
            TUPLE => Value::Tuple(self.count(1)?),
            DICT => Value::Dict(self.count(2)?),
            ROWS => {
                let rows = self.unsigned()?..self.unsigned()?;
                let tag = self.byte()?;
                let handle = self.handle(tag)?;
                handle.shared.meta.select_rows(Some(&rows)).map_err(|error| self.wrong(&error.to_string()))?;
                Value::Handle(ShardHandle { rows: Some(Box::new(rows)), ..handle })
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

    fn handle(&mut self, tag: u8) -> Result<ShardHandle, StoreError> {
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
            check_owner(address).map_err(|error| self.wrong(&error.to_string()))?;
            self.owners.push(address.into());
        }
        let meta = self.place(self.metas.len())?;
        if meta == self.metas.len() {
            let made = self.meta()?;
            self.metas.push(Arc::new(made));
        }
        if tag == NAMED_HANDLE {
            let id = self.text()?.parse::<ShardId>().map_err(|error| self.wrong(&error.to_string()))?;
            return Ok(ShardHandle { id, shared: self.shared(owner, meta), rows: None });
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

    fn numbered(&mut self, owner: usize, meta: usize, nonce: usize, counter: u64) -> ShardHandle {
        ShardHandle { id: ShardId::numbered(self.nonces[nonce], counter), shared: self.shared(owner, meta), rows: None }
    }

    /// The one that handles of this owner, type and shape share.
    fn shared(&mut self, owner: usize, meta: usize) -> Arc<SharedFields> {
        let (owners, metas) = (&self.owners, &self.metas);
        let make = || Arc::new(SharedFields { owner: Arc::clone(&owners[owner]), meta: Arc::clone(&metas[meta]) });
        Arc::clone(self.shared.entry((owner, meta)).or_insert_with(make))
    }

    fn meta(&mut self) -> Result<TensorMeta, StoreError> {
        let code = self.byte()?;
        let dtype = Dtype::from_code(code).map_err(|error| self.wrong(&error.to_string()))?;
        let dimensions = self.count(1)?;
        let mut shape = Shape::new();
        for _ in 0..dimensions {
            shape.push(self.unsigned()?);
        }
        TensorMeta::new(dtype, shape).map_err(|error| self.wrong(&error.to_string()))
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

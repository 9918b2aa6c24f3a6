//! Stores that fetch from each other within one process: shards are sent as bytes, or as references.
#![allow(dead_code, reason = "each test uses some of it")]

use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tundish_store::{
    Dtype, FetchReceiver, FetchedTensor, Limits, Selection, ShardId, ShardRows, StoreError, TensorMeta, TensorStore,
    TensorToStore, TimeLimit, Transport, Wanted,
};

/// Where the owner serves.
pub const OWNER: &str = "10.0.0.1:7000";

pub const LIMITS: Limits = Limits { storage_bytes: 1 << 30, buffer_bytes: 1 << 30 };

/// How a transport hands over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SendAs {
    Bytes,
    SegmentRange,
}

/// Called with each request before it is answered, with its number from 0 on.
pub type Before = Box<dyn Fn(usize) -> Result<(), StoreError> + Send + Sync>;

/// Fetches from other stores of this process.
pub struct LocalTransport {
    pub owners: Mutex<HashMap<String, Arc<TensorStore>>>,
    pub send_as: SendAs,
    pub requests: AtomicUsize,
    pub shards: AtomicUsize,
    pub before: Before,
    pub after: Before,
}

impl LocalTransport {
    pub fn new(send_as: SendAs) -> Self {
        LocalTransport {
            owners: Mutex::default(),
            send_as,
            requests: AtomicUsize::new(0),
            shards: AtomicUsize::new(0),
            before: Box::new(|_| Ok(())),
            after: Box::new(|_| Ok(())),
        }
    }

    pub fn add(&self, address: &str, store: &Arc<TensorStore>) {
        self.owners.lock().unwrap().insert(address.to_owned(), Arc::clone(store));
    }
}

/// An owner, a consumer, and the transport between them.
pub fn pair(send_as: SendAs) -> (Arc<TensorStore>, Arc<TensorStore>, LocalTransport) {
    let (owner, consumer) = (TensorStore::new(LIMITS), TensorStore::new(LIMITS));
    let transport = LocalTransport::new(send_as);
    transport.add(OWNER, &owner);
    (owner, consumer, transport)
}

impl Transport for LocalTransport {
    fn fetch(
        &self,
        owner: &Arc<str>,
        wanted: &[ShardRows],
        receiver: &mut FetchReceiver<'_>,
        time_limit: &mut TimeLimit<'_>,
    ) -> Result<(), StoreError> {
        let number = self.requests.fetch_add(1, Ordering::SeqCst);
        self.shards.fetch_add(wanted.len(), Ordering::SeqCst);
        (self.before)(number)?;
        let store = Arc::clone(&self.owners.lock().unwrap()[&**owner]);
        let outgoing = store.look_up(wanted).map_err(|error| match error {
            StoreError::Missing { shards, .. } => StoreError::Missing { owner: Some(Arc::clone(owner)), shards },
            other => other,
        })?;
        for (index, outgoing) in outgoing.iter().enumerate() {
            match outgoing.reference() {
                Some(reference) if self.send_as == SendAs::SegmentRange => {
                    (self.after)(number)?;
                    receiver.attach(index, outgoing.meta(), &reference)?;
                }
                _ => {
                    receiver.space(index, outgoing.meta(), time_limit)?.copy_from_slice(outgoing.bytes());
                    (self.after)(number)?;
                    receiver.complete(index)?;
                }
            }
        }
        Ok(())
    }
}

/// Runs `work` with a time limit of so many seconds.
pub fn within<T>(seconds: f64, work: impl FnOnce(&mut TimeLimit<'_>) -> T) -> T {
    let mut check_cancelled = || Ok(());
    work(&mut TimeLimit::new(Instant::now() + Duration::from_secs_f64(seconds), &mut check_cancelled))
}

pub fn bytes_meta(len: u64) -> TensorMeta {
    TensorMeta::new(Dtype::from_name("uint8").unwrap(), [len].as_slice()).unwrap()
}

pub fn put(store: &TensorStore, tensors: &[Vec<u8>]) -> Result<Vec<ShardId>, StoreError> {
    let sources: Vec<_> =
        tensors.iter().map(|bytes| TensorToStore::new(bytes_meta(bytes.len() as u64), bytes).unwrap()).collect();
    within(0.0, |time_limit| store.put(&sources, time_limit))
}

/// All of a shard of so many bytes.
pub fn whole(owner: &str, id: &ShardId, len: u64) -> Wanted {
    Wanted { owner: owner.into(), id: id.clone(), rows: Selection::All, meta: bytes_meta(len) }
}

pub fn rows(owner: &str, id: &ShardId, rows: Range<u64>) -> Wanted {
    let meta = bytes_meta(rows.end.saturating_sub(rows.start));
    Wanted { owner: owner.into(), id: id.clone(), rows: Selection::range(rows), meta }
}

pub fn fetch(
    store: &TensorStore,
    wanted: &[Wanted],
    transport: &LocalTransport,
) -> Result<Vec<FetchedTensor>, StoreError> {
    within(20.0, |time_limit| store.fetch(wanted, transport, time_limit))
}

/// Some bytes that differ from shard to shard.
pub fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let next = |_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as u8
    };
    (0..len).map(next).collect()
}

/// Writes to a view what its bytes are to be.
#[allow(unsafe_code, reason = "a view is memory that may be written to")]
pub fn overwrite(view: &FetchedTensor, byte: u8) {
    // SAFETY: the view's own bytes, which nobody reads meanwhile.
    unsafe { view.data().write_bytes(byte, view.meta().nbytes() as usize) };
}

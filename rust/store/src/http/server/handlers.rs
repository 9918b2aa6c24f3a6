//! Handles requests.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use http_body_util::{BodyExt, LengthLimitError, Limited};
use hyper::body::{Body, Bytes, Incoming};
use hyper::header::{ACCEPT, HeaderMap, HeaderName};
use hyper::http::request;

use super::client_session::Session;
use super::metrics;
use super::response::{Answer, ResponseBody};
use crate::Claimant;
use crate::checksum::RunningChecksum;
use crate::error::StoreError;
use crate::http::NODE_FIELD;
use crate::http::json::{self, ClaimAnswer, ClearedAnswer, KeepAnswer, OkAnswer, RemovedAnswer};
use crate::http::route::MediaType;
use crate::http::route::Refusal;
use crate::http::route::Route;
use crate::http::shard_header::{Payload, ShardHeader};
use crate::memory::tensor::OutgoingShard;
use crate::selection::{Selection, ShardRows};
use crate::shard_id::ShardId;
use crate::tensor_store::TensorStore;

/// Bytes of the longest body: a list of as many ids as one request may name.
const LONGEST_BODY: usize = 16 << 20;

/// Claimants with smaller numbers belong to no connection.
const FIRST_CLAIMANT: Claimant = 1 << 32;

static NEXT_CLAIMANT: AtomicU64 = AtomicU64::new(FIRST_CLAIMANT);

/// One request that was admitted.
pub(super) struct Handler<'a> {
    session: &'a Session,
    head: &'a request::Parts,
    body: Bytes,
}

impl<'a> Handler<'a> {
    /// Reads the body.
    ///
    /// # Errors
    /// A [`Refusal`] if it is too long; `None` if the client is gone or too slow.
    pub(super) async fn new(
        session: &'a Session,
        head: &'a request::Parts,
        incoming: Incoming,
    ) -> Result<Self, Option<Refusal>> {
        let too_long = || Refusal::new(413, format!("a body has at most {LONGEST_BODY} bytes"));
        if incoming.size_hint().lower() > LONGEST_BODY as u64 {
            return Err(Some(too_long()));
        }
        let collected = Limited::new(incoming, LONGEST_BODY).collect().await;
        let body = collected.map_err(|error| error.is::<LengthLimitError>().then(too_long))?.to_bytes();
        Ok(Handler { session, head, body })
    }

    pub(super) fn answer(&self) -> Result<Answer, Refusal> {
        let store = self.store();
        Ok(match Route::of(&self.head.method, self.head.uri.path())? {
            Route::Read(id) => self.read(id)?,
            Route::Batch => self.batch()?,
            Route::Remove => {
                let removed = store.remove(&self.ids()?);
                // AReaL's clients are told what is left.
                let left = store.stats().storage;
                Answer::json(200, &RemovedAnswer::new(removed, &left))
            }
            Route::ClearBuffer => {
                let ids = if self.body.is_empty() { None } else { json::read_ids(&self.body)? };
                Answer::json(200, &ClearedAnswer::new(store.clear_buffer(ids.as_deref())))
            }
            Route::Keep => {
                let kept = store.keep(&self.ids()?);
                Answer::json(200, &KeepAnswer { kept_count: kept.entries, kept_shards: kept.shards })
            }
            Route::Begin(step) => match store.begin_step(step, self.claimant()) {
                Ok(()) => {
                    self.hold_claims();
                    Answer::json(200, &OkAnswer::new())
                }
                Err(error) => Answer::error(&error),
            },
            Route::Claim(step) => match store.claim(step, self.claimant(), &self.ids()?) {
                Ok(claimed) => {
                    self.hold_claims();
                    Answer::json(200, &ClaimAnswer::from(claimed))
                }
                Err(error) => Answer::error(&error),
            },
            Route::End(step) => Answer::json(200, &store.end_step(step)),
            Route::BufferStats => Answer::json(200, &store.buffer_stats()),
            Route::Stats => Answer::json(200, &store.stats()),
            Route::Metrics => Answer::text(metrics::MEDIA_TYPE, self.session.server.metrics.page(&store.stats())),
            Route::Health => Answer::json(200, &OkAnswer::new()),
        })
    }

    fn store(&self) -> &TensorStore {
        &self.session.server.store
    }

    /// The media type of the response: JSON, unless the client names the type of shards.
    fn accepts(&self) -> MediaType {
        let accepted = header_text(&self.head.headers, &ACCEPT).unwrap_or_default();
        let takes_shards = accepted.split(',').any(|accepted| MediaType::Shards.matches(accepted));
        if takes_shards { MediaType::Shards } else { MediaType::Json }
    }

    fn read(&self, id: ShardId) -> Result<Answer, Refusal> {
        let shard = self.store().look_up(&[ShardRows { id, rows: Selection::All }])?.remove(0);
        let mut body = ResponseBody::default();
        match self.accepts() {
            MediaType::Shards => append_shard(&mut body, shard),
            MediaType::Json => body.json(shard),
        }
        Ok(Answer::new(200, self.accepts().name(), body))
    }

    fn batch(&self) -> Result<Answer, Refusal> {
        let (distinct, uses) = distinct(json::read_batch(&self.body)?);
        let shards = match self.store().look_up(&distinct) {
            Err(error @ StoreError::Missing { .. }) => return Ok(Answer::error(&error)),
            shards => shards?,
        };
        let is_json = self.accepts() == MediaType::Json;
        let node = header_text(&self.head.headers, &HeaderName::from_static(NODE_FIELD));
        let is_same_node = !is_json && node.is_some() && node == crate::http::this_node();
        let mut body = ResponseBody::default();
        let (mut shards, mut added) = (shards.into_iter(), Vec::with_capacity(distinct.len()));
        for (place, which) in uses.iter().enumerate() {
            if is_json {
                body.text(if place == 0 { "[" } else { "," });
            }
            let start = body.pieces();
            match added.get(*which) {
                Some(pieces) => body.repeat(Range::clone(pieces)),
                None => {
                    let shard = shards.next().expect("each comes first in the order in which they were looked up");
                    match shard.reference().filter(|_| is_same_node) {
                        _ if is_json => body.json(shard),
                        Some(reference) => {
                            let payload = Payload::SegmentRange(reference);
                            body.text(ShardHeader { meta: shard.meta().clone(), payload }.to_vec());
                        }
                        None => append_shard(&mut body, shard),
                    }
                    added.push(start..body.pieces());
                }
            }
        }
        if is_json {
            body.text(if uses.is_empty() { "[]" } else { "]" });
        }
        Ok(Answer::new(200, self.accepts().name(), body))
    }

    /// The shards that the body names.
    fn ids(&self) -> Result<Vec<ShardId>, Refusal> {
        json::read_ids(&self.body)?.ok_or_else(|| Refusal::new(400, "'shard_ids' must be a list"))
    }

    /// From now on this connection is not closed to make room. One whose claim was refused may be.
    fn hold_claims(&self) {
        self.session.admitted.connection.hold_claims();
    }

    /// The claimant of this connection.
    fn claimant(&self) -> Claimant {
        *self.session.claimant.get_or_init(|| NEXT_CLAIMANT.fetch_add(1, Ordering::Relaxed))
    }
}

/// The value of a header, where it is text.
pub(super) fn header_text<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Option<&'a str> {
    headers.get(name)?.to_str().ok()
}

/// Each selection once, in the order in which they first occur; and for each use its place among them.
fn distinct(wanted: Vec<ShardRows>) -> (Vec<ShardRows>, Vec<usize>) {
    let (mut places, mut distinct) = (HashMap::new(), Vec::new());
    let uses = wanted.into_iter().map(|one| {
        *places.entry(one).or_insert_with_key(|one: &ShardRows| {
            distinct.push(one.clone());
            distinct.len() - 1
        })
    });
    let uses = uses.collect();
    (distinct, uses)
}

/// Appends a shard with its header.
fn append_shard(body: &mut ResponseBody, shard: OutgoingShard) {
    // The checksum of a whole shard is computed once; the checksum of rows is computed for each request.
    let sum = || RunningChecksum::of(shard.bytes());
    let checksum = shard.checksum().map_or_else(sum, |known| *known.get_or_init(sum));
    body.text(ShardHeader { meta: shard.meta().clone(), payload: Payload::Bytes(checksum) }.to_vec());
    body.bytes(shard);
}

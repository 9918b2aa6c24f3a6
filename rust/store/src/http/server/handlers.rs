//! What is done for each request.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use hyper::header::{ACCEPT, CONTENT_RANGE, CONTENT_TYPE, HeaderMap, HeaderName, RANGE, TRANSFER_ENCODING};
use hyper::http::request;
use tokio::time::sleep;

use super::blocking::blocking;
use super::metrics;
use super::request_body::{Failure, RequestBody};
use super::request_memory::Reserved;
use super::response::{Answer, ResponseBody};
use super::session::Session;
use crate::checksum::Checksum;
use crate::error::StoreError;
use crate::http::json::{self, ClaimAnswer, ClearedAnswer, KeepAnswer, OkAnswer, RemovedAnswer, StoredAnswer};
use crate::http::media_type::MediaType;
use crate::http::range::{Asked, Unit};
use crate::http::refusal::Refusal;
use crate::http::route::Route;
use crate::http::same_node::{self, NODE_FIELD};
use crate::http::shard_header::{self, Payload, ShardHeader};
use crate::memory::transfers::{Incoming, Outgoing};
use crate::meta::Meta;
use crate::shard_id::{Rows, Selection, ShardId};
use crate::transport::Service;
use crate::{Claimant, Epoch};

/// How often space in a full store is asked for again.
const BETWEEN_TRIES: Duration = Duration::from_millis(20);

/// Work on more bytes than this is done beside the threads that serve.
const LONG: usize = 1 << 20;

/// Claimants with smaller numbers belong to no connection.
const FIRST_CLAIMANT: Claimant = 1 << 32;

static NEXT_CLAIMANT: AtomicU64 = AtomicU64::new(FIRST_CLAIMANT);

/// One request that was admitted.
pub(super) struct Handler<'a> {
    pub(super) session: &'a Session,
    pub(super) head: &'a request::Parts,
    pub(super) body: RequestBody,
    /// Memory that is reserved for the request, until its response is sent.
    pub(super) reserved: Option<Reserved>,
}

impl Handler<'_> {
    pub(super) async fn answer(&mut self) -> Result<Answer, Failure> {
        let route = Route::of(&self.head.method, self.head.uri.path())?;
        if self.head.headers.contains_key(TRANSFER_ENCODING) {
            return Err(Refusal::new(411, "tell the length of the body beforehand, in `Content-Length`").into());
        }
        match route {
            Route::Read(id) => self.read(id).await,
            Route::Store(id) => self.store(id).await,
            Route::Batch => self.batch().await,
            Route::Remove => self.remove().await,
            Route::ClearBuffer => self.clear_buffer().await,
            Route::Keep => self.keep().await,
            Route::Begin(epoch) => self.begin(epoch),
            Route::Claim(epoch) => self.claim(epoch).await,
            Route::Close(epoch) => {
                self.service().close_epoch(epoch, self.claimant()?);
                Ok(Answer::json(200, &OkAnswer::new()))
            }
            Route::End(epoch) => {
                let ledger = self.blocking(move |service| service.end_epoch(epoch)).await?;
                Ok(Answer::json(200, &ledger))
            }
            Route::BufferStats => Ok(Answer::json(200, &self.service().stats().buffer)),
            Route::Stats => Ok(Answer::json(200, &self.service().stats())),
            Route::Metrics => {
                Ok(Answer::text(metrics::MEDIA_TYPE, self.session.common.metrics.page(&self.service().stats())))
            }
            Route::Health => Ok(Answer::json(200, &OkAnswer::new())),
        }
    }

    fn service(&self) -> &Arc<dyn Service> {
        &self.session.common.service
    }

    /// What the response is to be; JSON where the client says nothing, or takes anything.
    fn accepts(&self) -> MediaType {
        let accepted = header(&self.head.headers, &ACCEPT).unwrap_or_default();
        let takes_shards = accepted.split(',').any(|accepted| MediaType::Shards.is_named_by(accepted));
        if takes_shards { MediaType::Shards } else { MediaType::Json }
    }

    async fn read(&self, id: ShardId) -> Result<Answer, Failure> {
        let accepts = self.accepts();
        let one = |rows| self.service().look_up(&[Selection { id: id.clone(), rows }]);
        let shard = one(None)?.remove(0);
        match header(&self.head.headers, &RANGE).and_then(Asked::parse) {
            Some(asked) if asked.unit == Unit::Rows => {
                let total = shard.meta().shape().first().copied();
                let total = total.ok_or_else(|| Refusal::new(400, "a tensor without dimensions has no rows"))?;
                let Some(rows) = asked.of(total) else { return Ok(unsatisfiable(asked, total)) };
                let shard = one(Some(Rows { start: rows.start, end: rows.end }))?.remove(0);
                Ok(partial(asked, &rows, total, accepts, body_of(shard, accepts).await?))
            }
            Some(asked) if accepts == MediaType::Shards => {
                let mut body = body_of(shard, accepts).await?;
                let total = body.len();
                let Some(bytes) = asked.of(total) else { return Ok(unsatisfiable(asked, total)) };
                body.cut(&bytes);
                Ok(partial(asked, &bytes, total, MediaType::Shards, body))
            }
            _ => Ok(Answer::new(200, accepts.name(), body_of(shard, accepts).await?)),
        }
    }

    async fn batch(&mut self) -> Result<Answer, Failure> {
        let (distinct, uses) = distinct(json::read_batch(&self.json().await?)?);
        let shards = match self.service().look_up(&distinct) {
            Err(error @ StoreError::Missing { .. }) => return Ok(Answer::error(&error)),
            shards => shards?,
        };
        let is_json = self.accepts() == MediaType::Json;
        let node = header(&self.head.headers, &HeaderName::from_static(NODE_FIELD));
        let is_near = !is_json && node.is_some_and(same_node::is_this);
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
                    match shard.reference().filter(|_| is_near) {
                        _ if is_json => body.json(shard),
                        Some(reference) => {
                            let payload = Payload::Reference(reference);
                            body.text(ShardHeader { meta: shard.meta().clone(), payload }.to_vec());
                        }
                        None => append(&mut body, shard).await?,
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

    /// The body, which is JSON. What is made of it has its memory reserved until it is answered.
    async fn json(&mut self) -> Result<Vec<u8>, Failure> {
        let (body, reserved) = self.body.json().await?;
        self.reserved = Some(reserved);
        Ok(body)
    }

    /// The shards that the body names.
    async fn ids(&mut self) -> Result<Vec<ShardId>, Failure> {
        let ids = json::read_ids(&self.json().await?)?;
        Ok(ids.ok_or_else(|| Refusal::new(400, "'shard_ids' must be a list"))?)
    }

    async fn store(&mut self, id: ShardId) -> Result<Answer, Failure> {
        let content = header(&self.head.headers, &CONTENT_TYPE).unwrap_or_default();
        if MediaType::Json.is_named_by(content) {
            let (meta, bytes) = json::read_tensor(&self.json().await?)?;
            let mut incoming = self.space(&id, meta).await?;
            incoming.space().copy_from_slice(&bytes);
            return stored(&id, incoming.commit(Checksum::of(&bytes)));
        }
        if !self.head.headers.contains_key(hyper::header::CONTENT_LENGTH) {
            return Err(Refusal::new(411, "tell the length of the body beforehand, in `Content-Length`").into());
        }
        let length = self.body.length();
        let parse = |begun: &[u8]| {
            let read = ShardHeader::read(begun)
                .map_err(|error| Refusal::new(400, format!("the body is no shard: {error}")))?;
            Ok(read.map(|(header, taken)| ((header, taken), taken)))
        };
        let (header, taken) = self.body.beginning(shard_header::LONGEST, parse).await?;
        let Payload::Bytes(checksum) = header.payload else {
            return Err(Refusal::new(400, "a shard is stored by its bytes, not by a reference to them").into());
        };
        if length != taken as u64 + header.meta.nbytes() {
            let (meta, has) = (&header.meta, length - taken as u64);
            let reason = format!("the bytes of a {meta:?} follow its header, and these are {has}");
            return Err(Refusal::new(400, reason).into());
        }
        let mut incoming = self.space(&id, header.meta).await?;
        if self.body.fill(incoming.space()).await? != checksum {
            return Err(Refusal::new(422, format!("shard {id} arrived damaged: its checksum is another one")).into());
        }
        stored(&id, incoming.commit(checksum))
    }

    /// Space for a shard, in a store that may be at its limit.
    async fn space(&self, id: &ShardId, meta: Meta) -> Result<Incoming, Failure> {
        let end = Instant::now() + self.session.common.timeouts.space;
        loop {
            let (id, meta) = (id.clone(), meta.clone());
            let received = if meta.nbytes() <= LONG as u64 {
                self.service().receive(id, meta)
            } else {
                self.blocking(move |service| service.receive(id, meta)).await?
            };
            match received {
                Err(StoreError::Full { .. }) if Instant::now() < end => sleep(BETWEEN_TRIES).await,
                received => return Ok(received?),
            }
        }
    }

    async fn remove(&mut self) -> Result<Answer, Failure> {
        let ids = self.ids().await?;
        let removed = self.blocking(move |service| service.remove(&ids)).await?;
        // What is left, as AReaL's servers tell it.
        let left = self.service().stats().storage;
        let answer = RemovedAnswer {
            status: "ok",
            cleared_count: removed.cleared_count,
            freed_bytes: removed.total_bytes,
            num_tensors: left.num_entries,
            total_bytes: left.total_bytes,
        };
        Ok(Answer::json(200, &answer))
    }

    async fn clear_buffer(&mut self) -> Result<Answer, Failure> {
        let body = self.json().await?;
        let ids = if body.is_empty() { None } else { json::read_ids(&body)? };
        let dropped = self.blocking(move |service| service.drop_fetched(ids.as_deref())).await?;
        let answer = ClearedAnswer { status: "ok", cleared_count: dropped.entries, kept_count: dropped.kept };
        Ok(Answer::json(200, &answer))
    }

    async fn keep(&mut self) -> Result<Answer, Failure> {
        let ids = self.ids().await?;
        let claimant = self.claimant()?;
        let kept = self.blocking(move |service| service.keep(claimant, &ids)).await?;
        Ok(Answer::json(200, &KeepAnswer { kept_count: kept.entries, kept_shards: kept.shards }))
    }

    fn begin(&self, epoch: Epoch) -> Result<Answer, Failure> {
        match self.service().begin_epoch(epoch, self.claimant()?) {
            Ok(()) => Ok(Answer::json(200, &OkAnswer::new())),
            Err(error) => Ok(Answer::error(&error)),
        }
    }

    async fn claim(&mut self, epoch: Epoch) -> Result<Answer, Failure> {
        let ids = self.ids().await?;
        let claimant = self.claimant()?;
        let claimed = match self.blocking(move |service| service.claim(epoch, claimant, &ids)).await? {
            Ok(claimed) => claimed,
            Err(error) => return Ok(Answer::error(&error)),
        };
        let answer = ClaimAnswer {
            claimed_count: claimed.claimed_count,
            total_bytes: claimed.total_bytes,
            missing_shard_ids: claimed.missing,
            taken_shard_ids: claimed.taken,
            kept_shard_ids: claimed.kept,
        };
        Ok(Answer::json(200, &answer))
    }

    /// The claimant of this connection.
    fn claimant(&self) -> Result<Claimant, Refusal> {
        if !self.session.admitted.hold_claims() {
            return Err(Refusal::new(
                503,
                "too many connections hold claims already; close some, or end their processes",
            ));
        }
        Ok(*self.session.claimant.get_or_init(|| NEXT_CLAIMANT.fetch_add(1, Ordering::Relaxed)))
    }

    /// Does what may take long, beside the threads that serve.
    async fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce(&dyn Service) -> T + Send + 'static,
    ) -> Result<T, Refusal> {
        let service = Arc::clone(self.service());
        blocking(move || work(&*service)).await
    }
}

/// The value of a header, where it is text.
pub(super) fn header<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Option<&'a str> {
    headers.get(name)?.to_str().ok()
}

/// Each selection once, in the order in which they first occur; and for each use its place among them.
fn distinct(wanted: Vec<Selection>) -> (Vec<Selection>, Vec<usize>) {
    let (mut places, mut distinct) = (HashMap::new(), Vec::new());
    let uses = wanted.into_iter().map(|one| {
        *places.entry(one).or_insert_with_key(|one: &Selection| {
            distinct.push(one.clone());
            distinct.len() - 1
        })
    });
    let uses = uses.collect();
    (distinct, uses)
}

/// The body that consists of one shard.
async fn body_of(shard: Outgoing, accepts: MediaType) -> Result<ResponseBody, Failure> {
    let mut body = ResponseBody::default();
    match accepts {
        MediaType::Shards => append(&mut body, shard).await?,
        MediaType::Json => body.json(shard),
    }
    Ok(body)
}

/// Appends a shard with its header.
async fn append(body: &mut ResponseBody, shard: Outgoing) -> Result<(), Refusal> {
    let payload = Payload::Bytes(checksum(&shard).await?);
    body.text(ShardHeader { meta: shard.meta().clone(), payload }.to_vec());
    body.bytes(shard);
    Ok(())
}

/// The checksum of a shard, which is computed once; that of rows is computed each time.
async fn checksum(shard: &Outgoing) -> Result<u64, Refusal> {
    if let Some(known) = shard.checksum().and_then(|place| place.get()) {
        return Ok(*known);
    }
    let value = if shard.bytes().len() <= LONG {
        Checksum::of(shard.bytes())
    } else {
        let shard = shard.clone();
        blocking(move || Checksum::of(shard.bytes())).await?
    };
    Ok(shard.checksum().map_or(value, |place| *place.get_or_init(|| value)))
}

fn stored(id: &ShardId, outcome: Result<(), StoreError>) -> Result<Answer, Failure> {
    outcome?;
    Ok(Answer::json(200, &StoredAnswer { status: "ok", shard_id: id }))
}

fn partial(asked: Asked, range: &Range<u64>, total: u64, media_type: MediaType, body: ResponseBody) -> Answer {
    let (unit, first, last) = (asked.unit.name(), range.start, range.end - 1);
    Answer::new(206, media_type.name(), body).with(CONTENT_RANGE, &format!("{unit} {first}-{last}/{total}"))
}

fn unsatisfiable(asked: Asked, total: u64) -> Answer {
    let unit = asked.unit.name();
    let refusal = Refusal::new(416, format!("it has {total} {unit}, and none of those that are asked for"));
    Answer::from(refusal).with(CONTENT_RANGE, &format!("{unit} */{total}"))
}

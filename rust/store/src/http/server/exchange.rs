//! Requests, and what is done for them.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use serde_json::json;
use tokio::time::sleep;

use super::answer::Answer;
use super::body::Body;
use super::connection::{Connection, TURN, Trouble, Whole, end_turn};
use super::metrics;
use super::rooms::{self, Aside};
use super::threads::beside;
use super::timing::Timing;
use super::traffic::Traffic;
use crate::checksum::Checksum;
use crate::error::StoreError;
use crate::http::head::{Form, RequestHead};
use crate::http::json::{self, ClaimAnswer, FlushAnswer, KeepAnswer};
use crate::http::range::{Asked, Unit};
use crate::http::refusal::Refusal;
use crate::http::route::Route;
use crate::http::same_node;
use crate::http::shard_header::{self, Payload, ShardHeader};
use crate::meta::Meta;
use crate::passage::{Incoming, Outgoing};
use crate::shard::{Rows, Selection, ShardId};
use crate::transport::Service;
use crate::{Claimant, Epoch};

/// Between two tries to get room in a store at its limit.
const BETWEEN_TRIES: Duration = Duration::from_millis(20);

/// Claimants with smaller numbers are not of the wire.
const FIRST_CLAIMANT: Claimant = 1 << 32;

static NEXT_CLAIMANT: AtomicU64 = AtomicU64::new(FIRST_CLAIMANT);

/// What a connection holds: the claims that were made on it, as long as it is open.
pub(super) struct Claims {
    service: Arc<dyn Service>,
    claimant: Option<Claimant>,
}

impl Claims {
    pub(super) fn new(service: Arc<dyn Service>) -> Self {
        Claims { service, claimant: None }
    }

    pub(super) fn are_held(&self) -> bool {
        self.claimant.is_some()
    }

    /// Who claims on this connection.
    fn claimant(&mut self, connection: &Connection) -> Result<Claimant, Refusal> {
        if !connection.seat.hold() {
            return Err(Refusal::new(
                503,
                "too many connections hold claims already; close some, or end their processes",
            ));
        }
        Ok(*self.claimant.get_or_insert_with(|| NEXT_CLAIMANT.fetch_add(1, Ordering::Relaxed)))
    }
}

impl Drop for Claims {
    fn drop(&mut self) {
        if let Some(claimant) = self.claimant {
            self.service.give_up(claimant);
        }
    }
}

/// One request on its way to an answer.
pub(super) struct Exchange<'a> {
    pub(super) service: &'a Arc<dyn Service>,
    pub(super) head: &'a RequestHead,
    pub(super) connection: &'a mut Connection,
    pub(super) claims: &'a mut Claims,
    pub(super) timing: Timing,
    pub(super) traffic: &'a Traffic,
    /// Memory that was set aside for the answer and what leads to it.
    pub(super) aside: Option<Aside>,
}

impl Exchange<'_> {
    pub(super) async fn answer(mut self) -> Result<Answer, Trouble> {
        let route = Route::of(self.head.method, &self.head.path)?;
        if matches!(route, Route::Store(_)) && self.head.content_length.is_none() {
            return Err(Refusal::new(411, "tell the length of the body beforehand, in `Content-Length`").into());
        }
        let mut answer = self.of(route).await?;
        answer.aside = self.aside;
        Ok(answer)
    }

    async fn of(&mut self, route: Route) -> Result<Answer, Trouble> {
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
                self.service.close_epoch(epoch, self.claims.claimant(self.connection)?);
                Ok(Answer::json(200, &json!({"status": "ok"})))
            }
            Route::End(epoch) => {
                let ledger = self.blocking(move |service| service.end_epoch(epoch)).await?;
                Ok(Answer::json(200, &ledger))
            }
            Route::Flush(epoch) => {
                let claimant = self.claims.claimant(self.connection)?;
                let cleared_count = self.blocking(move |service| service.flush_epoch(epoch, claimant)).await?;
                Ok(Answer::json(200, &FlushAnswer { cleared_count }))
            }
            Route::BufferStats => Ok(Answer::json(200, &self.service.stats().buffer)),
            Route::Stats => Ok(Answer::json(200, &self.service.stats())),
            Route::Metrics => {
                let text = metrics::text(&self.service.stats(), self.traffic);
                Ok(Answer::text("text/plain; version=0.0.4; charset=utf-8", text))
            }
            Route::Health => Ok(Answer::json(200, &json!({"status": "ok"}))),
        }
    }

    async fn read(&mut self, id: ShardId) -> Result<Answer, Trouble> {
        let whole = Selection { id: id.clone(), rows: None };
        let shard = self.look_up(&[whole]).map_err(Refusal::from)?.remove(0);
        match self.head.range {
            Some(asked) if asked.unit == Unit::Rows => {
                let total = shard.meta().shape().first().copied();
                let total = total.ok_or_else(|| Refusal::new(400, "a tensor without dimensions has no rows"))?;
                let Some(rows) = asked.of(total) else { return Ok(unsatisfiable(asked, total)) };
                let some = Selection { id, rows: Some(Rows { start: rows.start, end: rows.end }) };
                let shard = self.look_up(&[some]).map_err(Refusal::from)?.remove(0);
                Ok(partial(asked, &rows, total, self.head.accepts, self.one(shard).await))
            }
            Some(asked) if self.head.accepts == Form::Shards => {
                let mut body = self.one(shard).await;
                let total = body.len();
                let Some(bytes) = asked.of(total) else { return Ok(unsatisfiable(asked, total)) };
                body.cut(&bytes);
                Ok(partial(asked, &bytes, total, Form::Shards, body))
            }
            _ => Ok(Answer::new(200, self.head.accepts, self.one(shard).await)),
        }
    }

    /// The body of one shard.
    async fn one(&self, shard: Outgoing) -> Body {
        let mut body = Body::default();
        match self.head.accepts {
            Form::Shards => add(&mut body, shard).await,
            Form::Json => body.json(shard),
        }
        body
    }

    async fn batch(&mut self) -> Result<Answer, Trouble> {
        let (distinct, uses) = distinct(json::read_batch(&self.names().await?.bytes)?);
        let shards = match self.look_up(&distinct) {
            Err(error @ StoreError::Missing { .. }) => return Ok(Answer::error(&error)),
            shards => shards.map_err(Refusal::from)?,
        };
        let is_json = self.head.accepts == Form::Json;
        let is_near = self.head.node.as_deref().is_some_and(same_node::is_this);
        let mut body = Body::default();
        let (mut shards, mut added) = (shards.into_iter(), Vec::with_capacity(distinct.len()));
        for (place, which) in uses.iter().enumerate() {
            if is_json {
                body.text(|text| text.push(if place == 0 { b'[' } else { b',' }));
            }
            let start = body.pieces();
            match added.get(*which) {
                Some(pieces) => body.again(Range::clone(pieces)),
                None => {
                    let shard = shards.next().expect("each comes first in the order in which they were looked up");
                    match shard.reference().filter(|_| is_near && !is_json) {
                        _ if is_json => body.json(shard),
                        Some(reference) => {
                            let payload = Payload::Reference(reference);
                            let header = ShardHeader { meta: shard.meta().clone(), payload };
                            body.text(|text| header.write(text));
                        }
                        None => add(&mut body, shard).await,
                    }
                    added.push(start..body.pieces());
                }
            }
        }
        if is_json {
            body.text(|text| text.extend(if uses.is_empty() { &b"[]"[..] } else { b"]" }));
        }
        Ok(Answer::new(200, self.head.accepts, body))
    }

    /// The body, which names shards. What is made of it has its room until it is answered.
    async fn names(&mut self) -> Result<Whole, Trouble> {
        let body = self.connection.whole_body().await?;
        self.aside = Some(rooms::for_names(&body.bytes, self.timing.silence).await?);
        Ok(body)
    }

    /// The shards that the body names.
    async fn ids(&mut self) -> Result<Vec<ShardId>, Trouble> {
        let ids = json::read_ids(&self.names().await?.bytes)?;
        Ok(ids.ok_or_else(|| Refusal::new(400, "'shard_ids' must be a list"))?)
    }

    async fn store(&mut self, id: ShardId) -> Result<Answer, Trouble> {
        if self.head.content == Form::Json {
            let body = self.connection.whole_body().await?;
            let (meta, bytes) = json::read_tensor(&body.bytes).map_err(Refusal::from)?;
            let mut incoming = self.room(&id, meta).await?;
            incoming.room().copy_from_slice(&bytes);
            return stored(&id, incoming.commit(Checksum::of(&bytes)));
        }
        let length = self.head.content_length.unwrap_or_default();
        let parse = |begun: &[u8]| {
            let read = ShardHeader::read(begun)
                .map_err(|error| Refusal::new(400, format!("the body is no shard: {error}")))?;
            Ok(read.map(|(header, taken)| ((header, taken), taken)))
        };
        let (header, taken) = self.connection.beginning(shard_header::LONGEST, parse).await?;
        let Payload::Bytes(checksum) = header.payload else {
            return Err(Refusal::new(400, "a shard is stored by its bytes, not by a reference to them").into());
        };
        if length != taken as u64 + header.meta.nbytes() {
            let (meta, has) = (&header.meta, length - taken as u64);
            return Err(
                Refusal::new(400, format!("the bytes of a {meta:?} follow its header, and these are {has}")).into()
            );
        }
        let mut incoming = self.room(&id, header.meta).await?;
        if self.connection.fill(incoming.room()).await? != checksum {
            return Err(Refusal::new(422, format!("shard {id} arrived damaged: its checksum is another one")).into());
        }
        stored(&id, incoming.commit(checksum))
    }

    /// Room for a shard, in a store that may be at its limit.
    async fn room(&self, id: &ShardId, meta: Meta) -> Result<Incoming, Trouble> {
        let end = Instant::now() + self.timing.room;
        loop {
            let (id, meta) = (id.clone(), meta.clone());
            let received = if meta.nbytes() <= TURN as u64 {
                self.service.receive(id, meta)
            } else {
                self.blocking(move |service| service.receive(id, meta)).await?
            };
            match received {
                Err(StoreError::Full { .. }) if Instant::now() < end => sleep(BETWEEN_TRIES).await,
                received => return Ok(received.map_err(Refusal::from)?),
            }
        }
    }

    async fn remove(&mut self) -> Result<Answer, Trouble> {
        let ids = self.ids().await?;
        let removed = self.blocking(move |service| service.remove(&ids)).await?;
        // What is left, as AReaL's servers tell it.
        let left = self.service.stats().storage;
        let (num_tensors, total_bytes) = (left.num_entries, left.total_bytes);
        let counts = json!({"status": "ok", "cleared_count": removed.cleared_count, "num_tensors": num_tensors,
                            "total_bytes": total_bytes, "freed_bytes": removed.total_bytes});
        Ok(Answer::json(200, &counts))
    }

    async fn clear_buffer(&mut self) -> Result<Answer, Trouble> {
        let body = self.names().await?.bytes;
        let ids = if body.is_empty() { None } else { json::read_ids(&body)? };
        let dropped = self.blocking(move |service| service.drop_fetched(ids.as_deref())).await?;
        let counts = json!({"status": "ok", "cleared_count": dropped.entries, "kept_count": dropped.kept});
        Ok(Answer::json(200, &counts))
    }

    async fn keep(&mut self) -> Result<Answer, Trouble> {
        let ids = self.ids().await?;
        let claimant = self.claims.claimant(self.connection)?;
        let kept = self.blocking(move |service| service.keep(claimant, &ids)).await?;
        Ok(Answer::json(200, &KeepAnswer { kept_count: kept.entries, kept_shards: kept.shards }))
    }

    fn begin(&mut self, epoch: Epoch) -> Result<Answer, Trouble> {
        match self.service.begin_epoch(epoch, self.claims.claimant(self.connection)?) {
            Ok(()) => Ok(Answer::json(200, &json!({"status": "ok"}))),
            Err(error) => Ok(Answer::error(&error)),
        }
    }

    async fn claim(&mut self, epoch: Epoch) -> Result<Answer, Trouble> {
        let ids = self.ids().await?;
        let claimant = self.claims.claimant(self.connection)?;
        let claimed = match self.blocking(move |service| service.claim(epoch, claimant, &ids)).await? {
            Ok(claimed) => claimed,
            Err(error) => return Ok(Answer::error(&error)),
        };
        let names = |ids: &[ShardId]| ids.iter().map(ShardId::to_string).collect();
        let answer = ClaimAnswer {
            claimed_count: claimed.claimed_count,
            total_bytes: claimed.total_bytes,
            missing_shard_ids: names(&claimed.missing),
            taken_shard_ids: names(&claimed.taken),
            kept_shard_ids: names(&claimed.kept),
        };
        Ok(Answer::json(200, &answer))
    }

    fn look_up(&self, wanted: &[Selection]) -> Result<Vec<Outgoing>, StoreError> {
        self.service.look_up(wanted)
    }

    /// What may take longer than a turn.
    async fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce(&dyn Service) -> T + Send + 'static,
    ) -> Result<T, Trouble> {
        let service = Arc::clone(self.service);
        let done = beside(move || work(&*service)).await;
        done.ok_or_else(|| Refusal::new(500, "it failed; the owner's standard error tells why").into())
    }
}

/// Each thing that is named, in the order in which it first is; and for each time that it is named which.
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

/// A shard with its header.
async fn add(body: &mut Body, shard: Outgoing) {
    let checksum = checksum(&shard).await;
    let header = ShardHeader { meta: shard.meta().clone(), payload: Payload::Bytes(checksum) };
    body.text(|text| header.write(text));
    body.bytes(shard);
}

/// The checksum of a shard, which is summed once, in turns; that of rows is summed each time.
async fn checksum(shard: &Outgoing) -> u64 {
    if let Some(known) = shard.checksum().and_then(|place| place.get()) {
        return *known;
    }
    let mut checksum = Checksum::new();
    for (place, some) in shard.bytes().chunks(TURN).enumerate() {
        if place > 0 {
            end_turn().await;
        }
        checksum.update(some);
    }
    let value = checksum.value();
    shard.checksum().map_or(value, |place| *place.get_or_init(|| value))
}

fn stored(id: &ShardId, outcome: Result<(), StoreError>) -> Result<Answer, Trouble> {
    outcome.map_err(Refusal::from)?;
    Ok(Answer::json(200, &json!({"status": "ok", "shard_id": id.to_string()})))
}

fn partial(asked: Asked, range: &Range<u64>, total: u64, form: Form, body: Body) -> Answer {
    let (unit, first, last) = (asked.unit.name(), range.start, range.end - 1);
    Answer::new(206, form, body).with("Content-Range", format!("{unit} {first}-{last}/{total}"))
}

fn unsatisfiable(asked: Asked, total: u64) -> Answer {
    let unit = asked.unit.name();
    let refusal = Refusal::new(416, format!("it has {total} {unit}, and none of those that are asked for"));
    Answer::from(refusal).with("Content-Range", format!("{unit} */{total}"))
}

//! Fetching: from the buffer, from the fetches of other threads, and the rest in one request an owner, all at once.

mod receiver;

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::Duration;

pub use self::receiver::FetchReceiver;
use self::receiver::RequestedShard;
use crate::entries::fetch_buffer::{BufferLookup, CallStep, Found, InFlight, Outcome, ShardKey};
use crate::entries::locked::CHUNK_LEN;
use crate::error::StoreError;
use crate::memory::fetched_tensor::{FetchedTensor, views_of};
use crate::memory::tensor::Tensor;
use crate::selection::{Selection, ShardRows};
use crate::shard_id::ShardId;
use crate::tensor_meta::TensorMeta;
use crate::tensor_store::TensorStore;
use crate::time_limit::TimeLimit;

/// The most owners that are asked at the same time.
const MAX_OWNERS_AT_ONCE: usize = 64;

/// How often the calling thread checks for cancellation while other threads work.
const CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// A shard, or rows of one, as a handle names it.
#[derive(Clone, Debug)]
pub struct Wanted {
    /// The address of its owner.
    pub owner: Arc<str>,
    /// The shard.
    pub id: ShardId,
    /// The rows.
    pub rows: Selection,
    /// The declared type and shape of the rows.
    pub meta: TensorMeta,
}

impl Wanted {
    pub(crate) fn shard_rows(&self) -> ShardRows {
        ShardRows { id: self.id.clone(), rows: self.rows.clone() }
    }
}

/// Fetches from owners. Called by several threads at once, for one owner each.
pub trait Transport: Sync {
    /// Fetches these shards from `owner` in one request, into `receiver`.
    ///
    /// Calls [`FetchReceiver::space`] or [`FetchReceiver::attach`] for each entry of `wanted`, by its index. A space
    /// counts after [`FetchReceiver::complete`]. A retry may call them again for all but complete entries.
    ///
    /// # Errors
    /// The receiver's, [`StoreError::Missing`] with `owner`, and those of connections.
    fn fetch(
        &self,
        owner: &Arc<str>,
        wanted: &[ShardRows],
        receiver: &mut FetchReceiver<'_>,
        time_limit: &mut TimeLimit<'_>,
    ) -> Result<(), StoreError>;
}

impl TensorStore {
    /// The wanted shards, in order, in memory that the caller may write to and nobody else sees.
    ///
    /// Shards in the buffer are not fetched again. Each other one is asked for once, however many threads want it: in
    /// one request an owner, all owners at once. The buffer keeps them under the step that was current at the call.
    ///
    /// # Errors
    /// [`StoreError::Missing`] and the transport's errors; [`StoreError::StepEnded`] and [`StoreError::Drained`] if
    /// they were drained meanwhile; [`StoreError::Mismatch`], [`StoreError::Full`], and the errors of `time_limit`.
    pub fn fetch(
        &self,
        wanted: &[Wanted],
        transport: &dyn Transport,
        time_limit: &mut TimeLimit<'_>,
    ) -> Result<Vec<FetchedTensor>, StoreError> {
        let call_step = self.buffer.call_step();
        let (each, uses) = deduplicate(wanted)?;
        let mut found: Vec<Option<Tensor>> = self.stored_here(&each)?;
        let mut is_first = true;
        loop {
            let open: Vec<usize> = (0..each.len()).filter(|index| found[*index].is_none()).collect();
            if open.is_empty() {
                break;
            }
            if !is_first {
                time_limit.check_cancelled()?;
                if time_limit.is_over() {
                    let id = &each[open[0]].id;
                    return Err(StoreError::TimedOut { what: format!("shard {id} and {} more", open.len() - 1) });
                }
            }
            self.fetch_round(&call_step, &each, &open, &mut found, is_first, transport, time_limit)?;
            is_first = false;
        }
        let found: Vec<Tensor> = found.into_iter().map(|tensor| tensor.expect("the loop ends with all")).collect();
        let wanted_ones = uses.into_iter().map(|index| found[index].clone()).collect();
        Ok(views_of(wanted_ones, &call_step.viewed))
    }

    /// Looks for all open ones in the buffer, fetches those that no other thread fetches, and waits for the rest.
    #[expect(clippy::too_many_arguments, reason = "what a call of `fetch` has in its hands, in one loop")]
    fn fetch_round(
        &self,
        call_step: &CallStep,
        each: &[&Wanted],
        open: &[usize],
        found: &mut [Option<Tensor>],
        is_first: bool,
        transport: &dyn Transport,
        time_limit: &mut TimeLimit<'_>,
    ) -> Result<(), StoreError> {
        let mut receivers: HashMap<&str, FetchReceiver<'_>> = HashMap::new();
        let mut own: Vec<(usize, Arc<InFlight<Tensor>>)> = Vec::new();
        let mut others: Vec<(usize, Arc<InFlight<Tensor>>)> = Vec::new();
        for some in open.chunks(CHUNK_LEN) {
            let keys: Vec<ShardKey> = some.iter().map(|index| key(each[*index])).collect();
            for (index, asked) in some.iter().zip(self.buffer.look_up(call_step, &keys, is_first)?) {
                let wanted = each[*index];
                match asked {
                    BufferLookup::Hit(tensor, rows) => found[*index] = Some(select(wanted, tensor, &rows)?),
                    BufferLookup::Pending(in_flight) => others.push((*index, in_flight)),
                    BufferLookup::Miss(in_flight) => {
                        let receiver = receivers.entry(&wanted.owner).or_insert_with(|| FetchReceiver::new(self));
                        receiver.shards.push(RequestedShard::new(wanted, Arc::clone(&in_flight)));
                        own.push((*index, in_flight));
                    }
                }
            }
        }
        send_all(receivers.into_values().collect(), transport, time_limit)?;
        for (index, in_flight) in own.into_iter().chain(others) {
            if let Some((tensor, rows)) = wait(&in_flight, time_limit)? {
                found[index] = Some(select(each[index], tensor, &rows)?);
            }
        }
        Ok(())
    }

    /// The shards that this process stores itself.
    fn stored_here(&self, each: &[&Wanted]) -> Result<Vec<Option<Tensor>>, StoreError> {
        let mut own: Vec<usize> = {
            let owners = self.own_addresses.lock().unwrap_or_else(PoisonError::into_inner);
            (0..each.len()).filter(|index| owners.contains(&each[*index].owner)).collect()
        };
        own.retain(|index| self.owns(&each[*index].id));
        let ids: Vec<ShardId> = own.iter().map(|index| each[*index].id.clone()).collect();
        let tensors = self.storage.get(&ids).map_err(|shards| StoreError::Missing { owner: None, shards })?;
        let mut found: Vec<Option<Tensor>> = each.iter().map(|_| None).collect();
        for (index, tensor) in own.into_iter().zip(tensors) {
            found[index] = Some(select(each[index], tensor, &Selection::All)?);
        }
        Ok(found)
    }
}

fn key(wanted: &Wanted) -> ShardKey {
    ShardKey { id: wanted.id.clone(), owner: Arc::clone(&wanted.owner), rows: wanted.rows.clone() }
}

/// The wanted rows out of a tensor with `rows` of the shard; an error if they differ from the declaration.
fn select(wanted: &Wanted, tensor: Tensor, rows: &Selection) -> Result<Tensor, StoreError> {
    let selected = tensor.select(&wanted.rows.within(rows))?;
    if selected.meta == wanted.meta {
        return Ok(selected);
    }
    Err(StoreError::Mismatch {
        id: wanted.id.clone(),
        owner: Arc::clone(&wanted.owner),
        declared: format!("{:?}", wanted.meta),
        found: format!("{:?}", selected.meta),
    })
}

/// Each wanted shard once, and for each use its place among them.
fn deduplicate(wanted: &[Wanted]) -> Result<(Vec<&Wanted>, Vec<usize>), StoreError> {
    let mut places: HashMap<(&ShardId, &str, &Selection), usize> = HashMap::with_capacity(wanted.len());
    let mut each: Vec<&Wanted> = Vec::with_capacity(wanted.len());
    let mut uses = Vec::with_capacity(wanted.len());
    for one in wanted {
        let count = each.len();
        let place = *places.entry((&one.id, &one.owner, &one.rows)).or_insert(count);
        if place == count {
            each.push(one);
        } else if each[place].meta != one.meta {
            return Err(StoreError::Mismatch {
                id: one.id.clone(),
                owner: Arc::clone(&one.owner),
                declared: format!("{:?}", one.meta),
                found: format!("{:?} by another handle", each[place].meta),
            });
        }
        uses.push(place);
    }
    Ok((each, uses))
}

/// The tensor that another thread fetched, and its rows; `None` if it has to be asked for again.
fn wait(in_flight: &InFlight<Tensor>, time_limit: &mut TimeLimit<'_>) -> Result<Option<Found<Tensor>>, StoreError> {
    loop {
        match in_flight.wait(time_limit.next_wait()) {
            Some(Outcome::Arrived(tensor, rows)) => return Ok(Some((tensor, rows))),
            Some(Outcome::Failed(error)) => return Err(error),
            Some(Outcome::Again) => return Ok(None),
            None => time_limit.check_cancelled()?,
        }
        if time_limit.is_over() {
            return Err(StoreError::TimedOut { what: format!("shard {}, which another thread fetches", in_flight.id) });
        }
    }
}

/// Sends one request, and receives its answer.
fn send(
    request: &mut FetchReceiver<'_>,
    transport: &dyn Transport,
    time_limit: &mut TimeLimit<'_>,
) -> Result<(), StoreError> {
    let (owner, shards) = request.request();
    let sent = transport.fetch(owner, &shards, request, time_limit);
    request.finish(sent)
}

/// Sends all requests at once. Only this thread calls the caller's function. When one request fails, the others are
/// cancelled.
fn send_all(
    mut requests: Vec<FetchReceiver<'_>>,
    transport: &dyn Transport,
    time_limit: &mut TimeLimit<'_>,
) -> Result<(), StoreError> {
    if requests.len() < 2 {
        return requests.iter_mut().try_for_each(|request| send(request, transport, time_limit));
    }
    let deadline = time_limit.deadline();
    let is_off = AtomicBool::new(false);
    let first_error: Mutex<Option<StoreError>> = Mutex::new(None);
    let threads = requests.len().min(MAX_OWNERS_AT_ONCE);
    let queue = Mutex::new(requests.into_iter());
    let fail = |error| {
        // First, so that the failures of cancelled requests do not replace it.
        first_error.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
        is_off.store(true, Ordering::Relaxed);
    };
    let check_others = || if is_off.load(Ordering::Relaxed) { Err(StoreError::Interrupted) } else { Ok(()) };
    let work = |time_limit: &mut TimeLimit<'_>| {
        while !is_off.load(Ordering::Relaxed) {
            let next = queue.lock().unwrap_or_else(PoisonError::into_inner).next();
            let Some(mut request) = next else { break };
            if let Err(error) = send(&mut request, transport, time_limit) {
                fail(error);
            }
        }
    };
    let (done, all_done) = mpsc::channel::<()>();
    std::thread::scope(|scope| {
        for _ in 1..threads {
            let done = done.clone();
            let (work, check_others) = (&work, &check_others);
            // Without more threads, fewer do it.
            let _ = std::thread::Builder::new().name("tundish-fetch".to_owned()).spawn_scoped(scope, move || {
                let mut check_others = check_others;
                work(&mut TimeLimit::new(deadline, &mut check_others));
                drop(done);
            });
        }
        work(&mut TimeLimit::new(deadline, &mut || time_limit.check_cancelled().and_then(|()| check_others())));
        drop(done);
        while let Err(mpsc::RecvTimeoutError::Timeout) = all_done.recv_timeout(CHECK_INTERVAL) {
            if let Err(error) = time_limit.check_cancelled() {
                fail(error);
            }
        }
    });
    // Requests that were not sent fail as they are dropped.
    drop(queue);
    first_error.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
}

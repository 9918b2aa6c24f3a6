//! Private mappings of segments, kept for the next views of the same ones: their pages are found without a fault, and
//! to unmap them and map them again would take twice as long as to read them.
//!
//! What is kept is owned by the process, in one place. What always holds:
//!
//! 1. What is kept has no lock: its owner uses a segment again whether or not somebody keeps mappings of it. Who uses
//!    one has a lease of his own, and has seen with it that the segment is of the generation that was meant.
//! 2. A mapping is kept only when no page of it is its user's any more: the next one finds what the owner wrote. Looked
//!    at are the pages of the bytes that were his to write to.
//! 3. No mapping has two users.
//! 4. What is kept is bounded, and is let go of when it has been of no use for a minute. Mappings of what its owner has
//!    given up, or of an owner that ended, hold memory that nobody else has: they go within a second or two.
//! 5. A child made by `fork` begins with nothing; what it inherited in use is good there, and is not kept afterwards.

use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::process;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::OFlags;
use rustix::io::Errno;

use crate::arena::default_limit;
use crate::error::ShmError;
use crate::file::{self, DATA_START};
use crate::header::{self, Facts};
use crate::lease::Lease;
use crate::mapping::{Access, Mapping};
use crate::owner::Owner;
use crate::pages;
use crate::per_process::PerProcess;
use crate::registry::{self, Refusal};
use crate::segment::{Address, Segment};
use crate::watcher::without_signals;

/// Segments of which something is kept: each takes a descriptor.
const MOST_SEGMENTS: usize = 64;

/// Mappings that are kept of all of them.
const MOST_MAPPINGS: usize = 256;

/// What was of no use for so long is let go of.
const QUIET: Duration = Duration::from_secs(60);

/// Between two looks at what is kept.
const BETWEEN_LOOKS: Duration = Duration::from_secs(1);

static WARM: PerProcess<Warm> = PerProcess::new(Warm::new);

/// What mappings of a segment are made from.
#[derive(Debug)]
struct Source {
    map: Mapping,
    /// A description without a lock.
    file: OwnedFd,
    page: usize,
    identity: u64,
    owner: Owner,
}

/// A segment of another process, with a lease.
#[derive(Debug)]
pub struct Loan {
    home: &'static Warm,
    source: Arc<Source>,
    lease: Arc<Lease>,
    facts: Facts,
}

/// A private mapping in use, with a lease: its pages are shared until they are written to, and nobody else sees what
/// is.
#[derive(Debug)]
pub struct WarmCopy {
    /// Until it is kept.
    map: Option<Mapping>,
    /// Bytes of the mapping that its user may write to, in whole pages.
    used: Range<usize>,
    lease: Option<Arc<Lease>>,
    source: Weak<Source>,
    home: &'static Warm,
    process: u32,
}

#[derive(Debug)]
struct Warm {
    limit: usize,
    state: Mutex<State>,
    kept_some: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// The one that was used last is at the end.
    kept: Vec<Kept>,
    is_watched: bool,
}

/// What is kept of a segment.
#[derive(Debug)]
struct Kept {
    source: Arc<Source>,
    idle: Vec<Mapping>,
    used: Instant,
}

impl Source {
    fn new(file: OwnedFd, facts: &Facts, size: usize) -> Result<Arc<Self>, ShmError> {
        let page = file::page_of(file.as_fd());
        let map = Mapping::new(&file, size.next_multiple_of(page), Access::Read)?;
        Ok(Arc::new(Source { map, file, page, identity: facts.identity, owner: facts.owner }))
    }

    /// The segment that `file` is open on, by a description without a lock, if it is the one that was meant.
    fn of(file: OwnedFd, meant: &Address) -> Result<Arc<Self>, Refusal> {
        let name = registry::describe(meant);
        let refuse =
            |reason: &str| Refusal::Other(ShmError::NotASegment { segment: name.clone(), reason: reason.to_owned() });
        if !file::keeps_its_length(file.as_fd()) {
            return Err(refuse("it is not sealed"));
        }
        let size = usize::try_from(file::status(file.as_fd()).map_err(Refusal::Other)?.st_size).unwrap_or(0);
        let facts = Facts::read(file.as_fd(), size, &name).map_err(Refusal::Other)?;
        if facts.identity != meant.identity {
            return Err(refuse("another segment has taken its place"));
        }
        Source::new(file, &facts, size).map_err(Refusal::Other)
    }

    fn copy(
        self: &Arc<Self>,
        home: &'static Warm,
        lease: Arc<Lease>,
        bytes: Range<usize>,
    ) -> Result<WarmCopy, ShmError> {
        // Where the page of the header has data, too, nothing tells whether it alone was written to.
        let first = if self.page > DATA_START { 0 } else { (DATA_START + bytes.start) / self.page * self.page };
        let last = if self.page > DATA_START { usize::MAX } else { DATA_START + bytes.end };
        let used = first..last.checked_next_multiple_of(self.page).unwrap_or(last).min(self.map.len());
        let map = match home.take(self.identity) {
            Some(map) => map,
            None => Mapping::new(&self.file, self.map.len(), Access::Private)?,
        };
        let (source, process) = (Arc::downgrade(self), process::id());
        Ok(WarmCopy { map: Some(map), used, lease: Some(lease), source, home, process })
    }
}

impl Loan {
    fn on(home: &'static Warm, source: Arc<Source>, meant: &Address) -> Result<Self, Refusal> {
        let name = registry::describe(meant);
        let gone =
            |reason: &str| Refusal::GivenBack(ShmError::Gone { segment: name.clone(), reason: reason.to_owned() });
        let lease = Lease::take(source.file.as_fd(), source.page).map_err(Refusal::Other)?;
        let lease = lease.ok_or_else(|| gone("its owner is about to use it again"))?;
        // With the lease; before, the owner may be writing it.
        let facts = Facts::read(source.file.as_fd(), source.map.len(), &name).map_err(Refusal::Other)?;
        if facts.generation != meant.generation {
            return Err(gone(registry::GIVEN_BACK));
        }
        Ok(Loan { home, source, lease: Arc::new(lease), facts })
    }

    /// The first byte of data; valid for reads of [`facts`](Loan::facts)`.data_len` bytes as long as it lives.
    pub fn data(&self) -> *const u8 {
        self.source.map.start().wrapping_add(DATA_START)
    }

    /// What the header says.
    pub fn facts(&self) -> &Facts {
        &self.facts
    }

    /// A mapping of its own, of which these bytes of data are its user's to write to.
    ///
    /// # Errors
    /// [`ShmError::Io`] where the address space has no room.
    pub fn copy(&self, bytes: Range<usize>) -> Result<WarmCopy, ShmError> {
        self.source.copy(self.home, Arc::clone(&self.lease), bytes)
    }
}

impl WarmCopy {
    /// The first byte of data.
    pub fn data(&self) -> *mut u8 {
        self.map.as_ref().map_or(std::ptr::null_mut(), |map| map.start().wrapping_add(DATA_START))
    }
}

impl Drop for WarmCopy {
    fn drop(&mut self) {
        let Some(map) = self.map.take() else { return };
        let source = self.source.upgrade().filter(|source| {
            self.process == process::id()
                && source.page == rustix::param::page_size()
                // Before its first page is given back with others that were written to.
                && pages::is_left_alone(&map)
                && pages::give_back(&map, self.used.clone())
        });
        // Before the look at whether the owner gave the segment up: it empties what has no lease.
        drop(self.lease.take());
        match source {
            Some(source) => self.home.keep(source, map),
            None => drop(map),
        }
    }
}

/// Attaches to the segment at `address`: to one that this process has mapped already, or by a descriptor of a process
/// of this user.
///
/// # Errors
/// [`ShmError::Gone`] where the segment was given back, else [`ShmError::Unreached`] with all that was tried.
pub fn open(address: &Address) -> Result<Loan, ShmError> {
    WARM.get().open(address)
}

/// Attaches to the segment at `address` through `file`, of a description with a lease that another process made for
/// this one.
///
/// # Errors
/// As of [`open`].
pub fn open_file(address: &Address, file: &OwnedFd) -> Result<Loan, ShmError> {
    let (home, own) = (WARM.get(), file::reopen(file.as_fd(), OFlags::RDONLY)?);
    Source::of(own, address).and_then(|source| Loan::on(home, home.add(source), address)).map_err(Refusal::into_error)
}

/// A private mapping of a segment of this process, of which these bytes of data are its user's to write to.
///
/// # Errors
/// [`ShmError::Io`] where the process may open or map no more.
pub fn copy_of(segment: &Segment, bytes: Range<usize>) -> Result<WarmCopy, ShmError> {
    WARM.get().copy_of(segment, bytes)
}

/// Lets go of all that is kept; whether that was anything.
pub fn let_go() -> bool {
    let kept = std::mem::take(&mut WARM.get().lock().kept);
    !kept.is_empty()
}

/// What `attempt` opens or maps. Where descriptors, mappings or addresses of the process have run out: once more
/// without what is kept, which takes of all of them. For who holds no lock that what is kept could need.
///
/// # Errors
/// The kernel's.
pub fn or_without_kept<T>(mut attempt: impl FnMut() -> rustix::io::Result<T>) -> rustix::io::Result<T> {
    match attempt() {
        Err(Errno::MFILE | Errno::NFILE | Errno::NOMEM) if let_go() => attempt(),
        made => made,
    }
}

/// Lets go of what is kept of a segment, which its owner gives up.
pub(crate) fn forget(identity: u64) {
    WARM.get().forget(identity);
}

/// Lets go of what the parent kept at the fork, and would keep alive here. For a child.
pub fn forget_inherited() {
    // Where a thread of the parent was at it there is nothing to be trusted.
    if let Some(inherited) = WARM.inherited()
        && let Ok(mut state) = inherited.state.try_lock()
    {
        drop(std::mem::take(&mut state.kept));
    }
}

impl Warm {
    fn new() -> Self {
        Warm { limit: default_limit(), state: Mutex::default(), kept_some: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn open(&'static self, address: &Address) -> Result<Loan, ShmError> {
        if let Some(source) = self.find(address.identity) {
            match Loan::on(self, source, address) {
                Ok(loan) => return Ok(loan),
                Err(Refusal::GivenBack(error)) => return Err(error),
                Err(Refusal::Other(_)) => self.forget(address.identity),
            }
        }
        registry::reach(address, None, |file| Loan::on(self, self.add(Source::of(file, address)?), address))
    }

    fn copy_of(&'static self, segment: &Segment, bytes: Range<usize>) -> Result<WarmCopy, ShmError> {
        let lease = Arc::new(segment.lease()?);
        if let Some(source) = self.find(segment.address().identity) {
            return source.copy(self, lease, bytes);
        }
        let file = file::reopen(segment.file(), OFlags::RDONLY)?;
        let facts = Facts::read(file.as_fd(), segment.size(), "a segment")?;
        self.add(Source::new(file, &facts, segment.size())?).copy(self, lease, bytes)
    }

    fn forget(&self, identity: u64) {
        let mut state = self.lock();
        let place = state.kept.iter().position(|kept| kept.source.identity == identity);
        let forgotten = place.map(|place| state.kept.remove(place));
        drop(state);
        drop(forgotten);
    }

    fn find(&self, identity: u64) -> Option<Arc<Source>> {
        self.lock().kept.iter().find(|kept| kept.source.identity == identity).map(|kept| Arc::clone(&kept.source))
    }

    fn take(&self, identity: u64) -> Option<Mapping> {
        let map = self.lock().kept.iter_mut().find(|kept| kept.source.identity == identity)?.idle.pop()?;
        // The process may have locked all its memory since it was kept.
        Some(map).filter(pages::is_left_alone)
    }

    /// Keeps a source for the next time; who comes second gets what is there already.
    fn add(&'static self, source: Arc<Source>) -> Arc<Source> {
        let mut state = self.lock();
        if let Some(known) = state.kept.iter().find(|kept| kept.source.identity == source.identity) {
            return Arc::clone(&known.source);
        }
        let released = self.put(&mut state, Arc::clone(&source), &mut None);
        drop(state);
        drop(released);
        source
    }

    /// Keeps a mapping of which no page is anybody's but the file's.
    fn keep(&'static self, source: Arc<Source>, map: Mapping) {
        let mut state = self.lock();
        let mut map = Some(map);
        let released = self.put(&mut state, source, &mut map);
        drop(state);
        drop((released, map));
    }

    /// Takes the mapping, where there is room for it; returns what is to be let go of without the lock, which takes
    /// milliseconds a gigabyte.
    fn put(&'static self, state: &mut State, source: Arc<Source>, map: &mut Option<Mapping>) -> Vec<Kept> {
        let place = state.kept.iter().position(|kept| kept.source.identity == source.identity);
        let mut kept = place.map_or_else(
            || Kept { source: Arc::clone(&source), idle: Vec::new(), used: Instant::now() },
            |place| state.kept.remove(place),
        );
        kept.used = Instant::now();
        // Of the same segment, and therefore as good as one of those that it joins; unless they are too many.
        let room = self.limit.saturating_sub(kept.bytes());
        kept.idle.extend(map.take_if(|map| map.len() <= room));
        if header::is_retired(&kept.source.map) || !self.is_watched(state) {
            return vec![kept];
        }
        state.kept.push(kept);
        state.release_surplus(self.limit)
    }

    /// Whether there is a thread that lets go of what is kept; it starts when it is first needed.
    fn is_watched(&'static self, state: &mut State) -> bool {
        if !state.is_watched {
            let start = || thread::Builder::new().name("tundish-warm".to_owned()).spawn(move || self.watch());
            state.is_watched = without_signals(start).is_ok();
        }
        self.kept_some.notify_one();
        state.is_watched
    }

    fn watch(&self) {
        let mut state = self.lock();
        loop {
            state = if state.kept.is_empty() {
                self.kept_some.wait(state).unwrap_or_else(PoisonError::into_inner)
            } else {
                drop(state);
                thread::sleep(BETWEEN_LOOKS);
                self.look();
                self.lock()
            };
        }
    }

    /// Lets go of what is of no use any more.
    fn look(&self) {
        let sources: Vec<_> = self.lock().kept.iter().map(|kept| Arc::clone(&kept.source)).collect();
        let mut owners: Vec<(Owner, bool)> = Vec::new();
        for source in &sources {
            if !owners.iter().any(|(owner, _)| *owner == source.owner) {
                owners.push((source.owner, source.owner.lives()));
            }
        }
        let lives = |owner: &Owner| owners.iter().any(|(known, lives)| known == owner && *lives);
        drop(sources);
        let is_of_use = |kept: &mut Kept| {
            kept.used.elapsed() < QUIET && !header::is_retired(&kept.source.map) && lives(&kept.source.owner)
        };
        let mut state = self.lock();
        let released: Vec<_> = state.kept.extract_if(.., |kept| !is_of_use(kept)).collect();
        drop(state);
        drop(released);
    }
}

impl State {
    /// What has to go so that no more is kept than may be: the oldest.
    fn release_surplus(&mut self, limit: usize) -> Vec<Kept> {
        let mut bytes: usize = self.kept.iter().map(Kept::bytes).sum();
        let mut mappings: usize = self.kept.iter().map(|kept| kept.idle.len()).sum();
        let mut surplus = 0;
        for kept in &self.kept {
            if bytes <= limit && mappings <= MOST_MAPPINGS && self.kept.len() - surplus <= MOST_SEGMENTS {
                break;
            }
            bytes -= kept.bytes();
            mappings -= kept.idle.len();
            surplus += 1;
        }
        self.kept.drain(..surplus).collect()
    }
}

impl Kept {
    fn bytes(&self) -> usize {
        self.source.map.len() * self.idle.len()
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests;

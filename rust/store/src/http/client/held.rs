//! A connection that is held open: with it go the claims that were made on it.

use std::sync::Arc;

use serde::de::DeserializeOwned;

use super::attempts::Attempts;
use super::connection::{Connection, Trouble};
use super::request::{Request, unfit};
use super::{Client, epoch_path};
use crate::Epoch;
use crate::error::StoreError;
use crate::http::json::{self, ClaimAnswer, FlushAnswer, KeepAnswer};
use crate::patience::Patience;
use crate::shard::ShardId;
use crate::stats::{Claimed, EpochLedger, Kept};

/// A connection to a process whose steps are begun, given shards, and ended.
///
/// The process takes the end of the connection for the end of whoever holds it, and gives up what was claimed on it: so
/// it has to live as long as the claims, and where it breaks they are gone.
#[derive(Debug)]
pub struct Held<'a> {
    client: &'a Client,
    owner: Arc<str>,
    connection: Option<Connection>,
    /// Whether anything is claimed on it.
    has_claimed: bool,
}

impl<'a> Held<'a> {
    pub(super) fn new(client: &'a Client, owner: &Arc<str>) -> Self {
        Held { client, owner: Arc::clone(owner), connection: None, has_claimed: false }
    }

    /// Whom it leads to.
    pub fn owner(&self) -> &Arc<str> {
        &self.owner
    }

    /// From here on what that process fetches belongs to this step.
    ///
    /// # Errors
    /// [`StoreError::StepEnded`]; [`StoreError::Unanswered`], after which all claims are gone; what patience says.
    pub fn begin_epoch(&mut self, epoch: Epoch, patience: &mut Patience<'_>) -> Result<(), StoreError> {
        self.call(&Request::new("POST", &epoch_path(epoch, "begin"), &[]), patience)?;
        self.has_claimed = true;
        Ok(())
    }

    /// Claims shards that are stored there.
    ///
    /// # Errors
    /// As of [`begin_epoch`](Held::begin_epoch).
    pub fn claim(&mut self, epoch: Epoch, ids: &[ShardId], patience: &mut Patience<'_>) -> Result<Claimed, StoreError> {
        let mut claimed = Claimed::default();
        for some in ids.chunks(json::MOST_IDS) {
            let body = json::ids_body(some.iter());
            let answer = self.call(&Request::new("POST", &epoch_path(epoch, "claim"), &[&body]), patience)?;
            self.has_claimed = true;
            let answer: ClaimAnswer = self.read(&answer)?;
            let ids = |names: Vec<String>| {
                let parsed: Result<Vec<ShardId>, StoreError> = names.iter().map(|name| name.parse()).collect();
                parsed.map_err(|error| unfit(&self.owner, 200, &error.to_string()))
            };
            claimed.claimed_count += answer.claimed_count;
            claimed.total_bytes += answer.total_bytes;
            claimed.missing.extend(ids(answer.missing_shard_ids)?);
            claimed.taken.extend(ids(answer.taken_shard_ids)?);
            claimed.kept.extend(ids(answer.kept_shard_ids)?);
        }
        Ok(claimed)
    }

    /// Carries shards over, stored there or fetched: of steps that are another's as long as the connection is open.
    ///
    /// # Errors
    /// As of [`begin_epoch`](Held::begin_epoch).
    pub fn keep(&mut self, ids: &[ShardId], patience: &mut Patience<'_>) -> Result<Kept, StoreError> {
        let mut kept = Kept::default();
        for some in ids.chunks(json::MOST_IDS) {
            let body = json::ids_body(some.iter());
            let answer = self.call(&Request::new("POST", "/keep", &[&body]), patience)?;
            self.has_claimed = true;
            let KeepAnswer { kept_count, kept_shards } = self.read(&answer)?;
            kept.entries += kept_count;
            kept.shards += kept_shards;
        }
        Ok(kept)
    }

    /// Drops what was fetched there so far in a step that was begun here, and goes on. How many entries.
    ///
    /// # Errors
    /// As of [`begin_epoch`](Held::begin_epoch).
    pub fn flush_epoch(&mut self, epoch: Epoch, patience: &mut Patience<'_>) -> Result<u64, StoreError> {
        let answer = self.call(&Request::new("POST", &epoch_path(epoch, "flush"), &[]), patience)?;
        let FlushAnswer { cleared_count } = self.read(&answer)?;
        Ok(cleared_count)
    }

    /// Has nobody given what a step claimed here any more: it is about to end.
    ///
    /// # Errors
    /// As of [`begin_epoch`](Held::begin_epoch).
    pub fn close_epoch(&mut self, epoch: Epoch, patience: &mut Patience<'_>) -> Result<(), StoreError> {
        self.call(&Request::new("POST", &epoch_path(epoch, "close"), &[]), patience).map(drop)
    }

    /// Ends a step there: drops what it claimed and what was fetched in it. It may be asked for again.
    ///
    /// # Errors
    /// As of [`begin_epoch`](Held::begin_epoch).
    pub fn end_epoch(&mut self, epoch: Epoch, patience: &mut Patience<'_>) -> Result<EpochLedger, StoreError> {
        let answer = self.call(&Request::new("POST", &epoch_path(epoch, "end"), &[]), patience)?;
        self.read(&answer)
    }

    fn read<T: DeserializeOwned>(&self, answer: &[u8]) -> Result<T, StoreError> {
        serde_json::from_slice(answer).map_err(|error| unfit(&self.owner, 200, &error.to_string()))
    }

    /// Whether the other side has neither ended nor closed the connection.
    pub fn is_alive(&self) -> bool {
        self.connection.as_ref().is_none_or(Connection::is_quiet)
    }

    fn call(&mut self, request: &Request<'_>, patience: &mut Patience<'_>) -> Result<Vec<u8>, StoreError> {
        let mut attempts = Attempts::new();
        loop {
            let (client, owner) = (self.client, Arc::clone(&self.owner));
            let opened = self.opened(patience);
            let outcome = opened.and_then(|connection| client.exchange(connection, &owner, request, patience));
            match outcome {
                Ok(answer) => return Ok(answer),
                Err(Trouble::Final(error)) => return Err(Trouble::Final(error).into_error(&owner, None)),
                Err(trouble) => {
                    self.connection = None;
                    if std::mem::take(&mut self.has_claimed) {
                        let reason = format!("{}; all claims are given up there", trouble.reason());
                        return Err(Trouble::Broken(reason).into_error(&owner, None));
                    }
                    client.once_more(&owner, None, trouble, &mut attempts, patience)?;
                }
            }
        }
    }

    fn opened(&mut self, patience: &mut Patience<'_>) -> Result<&mut Connection, Trouble> {
        if self.connection.as_ref().is_some_and(|connection| !connection.is_own()) {
            // What was claimed is the parent's.
            (self.connection, self.has_claimed) = (None, false);
        }
        if self.connection.is_none() {
            self.connection = Some(Connection::open(&super::resolve(&self.owner, patience)?, patience)?);
        }
        Ok(self.connection.as_mut().expect("just opened"))
    }
}

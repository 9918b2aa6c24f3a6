//! Beginning, publishing and giving up a checkpoint.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::path::PathBuf;
use std::sync::Arc;

use rustix::io::Errno;

use super::checkpoint::{Checkpoint, Damage, Published, compare, strangers};
use super::directory::Directory;
use super::reading::{Kept, keep_from_readers};
use super::recovery::is_written_into;
use super::{Attempt, Key, Root, State, layout, records};
use crate::disk::{Disk, EntryKind, Sharing};
use crate::error::CommitError;
use crate::manifest::{self, Kind, Manifest};
use crate::seal::seal;

impl<D: Disk + Clone + 'static> Root<D> {
    /// Begins a checkpoint: makes the hidden folder that its files are to be written in, and returns its path.
    ///
    /// # Errors
    /// [`CommitError::StepExists`], [`CommitError::StepOrder`]; [`CommitError::ExchangeUnsupported`] for one that
    /// cannot be overwritten; [`CommitError::InvalidName`] for a step beyond 2⁶³ − 1. Whoever reads what is to be
    /// overwritten is in the way of [`publish`](Root::publish) alone. Where there is something to overwrite it waits for
    /// what is being published or removed, else for nothing.
    pub fn begin(&self, kind: Kind, step: u64, overwrite: bool) -> Result<PathBuf, CommitError> {
        let path = self.checkpoint_path((kind, step));
        if step > layout::MAX_STEP {
            return Err(CommitError::InvalidName { path, reason: "steps end at 2^63 - 1" });
        }
        // Trying an exchange makes the root durable, which waits for who changes it.
        let mut changes = None;
        let (_beginnings, replaces) = loop {
            let beginnings = self.beginnings()?;
            self.check_owned()?;
            self.check_beginning((kind, step))?;
            let replaces = self.has_target((kind, step), overwrite)?;
            if changes.is_some() || !replaces {
                break (beginnings, replaces);
            }
            drop(beginnings);
            changes = Some(self.changes()?);
        };
        let name = layout::attempt(kind, step);
        self.clear_attempt((kind, step))?;
        let folder = self.root.create_folder(&name)?;
        // Tells other processes that its writer lives; where there are no such locks, they cannot be told.
        self.root.disk.lock_folder(&folder.folder, Sharing::Shared, &folder.path)?;
        if replaces && let Err(error) = self.probe_exchange(&folder) {
            let _ = self.root.remove(&name);
            return Err(match error {
                CommitError::ExchangeUnsupported { .. } => CommitError::ExchangeUnsupported { path },
                error => error,
            });
        }
        let (status, path) = (folder.status()?, folder.path.clone());
        let attempt = Attempt { folder: Arc::new(folder), status, failed: false };
        self.state()?.attempts.insert((kind, step), attempt);
        Ok(path)
    }

    /// Refuses a step that is being written or perhaps not durable, and one below the newest that is there.
    fn check_beginning(&self, (kind, step): Key) -> Result<(), CommitError> {
        if self.state()?.newest(kind).is_some_and(|newest| newest > step) {
            // It may have gone.
            self.find_newest(kind)?;
        }
        let state = self.state()?;
        let path = self.checkpoint_path((kind, step));
        if state.attempts.contains_key(&(kind, step)) {
            return Err(CommitError::StepExists { path, reason: "is being written already".to_owned() });
        }
        state.check_order(kind, step, &self.root)?;
        if state.doubtful.contains(&(kind, step)) {
            let reason = "may be there, but its name may be lost with the power: open the root again".to_owned();
            return Err(CommitError::StepExists { path, reason });
        }
        Ok(())
    }

    /// Whether there is something to overwrite.
    fn has_target(&self, (kind, step): Key, overwrite: bool) -> Result<bool, CommitError> {
        let name = layout::checkpoint(kind, step);
        let path = self.root.path.join(&name);
        let Some(status) = self.root.look_at(&name)? else {
            return Ok(false);
        };
        if status.kind != EntryKind::Folder {
            return Err(CommitError::NameTaken { path, needed_for: "the checkpoint" });
        }
        if !overwrite {
            let reason = "is there already: save another step, overwrite it, or, after a rollback, set it aside with \
                          discard_after first"
                .to_owned();
            return Err(CommitError::StepExists { path, reason });
        }
        Ok(true)
    }

    /// What there is to overwrite, kept from readers.
    fn keep_target(&self, (kind, step): Key, overwrite: bool) -> Result<Option<Kept<D>>, CommitError> {
        if !self.has_target((kind, step), overwrite)? {
            return Ok(None);
        }
        keep_from_readers(&self.root, &layout::checkpoint(kind, step)).map(Some)
    }

    /// Takes what an earlier attempt at a step left out of the way.
    fn clear_attempt(&self, key: Key) -> Result<(), CommitError> {
        let name = layout::attempt(key.0, key.1);
        let Some(status) = self.root.look_at(&name)? else {
            return Ok(());
        };
        if status.kind != EntryKind::Folder {
            return self.root.remove(&name);
        }
        let aside = self.set_attempt_aside(key)?;
        if matches!(is_written_into(&self.root, &aside), Ok(false)) {
            // What cannot be removed now, or not even opened, is left to the next start.
            let _ = self.root.remove(&aside);
        }
        Ok(())
    }

    /// Gives the folder of an attempt a name to be removed under; returns it. Whoever still writes into it changes
    /// nothing of the next attempt, and removing it takes nothing from that.
    fn set_attempt_aside(&self, (kind, step): Key) -> Result<OsString, CommitError> {
        let aside = self.root.free_name(|number| layout::removed(kind, step, number))?;
        self.root.rename_new(&layout::attempt(kind, step), &aside)?;
        Ok(aside)
    }

    /// Tries whether the file system exchanges folders, before anything is written that could not be published.
    fn probe_exchange(&self, attempt: &Directory<D>) -> Result<(), CommitError> {
        let probe = OsStr::new(layout::EXCHANGE_PROBE);
        self.root.remove(probe)?;
        self.root.create_folder(probe)?;
        let name = attempt.path.file_name().unwrap_or_default();
        let outcome = self.root.exchange(name, probe).and_then(|()| self.root.exchange(name, probe));
        self.root.remove(probe)?;
        // Of names that went to and fro no part may come back after a crash.
        self.root.sync()?;
        outcome
    }

    /// Publishes a checkpoint whose files are all written and durable, and returns its path.
    ///
    /// `manifest` becomes its `tundish.json`; what the folder holds must be what it lists.
    ///
    /// # Errors
    /// [`CommitError::CheckpointInUse`]: somebody reads what is to be replaced; nothing was changed, and it can be
    /// tried again. [`CommitError::NotPublishable`], [`CommitError::Corrupt`], [`CommitError::StepExists`],
    /// [`CommitError::Io`]: nothing was published, and cannot be without beginning again ([`abandon`](Root::abandon)
    /// it); where nobody can tell whether the rename was made, not before the root was opened again.
    /// [`CommitError::NotDurable`]: it is whole and visible, but its name may be lost with the power; it is not
    /// counted. After an error of the registry or the pointer it is published.
    pub fn publish(&self, kind: Kind, step: u64, manifest: &str, overwrite: bool) -> Result<PathBuf, CommitError> {
        let key = (kind, step);
        let changes = self.changes()?;
        self.check_owned()?;
        self.forget_vanished()?;
        let (published, replaced) = match self.make_visible(key, manifest, overwrite) {
            Ok(visible) => visible,
            Err(error) => {
                // Whoever reads what is to be replaced will end, and nothing was changed yet.
                let is_in_use = matches!(error, CommitError::CheckpointInUse { .. });
                if let Some(attempt) = self.state()?.attempts.get_mut(&key).filter(|_| !is_in_use) {
                    attempt.failed = true;
                }
                return Err(error);
            }
        };
        let recorded = self.record(key, &published);
        // Whatever became of the records: it is durable, and the next start makes them anew.
        self.state()?.published.insert(key, published);
        let aside = match &replaced {
            Some(_) if recorded.is_ok() => self.set_attempt_aside(key).ok(),
            // What it replaced stays where it is, under the hidden name, until somebody begins again or starts.
            _ => None,
        };
        // Its hidden name is free again.
        self.state()?.attempts.remove(&key);
        drop(changes);
        recorded?;
        if let Some(aside) = aside {
            // The checkpoint is published; what cannot be removed now of what it held before, the next start removes.
            let _ = self.root.remove(&aside);
        }
        // Readers are locked out of it until it is gone.
        drop(replaced);
        Ok(self.checkpoint_path(key))
    }

    /// Everything up to a durable name. Returns what is published, and what it replaced, kept from readers.
    fn make_visible(
        &self,
        key: Key,
        text: &str,
        overwrite: bool,
    ) -> Result<(Arc<Published>, Option<Kept<D>>), CommitError> {
        // What cannot be sealed is no manifest, and refused as such.
        let text = &seal(text).unwrap_or_else(|| text.to_owned());
        let (attempt, manifest) = self.check_publishable(key, text)?;
        let target = self.keep_target(key, overwrite)?;
        let said = attempt.folder.create_file(OsStr::new(manifest::FILE_NAME), text.as_bytes())?;
        attempt.folder.sync_all()?;
        // Whatever comes between, a rename that may have been made is not durable before the root is.
        self.state()?.doubtful.insert(key);
        let replaced = self.rename(key, target).inspect_err(|_| self.settle_rename(key, &attempt))?;
        // What it replaced is not there any more, and of itself nothing is sure yet.
        self.state()?.published.remove(&key);
        let path = self.checkpoint_path(key);
        if let Err(error) = self.root.sync() {
            // There is no attempt to give up: it is visible.
            self.state()?.attempts.remove(&key);
            return Err(match error {
                CommitError::Io { source, .. } => CommitError::NotDurable { path, source },
                other => other,
            });
        }
        self.state()?.doubtful.remove(&key);
        let checkpoint = Checkpoint::new(path, manifest);
        Ok((Arc::new(Published { checkpoint, status: attempt.status, manifest: said }), replaced))
    }

    /// There is no doubt about a rename that failed where the attempt still has its hidden name. Where nobody can tell, on
    /// a network file system that does not answer, the next start looks.
    fn settle_rename(&self, key: Key, attempt: &Attempt<D>) {
        if matches!(self.root.has(&layout::attempt(key.0, key.1), &attempt.folder), Ok(true))
            && let Ok(mut state) = self.state()
        {
            state.doubtful.remove(&key);
        }
    }

    /// Writes the registry and the pointer as they are with a checkpoint that is durable now.
    fn record(&self, key: Key, published: &Arc<Published>) -> Result<(), CommitError> {
        let mut recorded = self.published()?;
        recorded.insert(key, Arc::clone(published));
        records::write_registry(&self.root, &recorded)?;
        records::point(&self.root, &recorded, key.0).map(drop)
    }

    fn check_publishable(&self, key: Key, text: &str) -> Result<(Attempt<D>, Manifest), CommitError> {
        let name = layout::attempt(key.0, key.1);
        let path = self.root.path.join(&name);
        let refuse = |reason: &str| CommitError::NotPublishable { path: path.clone(), reason: reason.to_owned() };
        let attempt = self.state()?.attempts.get(&key).cloned().ok_or_else(|| refuse("it was not begun"))?;
        if attempt.failed {
            return Err(refuse("publishing it failed before; begin it again"));
        }
        if !self.root.has(&name, &attempt.folder)? {
            return Err(refuse("somebody removed or renamed it while it was written"));
        }
        let manifest =
            Manifest::parse(text.as_bytes()).map_err(|reason| refuse(&format!("of its manifest: {reason}")))?;
        if (manifest.kind, manifest.step) != key {
            return Err(refuse(&format!("its manifest is that of {}-{}", manifest.kind, manifest.step)));
        }
        check_contents(&attempt.folder, &manifest)?;
        Ok((attempt, manifest))
    }

    /// `target`: what is replaced.
    fn rename(&self, (kind, step): Key, target: Option<Kept<D>>) -> Result<Option<Kept<D>>, CommitError> {
        let (from, to) = (layout::attempt(kind, step), layout::checkpoint(kind, step));
        if let Some(kept) = target {
            self.root.exchange(&from, &to)?;
            return Ok(Some(kept));
        }
        self.root.rename_new(&from, &to).map(|()| None).map_err(|error| match error {
            error if error.is(Errno::EXIST) => CommitError::StepExists {
                path: self.checkpoint_path((kind, step)),
                reason: "appeared while it was being written; move it elsewhere".to_owned(),
            },
            error => error,
        })
    }

    /// Gives up a checkpoint that was begun: removes what was written. Does nothing for any other.
    ///
    /// # Errors
    /// What cannot be removed stays under a hidden name, and the next start removes it.
    pub fn abandon(&self, kind: Kind, step: u64) -> Result<(), CommitError> {
        let changes = self.changes()?;
        let beginnings = self.beginnings()?;
        self.check_owned()?;
        let Some(attempt) = self.state()?.attempts.remove(&(kind, step)) else {
            return Ok(());
        };
        if !self.root.has(&layout::attempt(kind, step), &attempt.folder)? {
            return Ok(());
        }
        let aside = self.set_attempt_aside((kind, step))?;
        // Emptying it takes time, and concerns nobody else.
        drop(beginnings);
        drop(changes);
        self.root.remove(&aside)
    }
}

impl<D: Disk + Clone + 'static> State<D> {
    /// Refuses a step below one that is published or being written.
    fn check_order(&self, kind: Kind, step: u64, root: &Directory<D>) -> Result<(), CommitError> {
        let writing = self.attempts.range((kind, 0)..=(kind, u64::MAX)).next_back().map(|(&(_, step), _)| step);
        match self.newest(kind).max(writing) {
            Some(newest) if newest > step => {
                Err(CommitError::StepOrder { path: root.path.clone(), kind, step, newest })
            }
            _ => Ok(()),
        }
    }
}

/// Refuses a folder that does not hold exactly the files of its manifest.
fn check_contents<D: Disk + Clone>(folder: &Directory<D>, manifest: &Manifest) -> Result<(), CommitError> {
    let mut damaged = compare(folder, &manifest.files)?;
    let names: BTreeSet<&str> = manifest.files.iter().map(|file| file.name.as_str()).collect();
    damaged.extend(strangers(folder, "", &|name| names.contains(name))?);
    let Some(first) = damaged.first() else {
        return Ok(());
    };
    let reason = match damaged.len() {
        1 => first.to_string(),
        count => format!("{first}, and {} more", count - 1),
    };
    let files = damaged.into_iter().map(|Damage { name, .. }| name).collect();
    Err(CommitError::Corrupt { path: folder.path.clone(), reason, files })
}

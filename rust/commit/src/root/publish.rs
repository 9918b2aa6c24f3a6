//! Begins, publishes and abandons checkpoints.

use std::ffi::{OsStr, OsString};
use std::path::PathBuf;
use std::sync::Arc;

use rustix::io::Errno;

use super::checkpoint_root::{InProgress, Root, State};
use super::read_lock::{ReaderExclusion, exclude_readers};
use super::whole_checkpoint::{CheckpointInfo, CheckpointKey, PublishedCheckpoint, check_contents};
use super::{latest_links, names};
use crate::disk::{Disk, EntryKind, Room};
use crate::error::{CommitError, FirstFailure};
use crate::hidden_folder::HiddenFolder;
use crate::manifest::{self, CheckpointKind, Manifest, add_manifest_checksum};
use crate::open_folder::{OpenFolder, Replacing};

impl<D: Disk> Root<D> {
    /// Checks that a step may be saved, and reserves the room that its checkpoint will take. Until it is published or
    /// abandoned, no lower step may be saved. Changes nothing on the disk; a second call looks again.
    ///
    /// Returns the room on the disk beside that of all other checkpoints that are being written. It may be too little:
    /// the caller makes room, or abandons the step.
    ///
    /// # Errors
    /// As [`begin`](Root::begin).
    pub fn reserve(&self, kind: CheckpointKind, step: u64, overwrite: bool, room: Room) -> Result<Room, CommitError> {
        let key = (kind, step);
        {
            let _begin_lock = self.begin_lock()?;
            self.check_owned()?;
            self.check_may_begin(key, overwrite)?;
            self.state()?.reserved.insert(key, room);
        }
        self.free_beside(key)
    }

    /// The room on the disk beside that of all checkpoints that are being written but this one. Files are preallocated
    /// when writing begins: until then the file system does not count them.
    fn free_beside(&self, key: CheckpointKey) -> Result<Room, CommitError> {
        let reserved = self.state()?.reserved.clone();
        let mut free = self.root.disk.free_room(&self.root.folder, &self.root.path)?;
        for ((kind, step), room) in reserved.into_iter().filter(|(other, _)| *other != key) {
            let folder = self.root.open_folder(&names::unfinished(kind, step));
            // It was not begun, or is published by now.
            let taken = folder.and_then(|folder| folder.taken()).unwrap_or(Room { bytes: 0, files: 0 });
            free.bytes = free.bytes.saturating_sub(room.bytes.saturating_sub(taken.bytes));
            free.files = free.files.saturating_sub(room.files.saturating_sub(taken.files));
        }
        Ok(free)
    }

    /// Begins a checkpoint: makes the hidden folder for its files and returns its path.
    ///
    /// # Errors
    /// [`CommitError::StepExists`], [`CommitError::StepOrder`]; [`CommitError::InvalidName`] for a step beyond 2⁶³ − 1.
    /// Readers of what will be overwritten only matter in [`publish`](Root::publish).
    pub fn begin(&self, kind: CheckpointKind, step: u64, overwrite: bool) -> Result<PathBuf, CommitError> {
        let _begin_lock = self.begin_lock()?;
        self.check_owned()?;
        self.check_may_begin((kind, step), overwrite)?;
        self.hide_leftover((kind, step))?;
        let hidden = Arc::new(HiddenFolder::create(&self.root, &names::unfinished(kind, step))?);
        let path = hidden.folder.path.clone();
        self.state()?.in_progress.insert((kind, step), InProgress { hidden, failure: FirstFailure::default() });
        Ok(path)
    }

    fn check_may_begin(&self, (kind, step): CheckpointKey, overwrite: bool) -> Result<(), CommitError> {
        if step > names::MAX_STEP {
            let path = self.checkpoint_path((kind, step));
            return Err(CommitError::InvalidName { path, reason: "steps end at 2^63 - 1" });
        }
        self.check_step_is_new((kind, step))?;
        self.has_target((kind, step), overwrite).map(drop)
    }

    /// Refuses a step that is being written or may not be durable, and one below the newest.
    fn check_step_is_new(&self, (kind, step): CheckpointKey) -> Result<(), CommitError> {
        if self.state()?.newest(kind).is_some_and(|newest| newest > step) {
            // The newest may be gone.
            self.newest_present(kind)?;
        }
        let state = self.state()?;
        let path = self.checkpoint_path((kind, step));
        if state.in_progress.contains_key(&(kind, step)) {
            return Err(CommitError::StepExists { path, reason: "is being written already".to_owned() });
        }
        state.check_order(kind, step, &self.root)?;
        if state.uncertain.contains(&(kind, step)) {
            let reason = "may be there, but its name may not survive a power cut: open the root again".to_owned();
            return Err(CommitError::StepExists { path, reason });
        }
        Ok(())
    }

    /// Whether there is a checkpoint to overwrite.
    fn has_target(&self, (kind, step): CheckpointKey, overwrite: bool) -> Result<bool, CommitError> {
        let name = names::checkpoint(kind, step);
        let path = self.root.path.join(&name);
        let Some(stat) = self.root.look_at(&name)? else {
            return Ok(false);
        };
        if stat.kind != EntryKind::Folder {
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

    /// Locks readers out of the checkpoint to overwrite, if there is one.
    fn exclude_target_readers(
        &self,
        (kind, step): CheckpointKey,
        overwrite: bool,
    ) -> Result<Option<ReaderExclusion<D>>, CommitError> {
        if !self.has_target((kind, step), overwrite)? {
            return Ok(None);
        }
        exclude_readers(&self.root, &names::checkpoint(kind, step)).map(Some)
    }

    /// Moves what an earlier attempt at a step left out of the way.
    fn hide_leftover(&self, key: CheckpointKey) -> Result<(), CommitError> {
        let name = names::unfinished(key.0, key.1);
        let Some(stat) = self.root.look_at(&name)? else {
            return Ok(());
        };
        if stat.kind != EntryKind::Folder {
            return self.root.remove(&name);
        }
        let hidden = self.hide_unfinished(key)?;
        if matches!(self.root.has_live_writer(&hidden), Ok(false)) {
            // The next start removes what cannot be removed now.
            let _ = self.root.remove(&hidden);
        }
        Ok(())
    }

    /// Renames an unfinished folder to a name for removal and returns that. A process that still writes into it cannot
    /// affect the next attempt.
    fn hide_unfinished(&self, (kind, step): CheckpointKey) -> Result<OsString, CommitError> {
        let hidden = self.root.free_name(|number| names::removed(kind, step, number))?;
        self.root.rename(&names::unfinished(kind, step), &hidden, Replacing::Nothing)?;
        Ok(hidden)
    }

    /// Publishes a checkpoint whose files are all written and durable, and returns its path.
    ///
    /// `manifest` becomes its `tundish.json`; the folder must hold exactly the files it lists.
    ///
    /// # Errors
    /// [`CommitError::CheckpointInUse`]: somebody reads what is to be replaced. Nothing was changed; try again.
    /// [`CommitError::NotPublishable`], [`CommitError::Corrupt`], [`CommitError::StepExists`], [`CommitError::Io`]:
    /// nothing was published; [`abandon`](Root::abandon) it and begin again. If it is unknown whether the rename
    /// happened, open the root again first. [`CommitError::NotDurable`]: it is whole and visible, but its name may not
    /// survive a power cut; it does not count. After an error of the link it is published.
    pub fn publish(
        &self,
        kind: CheckpointKind,
        step: u64,
        manifest: &str,
        overwrite: bool,
    ) -> Result<PathBuf, CommitError> {
        let key = (kind, step);
        let publish_lock = self.publish_lock()?;
        self.check_owned()?;
        self.forget_missing()?;
        let (published, replaced) = match self.rename_into_place(key, manifest, overwrite) {
            Ok(visible) => visible,
            Err(error) => {
                // The reader will end, and nothing was changed yet.
                let is_in_use = matches!(error, CommitError::CheckpointInUse { .. });
                if let Some(unfinished) = self.state()?.in_progress.get_mut(&key).filter(|_| !is_in_use) {
                    unfinished.failure.record(error.again());
                }
                return Err(error);
            }
        };
        let linked = self.link(key, &published);
        // Even if that failed: it is durable, and the next start writes the link again.
        self.state()?.published.insert(key, published);
        let hidden = match &replaced {
            Some(_) if linked.is_ok() => self.hide_unfinished(key).ok(),
            // The replaced checkpoint keeps the hidden name until the step is begun again, or until the next start.
            _ => None,
        };
        // Its hidden name is free again.
        self.state()?.forget_unfinished(key);
        drop(publish_lock);
        linked?;
        if let Some(hidden) = hidden {
            // The checkpoint is published. The next start removes what cannot be removed of the old one now.
            let _ = self.root.remove(&hidden);
        }
        // Readers stay locked out of the old one until it is gone.
        drop(replaced);
        Ok(self.checkpoint_path(key))
    }

    /// Everything up to a durable name. Returns what is published, and the lock on what it replaced.
    fn rename_into_place(
        &self,
        key: CheckpointKey,
        text: &str,
        overwrite: bool,
    ) -> Result<(Arc<PublishedCheckpoint>, Option<ReaderExclusion<D>>), CommitError> {
        // A text without a checksum is no manifest, and is refused as such.
        let text = &add_manifest_checksum(text).unwrap_or_else(|| text.to_owned());
        let (hidden, manifest) = self.check_publishable(key, text)?;
        let target = self.exclude_target_readers(key, overwrite)?;
        let manifest_file = hidden.folder.create_file(OsStr::new(manifest::FILE_NAME), text.as_bytes())?;
        hidden.complete()?;
        // A rename that may have happened is not durable before the root is.
        self.state()?.uncertain.insert(key);
        let replaced = self.rename(key, &hidden, target).inspect_err(|_| self.resolve_uncertainty(key, &hidden))?;
        // The replaced checkpoint is gone, and the new one is not durable yet.
        self.state()?.published.remove(&key);
        let path = self.checkpoint_path(key);
        if let Err(error) = self.root.sync_name(&path) {
            // It is visible, so there is nothing to abandon.
            self.state()?.forget_unfinished(key);
            return Err(error);
        }
        self.state()?.uncertain.remove(&key);
        let checkpoint = CheckpointInfo::new(path, manifest);
        Ok((Arc::new(PublishedCheckpoint { checkpoint, manifest: manifest_file }), replaced))
    }

    /// A rename certainly failed if the folder still has its hidden name. Where that is unknown, as on a network file
    /// system that does not answer, the next start looks.
    fn resolve_uncertainty(&self, key: CheckpointKey, hidden: &HiddenFolder<D>) {
        if matches!(hidden.is_in(&self.root), Ok(true))
            && let Ok(mut state) = self.state()
        {
            state.uncertain.remove(&key);
        }
    }

    /// Makes the link lead to the newest checkpoint, with one that is durable now.
    fn link(&self, key: CheckpointKey, published: &Arc<PublishedCheckpoint>) -> Result<(), CommitError> {
        let mut all = self.published()?;
        all.insert(key, Arc::clone(published));
        latest_links::update_latest_link(&self.root, &all, key.0).map(drop)
    }

    fn check_publishable(
        &self,
        key: CheckpointKey,
        text: &str,
    ) -> Result<(Arc<HiddenFolder<D>>, Manifest), CommitError> {
        let path = self.root.path.join(names::unfinished(key.0, key.1));
        let refuse = |reason: &str| CommitError::NotPublishable { path: path.clone(), reason: reason.to_owned() };
        let hidden = match self.state()?.in_progress.get(&key) {
            None => return Err(refuse("it was not begun")),
            Some(unfinished) => {
                unfinished.failure.check()?;
                Arc::clone(&unfinished.hidden)
            }
        };
        if !hidden.is_in(&self.root)? {
            return Err(refuse("somebody removed or renamed it while it was written"));
        }
        let manifest =
            Manifest::parse(text.as_bytes()).map_err(|reason| refuse(&format!("of its manifest: {reason}")))?;
        if (manifest.kind, manifest.step) != key {
            return Err(refuse(&format!("its manifest is that of {}-{}", manifest.kind, manifest.step)));
        }
        check_contents(&hidden.folder, &manifest)?;
        Ok((hidden, manifest))
    }

    /// `target`: the lock on what is replaced.
    fn rename(
        &self,
        (kind, step): CheckpointKey,
        hidden: &HiddenFolder<D>,
        target: Option<ReaderExclusion<D>>,
    ) -> Result<Option<ReaderExclusion<D>>, CommitError> {
        let replacing = if target.is_some() { Replacing::Folder } else { Replacing::Nothing };
        let path = self.checkpoint_path((kind, step));
        match hidden.rename(&self.root, &names::checkpoint(kind, step), replacing) {
            Err(error) if error.is(Errno::EXIST) => {
                let reason = "appeared while it was being written; move it elsewhere".to_owned();
                Err(CommitError::StepExists { path, reason })
            }
            Err(error) if target.is_some() && error.is(Errno::INVAL) => Err(CommitError::ExchangeUnsupported { path }),
            outcome => outcome.map(|()| target),
        }
    }

    /// Abandons a checkpoint that was begun: removes what was written. Does nothing for any other.
    ///
    /// # Errors
    /// Files that cannot be removed keep a hidden name; the next start removes them.
    pub fn abandon(&self, kind: CheckpointKind, step: u64) -> Result<(), CommitError> {
        let publish_lock = self.publish_lock()?;
        let begin_lock = self.begin_lock()?;
        self.check_owned()?;
        let Some(unfinished) = self.state()?.forget_unfinished((kind, step)) else {
            return Ok(());
        };
        if !unfinished.hidden.is_in(&self.root)? {
            return Ok(());
        }
        let hidden = self.hide_unfinished((kind, step))?;
        // Emptying it takes time, and needs no lock.
        drop(begin_lock);
        drop(publish_lock);
        self.root.remove(&hidden)
    }
}

impl<D: Disk> State<D> {
    fn forget_unfinished(&mut self, key: CheckpointKey) -> Option<InProgress<D>> {
        self.reserved.remove(&key);
        self.in_progress.remove(&key)
    }

    /// Refuses a step below one that is published or being written.
    fn check_order(&self, kind: CheckpointKind, step: u64, root: &OpenFolder<D>) -> Result<(), CommitError> {
        let steps = (kind, 0)..=(kind, u64::MAX);
        let writing = self.in_progress.range(steps.clone()).next_back().map(|(&(_, step), _)| step);
        let reserved = self.reserved.range(steps).next_back().map(|(&(_, step), _)| step);
        match self.newest(kind).max(writing).max(reserved) {
            Some(newest) if newest > step => {
                Err(CommitError::StepOrder { path: root.path.clone(), kind, step, newest })
            }
            _ => Ok(()),
        }
    }
}

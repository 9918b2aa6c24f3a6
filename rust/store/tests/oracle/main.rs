//! An owner and a consumer beside a model without memory: after any operations in any order, entries, counts and bytes
//! are the same.

#[path = "../common/mod.rs"]
mod common;
mod model;

use std::collections::BTreeSet;
use std::sync::Arc;

use common::{LIMITS, LocalTransport, OWNER, SendAs, bytes_meta, fetch, pattern, put, rows, whole, within};
use model::{FetchedRows, Model, NEXT, StepCounts};
use proptest::prelude::*;
use proptest::sample::Index;
use tundish_store::{
    FetchedTensor, KeptCounts, Removed, Selection, ShardId, ShardRows, StoreError, TensorStore, TensorToStore,
};

#[derive(Clone, Debug)]
enum Action {
    Put(Vec<usize>),
    PutAs(usize),
    Remove(Vec<Index>),
    ClearAll,
    Claim(u64, Vec<Index>),
    Keep(Vec<Index>),
    Begin(u64),
    End(u64),
    ReleaseClaimant(u64),
    Fetch(Vec<(Index, Option<(u64, u64)>)>),
    ClearBuffer(Option<Vec<Index>>),
    DropViews,
}

fn actions() -> impl Strategy<Value = Vec<Action>> {
    let size = prop_oneof![3 => 0usize..300, 1 => Just(20_000), 1 => Just(300_000)];
    let some = || prop::collection::vec(any::<Index>(), 0..6);
    let range = prop::option::weighted(0.3, (0u64..200, 0u64..100));
    let step = || 0u64..6;
    let action = prop_oneof![
        4 => prop::collection::vec(size.clone(), 0..5).prop_map(Action::Put),
        2 => size.prop_map(Action::PutAs),
        2 => some().prop_map(Action::Remove),
        1 => Just(Action::ClearAll),
        3 => (step(), some()).prop_map(|(step, some)| Action::Claim(step, some)),
        2 => some().prop_map(Action::Keep),
        3 => step().prop_map(Action::Begin),
        2 => step().prop_map(Action::End),
        1 => (0u64..2).prop_map(Action::ReleaseClaimant),
        8 => prop::collection::vec((any::<Index>(), range), 0..6).prop_map(Action::Fetch),
        2 => prop::option::weighted(0.8, some()).prop_map(Action::ClearBuffer),
        1 => Just(Action::DropViews),
    ];
    prop::collection::vec(action, 1..80)
}

struct World {
    owner: Arc<TensorStore>,
    consumer: Arc<TensorStore>,
    transport: LocalTransport,
    /// All that ever were.
    shards: Vec<(ShardId, Vec<u8>)>,
    stored: Model<ShardId>,
    fetched: Model<FetchedRows>,
    /// Shards that somebody kept.
    were_kept: BTreeSet<ShardId>,
    /// Steps of the consumer that have begun and not ended, the newest last.
    begun: Vec<u64>,
    views: Vec<(FetchedTensor, Vec<u8>)>,
    hits: u64,
    misses: u64,
}

fn taken(bytes: &[u8]) -> u64 {
    bytes.len().next_multiple_of(64) as u64
}

impl World {
    fn new(send_as: SendAs) -> Self {
        let (owner, consumer, transport) =
            (TensorStore::new(LIMITS), TensorStore::new(LIMITS), LocalTransport::new(send_as));
        transport.add(OWNER, &owner);
        let (stored, fetched) = (Model::new(), Model::new());
        let (shards, begun, views) = (Vec::new(), Vec::new(), Vec::new());
        let were_kept = BTreeSet::new();
        World { owner, consumer, transport, shards, stored, fetched, were_kept, begun, views, hits: 0, misses: 0 }
    }

    fn named(&self, some: &[Index]) -> Vec<ShardId> {
        let mut ids = vec!["nobody.has.this".parse().unwrap()];
        if !self.shards.is_empty() {
            ids.extend(some.iter().map(|index| index.get(&self.shards).0.clone()));
        }
        ids
    }

    fn clear_pieces(&mut self, ids: &[ShardId]) -> u64 {
        let of_these: Vec<FetchedRows> =
            self.fetched.entries.keys().filter(|(id, _)| ids.contains(id)).cloned().collect();
        of_these.iter().filter(|piece| self.fetched.take(piece).is_some()).count() as u64
    }

    fn take(&mut self, action: Action) {
        match action {
            Action::Put(sizes) => {
                let first = self.shards.len() as u64;
                let tensors: Vec<_> = sizes.iter().zip(first..).map(|(size, seed)| pattern(seed, *size)).collect();
                for (id, bytes) in put(&self.owner, &tensors).unwrap().into_iter().zip(tensors) {
                    self.stored.put(id.clone(), None, taken(&bytes));
                    self.shards.push((id, bytes));
                }
            }
            Action::PutAs(size) => {
                let id: ShardId = format!("sent.{}", self.shards.len()).parse().unwrap();
                let bytes = pattern(self.shards.len() as u64, size);
                let source = TensorToStore::new(bytes_meta(size as u64), &bytes).unwrap();
                within(0.0, |time_limit| self.owner.put_as(&id, source, time_limit)).unwrap();
                self.stored.put(id.clone(), None, taken(&bytes));
                self.shards.push((id, bytes));
            }
            Action::Remove(some) => {
                let ids = self.named(&some);
                let freed: Vec<u64> =
                    ids.iter().filter_map(|id| self.stored.take(id)).map(|(_, bytes)| bytes).collect();
                let count = freed.len() as u64;
                let removed = Removed { cleared_count: count, num_tensors: count, total_bytes: freed.iter().sum() };
                assert_eq!(self.owner.remove(&ids), removed);
            }
            Action::ClearAll => {
                let (count, total_bytes) = self.stored.held();
                let ids: Vec<_> = self.stored.entries.keys().cloned().collect();
                ids.iter().for_each(|id| assert!(self.stored.take(id).is_some()));
                let removed = Removed { cleared_count: count, num_tensors: count, total_bytes };
                assert_eq!(self.owner.clear_all(), removed);
            }
            Action::Claim(step, some) => {
                let ids = self.named(&some);
                let claimed = self.owner.claim(step, step % 2, &ids);
                if !self.stored.begin(step) {
                    assert!(matches!(claimed, Err(StoreError::StepEnded { step: of }) if of == step));
                    return;
                }
                let claimed = claimed.unwrap();
                let (mut count, mut bytes) = (0, 0);
                let (mut missing, mut others) = (Vec::new(), Vec::new());
                for id in &ids {
                    match self.stored.entries.get(id).copied() {
                        Some((None, size)) => {
                            self.stored.take(id);
                            self.stored.put(id.clone(), Some(step), size);
                            (count, bytes) = (count + 1, bytes + size);
                        }
                        Some((Some(of), _)) if of == step => {}
                        Some(_) => others.push(id.clone()),
                        None => missing.push(id.clone()),
                    }
                }
                assert_eq!((claimed.claimed_count, claimed.total_bytes), (count, bytes));
                assert_eq!((claimed.missing, claimed.taken), (missing, others));
                let is_its = |id: &&ShardId| self.stored.entries.get(id).is_some_and(|(of, _)| *of == Some(step));
                let kept: Vec<_> = ids.iter().filter(is_its).filter(|id| self.were_kept.contains(id)).collect();
                assert_eq!(claimed.kept.iter().collect::<Vec<_>>(), kept);
            }
            Action::Keep(some) => {
                let ids = self.named(&some);
                let there = ids.iter().filter(|id| self.stored.entries.contains_key(id));
                self.were_kept.extend(there.cloned());
                let shards = self.stored.keep(&ids);
                assert_eq!(self.owner.keep(&ids), KeptCounts { shards, entries: 0 });
                let entries = self.fetched.keep(&ids);
                assert_eq!(self.consumer.keep(&ids), KeptCounts { shards: 0, entries });
            }
            Action::Begin(step) => {
                let begun = self.consumer.begin_step(step, step % 2);
                if self.fetched.begin(step) {
                    begun.unwrap();
                    let others = self.consumer.begin_step(step, 2);
                    assert!(matches!(others, Err(StoreError::StepTaken { step: of }) if of == step));
                    if !self.begun.contains(&step) {
                        self.begun.push(step);
                    }
                    assert_eq!(self.consumer.current_step(), Some(step.into()));
                    // As a controller does: one step after the other.
                    while let Some(other) = self.begun.iter().find(|other| **other != step).copied() {
                        self.end(other);
                    }
                } else {
                    assert!(matches!(begun, Err(StoreError::StepEnded { .. })));
                }
            }
            Action::End(step) => self.end(step),
            Action::ReleaseClaimant(claimant) => {
                self.owner.release_claimant(claimant);
                self.consumer.release_claimant(claimant);
                let stored = self.stored.open_steps_of(claimant);
                let claimed = |of: Option<u64>| of.is_some_and(|of| stored.contains(&of));
                let ids: Vec<_> = self.shards.iter().flat_map(|(id, _)| self.stored.of(id, claimed)).collect();
                self.stored.move_to(None, &ids);
                stored.into_iter().for_each(|step| self.stored.end(step));
                self.fetched.open_steps_of(claimant).into_iter().for_each(|step| self.fetched.end(step));
                self.begun.retain(|step| step % 2 != claimant);
            }
            Action::Fetch(some) => self.fetch(&some),
            Action::ClearBuffer(Some(some)) => {
                let ids = self.named(&some);
                let count = self.clear_pieces(&ids);
                assert_eq!(self.consumer.clear_buffer(Some(&ids)), count);
            }
            Action::ClearBuffer(None) => {
                let ids: Vec<ShardId> = self.fetched.entries.keys().map(|(id, _)| id.clone()).collect();
                let count = self.clear_pieces(&ids);
                assert_eq!(self.consumer.clear_buffer(None), count);
            }
            Action::DropViews => self.views.clear(),
        }
    }

    fn end(&mut self, step: u64) {
        self.stored.end(step);
        self.fetched.end(step);
        self.begun.retain(|other| *other != step);
        for store in [&self.owner, &self.consumer] {
            let step_stats = store.end_step(step);
            assert!(step_stats.has_ended && step_stats.held_bytes == 0);
            assert_eq!(store.end_step(step), step_stats, "again, it changes nothing");
        }
    }

    fn fetch(&mut self, some: &[(Index, Option<(u64, u64)>)]) {
        if self.shards.is_empty() {
            return;
        }
        let wanted: Vec<_> = some
            .iter()
            .map(|(index, range)| {
                let (id, bytes) = index.get(&self.shards);
                let len = bytes.len() as u64;
                // Within what there is.
                let range = range.map(|(start, count)| (start.min(len), (start + count).min(len)));
                (id.clone(), range, bytes.clone())
            })
            .collect();
        let step = self.begun.last().copied().or(Some(NEXT));
        let mut unique: Vec<(FetchedRows, u64)> = Vec::new();
        for (id, range, bytes) in &wanted {
            let part = range.map_or(&bytes[..], |(start, end)| &bytes[start as usize..end as usize]);
            if !unique.iter().any(|(piece, _)| *piece == (id.clone(), *range)) {
                unique.push(((id.clone(), *range), taken(part)));
            }
        }
        // A piece that an earlier entry of the same call fetches is not fetched again.
        let covers = |have: &FetchedRows, want: &FetchedRows| {
            let fits = match (have.1, want.1) {
                (None, _) => true,
                (Some(_), None) => false,
                (Some(have), Some(want)) => have.0 <= want.0 && want.1 <= have.1,
            };
            have.0 == want.0 && fits
        };
        let mut missed: Vec<(FetchedRows, u64)> = Vec::new();
        for (piece, bytes) in unique {
            let known = self.fetched.entries.keys().chain(missed.iter().map(|(piece, _)| piece));
            if known.into_iter().any(|have| covers(have, &piece)) {
                self.hits += 1;
            } else {
                self.misses += 1;
                missed.push((piece, bytes));
            }
        }
        let asked: Vec<_> = wanted
            .iter()
            .map(|(id, range, bytes)| match range {
                Some((start, end)) => rows(OWNER, id, *start..*end),
                None => whole(OWNER, id, bytes.len() as u64),
            })
            .collect();
        let views = fetch(&self.consumer, &asked, &self.transport);
        let gone: BTreeSet<&ShardId> =
            missed.iter().map(|((id, _), _)| id).filter(|id| !self.stored.entries.contains_key(id)).collect();
        if !gone.is_empty() {
            let Err(StoreError::Missing { shards, .. }) = views else { panic!("{gone:?} are missing") };
            assert_eq!(shards.iter().map(|shard| &shard.id).collect::<BTreeSet<_>>(), gone);
            return;
        }
        for (view, (_, range, bytes)) in views.unwrap().into_iter().zip(wanted) {
            let part = range.map_or(&bytes[..], |(start, end)| &bytes[start as usize..end as usize]);
            assert_eq!(view.bytes(), part);
            self.views.push((view, part.to_vec()));
        }
        for (piece, bytes) in missed {
            self.fetched.put(piece, step, bytes);
        }
    }

    fn check(&self) {
        let (storage, buffer) = (self.owner.stats().storage, self.consumer.stats().buffer);
        assert_eq!((storage.num_entries, storage.total_bytes), self.stored.held());
        let unclaimed = self.stored.entries.values().filter(|(step, _)| step.is_none());
        let (entries, bytes) = unclaimed.fold((0, 0), |(entries, sum), (_, bytes)| (entries + 1, sum + bytes));
        assert_eq!((storage.unclaimed_entries, storage.unclaimed_bytes), (entries, bytes));
        assert_eq!((buffer.num_entries, buffer.total_bytes), self.fetched.held());
        let current = Some(self.begun.last().copied().unwrap_or(NEXT));
        let of_current = self.fetched.entries.values().filter(|(step, _)| *step == current);
        let (entries, bytes) = of_current.fold((0, 0), |(entries, sum), (_, bytes)| (entries + 1, sum + bytes));
        assert_eq!((buffer.current_entries, buffer.current_bytes), (entries, bytes));
        assert_eq!((buffer.hits, buffer.misses, buffer.in_flight), (self.hits, self.misses, 0));
        assert_eq!(buffer.late_inserts_refused, 0);
        assert_eq!(self.consumer.current_step(), self.begun.last().map(|step| (*step).into()));
        for (store, all_counts, is_owner) in
            [(&self.owner, &self.stored.all_counts, true), (&self.consumer, &self.fetched.all_counts, false)]
        {
            for (step, step_counts) in all_counts {
                let step_stats = store.step_stats(*step).unwrap();
                let added = if is_owner { step_stats.stored_bytes } else { step_stats.fetched_bytes };
                let told = StepCounts { added, held: step_stats.held_bytes, has_ended: step_stats.has_ended };
                assert_eq!(told, *step_counts, "step {step}");
                assert_eq!(
                    step_stats.stored_bytes + step_stats.fetched_bytes,
                    step_stats.held_bytes + step_stats.freed_bytes
                );
            }
        }
        for (id, bytes) in &self.shards {
            let found = self.owner.look_up(&[ShardRows { id: id.clone(), rows: Selection::All }]);
            assert_eq!(found.ok().map(|found| found[0].bytes() == bytes), self.stored.entries.get(id).map(|_| true));
        }
        assert!(self.views.iter().all(|(view, bytes)| view.bytes() == bytes), "views stay what they were");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(192))]

    #[test]
    fn a_store_behaves_as_its_model(
        actions in actions(), send_as in prop_oneof![Just(SendAs::Bytes), Just(SendAs::SegmentRange)],
    ) {
        let mut world = World::new(send_as);
        for action in actions {
            world.take(action);
            world.check();
        }
        world.views.clear();
        (0..6).for_each(|step| world.end(step));
        world.owner.clear_all();
        world.consumer.clear_buffer(None);
        for store in [&world.owner, &world.consumer] {
            let stats = store.stats();
            for memory in [stats.storage.memory, stats.buffer.memory] {
                prop_assert_eq!((memory.used_bytes, memory.escaped_bytes), (0, 0));
            }
        }
    }
}

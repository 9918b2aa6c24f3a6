//! `/metrics`: counts of a server and of its process, in the format of OpenMetrics.

use std::sync::atomic::AtomicU64;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::{ConstCounter, Counter};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::{ConstGauge, Gauge};
use prometheus_client::registry::{Metric, Registry};

use crate::stats::{MemoryStats, Stats};

const PREFIX: &str = "tundish_rtensor";

pub(super) const MEDIA_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// The counts of a server.
#[derive(Debug, Default)]
pub(super) struct Metrics {
    pub(super) connections: Gauge,
    pub(super) sent_bytes: Counter,
    pub(super) received_bytes: Counter,
    answers: Family<Status, Counter>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Status {
    status: u16,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct SideLabel {
    side: &'static str,
}

impl Metrics {
    pub(super) fn count_answer(&self, status: u16) {
        self.answers.get_or_create(&Status { status }).inc();
    }

    /// The page, with these statistics of the process.
    pub(super) fn page(&self, stats: &Stats) -> String {
        let mut page = Registry::with_prefix(PREFIX);
        self.add_stats(&mut page, stats);
        add(&mut page, "connections", "Open connections", self.connections.clone());
        add(&mut page, "sent_bytes", "Bytes sent", self.sent_bytes.clone());
        add(&mut page, "received_bytes", "Bytes received", self.received_bytes.clone());
        add(&mut page, "answers", "Answers", self.answers.clone());
        let mut text = String::new();
        encode(&mut text, &page).expect("a string takes all");
        text
    }

    fn add_stats(&self, page: &mut Registry, stats: &Stats) {
        let (storage, buffer) = (&stats.storage, &stats.buffer);
        let mut sides = |name, help, values: [u64; 2]| {
            let family = Family::<SideLabel, Gauge<u64, AtomicU64>>::default();
            for (side, value) in ["storage", "buffer"].into_iter().zip(values) {
                family.get_or_create(&SideLabel { side }).set(value);
            }
            add(page, name, help, family);
        };
        let memory = |value: fn(&MemoryStats) -> u64| [value(&storage.memory), value(&buffer.memory)];
        sides("entries", "Tensors held", [storage.num_entries, buffer.num_entries]);
        sides("bytes", "Bytes of tensors held", [storage.total_bytes, buffer.total_bytes]);
        let high = [storage.high_water_bytes, buffer.high_water_bytes];
        sides("high_water_bytes", "The most bytes of tensors ever held", high);
        sides("memory_limit_bytes", "The most memory that may be used", memory(|memory| memory.limit_bytes));
        sides("memory_used_bytes", "Memory in use", memory(|memory| memory.used_bytes));
        let escaped = memory(|memory| memory.escaped_bytes);
        sides("memory_escaped_bytes", "Memory that was released while a tensor over it lived", escaped);
        sides("memory_idle_bytes", "Memory kept for its next use", memory(|memory| memory.idle_bytes));
        let high = memory(|memory| memory.high_water_bytes);
        sides("memory_high_water_bytes", "The most memory ever in use", high);
        let mut gauge = |name, help, value: u64| add(page, name, help, ConstGauge::new(value));
        gauge("unclaimed_entries", "Stored shards that no step has claimed", storage.unclaimed_entries);
        gauge("unclaimed_bytes", "Bytes of stored shards that no step has claimed", storage.unclaimed_bytes);
        gauge("in_flight", "Tensors being fetched", buffer.in_flight);
        let open = || stats.steps.iter().filter(|step_stats| !step_stats.has_ended);
        gauge("open_steps", "Steps that have begun and not ended", open().count() as u64);
        let held = open().map(|step_stats| step_stats.held_bytes).sum();
        gauge("open_steps_held_bytes", "Bytes that open steps hold", held);
        let escaped = stats.steps.iter().map(|step_stats| step_stats.escaped_bytes).sum();
        gauge("ended_steps_escaped_bytes", "Bytes of tensors that outlived their step", escaped);
        let age = ConstGauge::new(storage.oldest_unclaimed_seconds);
        add(page, "oldest_unclaimed_seconds", "Age of the oldest shard that no step has claimed", age);
        let mut counter = |name, help, value: u64| add(page, name, help, ConstCounter::new(value));
        counter("hits", "Tensors that the buffer had", buffer.hits);
        counter("misses", "Tensors that had to be fetched", buffer.misses);
        counter("late_inserts_refused", "Tensors that came after their step had ended", buffer.late_inserts_refused);
    }
}

fn add(page: &mut Registry, name: &str, help: &str, metric: impl Metric) {
    page.register(name, help, metric);
}

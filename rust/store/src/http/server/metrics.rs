//! Statistics as Prometheus reads them: its text format, version 0.0.4.

use std::fmt::{Display, Write};

use super::traffic::Traffic;
use crate::stats::{Account, Stats};

const PREFIX: &str = "tundish_rtensor_";

/// A text in the making.
struct Page(String);

impl Page {
    /// A measure with its values, each with its labels.
    fn measure<V: Display>(
        &mut self,
        name: &str,
        kind: &str,
        help: &str,
        values: impl IntoIterator<Item = (String, V)>,
    ) {
        let name = format!("{PREFIX}{name}");
        let mut write = |line: std::fmt::Arguments<'_>| writeln!(self.0, "{line}").expect("a string takes all");
        write(format_args!("# HELP {name} {help}"));
        write(format_args!("# TYPE {name} {kind}"));
        for (labels, value) in values {
            write(format_args!("{name}{labels} {value}"));
        }
    }

    fn gauge<V: Display>(&mut self, name: &str, help: &str, sides: [V; 2]) {
        let labels = ["storage", "buffer"].map(|side| format!("{{side=\"{side}\"}}"));
        self.measure(name, "gauge", help, labels.into_iter().zip(sides));
    }

    fn one<V: Display>(&mut self, name: &str, kind: &str, help: &str, value: V) {
        self.measure(name, kind, help, [(String::new(), value)]);
    }
}

/// All that a process tells of itself.
pub(super) fn text(stats: &Stats, traffic: &Traffic) -> String {
    let (storage, buffer) = (&stats.storage, &stats.buffer);
    let mut page = Page(String::new());
    page.gauge("entries", "Tensors that are held.", [storage.num_entries, buffer.num_entries]);
    page.gauge("bytes", "Bytes of tensors that are held.", [storage.total_bytes, buffer.total_bytes]);
    let high = [storage.high_water_bytes, buffer.high_water_bytes];
    page.gauge("high_water_bytes", "The most bytes that tensors ever took.", high);
    let memory = |value: fn(&Account) -> u64| [value(&storage.memory), value(&buffer.memory)];
    page.gauge("memory_limit_bytes", "The most memory that may be used.", memory(|account| account.limit_bytes));
    page.gauge("memory_used_bytes", "Memory in use.", memory(|account| account.used_bytes));
    page.gauge(
        "memory_escaped_bytes",
        "Memory that was given up while a view of it lived.",
        memory(|account| account.escaped_bytes),
    );
    page.gauge("memory_idle_bytes", "Memory that waits for its next use.", memory(|account| account.idle_bytes));
    page.gauge("memory_high_water_bytes", "The most memory ever in use.", memory(|account| account.high_water_bytes));
    page.one("unclaimed_entries", "gauge", "Stored shards that no step has claimed.", storage.unclaimed_entries);
    page.one("unclaimed_bytes", "gauge", "Bytes of stored shards that no step has claimed.", storage.unclaimed_bytes);
    page.one(
        "oldest_unclaimed_seconds",
        "gauge",
        "Age of the oldest shard that no step has claimed.",
        storage.oldest_unclaimed_seconds,
    );
    page.one("hits_total", "counter", "Tensors that the buffer had.", buffer.hits);
    page.one("misses_total", "counter", "Tensors that had to be fetched.", buffer.misses);
    page.one(
        "late_inserts_refused_total",
        "counter",
        "Tensors that came after their step had ended.",
        buffer.late_inserts_refused,
    );
    page.one("in_flight", "gauge", "Tensors that are being fetched.", buffer.in_flight);
    let open = || stats.epochs.iter().filter(|ledger| !ledger.has_ended);
    page.one("open_epochs", "gauge", "Steps that have begun and not ended.", open().count());
    let held = open().map(|ledger| ledger.held_bytes).sum::<u64>();
    page.one("open_epochs_held_bytes", "gauge", "Bytes that open steps hold.", held);
    let escaped = stats.epochs.iter().map(|ledger| ledger.escaped_bytes).sum::<u64>();
    page.one("ended_epochs_escaped_bytes", "gauge", "Bytes of tensors that outlived their step.", escaped);
    page.one("connections", "gauge", "Open connections.", Traffic::value(&traffic.connections));
    page.one("sent_bytes_total", "counter", "Bytes sent.", Traffic::value(&traffic.sent_bytes));
    page.one("received_bytes_total", "counter", "Bytes received.", Traffic::value(&traffic.received_bytes));
    let answers = traffic.answers().into_iter().map(|(status, count)| (format!("{{status=\"{status}\"}}"), count));
    page.measure("answers_total", "counter", "Answers.", answers);
    page.0
}

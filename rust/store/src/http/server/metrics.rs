//! `/metrics`: counts of a server and of its process, in the format of OpenMetrics.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::{ConstCounter, Counter};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::{ConstGauge, Gauge};
use prometheus_client::registry::{Metric, Registry};

use crate::stats::{Number, Stats, Value};

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

impl Metrics {
    pub(super) fn count_answer(&self, status: u16) {
        self.answers.get_or_create(&Status { status }).inc();
    }

    /// The page, with these statistics of the process.
    pub(super) fn page(&self, stats: &Stats) -> String {
        let mut page = Registry::with_prefix(PREFIX);
        for Number { name, help, value } in stats.numbers() {
            match value {
                Value::Gauge(value) => add(&mut page, name, help, ConstGauge::new(value)),
                Value::Counter(value) => add(&mut page, name, help, ConstCounter::new(value)),
                Value::Seconds(value) => add(&mut page, name, help, ConstGauge::new(value)),
            }
        }
        add(&mut page, "connections", "Open connections", self.connections.clone());
        add(&mut page, "sent_bytes", "Bytes sent", self.sent_bytes.clone());
        add(&mut page, "received_bytes", "Bytes received", self.received_bytes.clone());
        add(&mut page, "answers", "Answers", self.answers.clone());
        let mut text = String::new();
        encode(&mut text, &page).expect("a string takes all");
        text
    }
}

fn add(page: &mut Registry, name: &str, help: &str, metric: impl Metric) {
    page.register(name, help, metric);
}

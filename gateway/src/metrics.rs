//! The gateway's metrics for Prometheus.

use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;

use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{EncodeLabelSet, EncodeLabelValue, LabelValueEncoder};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Metric, Registry};
use vramq_amqp::Excess;
use vramq_program::dropped_log_lines;

/// From 1 ms to some 16 s, and above.
const BUCKETS: u16 = 15;

/// A route and how it answered. Routes are the gateway's own patterns, never paths of requests.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct Request {
    pub route: String,
    pub status: u16,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct Route {
    pub route: String,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Ended {
    end: Word,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq)]
struct Word(&'static str);

impl EncodeLabelValue for Word {
    fn encode(&self, encoder: &mut LabelValueEncoder<'_>) -> Result<(), std::fmt::Error> {
        self.0.encode(encoder)
    }
}

/// All metrics. Gauges of the current moment are set just before they are written.
#[derive(Debug)]
pub struct Metrics {
    registry: Mutex<Registry>,
    pub requests: Family<Request, Counter>,
    pub seconds: Family<Route, Histogram, fn() -> Histogram>,
    ended: Family<Ended, Counter>,
    pub withdrawn: Counter,
    pub connections: Gauge,
    pub refused_connections: Counter,
    unfinished_jobs: Gauge,
    kept_jobs: Gauge,
    kept_bytes: Gauge,
    withdrawals: Gauge,
    withdrawals_sent_once: Counter,
    withdrawals_not_sent: Counter,
    connected: Gauge,
    log_lines_dropped: Counter,
}

/// Gauges of the current moment.
#[derive(Clone, Copy, Debug)]
pub struct Now {
    pub unfinished_jobs: usize,
    pub kept_jobs: usize,
    pub kept_bytes: usize,
    pub withdrawals: usize,
    /// Counted since the start.
    pub excess: Excess,
    pub connected: bool,
}

impl Default for Metrics {
    fn default() -> Self {
        let mut registry = Registry::with_prefix("vramq_gateway");
        let mut all = Registered(&mut registry);
        Self {
            requests: all.metric(
                "requests",
                "Requests, by route and status; 499: the client hung up before the answer",
            ),
            seconds: all.histogram(
                "request_seconds",
                "Time from the head of a request to the head of its response, or until the client hung up",
            ),
            ended: all.metric("jobs_ended", "Jobs that ended, by outcome"),
            withdrawn: all.metric("jobs_withdrawn", "Jobs that were withdrawn"),
            connections: all.metric("connections", "Open connections"),
            refused_connections: all
                .metric("connections_refused", "Connections that were closed because there were too many"),
            unfinished_jobs: all.metric(
                "jobs_unfinished",
                "Jobs that have not ended, and whose replies no other gateway can take",
            ),
            kept_jobs: all.metric("jobs_kept", "Jobs whose state or result can be requested"),
            kept_bytes: all.metric("results_bytes", "Memory of kept results"),
            withdrawals: all.metric("withdrawals_open", "Withdrawn jobs that have not ended yet"),
            withdrawals_sent_once: all.metric(
                "withdrawals_sent_once",
                "Withdrawals that are not repeated, because too many withdrawn jobs have not ended",
            ),
            withdrawals_not_sent: all.metric(
                "withdrawals_not_sent",
                "Withdrawals that were not sent, because too many waited to be sent",
            ),
            connected: all.metric(
                "broker_connected",
                "1 while there are the gateway's own connection to the broker and those for its jobs",
            ),
            log_lines_dropped: all.metric(
                "log_lines_dropped",
                "Lines of the log that were dropped, because standard error was not read fast enough",
            ),
            registry: Mutex::new(registry),
        }
    }
}

/// Creates and registers metrics.
struct Registered<'a>(&'a mut Registry);

impl Registered<'_> {
    fn metric<M: Metric + Clone + Default>(&mut self, name: &str, help: &str) -> M {
        self.add(name, help, M::default())
    }

    fn histogram(&mut self, name: &str, help: &str) -> Family<Route, Histogram, fn() -> Histogram> {
        let made: fn() -> Histogram = || Histogram::new(exponential_buckets(0.001, 2.0, BUCKETS));
        self.add(name, help, Family::new_with_constructor(made))
    }

    fn add<M: Metric + Clone>(&mut self, name: &str, help: &str, metric: M) -> M {
        self.0.register(name, help, metric.clone());
        metric
    }
}

impl Metrics {
    /// Counts a job's end.
    pub fn ended(&self, end: &'static str) {
        self.ended.get_or_create(&Ended { end: Word(end) }).inc();
    }

    /// All figures, in the text format of OpenMetrics.
    pub fn encode(&self, now: Now) -> String {
        let count = |n: usize| i64::try_from(n).unwrap_or(i64::MAX);
        self.unfinished_jobs.set(count(now.unfinished_jobs));
        self.kept_jobs.set(count(now.kept_jobs));
        self.kept_bytes.set(count(now.kept_bytes));
        self.withdrawals.set(count(now.withdrawals));
        // These counters are kept elsewhere, and never decrease.
        self.withdrawals_sent_once.inner().fetch_max(now.excess.sent_once, Ordering::Relaxed);
        self.withdrawals_not_sent.inner().fetch_max(now.excess.not_sent, Ordering::Relaxed);
        self.log_lines_dropped.inner().fetch_max(dropped_log_lines(), Ordering::Relaxed);
        self.connected.set(now.connected.into());
        let mut text = String::new();
        // Nothing panics while it holds the lock; writing to a String cannot fail.
        let registry = self.registry.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = encode(&mut text, &registry);
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_metric_is_in_the_docs() {
        let metrics = Metrics::default();
        metrics.requests.get_or_create(&Request { route: "/".into(), status: 200 }).inc();
        metrics.seconds.get_or_create(&Route { route: "/".into() }).observe(1.0);
        metrics.ended.get_or_create(&Ended { end: Word("done") }).inc();
        let now = Now {
            unfinished_jobs: 0,
            kept_jobs: 0,
            kept_bytes: 0,
            withdrawals: 0,
            excess: Excess::default(),
            connected: true,
        };
        let text = metrics.encode(now);
        let described: Vec<_> = text.lines().filter_map(|line| line.strip_prefix("# TYPE ")).collect();
        let documented = include_str!("../../docs/metrics.md");
        for line in &described {
            let (name, kind) = line.split_once(' ').unwrap();
            let suffix = if kind == "counter" { "_total" } else { "" };
            assert!(
                documented.contains(&format!("| `{name}{suffix}` | {kind} |")),
                "docs/metrics.md lacks {line}"
            );
        }
        assert_eq!(described.len(), documented.matches("| `vramq_gateway_").count());
    }
}

//! Progress of a job's items: from the program that reports it to the event loop, which publishes it for the job's caller.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::mpsc;
use vramq_core::ids::{ItemIndex, JobKey};
use vramq_schemas::{ItemProgress, PROGRESS_NOTE_BYTES_MAX};

/// The least time between two reports on a job. That is as often as a person looks, and costs the job nothing. Earlier reports are dropped.
const INTERVAL_MIN: Duration = Duration::from_millis(500);

/// Limits the reports on one job, through all its passes. Only jobs that asked for progress have one.
#[derive(Debug, Default)]
pub struct RateLimit {
    last: Mutex<Option<Instant>>,
    /// The job's first pass has begun.
    started: AtomicBool,
    /// Index within the job of its last item, and whether that item was reported as finished.
    last_item: u32,
    ended: AtomicBool,
}

impl RateLimit {
    pub fn new(items_total: u32) -> Self {
        Self { last_item: items_total.saturating_sub(1), ..Self::default() }
    }

    /// Whether a report is the last of its job. It is sent once, without the least time.
    fn is_end(&self, item: ItemIndex, fraction: f64) -> bool {
        item.0 == self.last_item && fraction >= 1.0 && !self.ended.swap(true, Ordering::Relaxed)
    }

    /// Whether a report may go out now; if so, it counts as sent.
    fn admits(&self, now: Instant) -> bool {
        // Nothing panics while it holds the lock.
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let is_due = last.is_none_or(|last| now.saturating_duration_since(last) >= INTERVAL_MIN);
        if is_due {
            *last = Some(now);
        }
        is_due
    }
}

/// An item of a job that asked for progress.
#[derive(Clone, Debug)]
pub struct Followed {
    pub job: JobKey,
    pub item: ItemIndex,
    pub limit: Arc<RateLimit>,
}

/// Receives progress reports on the items of a pass.
#[derive(Default)]
pub struct ProgressSink {
    /// For each item of the pass, in order; empty if no job asked for progress.
    items: Vec<Option<Followed>>,
    /// Sends a report without waiting.
    report: Option<Box<dyn Fn(JobKey, ItemProgress) + Send + Sync>>,
}

impl fmt::Debug for ProgressSink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProgressSink").field("items", &self.items).finish_non_exhaustive()
    }
}

impl ProgressSink {
    /// Sends reports to a channel, converted by `message`.
    pub fn new<T: Send + 'static>(
        items: Vec<Option<Followed>>,
        channel: mpsc::Sender<T>,
        message: fn(JobKey, ItemProgress) -> T,
    ) -> Self {
        if !items.iter().any(Option::is_some) {
            return Self::default();
        }
        // An `Err` means that the receiver is busy or has ended.
        let report = move |job, progress| drop(channel.try_send(message(job, progress)));
        Self { items, report: Some(Box::new(report)) }
    }

    /// Reports the start of a job's first pass, with its first item at 0, for each job that asked for progress.
    pub fn begin(&self) {
        for Followed { job, item, limit } in self.items.iter().flatten() {
            if !limit.started.swap(true, Ordering::Relaxed) {
                self.send(*job, ItemProgress { item: item.0, fraction: 0.0, note: String::new() });
            }
        }
    }

    /// Forwards a report. Never waits: if the event loop is busy, the report is dropped.
    pub fn report(&self, at: usize, fraction: f64, mut note: String) {
        let Some(Followed { job, item, limit }) = self.items.get(at).and_then(Option::as_ref) else { return };
        let is_end = limit.is_end(*item, fraction);
        if !limit.admits(Instant::now()) && !is_end {
            return;
        }
        note.truncate(note.floor_char_boundary(PROGRESS_NOTE_BYTES_MAX));
        self.send(*job, ItemProgress { item: item.0, fraction, note });
    }

    fn send(&self, job: JobKey, progress: ItemProgress) {
        if let Some(report) = &self.report {
            report(job, progress);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Report = (JobKey, ItemProgress);

    fn report(job: JobKey, progress: ItemProgress) -> Report {
        (job, progress)
    }

    fn sink(reports: mpsc::Sender<Report>) -> ProgressSink {
        let limit = Arc::new(RateLimit::new(6));
        let followed =
            |item| Some(Followed { job: JobKey(7), item: ItemIndex(item), limit: Arc::clone(&limit) });
        ProgressSink::new(vec![None, followed(4), followed(5)], reports, report)
    }

    #[test]
    fn a_job_is_reported_on_now_and_then() {
        let limit = RateLimit::default();
        let start = Instant::now();
        let admitted = |ms| limit.admits(start + Duration::from_millis(ms));
        assert_eq!([0, 1, 499, 500, 501, 1500].map(admitted), [true, false, false, true, false, true]);
    }

    #[test]
    fn items_of_a_job_share_its_limit_and_others_are_not_reported() {
        let (reports, mut received) = mpsc::channel(8);
        let sink = sink(reports);
        sink.report(0, 0.1, String::new());
        sink.report(9, 0.1, String::new());
        sink.report(1, 0.25, "\u{e4}".repeat(PROGRESS_NOTE_BYTES_MAX));
        sink.report(2, 0.5, String::new());
        let Ok((JobKey(7), progress)) = received.try_recv() else { panic!("no report") };
        assert_eq!((progress.item, progress.fraction), (4, 0.25));
        assert_eq!(progress.note, "\u{e4}".repeat(PROGRESS_NOTE_BYTES_MAX / 2));
        assert!(received.try_recv().is_err());
    }

    #[test]
    fn the_start_of_a_job_is_reported_once_and_does_not_delay_the_next_report() {
        let (reports, mut received) = mpsc::channel(8);
        let sink = sink(reports);
        sink.begin();
        sink.begin();
        sink.report(2, 0.5, "half".to_owned());
        let mut next = || match received.try_recv() {
            Ok((_, progress)) => Some((progress.item, progress.fraction, progress.note)),
            _ => None,
        };
        assert_eq!([next(), next()], [Some((4, 0.0, String::new())), Some((5, 0.5, "half".to_owned()))]);
        assert_eq!(next(), None);
    }

    #[test]
    fn the_end_of_the_last_item_is_reported_however_soon_it_comes_and_once() {
        let (reports, mut received) = mpsc::channel(8);
        let limit = Arc::new(RateLimit::new(2));
        let followed =
            |item| Some(Followed { job: JobKey(7), item: ItemIndex(item), limit: Arc::clone(&limit) });
        let sink = ProgressSink::new(vec![followed(0), followed(1)], reports, report);
        for (at, fraction) in [(0, 0.5), (0, 1.0), (1, 0.5), (1, 1.0), (1, 1.0)] {
            sink.report(at, fraction, String::new());
        }
        let mut next = || match received.try_recv() {
            Ok((_, progress)) => Some((progress.item, progress.fraction)),
            _ => None,
        };
        assert_eq!([next(), next(), next()], [Some((0, 0.5)), Some((1, 1.0)), None]);
    }

    #[test]
    fn a_busy_event_loop_is_not_waited_for() {
        let (reports, mut received) = mpsc::channel(1);
        reports
            .try_send((JobKey(1), ItemProgress { item: 0, fraction: 0.0, note: String::new() }))
            .unwrap_or_else(|_| panic!("room for one"));
        sink(reports).report(1, 0.5, String::new());
        assert!(received.try_recv().is_ok() && received.try_recv().is_err());
    }
}

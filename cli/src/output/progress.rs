//! Progress on standard error: a bar on a terminal that takes one, a line every few seconds otherwise.

use std::fmt::Write;
use std::io::{self, IsTerminal as _};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use indicatif::{HumanCount, ProgressBar, ProgressState, ProgressStyle};
use tokio::time::{Interval, MissedTickBehavior, interval_at};
use vramq_program::is_dumb_terminal;

/// The time between plain lines: short enough to show progress, long enough for a log.
const LINE_EVERY: Duration = Duration::from_secs(5);

/// Cheap to clone.
#[derive(Clone)]
pub(crate) struct Progress {
    bar: ProgressBar,
    /// Counted here, because the bar's position jumps to the end when the bar is cleared.
    done: Arc<AtomicU64>,
    /// The progress of one item, in words; empty if unknown.
    current: Arc<Mutex<String>>,
    shown: Shown,
    start: Instant,
    /// What is counted, in the plural.
    unit: &'static str,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Shown {
    Bar,
    Lines,
    Nothing,
}

impl Progress {
    pub(crate) fn new(unit: &'static str, total: Option<u64>, quiet: bool) -> Self {
        let shown = match (quiet, io::stderr().is_terminal() && !is_dumb_terminal()) {
            (true, _) => Shown::Nothing,
            (false, true) => Shown::Bar,
            (false, false) => Shown::Lines,
        };
        let bar = match shown {
            Shown::Bar => ProgressBar::no_length(),
            Shown::Lines | Shown::Nothing => ProgressBar::hidden(),
        };
        let template = match total {
            Some(total) => {
                bar.set_length(total);
                format!("{{bar:32}} {{human_pos}}/{{human_len}} {unit}, {{rate}}, {{eta}} left {{wide_msg}}")
            }
            None => format!("{{spinner}} {{human_pos}} {unit}, {{rate}} {{wide_msg}}"),
        };
        if let Ok(style) = ProgressStyle::with_template(&template) {
            bar.set_style(style.with_key("rate", move |state: &ProgressState, to: &mut dyn Write| {
                // Writing to indicatif's buffer does not fail.
                let _ = write!(to, "{:.0} {unit}/s", state.per_sec());
            }));
        }
        if shown == Shown::Bar {
            bar.enable_steady_tick(Duration::from_millis(200));
        }
        Self { bar, done: Arc::default(), current: Arc::default(), shown, start: Instant::now(), unit }
    }

    pub(crate) fn add(&self, items: usize) {
        self.done.fetch_add(items as u64, Ordering::Relaxed);
        self.bar.inc(items as u64);
    }

    /// Shows how far an item is, beside what is done.
    pub(crate) fn show(&self, current: Option<String>) {
        let current = current.unwrap_or_default();
        self.bar.set_message(current.clone());
        *self.current.lock().unwrap_or_else(PoisonError::into_inner) = current;
    }

    pub(crate) fn done(&self) -> u64 {
        self.done.load(Ordering::Relaxed)
    }

    /// Prints a message above the bar.
    pub(crate) fn say(&self, message: &str) {
        self.bar.suspend(|| eprintln!("{message}"));
    }

    /// Runs something that prints, with the bar hidden.
    pub(crate) fn suspended(&self, say: impl FnOnce()) {
        self.bar.suspend(say);
    }

    /// When the next plain line is due.
    pub(crate) fn ticks(&self) -> Interval {
        let mut ticks = interval_at(tokio::time::Instant::now() + LINE_EVERY, LINE_EVERY);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        ticks
    }

    pub(crate) fn tick(&self) {
        if self.shown == Shown::Lines {
            let line = line(self.unit, self.done(), self.bar.length(), self.start.elapsed());
            let current = self.current.lock().unwrap_or_else(PoisonError::into_inner).clone();
            eprintln!("{}", if current.is_empty() { line } else { format!("{line}; {current}") });
        }
    }

    /// Removes the bar and prints a summary.
    pub(crate) fn finish(&self, what: &str) {
        self.bar.finish_and_clear();
        if self.shown != Shown::Nothing {
            let elapsed = self.start.elapsed();
            let rate = self.done() as f64 / elapsed.as_secs_f64().max(1e-9);
            eprintln!(
                "{} {unit} {what} in {:.1} s ({rate:.0} {unit}/s)",
                HumanCount(self.done()),
                elapsed.as_secs_f64(),
                unit = self.unit
            );
        }
    }

    pub(crate) fn clear(&self) {
        self.bar.finish_and_clear();
    }
}

fn line(unit: &str, done: u64, total: Option<u64>, elapsed: Duration) -> String {
    let rate = done as f64 / elapsed.as_secs_f64().max(1e-9);
    match total {
        Some(total) if done > 0 => {
            let left_s = total.saturating_sub(done) as f64 / rate;
            format!(
                "{} of {} {unit}, {rate:.0} {unit}/s, {left_s:.0} s left",
                HumanCount(done),
                HumanCount(total)
            )
        }
        Some(total) => format!("0 of {} {unit}", HumanCount(total)),
        None => format!("{} {unit}, {rate:.0} {unit}/s", HumanCount(done)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_show_the_rate_and_the_time_left() {
        let second = Duration::from_secs(1);
        assert_eq!(line("items", 0, Some(9), second), "0 of 9 items");
        assert_eq!(
            line("items", 2_000, Some(5_000), 2 * second),
            "2,000 of 5,000 items, 1000 items/s, 3 s left"
        );
        assert_eq!(line("items", 10, None, second), "10 items, 10 items/s");
        assert_eq!(line("items", 10, Some(9), second), "10 of 9 items, 10 items/s, 0 s left");
    }
}

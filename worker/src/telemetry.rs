//! Logs, and the figures that a worker keeps about itself.

use std::time::Duration;

use tracing_subscriber::EnvFilter;

use crate::config::cli::LogFormat;
use crate::device::OutOfMemory;

/// Starts logging to standard error.
///
/// # Errors
/// A filter that cannot be read.
pub fn init(filter: &str, format: LogFormat) -> Result<(), tracing_subscriber::filter::ParseError> {
    // lapin logs what it also returns, and a returned message with its whole body; what matters of it is logged where
    // it is handled.
    let filter = EnvFilter::builder().parse(format!("lapin=off,{filter}"))?;
    let plain =
        std::env::var_os("NO_COLOR").is_some() || !std::io::IsTerminal::is_terminal(&std::io::stderr());
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_target(false)
        .with_ansi(!plain);
    match format {
        LogFormat::Text => builder.init(),
        LogFormat::Json => builder.json().flatten_event(true).init(),
    }
    Ok(())
}

/// What a worker did since it started.
#[derive(Clone, Copy, Debug, Default)]
pub struct Totals {
    pub answered: u64,
    pub items: u64,
    pub passes: u64,
    /// Sum of the costs of all items run: tokens, for an encoder.
    pub cost: u64,
    /// Passes that ran out of device memory: with nobody else on the device, beside others, and of those where other
    /// processes held what was missing.
    pub oom_alone: u64,
    pub oom_shared: u64,
    pub oom_foreign: u64,
    /// Jobs that went back to their queue for another attempt, in whatever way.
    pub requeued: u64,
    /// Of those: for the whole device alone, after a wait for others' memory, and to a larger device.
    pub exclusive: u64,
    pub delayed: u64,
    pub enlarged: u64,
    /// Jobs that went on elsewhere, as they stood: at a drain, from a sick device, or after too long a time.
    pub handed_over: u64,
    /// Replies with some of a job's items.
    pub parts: u64,
    /// Items whose outputs were lost because their job went elsewhere without them.
    pub recomputed: u64,
    /// Sum of the bytes of all passes.
    pub bytes_admitted: u64,
    /// Time in which items waited and no pass had room.
    pub blocked_on_memory: Duration,
    pub dead: u64,
    /// Jobs that went back to the broker unsettled.
    pub handed_back: u64,
    /// Acks that came too late to count.
    pub acks_lost: u64,
}

impl Totals {
    /// Counts a pass that ran out of memory.
    pub fn ran_out(&mut self, oom: &OutOfMemory, alone: bool) {
        if alone {
            self.oom_alone += 1;
        } else {
            self.oom_shared += 1;
        }
        if oom.foreign > 0 && oom.asked <= oom.free.saturating_add(oom.foreign) {
            self.oom_foreign += 1;
        }
    }

    /// Jobs that came to an end here.
    pub fn settled(&self) -> u64 {
        self.answered + self.requeued + self.dead
    }

    /// One line on it all.
    pub fn log(&self) {
        tracing::info!(
            jobs = self.answered,
            items = self.items,
            passes = self.passes,
            tokens = self.cost,
            oom_alone = self.oom_alone,
            oom_shared = self.oom_shared,
            oom_foreign = self.oom_foreign,
            requeued = self.requeued,
            exclusive = self.exclusive,
            delayed = self.delayed,
            enlarged = self.enlarged,
            handed_over = self.handed_over,
            parts = self.parts,
            recomputed = self.recomputed,
            bytes_admitted = self.bytes_admitted,
            blocked_on_memory_ms = u64::try_from(self.blocked_on_memory.as_millis()).unwrap_or(u64::MAX),
            dead = self.dead,
            handed_back = self.handed_back,
            acks_lost = self.acks_lost,
            "totals"
        );
    }
}

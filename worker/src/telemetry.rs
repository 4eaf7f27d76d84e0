//! Logs, and the figures that a worker keeps about itself.

use tracing_subscriber::EnvFilter;

use crate::config::cli::LogFormat;

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
    pub out_of_memory: u64,
    pub requeued: u64,
    pub dead: u64,
    /// Jobs that went back to the broker unsettled.
    pub handed_back: u64,
    /// Acks that came too late to count.
    pub acks_lost: u64,
}

impl Totals {
    /// One line on it all.
    pub fn log(&self) {
        tracing::info!(
            jobs = self.answered,
            items = self.items,
            passes = self.passes,
            tokens = self.cost,
            out_of_memory = self.out_of_memory,
            requeued = self.requeued,
            dead = self.dead,
            handed_back = self.handed_back,
            acks_lost = self.acks_lost,
            "totals"
        );
    }
}

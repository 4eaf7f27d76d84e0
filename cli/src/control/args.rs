//! The arguments of `vramq control`.

use std::time::Duration;

use clap::Subcommand;
use lapin::types::ShortString;
use vramq_program::log_filter;
use vramq_schemas::control::Command;
use vramq_schemas::topology::control_key;

use crate::broker::Broker;
use crate::duration;

/// How long to wait for answers. A running worker sends a heartbeat every 5 s by default.
const LISTEN: &str = "6s";

/// Send commands to workers: pause, resume, drain, cancel a job, change the log filter.
///
/// Prints each worker's answer. Exits with 0 only if every worker that answered or sent a heartbeat has carried it out; for
/// `cancel`, if a worker had the job and has released its memory.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  vramq control pause --all\n  vramq control cancel 4711\n  vramq control set log=debug \
    --worker gpu-3\n\nExit codes: 0 done, 1 a worker did not carry it out or none answered, 2 usage, 3 broker unreachable, \
    4 refused by the broker, 141 the reader of the output has gone."
)]
pub(crate) struct Args {
    #[command(subcommand)]
    pub(super) what: What,
    #[command(flatten)]
    pub(super) broker: Broker,
}

/// The end of a subcommand's help.
macro_rules! after_help {
    ($example:literal) => {
        concat!(
            "Example:\n  vramq control ",
            $example,
            "\n\nExit codes:\n  0 done · 1 a worker did not carry it out or none answered · 2 usage · 3 broker unreachable · 4 refused \
             by the broker · 141 the reader of the output has gone"
        )
    };
}

#[derive(Debug, Subcommand)]
pub(super) enum What {
    /// Stop consuming; unacknowledged jobs are finished.
    #[command(after_help = after_help!("pause --all"))]
    Pause(To),
    /// Consume again.
    #[command(after_help = after_help!("resume --worker gpu-3"))]
    Resume(To),
    /// Finish or requeue unacknowledged jobs, and exit with 0, as on SIGTERM.
    #[command(after_help = after_help!("drain --worker gpu-3"))]
    Drain(To),
    /// Cancel a job that a worker has: it is dead-lettered, and its caller gets a `failed` reply.
    #[command(after_help = after_help!("cancel 4711"))]
    Cancel {
        /// The job's id.
        id: String,
        #[command(flatten)]
        to: Anyone,
    },
    /// Change a setting until the worker exits.
    #[command(after_help = after_help!("set log=debug --worker gpu-3"))]
    Set {
        /// log=FILTER: a level, or directives as in log=info,lapin=debug.
        #[arg(value_name = "log=FILTER", value_parser = setting)]
        setting: String,
        #[command(flatten)]
        to: To,
    },
}

/// The workers that a command is for; required.
#[derive(Clone, Debug, clap::Args)]
#[group(required = true, multiple = false, args = ["worker", "all"])]
pub(super) struct To {
    /// The name of a worker; may be repeated.
    #[arg(long, value_name = "NAME", value_parser = worker)]
    worker: Vec<String>,
    /// All workers.
    #[arg(long, short)]
    all: bool,
    #[command(flatten)]
    how: How,
}

/// The workers that a command is for; all by default.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct Anyone {
    /// The name of a worker; may be repeated [default: all].
    #[arg(long, value_name = "NAME", value_parser = worker)]
    worker: Vec<String>,
    /// All workers.
    #[arg(long, short, conflicts_with = "worker")]
    all: bool,
    #[command(flatten)]
    how: How,
}

#[derive(Clone, Debug, Default, clap::Args)]
pub(super) struct How {
    /// How long to wait for answers.
    #[arg(long, value_parser = duration::parse, default_value = LISTEN, value_name = "TIME")]
    wait: Duration,
    /// The name of --wait in 0.2: elsewhere --timeout limits what was asked for.
    #[arg(long, hide = true, conflicts_with = "wait", value_parser = duration::parse, value_name = "TIME")]
    timeout: Option<Duration>,
    /// Stop waiting when this many workers have given their last answer, also if they have one name.
    #[arg(long, value_name = "N")]
    pub(super) expect: Option<usize>,
    /// Print each answer as a JSON object on a line.
    #[arg(long)]
    pub(super) json: bool,
}

impl How {
    /// How long to wait for answers.
    pub(super) fn wait(&self) -> Duration {
        self.timeout.unwrap_or(self.wait)
    }

    /// The old name of a flag that was given, with its new one.
    pub(super) fn renamed(&self) -> Option<(&'static str, &'static str)> {
        self.timeout.map(|_| ("--timeout", "--wait"))
    }
}

/// Refuses names that no worker has, among them those that fit no routing key.
fn worker(name: &str) -> Result<String, String> {
    if name.is_empty() || ShortString::try_new(control_key(name)).is_err() {
        return Err("empty, or longer than a worker's name can be".to_owned());
    }
    Ok(name.to_owned())
}

fn setting(text: &str) -> Result<String, String> {
    match text.split_once('=') {
        Some(("log", filter)) if !filter.is_empty() => log_filter(filter),
        _ => Err("the setting is `log=FILTER`, as in log=debug".to_owned()),
    }
}

impl What {
    /// The command, its workers (none: all), and how to wait for them.
    pub(super) fn parts(self) -> (Command, Vec<String>, How) {
        match self {
            Self::Pause(to) => (Command::Pause, to.worker, to.how),
            Self::Resume(to) => (Command::Resume, to.worker, to.how),
            Self::Drain(to) => (Command::Drain, to.worker, to.how),
            Self::Cancel { id, to } => (Command::Cancel { job: id }, to.worker, to.how),
            Self::Set { setting, to } => (Command::Set { log: setting }, to.worker, to.how),
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;

    #[derive(Debug, clap::Parser)]
    struct Cli {
        #[command(flatten)]
        args: Args,
    }

    #[test]
    fn a_name_that_fits_no_routing_key_is_refused() {
        let parsed = |name: &str| {
            let pause = Cli::try_parse_from(["control", "pause", "--worker", name]);
            let cancel = Cli::try_parse_from(["control", "cancel", "4711", "--worker", name]);
            [pause, cancel].map(|parsed| parsed.map(|cli| cli.args.what.parts().1).ok())
        };
        assert_eq!(parsed("gpu-3"), [Some(vec!["gpu-3".to_owned()]), Some(vec!["gpu-3".to_owned()])]);
        for name in ["", &"é".repeat(150)] {
            assert_eq!(parsed(name), [None, None], "{name}");
        }
    }
}

//! `vramq status`: shows workers, from their heartbeats, and queues.

mod fleet;
mod keys;
mod letters;
mod lines;
mod listen;
mod models;
mod queues;
mod report;
mod severity;
mod view;
mod watch;
mod worker_snapshot;
mod workers;

use std::io::{self, Write as _};
use std::time::{Duration, Instant};

use tokio::sync::{mpsc, watch as values};
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};
use vramq_amqp::Address;
use vramq_schemas::topology::check_model_name;

use crate::broker::{Broker, CLOSE_MAX, InvalidBroker, connection_name};
use crate::output::text::{safe, safe_json};
use crate::signals::Signals;
use crate::{duration, exit};
use fleet::{Fleet, ToCount};
use listen::{Event, Listener};
use report::Report;
use worker_snapshot::{Down, Link};

/// Events that may wait to be processed.
const EVENTS_MAX: usize = 256;

/// Show the workers that send heartbeats, and the queues of their models.
///
/// Listens for one heartbeat interval, then prints a table of queues and one of workers. Rates are computed from two heartbeats
/// of a worker: `-` until the second one. Consumes no jobs and changes nothing.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  vramq status
  vramq status --model minilm --for 11s
  vramq status --json
  vramq status --watch

Exit codes:
  0 heartbeats were received · 1 none was received, or the connection was lost · 2 usage · 3 broker unreachable
  4 refused by the broker, at first or later · 130 interrupted (SIGINT) · 143 terminated (SIGTERM)
  141 the reader of the output has gone")]
pub(crate) struct Args {
    /// Show the queues of this model (or key) even if no worker serves it; may be repeated.
    #[arg(long = "model", short, value_name = "MODEL")]
    models: Vec<String>,
    /// How long to listen: a little more than a heartbeat interval (worker.heartbeat_s, 5 s). Twice that gives rates.
    #[arg(long = "for", value_parser = duration::parse, default_value = "6s", value_name = "TIME", conflicts_with = "watch")]
    listen: Duration,
    /// Keep running, and show changes as they happen; `d` lists dead letters and explains them.
    #[arg(long, short)]
    watch: bool,
    /// Print JSON instead of tables.
    #[arg(long, conflicts_with = "watch")]
    json: bool,
    #[command(flatten)]
    broker: Broker,
}

/// The fleet as it is known, and the listener that updates it.
struct Session {
    address: Address,
    /// The address without its password.
    broker: String,
    fleet: Fleet,
    events: mpsc::Receiver<Event>,
    to_count: values::Sender<ToCount>,
    listening: JoinHandle<()>,
}

pub(crate) async fn run(args: Args) -> u8 {
    for model in &args.models {
        if let Err(error) = check_model_name(model) {
            eprintln!("error: {}", safe(&error.to_string()));
            return exit::USAGE;
        }
    }
    let mut session = match Session::open(&args) {
        Ok(session) => session,
        Err(error) => {
            eprintln!("error: {error}");
            return exit::USAGE;
        }
    };
    // A wrong address is reported before the terminal is taken over or time is spent listening.
    session.hear().await;
    if let Link::Down { why, .. } = &session.fleet.link {
        let (error, code) = match why {
            Down::Connecting => ("no answer yet", exit::UNREACHABLE),
            Down::Unreachable(error) => (error.as_str(), exit::UNREACHABLE),
            Down::Refused(error) => (error.as_str(), exit::REFUSED),
        };
        eprintln!("error: connect to the broker at {}: {}", session.broker, safe(error));
        return code;
    }
    let mut signals = match Signals::new() {
        Ok(signals) => signals,
        Err(error) => {
            eprintln!("error: listen for signals: {error}");
            return exit::FAILED;
        }
    };
    let code = match args.watch {
        true => watch::run(&mut session, &mut signals).await,
        false => print_once(&mut session, &mut signals, args.listen, args.json).await,
    };
    tokio::select! {
        () = session.close() => code,
        (code, _) = signals.next() => code,
    }
}

/// Listens for a while, then prints once.
async fn print_once(session: &mut Session, signals: &mut Signals, listen: Duration, json: bool) -> u8 {
    let mut end = std::pin::pin!(sleep(listen));
    loop {
        tokio::select! {
            () = &mut end => break,
            (code, _) = signals.next() => return code,
            () = session.hear() => {
                // Further attempts would be refused as well.
                if matches!(session.fleet.link, Link::Down { why: Down::Refused(_), .. }) {
                    break;
                }
            }
        }
    }
    let now = Instant::now();
    let error = match &session.fleet.link {
        Link::Up { .. } => None,
        Link::Down { why, .. } => Some(why.in_words()),
    };
    let output = if json {
        // Cannot fail: it is made of texts and numbers.
        let report = serde_json::to_string_pretty(&Report::new(
            &session.broker,
            error.as_deref(),
            &session.fleet,
            now,
        ));
        report.unwrap_or_default().lines().map(|line| safe_json(line) + "\n").collect::<String>()
    } else {
        lines::known(&session.fleet, now).into_iter().map(|line| line.text + "\n").collect()
    };
    match io::stdout().write_all(output.as_bytes()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => return exit::BROKEN_PIPE,
        Err(error) => {
            eprintln!("error: write: {error}");
            return exit::FAILED;
        }
        Ok(()) => {}
    }
    if let Some(error) = &error {
        let about = if output.is_empty() || json { "" } else { "; the output is what was known before" };
        eprintln!("error: {}{about}", safe(error));
    }
    match &session.fleet.link {
        Link::Up { .. } if !session.fleet.is_empty() => exit::DONE,
        Link::Down { why: Down::Refused(_), .. } => exit::REFUSED,
        Link::Up { .. } | Link::Down { .. } => exit::FAILED,
    }
}

impl Session {
    fn open(args: &Args) -> Result<Self, InvalidBroker> {
        let address = args.broker.address()?;
        let fleet = Fleet::new(&args.models, Instant::now());
        let (event_sender, events) = mpsc::channel(EVENTS_MAX);
        let (to_count, counting) = values::channel(fleet.to_count());
        let broker = address.to_string();
        let name = connection_name("status");
        let listener = Listener { address: address.clone(), name, to_count: counting, events: event_sender };
        let listening = tokio::spawn(listener.run());
        Ok(Self { address, broker, fleet, events, to_count, listening })
    }

    /// Ends the listener, and waits until it has closed its connection. The process would otherwise end before that.
    async fn close(self) {
        let Self { events, listening, .. } = self;
        drop(events);
        // An `Err`: the broker does not answer. The command ends anyway.
        let _ = timeout(CLOSE_MAX, listening).await;
    }

    /// Waits for an event, and applies it.
    ///
    /// Cancel safety: an event that was received is applied at once.
    async fn hear(&mut self) {
        match self.events.recv().await {
            Some(events) => self.take(events),
            // The listener ends only with this session. Callers of this function wait for another event at the same time.
            None => std::future::pending().await,
        }
    }

    /// Applies the events that are waiting.
    fn hear_waiting(&mut self) {
        while let Ok(events) = self.events.try_recv() {
            self.take(events);
        }
    }

    fn take(&mut self, events: Event) {
        let now = Instant::now();
        match events {
            Event::Connected => self.fleet.connected(now),
            Event::Lost(why) => self.fleet.lost(why, now),
            Event::Exchange(exists) => self.fleet.has_exchange = Some(exists),
            Event::Counted(key, counted) => self.fleet.counted(&key, counted),
            Event::Heartbeat(body) => {
                self.fleet.heard(&body, now);
                let to_count = self.fleet.to_count();
                self.to_count.send_if_modified(|known| {
                    let differs = *known != to_count;
                    *known = to_count;
                    differs
                });
            }
        }
    }
}

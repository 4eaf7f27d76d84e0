//! `vramq status`: which workers there are, what they do, and what waits in the queues.

mod fleet;
mod lines;
mod listen;
mod queues;
mod report;
mod view;
mod watch;
mod worker_snapshot;

use std::collections::BTreeSet;
use std::io::{self, Write as _};
use std::time::{Duration, Instant};

use tokio::sync::{mpsc, watch as values};
use tokio::time::sleep;
use vramq_amqp::InvalidAddress;
use vramq_schemas::topology::check_model_name;

use crate::broker::Broker;
use crate::output::text::{safe, safe_json};
use crate::signals::Signals;
use crate::{duration, exit};
use fleet::Fleet;
use listen::{Event, Listener};
use report::Report;
use worker_snapshot::Link;

/// Event that may wait for whoever draws or prints.
const EVENTS_MAX: usize = 256;

/// Show the workers that send heartbeats, and the queues of their models.
///
/// Listens for one interval of heartbeats, then prints a table of queues and one of workers. Rates are differences
/// between two heartbeats of a worker: `-` until it was heard twice. Nothing is consumed, and nothing is changed.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  vramq status
  vramq status --model minilm --for 11s
  vramq status --json
  vramq status --watch

Exit codes:
  0 workers were heard · 1 none was heard, or the connection was lost · 2 usage · 3 broker unreachable
  130 interrupted · 143 told to end")]
pub(crate) struct Args {
    /// Count the queues of this model (or key), too, if no worker tells of it; may be repeated.
    #[arg(long = "model", short, value_name = "MODEL")]
    models: Vec<String>,
    /// How long to listen: one interval of heartbeats, and a little (worker.heartbeat_s, 5 s). Twice that gives rates.
    #[arg(long = "for", value_parser = duration::parse, default_value = "6s", value_name = "TIME", conflicts_with = "watch")]
    listen: Duration,
    /// Stay, and show changes as they happen.
    #[arg(long, short)]
    watch: bool,
    /// As JSON rather than tables.
    #[arg(long, conflicts_with = "watch")]
    json: bool,
    #[command(flatten)]
    broker: Broker,
}

/// What is known, and where it comes from.
struct Session {
    broker: String,
    fleet: Fleet,
    events: mpsc::Receiver<Event>,
    keys: values::Sender<BTreeSet<String>>,
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
            eprintln!("error: the broker URL {error}");
            return exit::USAGE;
        }
    };
    // Before a terminal is taken over, or seconds pass in vain: an address that is wrong is told at once.
    session.hear().await;
    if let Link::Down { error, .. } = &session.fleet.link {
        eprintln!("error: cannot reach the broker at {}: {}", session.broker, safe(error));
        return exit::UNREACHABLE;
    }
    if args.watch { watch::run(session).await } else { look(session, args.listen, args.json).await }
}

/// Listens for a while, and tells once.
async fn look(mut session: Session, listen: Duration, json: bool) -> u8 {
    let mut signals = match Signals::new() {
        Ok(signals) => signals,
        Err(error) => {
            eprintln!("error: listen for signals: {error}");
            return exit::FAILED;
        }
    };
    let mut end = std::pin::pin!(sleep(listen));
    loop {
        tokio::select! {
            () = &mut end => break,
            (code, _) = signals.next() => return code,
            () = session.hear() => {}
        }
    }
    let now = Instant::now();
    let told = if json {
        // Numbers and texts: cannot fail.
        let report = serde_json::to_string_pretty(&Report::new(&session.broker, &session.fleet, now));
        report.unwrap_or_default().lines().map(|line| safe_json(line) + "\n").collect::<String>()
    } else {
        lines::lines(&session.fleet, now).into_iter().map(|line| line.text + "\n").collect()
    };
    match io::stdout().write_all(told.as_bytes()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => return exit::BROKEN_PIPE,
        Err(error) => {
            eprintln!("error: write: {error}");
            return exit::FAILED;
        }
        Ok(()) => {}
    }
    let heard = !session.fleet.is_empty() && matches!(session.fleet.link, Link::Up { .. });
    if heard { exit::DONE } else { exit::FAILED }
}

impl Session {
    fn open(args: &Args) -> Result<Self, InvalidAddress> {
        let address = args.broker.address()?;
        let fleet = Fleet::new(&args.models, Instant::now());
        let (event_sender, events) = mpsc::channel(EVENTS_MAX);
        let (keys, keys_receiver) = values::channel(fleet.keys());
        let broker = address.to_string();
        let name = format!("vramq status {}", std::process::id());
        tokio::spawn(Listener { address, name, keys: keys_receiver, events: event_sender }.run());
        Ok(Self { broker, fleet, events, keys })
    }

    /// Waits for one piece of events, and takes it. Cancel-safe: what is taken is noted at once.
    async fn hear(&mut self) {
        match self.events.recv().await {
            Some(events) => self.take(events),
            // The listener ends only with this session. Whoever waits here waits for something else, too.
            None => std::future::pending().await,
        }
    }

    /// Takes what is there already.
    fn hear_waiting(&mut self) {
        while let Ok(events) = self.events.try_recv() {
            self.take(events);
        }
    }

    fn take(&mut self, events: Event) {
        let now = Instant::now();
        match events {
            Event::Connected => self.fleet.connected(now),
            Event::Lost(error) => self.fleet.lost(error, now),
            Event::Exchange(exists) => self.fleet.has_exchange = exists,
            Event::Counted(key, counted) => self.fleet.counted(&key, counted),
            Event::Heartbeat(body) => {
                self.fleet.heard(&body, now);
                let keys = self.fleet.keys();
                self.keys.send_if_modified(|known| {
                    let differs = *known != keys;
                    *known = keys;
                    differs
                });
            }
        }
    }
}

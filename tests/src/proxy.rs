//! A TCP proxy between programs and the broker that behaves like faulty networks: it cuts, refuses, stalls and slows connections.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};

use crate::frames::{
    CONFIRMING, Lost, Request, SETTLING, closes_connection, note_lost, without_acks, without_channels,
    without_requests,
};
use crate::publish_counter::PublishCounter;

/// Connections at a time; more are reset. Far above what a test needs, and far below what a process may have open.
const CONNECTIONS_MAX: usize = 256;

/// Bytes of a connection, in each direction, that are read and not yet written.
const BUFFER_BYTES: usize = 64 * 1024;

/// Slices of a second in which a slow proxy forwards.
const SLICES: u64 = 20;

/// What happens to connections, new ones and those that stand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    Pass,
    /// New ones are reset as soon as they are accepted; those that stand go on.
    Refuse,
    /// Accepted, and nothing is forwarded: as when a network drops every packet. What was sent meanwhile arrives when
    /// this ends.
    Stall,
    /// All but the acknowledgements of deliveries.
    LoseAcks,
    /// All but the confirms of publishes, which arrive when this ends.
    HoldConfirms,
    /// The same for connections that are opened meanwhile. All others pass.
    HoldNewConfirms,
    /// Towards the broker, only frames of channel 0: connections stay open, but the broker answers nothing on any other channel.
    Swallow,
    /// The same for connections that are opened meanwhile, for as long as they stand. All others pass.
    SwallowNew,
    /// All but one kind of request to the broker.
    SwallowRequests(Request),
    /// So many bytes a second, of each connection in each direction.
    Slow(u64),
}

/// How a connection ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cut {
    /// By a RST: what is under way is lost.
    Reset,
    /// By a FIN: what is under way arrives.
    Finish,
}

/// The proxy. Ends, with all its connections, when it is dropped.
#[derive(Debug)]
pub struct Proxy {
    url: String,
    shared: Arc<Shared>,
    accepting: JoinHandle<()>,
}

#[derive(Debug)]
struct Shared {
    broker: String,
    mode: watch::Sender<Mode>,
    /// The last cut, and how many there were.
    cut: watch::Sender<(u64, Cut)>,
    open: AtomicUsize,
    accepted: AtomicUsize,
    closed: AtomicUsize,
    lost_acks: AtomicUsize,
    published: AtomicUsize,
    publishing: AtomicUsize,
}

impl Proxy {
    /// A proxy to the broker of an AMQP URL, on a port of its own.
    ///
    /// # Errors
    /// The URL has no host and port, or the system no port.
    pub async fn to(url: &str) -> Result<Self> {
        let host = url.split_once('@').and_then(|(_, rest)| rest.split_once('/'));
        let (broker, _vhost) = host.with_context(|| format!("no USER:PASSWORD@HOST:PORT/ in {url}"))?;
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?.to_string();
        let shared = Arc::new(Shared {
            broker: broker.to_owned(),
            mode: watch::Sender::new(Mode::Pass),
            cut: watch::Sender::new((0, Cut::Reset)),
            open: AtomicUsize::new(0),
            accepted: AtomicUsize::new(0),
            closed: AtomicUsize::new(0),
            lost_acks: AtomicUsize::new(0),
            published: AtomicUsize::new(0),
            publishing: AtomicUsize::new(0),
        });
        let accepting = tokio::spawn(accept(listener, Arc::clone(&shared)));
        Ok(Self { url: url.replacen(broker, &address, 1), shared, accepting })
    }

    /// The AMQP URL through it.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Forwards again.
    pub fn pass(&self) {
        self.shared.mode.send_replace(Mode::Pass);
    }

    /// Lets no new connection through.
    pub fn refuse(&self) {
        self.shared.mode.send_replace(Mode::Refuse);
    }

    /// Forwards nothing, without an error to either side.
    pub fn stall(&self) {
        self.shared.mode.send_replace(Mode::Stall);
    }

    /// Forwards all but acknowledgements and rejections of deliveries, so that the broker never learns of them.
    pub fn lose_acks(&self) {
        self.shared.mode.send_replace(Mode::LoseAcks);
    }

    /// Forwards everything except the broker's confirms of publishes, which arrive when the proxy passes again. So a program's publishes
    /// stay unconfirmed for as long as a test needs.
    pub fn hold_confirms(&self) {
        self.shared.mode.send_replace(Mode::HoldConfirms);
    }

    /// The same for connections that are opened from now on, for as long as they stand.
    pub fn hold_new_confirms(&self) {
        self.shared.mode.send_replace(Mode::HoldNewConfirms);
    }

    /// Lets connections be opened, and swallows all that is sent to the broker on their channels.
    pub fn swallow(&self) {
        self.shared.mode.send_replace(Mode::Swallow);
    }

    /// Swallows what is sent on the channels of connections that are opened from now on, for as long as they stand.
    pub fn swallow_new(&self) {
        self.shared.mode.send_replace(Mode::SwallowNew);
    }

    /// Forwards all but this kind of request to the broker, which so never answers one.
    pub fn swallow_requests(&self, request: Request) {
        self.shared.mode.send_replace(Mode::SwallowRequests(request));
    }

    /// Forwards so many bytes a second, of each connection in each direction.
    pub fn slow(&self, bytes_per_second: u64) {
        self.shared.mode.send_replace(Mode::Slow(bytes_per_second));
    }

    /// Ends all connections. How many there were.
    pub fn cut(&self, how: Cut) -> usize {
        let open = self.open();
        self.shared.cut.send_modify(|(cuts, last)| {
            *cuts += 1;
            *last = how;
        });
        open
    }

    /// Deliveries whose acknowledgement was not forwarded.
    pub fn lost_acks(&self) -> usize {
        self.shared.lost_acks.load(Ordering::SeqCst)
    }

    /// Messages that programs have published, without heartbeats.
    pub fn published(&self) -> usize {
        self.shared.published.load(Ordering::SeqCst)
    }

    /// Connections on which anything was ever published, heartbeats included.
    pub fn publishing(&self) -> usize {
        self.shared.publishing.load(Ordering::SeqCst)
    }

    /// Connections that stand.
    pub fn open(&self) -> usize {
        self.shared.open.load(Ordering::SeqCst)
    }

    /// Connections that were ever accepted.
    pub fn accepted(&self) -> usize {
        self.shared.accepted.load(Ordering::SeqCst)
    }

    /// Connections that programs have closed. The broker's log has a warning for each that just ended.
    pub fn closed(&self) -> usize {
        self.shared.closed.load(Ordering::SeqCst)
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        // The connections' tasks belong to this one, and end with it.
        self.accepting.abort();
    }
}

async fn accept(listener: TcpListener, shared: Arc<Shared>) {
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            Ok((client, _)) = listener.accept() => {
                let refuses = *shared.mode.borrow() == Mode::Refuse;
                if refuses || connections.len() >= CONNECTIONS_MAX {
                    reset(&client);
                    continue;
                }
                // Before it counts: whoever sees that it was accepted may set another mode.
                let always = match *shared.mode.borrow() {
                    Mode::SwallowNew => Some(Mode::Swallow),
                    Mode::HoldNewConfirms => Some(Mode::HoldConfirms),
                    _ => None,
                };
                shared.accepted.fetch_add(1, Ordering::SeqCst);
                connections.spawn(connection(client, Arc::clone(&shared), always));
            }
            Some(_) = connections.join_next() => {}
        }
    }
}

/// Counts a connection for as long as it lives.
struct Open<'a>(&'a AtomicUsize);

impl Drop for Open<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Forwards a connection to its end, in the proxy's mode, or always in one.
async fn connection(mut client: TcpStream, shared: Arc<Shared>, always: Option<Mode>) {
    let mut cut = shared.cut.subscribe();
    shared.open.fetch_add(1, Ordering::SeqCst);
    let _open = Open(&shared.open);
    let mut mode = shared.mode.subscribe();
    // A stalled connection does not reach the broker; a broker that is away resets.
    let broker = async {
        mode.wait_for(|mode| *mode != Mode::Stall).await.ok()?;
        TcpStream::connect(&shared.broker).await.ok()
    };
    let broker = tokio::select! {
        broker = broker => broker,
        _ = cut.changed() => None,
    };
    let Some(mut broker) = broker else { return reset(&client) };
    let _ = (client.set_nodelay(true), broker.set_nodelay(true));
    let ended = {
        let (from_client, to_client) = client.split();
        let (from_broker, to_broker) = broker.split();
        let both = futures_util::future::try_join(
            pump(from_client, to_broker, &shared, Towards::Broker, always),
            pump(from_broker, to_client, &shared, Towards::Client, always),
        );
        tokio::select! {
            ended = both => ended.map_or(Cut::Reset, |_| Cut::Finish),
            changed = cut.changed() => changed.map_or(Cut::Reset, |()| cut.borrow().1),
        }
    };
    if ended == Cut::Reset {
        reset(&client);
        reset(&broker);
    } else {
        let _ = (client.shutdown().await, broker.shutdown().await);
    }
}

/// Makes a socket end by a RST when it is dropped.
fn reset(stream: &TcpStream) {
    let _ = stream.set_zero_linger();
}

/// A direction. Needed because acks of deliveries and confirms of publishes are the same frames in opposite directions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Towards {
    Broker,
    Client,
}

/// Forwards one direction to its end, in the proxy's mode, or always in one.
async fn pump(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    shared: &Shared,
    towards: Towards,
    always: Option<Mode>,
) -> std::io::Result<()> {
    let mut mode = shared.mode.subscribe();
    let mut buffer = vec![0; BUFFER_BYTES];
    let (mut lost, mut held) = (Lost::new(), Vec::new());
    let mut publishes = PublishCounter::new();
    loop {
        let of_all = *mode.borrow_and_update();
        let now = always.unwrap_or(of_all);
        if now != Mode::HoldConfirms && !held.is_empty() {
            to.write_all(&std::mem::take(&mut held)).await?;
        }
        if now == Mode::Stall {
            // An `Err` means that the proxy ends.
            mode.changed().await.map_err(std::io::Error::other)?;
            continue;
        }
        let most = match now {
            Mode::Slow(rate) => usize::try_from((rate / SLICES).max(1)).unwrap_or(usize::MAX),
            _ => usize::MAX,
        };
        let most = most.min(buffer.len());
        let read = tokio::select! {
            read = from.read(&mut buffer[..most]) => read?,
            _ = mode.changed() => continue,
        };
        if read == 0 {
            return to.shutdown().await;
        }
        let read = match now {
            Mode::LoseAcks if towards == Towards::Broker => {
                let (before, mut acks) = (lost.len(), Vec::new());
                let kept = without_acks(&mut buffer, read, SETTLING, &mut acks);
                note_lost(&acks, &mut lost);
                shared.lost_acks.fetch_add(lost.len() - before, Ordering::SeqCst);
                kept
            }
            Mode::HoldConfirms if towards == Towards::Client => {
                without_acks(&mut buffer, read, CONFIRMING, &mut held)
            }
            Mode::Swallow if towards == Towards::Broker => without_channels(&mut buffer, read),
            Mode::SwallowRequests(request) if towards == Towards::Broker => {
                without_requests(&mut buffer, read, request)
            }
            _ => read,
        };
        // Before the broker answers: then the program ends.
        if towards == Towards::Broker && closes_connection(&buffer[..read]) {
            shared.closed.fetch_add(1, Ordering::SeqCst);
        }
        to.write_all(&buffer[..read]).await?;
        if towards == Towards::Broker {
            let had_publishes = publishes.has_publishes();
            shared.published.fetch_add(publishes.take_in(&buffer[..read]), Ordering::SeqCst);
            let is_first = publishes.has_publishes() && !had_publishes;
            shared.publishing.fetch_add(usize::from(is_first), Ordering::SeqCst);
        }
        if let Mode::Slow(rate) = now {
            tokio::time::sleep(Duration::from_secs_f64(read as f64 / rate.max(1) as f64)).await;
        }
    }
}

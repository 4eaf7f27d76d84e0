//! Publishes replies to callers that receive them on their own channel (RabbitMQ's direct reply-to), over a separate connection.
//!
//! RabbitMQ closes the connection that publishes to certain addresses although they look genuine: up to 3.10.8 at least, the address of a
//! caller whose node has left the cluster. So jobs do not depend on this connection. It is opened for the first such reply. Replies to
//! nodes that accepted one before are published together; others are published alone: see [`proven_nodes`](super::proven_nodes). If the
//! connection is lost, each unconfirmed reply is published again, alone. If it is lost again, that reply is the cause and is given up: its
//! results go into a dead letter.

use std::collections::VecDeque;
use std::fmt;
use std::time::{Duration, Instant};

use futures_util::future::BoxFuture;
use futures_util::stream::{FuturesUnordered, StreamExt as _};
use lapin::ErrorKind;
use lapin::protocol::{AMQPErrorKind, AMQPHardError};
use lapin::types::ShortString;
use tokio::sync::{mpsc, oneshot};
use vramq_amqp::Address;

use crate::broker::direct_link::{CLOSE_MAX, Link, Loss, OpenError};
use crate::broker::message::Message;
use crate::broker::proven_nodes::{COUNTED_FOR, CUTS_MAX, NodeTrust, ProvenNodes};
use crate::broker::publisher::MessageOutcome;
use crate::broker::session::message_size_max;
use crate::publishers::direct_address::{self, Process};
use crate::retry::Backoff;

/// The most replies that wait for this task; further jobs wait to add theirs. There are at most as many as slots.
const WAITING_MAX: usize = 16;

/// The most replies without a confirm. The broker confirms direct replies without writing to a disk, so more would not be faster; and each
/// of them is published again, alone, when the connection is lost.
const UNCONFIRMED_MAX: usize = 64;

/// How long a reply waits for a connection that cannot be opened, and the waits between attempts.
const CONNECT_MAX: Duration = Duration::from_secs(15);
const CONNECT_WAIT_MIN: Duration = Duration::from_millis(100);
const CONNECT_WAIT_MAX: Duration = Duration::from_secs(3);

/// How long the worker does not connect after the broker refused a connection. Only operators can change its limits.
const REFUSED_FOR: Duration = Duration::from_secs(60);

/// A connection without replies for so long is closed, because it counts against the user's limit.
const IDLE_MAX: Duration = Duration::from_secs(300);

/// Passes replies to the task that owns the connection. Clones share that task.
#[derive(Clone, Debug)]
pub struct DirectReplies {
    commands: mpsc::Sender<Command>,
}

#[derive(Debug)]
enum Command {
    Publish(Box<Request>),
    Close(oneshot::Sender<()>),
}

/// A reply, and the receiver of its outcome, if there is one.
#[derive(Debug)]
struct Request {
    message: Message,
    /// The process that its address names.
    process: Process,
    asked_at: Instant,
    /// How many connections were lost while it was in flight.
    losses: usize,
    outcome: Option<oneshot::Sender<MessageOutcome>>,
}

impl Request {
    /// `None` if no broker creates such an address.
    fn new(message: Message, outcome: Option<oneshot::Sender<MessageOutcome>>) -> Option<Self> {
        let process = direct_address::process(message.routing_key.as_str()).ok()?;
        Some(Self { message, process, asked_at: Instant::now(), losses: 0, outcome })
    }

    fn address(&self) -> &ShortString {
        &self.message.routing_key
    }

    /// False if the session of the job is lost: then the job is redelivered, and its reply is published again.
    fn is_wanted(&self) -> bool {
        self.outcome.as_ref().is_none_or(|outcome| !outcome.is_closed())
    }

    fn end(self, answer: MessageOutcome) {
        if let Some(outcome) = self.outcome {
            // An `Err` means that the receiver is gone.
            let _ = outcome.send(answer);
        }
    }
}

impl DirectReplies {
    /// Starts the task, which connects when the first reply comes. Must be called in a runtime.
    pub fn start(broker: Address, worker: &str) -> Self {
        let (commands, receiver) = mpsc::channel(WAITING_MAX);
        let task = Task {
            broker,
            name: format!("vramq-worker {worker} direct replies"),
            commands: receiver,
            link: None,
            unconfirmed: FuturesUnordered::new(),
            alone: VecDeque::new(),
            nodes: ProvenNodes::default(),
            refused_at: None,
        };
        tokio::spawn(task.run());
        Self { commands }
    }

    /// Publishes a reply and waits for the outcome, at most until `until`: [`MessageOutcome::Confirmed`],
    /// [`MessageOutcome::ConnectionLost`], [`MessageOutcome::Barred`], [`MessageOutcome::NoConnection`], [`MessageOutcome::TooLarge`] or
    /// [`MessageOutcome::Refused`].
    pub async fn publish(&self, message: &Message, until: Option<Instant>) -> MessageOutcome {
        let (sender, outcome) = oneshot::channel();
        let Some(request) = Request::new(message.clone(), Some(sender)) else {
            return MessageOutcome::Barred;
        };
        let command = Command::Publish(Box::new(request));
        let published = async {
            // Both fail only when the task has ended, at the end of the worker.
            self.commands.send(command).await.ok()?;
            outcome.await.ok()
        };
        let answer = match until {
            Some(until) => tokio::time::timeout_at(until.into(), published).await.ok().flatten(),
            None => published.await,
        };
        answer.unwrap_or(MessageOutcome::NoConnection)
    }

    /// Publishes a reply that may be lost. False if too many replies are waiting.
    pub fn try_publish(&self, message: Message) -> bool {
        let request = Request::new(message, None);
        request.is_some_and(|request| self.commands.try_send(Command::Publish(Box::new(request))).is_ok())
    }

    /// Closes the connection after the replies in flight, within `CLOSE_MAX`.
    pub async fn close(&self) {
        let (sender, closed) = oneshot::channel();
        let closing = async {
            if self.commands.send(Command::Close(sender)).await.is_ok() {
                let _ = closed.await;
            }
        };
        // Replies that take longer are lost with the process.
        let _ = tokio::time::timeout(CLOSE_MAX, closing).await;
    }
}

/// The state of the connection's task.
struct Task {
    broker: Address,
    name: String,
    commands: mpsc::Receiver<Command>,
    link: Option<Link>,
    /// At most [`UNCONFIRMED_MAX`], all published on the current link.
    unconfirmed: FuturesUnordered<BoxFuture<'static, (Request, Result<MessageOutcome, Loss>)>>,
    /// Replies that must be published while no other is unconfirmed: those in flight when the connection was lost, one that came at that
    /// moment, and one whose node is not proven.
    alone: VecDeque<Request>,
    nodes: ProvenNodes,
    /// When the broker last refused a connection.
    refused_at: Option<Instant>,
}

impl fmt::Debug for Task {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Task").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Task {
    async fn run(mut self) {
        loop {
            if self.unconfirmed.is_empty()
                && let Some(request) = self.alone.pop_front()
            {
                self.publish_alone(request).await;
                continue;
            }
            let has_room = self.alone.is_empty() && self.unconfirmed.len() < UNCONFIRMED_MAX;
            let is_idle = self.unconfirmed.is_empty() && self.link.is_some();
            tokio::select! {
                Some((request, result)) = self.unconfirmed.next() => self.published(request, result),
                command = self.commands.recv(), if has_room => match command {
                    Some(Command::Publish(request)) => self.publish(*request).await,
                    Some(Command::Close(done)) => {
                        self.close().await;
                        let _ = done.send(());
                        return;
                    }
                    None => return,
                },
                () = tokio::time::sleep(IDLE_MAX), if is_idle => self.abandon_link(),
            }
        }
    }

    /// Publishes a reply without waiting for others, if its node is proven.
    async fn publish(&mut self, request: Request) {
        let is_lost = self.link.as_ref().is_some_and(|link| !link.is_open());
        match self.nodes.trust(request.process, Instant::now()) {
            NodeTrust::Barred => return request.end(MessageOutcome::Barred),
            NodeTrust::Unproven => return self.alone.push_back(request),
            // The unconfirmed replies have not yet noticed that the connection is lost.
            NodeTrust::Proven if is_lost && !self.unconfirmed.is_empty() => {
                return self.alone.push_back(request);
            }
            NodeTrust::Proven => {}
        }
        if let Some((request, link)) = self.prepare(request).await {
            self.unconfirmed.push(Box::pin(async move {
                let result = link.publish(&request.message).await;
                (request, result)
            }));
        }
    }

    fn published(&mut self, mut request: Request, result: Result<MessageOutcome, Loss>) {
        match result {
            Ok(answer) => request.end(answer),
            Err(loss) => {
                if self.link.is_some() {
                    tracing::warn!(
                        error = loss.to_string(),
                        "connection for direct replies lost: publishing each unconfirmed reply again, one at a time"
                    );
                }
                self.abandon_link();
                if is_too_large(&loss, &request) {
                    return request.end(MessageOutcome::TooLarge);
                }
                request.losses += 1;
                self.alone.push_back(request);
            }
        }
    }

    /// Publishes a reply while no other is unconfirmed, so that a lost connection can be attributed to it.
    async fn publish_alone(&mut self, request: Request) {
        if self.nodes.trust(request.process, Instant::now()) == NodeTrust::Barred {
            return request.end(MessageOutcome::Barred);
        }
        let Some((mut request, link)) = self.prepare(request).await else { return };
        let loss = match link.publish(&request.message).await {
            Ok(answer) => {
                if answer == MessageOutcome::Confirmed {
                    self.nodes.confirmed(request.process);
                }
                return request.end(answer);
            }
            Err(loss) => loss,
        };
        self.abandon_link();
        if is_too_large(&loss, &request) {
            return request.end(MessageOutcome::TooLarge);
        }
        if request.losses == 0 && !is_crash(&loss) {
            request.losses += 1;
            return self.alone.push_back(request);
        }
        self.give_up(request, &loss);
    }

    /// Ends a reply that was in flight, alone, when the connection was lost.
    fn give_up(&mut self, request: Request, loss: &Loss) {
        tracing::warn!(
            job = request.message.properties.message_id().as_ref().map(ShortString::as_str),
            address = request.address().as_str(),
            error = loss.to_string(),
            "connection for direct replies lost with only this reply on it: giving the reply up"
        );
        if is_over_address(loss) {
            self.nodes.closed_over(request.process, Instant::now());
        }
        if !self.nodes.has_cuts_left() {
            tracing::warn!(
                closed = CUTS_MAX,
                seconds = COUNTED_FOR.as_secs(),
                "the broker keeps closing the connection for direct replies: for a while only callers on nodes that were reached before get direct replies; results for other callers become dead letters"
            );
        }
        request.end(MessageOutcome::ConnectionLost);
    }

    /// Connects if necessary, and returns the request with its link. `None` if the request has ended instead.
    async fn prepare(&mut self, request: Request) -> Option<(Request, Link)> {
        if !self.link.as_ref().is_some_and(Link::is_open) {
            self.abandon_link();
            self.link = self.connect(&request).await;
        }
        let Some(link) = self.link.clone() else {
            request.end(MessageOutcome::NoConnection);
            return None;
        };
        Some((request, link))
    }

    /// Tries to connect for a while, unless the broker refuses. Other replies wait meanwhile, because they need the same connection.
    async fn connect(&mut self, request: &Request) -> Option<Link> {
        if self.refused_at.is_some_and(|at| at.elapsed() < REFUSED_FOR) {
            return None;
        }
        let mut waits = Backoff::between(CONNECT_WAIT_MIN, CONNECT_WAIT_MAX);
        while request.is_wanted() {
            let error = match Link::open(&self.broker, &self.name).await {
                Ok(link) => {
                    self.refused_at = None;
                    return Some(link);
                }
                Err(error) => error,
            };
            if matches!(&error, OpenError::Connect(error) if error.is_refusal()) {
                self.refused_at = Some(Instant::now());
                tracing::warn!(
                    %error,
                    seconds = REFUSED_FOR.as_secs(),
                    "the broker refuses a connection for direct replies: until the next try, results for direct reply addresses become dead letters, and other direct replies are dropped"
                );
                return None;
            }
            if request.asked_at.elapsed() > CONNECT_MAX {
                tracing::warn!(%error, "cannot connect to publish a direct reply: a job's results become dead letters, other replies are dropped");
                return None;
            }
            tokio::time::sleep(waits.next_wait()).await;
        }
        None
    }

    fn abandon_link(&mut self) {
        if let Some(link) = self.link.take() {
            link.abandon();
        }
    }

    /// Waits for the replies in flight. The caller limits the time.
    async fn close(&mut self) {
        while self.unconfirmed.next().await.is_some() {}
        if let Some(link) = self.link.take() {
            link.close().await;
        }
    }
}

/// Whether the channel was closed because this reply is larger than the broker takes.
fn is_too_large(loss: &Loss, request: &Request) -> bool {
    let Loss::Closed(error) = loss else { return false };
    message_size_max(error).is_some_and(|max| request.message.body.len() > max)
}

/// Whether the broker closed the connection, perhaps over an address. Not if the network lost it, or if an operator or the end of the node
/// closed it, which says nothing of addresses.
fn is_over_address(loss: &Loss) -> bool {
    const BY_OPERATOR: AMQPErrorKind = AMQPErrorKind::Hard(AMQPHardError::CONNECTIONFORCED);
    let Loss::Closed(error) = loss else { return false };
    matches!(error.kind(), ErrorKind::ProtocolError(answer) if *answer.kind() != BY_OPERATOR)
}

/// Whether the broker failed internally on what it read from the connection.
fn is_crash(loss: &Loss) -> bool {
    let Loss::Closed(error) = loss else { return false };
    matches!(error.kind(), ErrorKind::ProtocolError(answer) if *answer.kind() == AMQPErrorKind::Hard(AMQPHardError::INTERNALERROR))
}

#[cfg(test)]
mod tests {
    use std::io;

    use lapin::protocol::AMQPError;

    use super::*;

    #[test]
    fn an_address_is_not_blamed_if_an_operator_or_the_network_ends_the_connection() {
        let by_broker = |kind: AMQPHardError| {
            let error = AMQPError::new(kind.into(), "text".into());
            Loss::Closed(ErrorKind::ProtocolError(error).into())
        };
        let by_network = Loss::Closed(io::Error::from(io::ErrorKind::BrokenPipe).into());
        assert!(is_over_address(&by_broker(AMQPHardError::INTERNALERROR)));
        assert!(!is_over_address(&by_broker(AMQPHardError::CONNECTIONFORCED)));
        assert!(!is_over_address(&by_network));
    }
}

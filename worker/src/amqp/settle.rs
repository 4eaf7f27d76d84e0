//! Carries out a verdict on a job: publish, confirm, and only then ack.
//!
//! [`settle`] goes as far as the confirm. The ack is [`acknowledge`]'s, for all that are confirmed by then at once.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use lapin::Acker;
use lapin::options::{BasicAckOptions, BasicNackOptions, BasicRejectOptions};
use vramq_schemas::{JobHeaders, Reason, Traceparent};

use crate::amqp::acks::Ack;
use crate::amqp::message::{self, Identity, Message};
use crate::amqp::publish::{Publisher, Taken};
use crate::drill::{self, Point};
use crate::job::Received;
use crate::metrics::Cause;
use crate::model::Model;
use crate::refusal::Refusal;
use crate::spans::Times;

/// How long a job that can neither be answered nor dead-lettered is kept before it is handed back.
const HAND_BACK_WAIT: Duration = Duration::from_secs(1);

/// What is to happen with a job.
#[derive(Debug)]
pub enum Verdict {
    /// It ran.
    Answer(Box<Answer>),
    /// It goes on later or elsewhere.
    Requeue(Box<Requeue>),
    /// It can never run.
    Bury(Box<Burial>),
    /// It was answered before, but the broker did not learn of it.
    Forget,
}

/// A job that ran.
#[derive(Debug)]
pub struct Answer {
    /// Its replies, or the last of them.
    pub replies: Vec<Message>,
    /// Where it stands before they are out.
    pub headers: JobHeaders,
}

/// A job that goes on.
#[derive(Debug)]
pub struct Requeue {
    /// What is finished of it: goes first, so that nothing is computed twice.
    pub parts: Vec<Message>,
    /// Items that were answered before those.
    pub answered: u32,
    pub job: Message,
    pub cause: Cause,
    /// Where it stands when the parts are out.
    pub headers: JobHeaders,
    /// What becomes of it when the place where it should go on does not exist.
    pub otherwise: Option<Refusal>,
}

/// A job that ends without all its results.
#[derive(Debug)]
pub struct Burial {
    /// What is finished of it.
    pub parts: Vec<Message>,
    /// Items that were answered before those.
    pub answered: u32,
    /// Where it stands when the parts are out; nothing of a job that could not be read.
    pub headers: Option<JobHeaders>,
    /// Replies that nobody took, kept beside the job.
    pub untaken: Vec<Message>,
    pub refusal: Refusal,
}

impl Burial {
    /// Of a job of which nothing is known or finished.
    pub fn of(refusal: Refusal) -> Self {
        Self { parts: Vec::new(), answered: 0, headers: None, untaken: Vec::new(), refusal }
    }
}

/// A job and what is to happen with it.
#[derive(Debug)]
pub struct Settlement {
    pub received: Received,
    pub model: Arc<Model>,
    pub verdict: Verdict,
}

/// How a job ended, once the broker has all that is published of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    Answered,
    Requeued(Cause),
    Dead(Reason),
    Forgotten,
    /// Its dead letter is larger than the broker takes: the broker was told to dead-letter the job itself.
    Rejected(Reason),
    /// The broker takes neither replies nor dead letters: the job was handed back as it was.
    HandedBack,
}

impl End {
    /// Whether it ends with an ack.
    pub fn is_acked(self) -> bool {
        !matches!(self, Self::HandedBack | Self::Rejected(_))
    }
}

/// A settled job.
#[derive(Debug)]
pub struct Settled {
    /// Index of its model.
    pub model: usize,
    pub end: End,
    /// Its number on its model's channel.
    pub delivery_tag: u64,
    acker: Acker,
    /// The broker was told: has the ack, or the job back. If not, the job will come again.
    pub told: bool,
    pub id: Option<String>,
    pub fingerprint: u64,
    pub trace: Option<Traceparent>,
    pub times: Times,
}

/// Publishes what the verdict asks for and waits for the confirms. Gives a job back that has to be; an ack is still due.
///
/// # Errors
/// The channel is gone: the broker will deliver the job again.
pub async fn settle(
    publisher: Publisher,
    identity: Arc<Identity>,
    settlement: Settlement,
) -> lapin::Result<Settled> {
    let ready_at = Instant::now();
    let Settlement { received, model, verdict } = settlement;
    let settler = Settler { publisher: &publisher, identity: &identity, received: &received, model: &model };
    let end = match verdict {
        Verdict::Answer(answer) => settler.answer(*answer).await?,
        Verdict::Requeue(requeue) => settler.requeue(*requeue).await?,
        Verdict::Bury(burial) => settler.bury(*burial).await?,
        Verdict::Forget => End::Forgotten,
    };
    let acker = received.delivery.acker.clone();
    let told = match end {
        End::HandedBack => {
            // It comes again at once: not faster than somebody can repair what is missing.
            tokio::time::sleep(HAND_BACK_WAIT).await;
            is_told(acker.nack(BasicNackOptions { requeue: true, multiple: false }).await)
        }
        End::Rejected(_) => is_told(acker.reject(BasicRejectOptions { requeue: false }).await),
        _ => false,
    };
    if !end.is_acked() {
        drill::reach(Point::Acked, [received.id()]);
    }
    let delivery_tag = received.delivery.delivery_tag;
    let (id, fingerprint) = (received.id().map(str::to_owned), received.fingerprint);
    let (published_ms, first_pass_at) = (received.published_ms(), received.first_pass_at);
    let Received { at, at_ms, trace, .. } = received;
    let times = Times { published_ms, at, at_ms, first_pass_at, ready_at };
    Ok(Settled { model: model.index, end, delivery_tag, acker, told, id, fingerprint, trace, times })
}

/// Sends acks, and gives back what they were for: of one model, all of its that are under way.
pub async fn acknowledge(acks: Vec<Ack<Settled>>) -> Vec<Settled> {
    let told = acks.into_iter().map(async |Ack { multiple, mut settled }| {
        if let Some(last) = settled.last() {
            let told = is_told(last.acker.ack(BasicAckOptions { multiple }).await);
            settled.iter_mut().for_each(|settled| settled.told = told);
        }
        for settled in &settled {
            drill::reach(Point::Acked, [settled.id.as_deref()]);
        }
        settled
    });
    join_all(told).await.into_iter().flatten().collect()
}

/// That the session is lost is heard from others. That the broker was told, only from here.
fn is_told(told: lapin::Result<bool>) -> bool {
    told.unwrap_or(false)
}

/// One job's settlement in the making.
struct Settler<'a> {
    publisher: &'a Publisher,
    identity: &'a Identity,
    received: &'a Received,
    model: &'a Model,
}

impl Settler<'_> {
    async fn answer(&self, answer: Answer) -> lapin::Result<End> {
        let Answer { replies, headers } = answer;
        match self.publisher.publish_all(&replies).await? {
            Taken::Confirmed => Ok(End::Answered),
            taken => self.untaken(replies, headers, taken).await,
        }
    }

    async fn requeue(&self, requeue: Requeue) -> lapin::Result<End> {
        let Requeue { parts, answered, job, cause, headers, otherwise } = requeue;
        match self.publisher.publish_all(&parts).await? {
            Taken::Confirmed => {}
            taken => {
                let headers = JobHeaders { items_done: answered, ..headers };
                return self.untaken(parts, headers, taken).await;
            }
        }
        match (self.publisher.publish(&job).await?, otherwise) {
            (Taken::Confirmed, _) => Ok(End::Requeued(cause)),
            (taken, Some(refusal)) => {
                let (id, key) = (self.received.id(), job.routing_key.as_str());
                let trace_id = self.received.trace_id();
                tracing::warn!(job = id, trace_id, key, ?taken, "no worker with a larger device takes it");
                let headers = Some(headers);
                self.bury(Burial { headers, ..Burial::of(refusal) }).await
            }
            // The last two are of direct replies alone, and a job is none.
            (Taken::Refused | Taken::ConnectionLost | Taken::NoConnection, None) => {
                self.wait_for_room(job, cause).await
            }
            (Taken::Unroutable, None) => self.no_queue(&job),
            (Taken::TooLarge, None) => {
                let error = "the job has to go back to its queue, and is larger than the broker takes by now";
                let refusal = Refusal::new(Reason::TooLarge, error);
                self.bury(Burial { headers: Some(headers), ..Burial::of(refusal) }).await
            }
        }
    }

    /// The job's queue is full. As it came the job would run at the size that failed, and send its parts again; and held
    /// here it would keep others from being taken, which makes no room. So it waits where there is no bound: the broker
    /// takes it from there to its queue as soon as that has room.
    async fn wait_for_room(&self, job: Message, cause: Cause) -> lapin::Result<End> {
        let (id, model) = (self.received.id(), &self.model.name);
        tracing::warn!(
            job = id,
            trace_id = self.received.trace_id(),
            model,
            "the queue is full: a job that has to go back waits in a delay queue"
        );
        let delayed = message::delayed(job, self.model);
        match self.publisher.publish(&delayed).await? {
            Taken::Confirmed => Ok(End::Requeued(cause)),
            Taken::Unroutable => self.no_queue(&delayed),
            _ => Ok(End::HandedBack),
        }
    }

    /// A queue or a binding of our own is gone. Where sessions declare them, the next one brings it back; where they do not, a
    /// new session would change nothing, and cost all others their jobs in hand.
    fn no_queue(&self, message: &Message) -> lapin::Result<End> {
        let error = gone(message);
        if self.publisher.limits().declares {
            return Err(error);
        }
        let (job, model) = (self.received.id(), &self.model.name);
        tracing::error!(job, trace_id = self.received.trace_id(), model, %error, "job handed back");
        Ok(End::HandedBack)
    }

    /// Replies that nobody takes: the job ends, with them beside it.
    async fn untaken(&self, replies: Vec<Message>, headers: JobHeaders, taken: Taken) -> lapin::Result<End> {
        let refusal = untaken(self.received, self.model, &replies, taken);
        self.bury(Burial { headers: Some(headers), untaken: replies, ..Burial::of(refusal) }).await
    }

    /// What is finished first, then the dead letter with the replies that nobody took; then, on a best effort, word to
    /// the caller.
    async fn bury(&self, burial: Burial) -> lapin::Result<End> {
        let Burial { parts, answered, mut headers, mut untaken, refusal } = burial;
        let (received, model, identity) = (self.received, self.model, self.identity);
        if self.publisher.publish_all(&parts).await? != Taken::Confirmed {
            untaken.extend(parts);
            headers = headers.map(|headers| JobHeaders { items_done: answered, ..headers });
        }
        let told = !untaken.is_empty() && refusal.reason == Reason::Unroutable;
        untaken.retain(|reply| reply.body.len() <= self.publisher.limits().body_max);
        let mut letters: Vec<_> =
            untaken.into_iter().map(|reply| message::dead_reply(reply, model, identity, &refusal)).collect();
        letters.push(message::dead_letter(received, headers.as_ref(), model, identity, &refusal));
        let end = match self.publisher.publish_all(&letters).await? {
            Taken::Confirmed => End::Dead(refusal.reason),
            Taken::TooLarge if self.publisher.limits().declares => {
                let (job, model) = (received.id(), &model.name);
                tracing::error!(
                    job,
                    trace_id = received.trace_id(),
                    model,
                    "dead letter larger than the broker takes: the broker dead-letters the job"
                );
                End::Rejected(refusal.reason)
            }
            Taken::Unroutable => return self.no_queue(&letters[letters.len() - 1]),
            taken => {
                let (job, model) = (received.id(), &model.name);
                tracing::error!(
                    job,
                    trace_id = received.trace_id(),
                    model,
                    ?taken,
                    "dead letter not taken, job handed back"
                );
                return Ok(End::HandedBack);
            }
        };
        if !told && let Some(notice) = message::failed(received, model, identity, &refusal) {
            let queue = notice.routing_key.clone();
            if self.publisher.publish(&notice).await? != Taken::Confirmed {
                tracing::warn!(
                    job = received.id(),
                    trace_id = received.trace_id(),
                    queue = queue.as_str(),
                    "nobody to tell that the job failed"
                );
            }
        }
        Ok(end)
    }
}

/// The session is of no use.
fn gone(message: &Message) -> lapin::Error {
    let (exchange, key) = (message.exchange.as_str(), message.routing_key.as_str());
    let text = format!(
        "no queue takes what goes to exchange `{exchange}` with the key `{key}`: it was deleted or unbound"
    );
    std::io::Error::new(std::io::ErrorKind::NotFound, text).into()
}

/// Why a job ends whose replies nobody takes.
pub fn untaken(received: &Received, model: &Model, replies: &[Message], taken: Taken) -> Refusal {
    let queue = replies.first().map_or("", |reply| reply.routing_key.as_str());
    let (job, trace_id) = (received.id(), received.trace_id());
    tracing::warn!(job, trace_id, model = model.name, queue, ?taken, "reply not taken, dead-lettered");
    let fault = match taken {
        Taken::TooLarge => {
            let error = "the reply is larger than the broker takes: raise its max_message_size, or ask for less at a time";
            return Refusal::new(Reason::TooLarge, error);
        }
        Taken::Unroutable => "does not exist",
        Taken::ConnectionLost => "made the broker close the connection for direct replies twice",
        Taken::NoConnection => "was not reached: the worker has no connection for direct replies",
        Taken::Confirmed | Taken::Refused => "stayed full",
    };
    let error = format!("the reply queue `{queue}` {fault}; the results are beside this letter");
    Refusal::new(Reason::Unroutable, error)
}

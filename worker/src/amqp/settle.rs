//! Carries out a verdict on a job: publish, confirm, and only then ack.

use std::sync::Arc;
use std::time::Duration;

use lapin::options::{BasicAckOptions, BasicNackOptions};
use vramq_schemas::Reason;

use crate::amqp::message::{self, Identity, Message};
use crate::amqp::publish::{Publisher, Taken};
use crate::job::{Received, Refusal};
use crate::model::Model;

/// How long a job that can neither be answered nor dead-lettered is kept before it is handed back.
const HAND_BACK_WAIT: Duration = Duration::from_secs(1);

/// What is to happen with a job.
#[derive(Debug)]
pub enum Verdict {
    /// It ran: these are its replies.
    Answer(Vec<Message>),
    /// It goes back to its queue, with other headers.
    Requeue(Box<Message>),
    /// It can never run.
    Bury(Refusal),
    /// It was answered before, but the broker did not learn of it.
    Forget,
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
    Requeued,
    Dead(Reason),
    Forgotten,
    /// The broker takes neither replies nor dead letters: the job was handed back as it was.
    HandedBack,
}

/// A settled job.
#[derive(Debug)]
pub struct Settled {
    pub end: End,
    /// The broker has the ack. If not, the job will come again.
    pub acked: bool,
    pub id: Option<String>,
    pub fingerprint: u64,
}

/// Publishes what the verdict asks for, waits for the confirms, and acks.
///
/// # Errors
/// The channel is gone: the broker will deliver the job again.
pub async fn settle(
    publisher: Publisher,
    identity: Arc<Identity>,
    settlement: Settlement,
) -> lapin::Result<Settled> {
    let Settlement { received, model, verdict } = settlement;
    let end = match verdict {
        Verdict::Answer(replies) => answer(&publisher, &identity, &received, &model, replies).await?,
        Verdict::Requeue(job) => match publisher.publish(&job).await? {
            Taken::Confirmed => End::Requeued,
            Taken::Unroutable | Taken::Refused => End::HandedBack,
        },
        Verdict::Bury(refusal) => {
            bury(&publisher, &identity, &received, &model, &refusal, Vec::new()).await?
        }
        Verdict::Forget => End::Forgotten,
    };
    let acker = &received.delivery.acker;
    let acked = match end {
        End::HandedBack => {
            // It comes again at once: not faster than somebody can repair what is missing.
            tokio::time::sleep(HAND_BACK_WAIT).await;
            acker.nack(BasicNackOptions { requeue: true, multiple: false }).await?
        }
        _ => acker.ack(BasicAckOptions::default()).await?,
    };
    // Only needed, and only worth its hash, when the job will come again.
    let fingerprint = if acked { 0 } else { received.fingerprint() };
    Ok(Settled { end, acked, id: received.id().map(str::to_owned), fingerprint })
}

async fn answer(
    publisher: &Publisher,
    identity: &Identity,
    received: &Received,
    model: &Model,
    replies: Vec<Message>,
) -> lapin::Result<End> {
    let taken = publisher.publish_all(&replies).await?;
    if taken == Taken::Confirmed {
        return Ok(End::Answered);
    }
    let queue = replies.first().map_or("", |reply| reply.routing_key.as_str());
    let error = match taken {
        Taken::Unroutable => {
            format!("the reply queue `{queue}` does not exist; the results are beside this letter")
        }
        _ => format!("the reply queue `{queue}` stayed full; the results are beside this letter"),
    };
    tracing::warn!(job = received.id(), model = model.name, queue, ?taken, "reply not taken, dead-lettered");
    let refusal = Refusal::new(Reason::Unroutable, error);
    bury(publisher, identity, received, model, &refusal, replies).await
}

/// The dead letter first, with the replies that nobody took; then, on a best effort, word to the caller.
async fn bury(
    publisher: &Publisher,
    identity: &Identity,
    received: &Received,
    model: &Model,
    refusal: &Refusal,
    replies: Vec<Message>,
) -> lapin::Result<End> {
    let mut letters: Vec<_> =
        replies.into_iter().map(|reply| message::dead_reply(reply, model, identity, refusal)).collect();
    let told = !letters.is_empty();
    letters.push(message::dead_letter(received, model, identity, refusal));
    match publisher.publish_all(&letters).await? {
        Taken::Confirmed => {}
        taken => {
            tracing::error!(
                job = received.id(),
                model = model.name,
                ?taken,
                "dead letter not taken, job handed back"
            );
            return Ok(End::HandedBack);
        }
    }
    if !told && let Some(notice) = message::failed(received, model, identity, refusal) {
        let queue = notice.routing_key.clone();
        if publisher.publish(&notice).await? != Taken::Confirmed {
            tracing::warn!(job = received.id(), queue = queue.as_str(), "nobody to tell that the job failed");
        }
    }
    Ok(End::Dead(refusal.reason))
}

//! The loop's first steps with a job: whether it was dealt with before, whether it may be what workers vanish of, and what
//! is in it.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use vramq_schemas::topology::DELAYS_MS;
use vramq_schemas::{Attempt, JobHeaders, Reason};

use super::{Event, INLINE_BYTES_MAX, Loop};
use crate::amqp::message::{self, Identity, Onward};
use crate::amqp::settle::{Burial, Requeue, Settlement, Verdict};
use crate::batcher::{JobKey, Waiting};
use crate::drill::{self, Point};
use crate::job::{Decoded, Received, Refusal, unix_ms};
use crate::model::Model;
use crate::suspicion::{Arrival, Ruling};

/// A job that was understood, and its items; or the delivery and what is wrong with it.
pub(super) type DecodeResult = Result<(Box<Decoded>, Waiting), Box<(Received, Refusal)>>;

/// How the history names a worker that vanished.
const WORKER_LOST: &str = "worker-lost";

impl Loop<'_> {
    pub(super) fn received(&mut self, model_index: usize, received: Received) {
        self.in_hand[model_index] += 1;
        self.starved[model_index] = 0;
        let model = Arc::clone(&self.host.models[model_index]);
        if !received.delivery.redelivered {
            // Whoever publishes the very same once more wants it once more.
            self.host.finished.forget(received.fingerprint);
        } else if self.host.finished.contains(received.fingerprint) {
            tracing::info!(job = received.id(), "settled before, acknowledged without running");
            return self.settle(Settlement { received, model, verdict: Verdict::Forget });
        }
        match self.rule(&received) {
            Ruling::Run | Ruling::RunAlone => self.read(model_index, received),
            ruling => self.divert(model, received, ruling),
        }
    }

    fn rule(&mut self, received: &Received) -> Ruling {
        // What cannot be read is refused before it can do any harm.
        let headers = received.headers().map_or_else(|| Ok(JobHeaders::default()), JobHeaders::read);
        let Ok(JobHeaders { crashes, .. }) = headers else { return Ruling::Run };
        let counted = self.host.broker_counts;
        let returns = received.returns(counted);
        let given_back = self.host.given_back.times(received.fingerprint);
        let explained = self.host.losses.recent(Instant::now()).saturating_add(given_back);
        let suspect = received.suspect;
        self.host.patience.rule(Arrival { crashes, returns, counted, explained, suspect })
    }

    fn read(&mut self, model_index: usize, received: Received) {
        let model = Arc::clone(&self.host.models[model_index]);
        let key = self.next_key;
        self.next_key += 1;
        if model.engine.takes_inputs_as_they_come() && received.delivery.data.len() <= INLINE_BYTES_MAX {
            return self.decoded(model_index, decode(received, &model, key));
        }
        let sender = self.sender.clone();
        self.host.pool.spawn(move || {
            // An `Err` means that the loop ended: the broker has the job again.
            let _ = sender.blocking_send(Event::Decoded(model_index, decode(received, &model, key)));
        });
    }

    /// Sends a job where the ruling says.
    fn divert(&mut self, model: Arc<Model>, received: Received, ruling: Ruling) {
        let (job, name) = (received.id(), &model.name);
        match ruling {
            Ruling::Isolate(crashes) => {
                tracing::warn!(
                    job,
                    model = name,
                    crashes,
                    "workers vanish while they hold it: it will run alone"
                );
            }
            _ => tracing::info!(job, model = name, "came back from a worker that vanished"),
        }
        let identity = Arc::clone(&self.host.identity);
        let bytes = received.delivery.data.len();
        let diverted = move || diverted(received, model, &identity, ruling);
        if bytes <= INLINE_BYTES_MAX {
            return self.settle(diverted());
        }
        let sender = self.sender.clone();
        self.host.pool.spawn(move || drop(sender.blocking_send(Event::Encoded(diverted()))));
    }

    pub(super) fn decoded(&mut self, model: usize, result: DecodeResult) {
        match result {
            Ok((job, waiting)) if job.is_complete() => self.finish(model, job, waiting.key),
            Ok((job, waiting)) => {
                let key = waiting.key;
                self.jobs.insert(key, (model, job));
                self.batchers[model].push(waiting);
                if self.leaving {
                    self.hand_over(key);
                }
            }
            Err(refused) => {
                let (received, refusal) = *refused;
                let model = Arc::clone(&self.host.models[model]);
                let verdict = Verdict::Bury(Box::new(Burial::of(refusal)));
                self.settle(Settlement { received, model, verdict });
            }
        }
    }
}

/// Reads a job and makes its items ready. CPU work.
fn decode(received: Received, model: &Model, key: JobKey) -> DecodeResult {
    drill::reach(Point::Decode, [received.id()]);
    received.decode(model).map(|(decoded, items)| {
        let waiting = Waiting { items, ..waits(key, &decoded) };
        (Box::new(decoded), waiting)
    })
}

/// How a job waits, without its items.
pub(super) fn waits(key: JobKey, job: &Decoded) -> Waiting {
    let headers = &job.headers;
    Waiting {
        key,
        hint: headers.batch_hint,
        exclusive: headers.exclusive,
        tried_at_ms: headers.history.first().map_or(0, |attempt| attempt.at_ms),
        isolated: job.isolated,
        items: VecDeque::new(),
    }
}

/// Builds what carries out a ruling. CPU work: the body is copied.
fn diverted(received: Received, model: Arc<Model>, identity: &Identity, ruling: Ruling) -> Settlement {
    let mut headers = received.headers().and_then(|table| JobHeaders::read(table).ok()).unwrap_or_default();
    let (Ruling::Mark(crashes) | Ruling::Isolate(crashes) | Ruling::Condemn(crashes)) = ruling else {
        return Settlement { received, model, verdict: Verdict::Forget };
    };
    if crashes > headers.crashes {
        headers.crashes = crashes;
        headers.history.push(Attempt {
            at_ms: unix_ms(),
            worker: identity.worker.clone(),
            outcome: WORKER_LOST.to_owned(),
            ..Attempt::default()
        });
    }
    let onward = match ruling {
        Ruling::Condemn(_) => {
            let refusal = Refusal::new(Reason::Crashed, condemned(crashes));
            let burial = Burial { headers: Some(headers), ..Burial::of(refusal) };
            return Settlement { received, model, verdict: Verdict::Bury(Box::new(burial)) };
        }
        // Not at once: killed by the copy before the ack of this one has left, a worker would leave two of it.
        Ruling::Mark(_) if !received.suspect => Onward::Delay(DELAYS_MS[0]),
        _ => Onward::Suspects,
    };
    let job = message::requeue(&received, &model, &headers, &onward);
    let requeue = Requeue { parts: Vec::new(), answered: headers.items_done, job, headers, otherwise: None };
    Settlement { received, model, verdict: Verdict::Requeue(Box::new(requeue)) }
}

fn condemned(crashes: u32) -> String {
    format!(
        "{crashes} workers vanished while they held this job, the last ones while it ran alone: it seems to kill them. \
         The times are in `history`; look at what the workers and the system logged then"
    )
}

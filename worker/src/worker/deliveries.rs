//! The loop's first steps with a job: whether it was dealt with before, whether it may be what workers vanish of, and what
//! is in it.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use vramq_schemas::topology::DELAYS_MS;
use vramq_schemas::{Attempt, JobHeaders, Reason};

use super::state::Held;
use super::{Event, INLINE_BYTES_MAX, Loop};
use crate::amqp::message::{self, Identity, Onward};
use crate::amqp::settle::{Burial, Requeue, Settlement, Verdict};
use crate::batcher::{JobKey, Waiting};
use crate::drill::{self, Point};
use crate::job::{Decoded, Received, unix_ms};
use crate::metrics::Cause;
use crate::model::Model;
use crate::refusal::Refusal;
use crate::suspicion::{Arrival, Diversion, Ruling};

/// A job that was understood, and its items; or the delivery and what is wrong with it.
pub(super) type DecodeResult = Result<(Box<Decoded>, Waiting), Box<(Received, Refusal)>>;

/// How the history names a worker that vanished.
const WORKER_LOST: &str = "worker-lost";

impl Loop<'_> {
    pub(super) fn received(&mut self, model_index: usize, mut received: Received) {
        drill::reach(Point::Received, [received.id()]);
        self.in_hand[model_index] += 1;
        let meters = &self.host.meters.models[model_index];
        meters.received.inc();
        if received.suspect {
            meters.suspects.inc();
        }
        self.starved[model_index] = 0;
        let held = self.holding.entry(received.fingerprint);
        held.or_insert_with(|| Held { copies: 0, id: received.id().map(str::to_owned) }).copies += 1;
        let model = Arc::clone(&self.host.models[model_index]);
        // Whoever publishes the very same once more wants it once more; and what was settled once explains one redelivery.
        let settled = self.host.finished.contains(received.fingerprint);
        self.host.finished.forget(received.fingerprint);
        self.settled.forget(received.fingerprint);
        if settled && received.delivery.redelivered {
            let (job, trace_id) = (received.id(), received.trace_id());
            tracing::info!(job, trace_id, "settled before, acknowledged without running");
            return self.settle(Settlement { received, model, verdict: Verdict::Forget });
        }
        match self.rule(&received) {
            Ruling::Run(crashes) => {
                received.crashes = crashes;
                self.read(model_index, received);
            }
            Ruling::Divert(diversion) => self.divert(model, received, diversion),
        }
    }

    fn rule(&mut self, received: &Received) -> Ruling {
        // What cannot be read is refused before it can do any harm.
        let headers = received.headers().map_or_else(|| Ok(JobHeaders::default()), JobHeaders::read);
        let Ok(JobHeaders { crashes, .. }) = headers else { return Ruling::Run(0) };
        let (returns, counted) = received.returns();
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

    fn divert(&mut self, model: Arc<Model>, received: Received, diversion: Diversion) {
        let (job, name) = (received.id(), &model.name);
        match diversion {
            Diversion::Isolate(crashes) => {
                tracing::warn!(
                    job,
                    trace_id = received.trace_id(),
                    model = name,
                    crashes,
                    "workers vanish while they hold it: it will run alone"
                );
            }
            Diversion::Mark(crashes) => {
                tracing::info!(
                    job,
                    trace_id = received.trace_id(),
                    model = name,
                    crashes,
                    "came back, and is counted"
                );
            }
            // Told when it is dead-lettered.
            Diversion::Condemn(_) => {}
        }
        let identity = Arc::clone(&self.host.identity);
        let bytes = received.delivery.data.len();
        let suspect_after = self.host.patience.suspect_after;
        let diverted = move || diverted(received, model, &identity, diversion, suspect_after);
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
                let cancelled = self.is_cancelled(job.received.id());
                self.jobs.insert(key, (model, job));
                self.batchers[model].push(waiting);
                if cancelled {
                    self.call_off(key);
                } else if self.leaving {
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

/// Builds what carries out a diversion. CPU work: the body is copied.
fn diverted(
    received: Received,
    model: Arc<Model>,
    identity: &Identity,
    diversion: Diversion,
    suspect_after: u32,
) -> Settlement {
    let mut headers = received.headers().and_then(|table| JobHeaders::read(table).ok()).unwrap_or_default();
    let (Diversion::Mark(crashes) | Diversion::Isolate(crashes) | Diversion::Condemn(crashes)) = diversion;
    if crashes > headers.crashes {
        headers.history.push(incident(WORKER_LOST, identity));
    }
    headers.crashes = crashes;
    let (onward, cause) = match diversion {
        Diversion::Condemn(_) => {
            // Whoever publishes the letter again gives the job another chance, as a suspect.
            headers.crashes = suspect_after;
            let refusal = Refusal::new(Reason::Crashed, condemned(crashes));
            let burial = Burial { headers: Some(headers), ..Burial::of(refusal) };
            return Settlement { received, model, verdict: Verdict::Bury(Box::new(burial)) };
        }
        // Not at once: killed by the copy before the ack of this one has left, a worker would leave two of it.
        Diversion::Mark(_) if !received.suspect => (Onward::Delay(DELAYS_MS[0]), Cause::Counted),
        Diversion::Mark(_) => (Onward::Suspects, Cause::Counted),
        Diversion::Isolate(_) => (Onward::Suspects, Cause::Suspect),
    };
    let job = message::requeue(&received, &model, &headers, &onward);
    let (parts, answered) = (Vec::new(), headers.items_done);
    let requeue = Requeue { parts, answered, job, cause, headers, otherwise: None };
    Settlement { received, model, verdict: Verdict::Requeue(Box::new(requeue)) }
}

/// What the history tells of a job that may have brought a worker or a device down; who noticed, that is.
pub(super) fn incident(outcome: &str, identity: &Identity) -> Attempt {
    let (worker, outcome) = (identity.worker.clone(), outcome.to_owned());
    Attempt { at_ms: unix_ms(), worker, outcome, ..Attempt::default() }
}

fn condemned(crashes: u32) -> String {
    format!(
        "{crashes} workers vanished, or lost their device, while they held this job, the last ones while it ran \
         alone: it seems to be the reason. The times are in `history`; look at what the workers and the system logged then"
    )
}

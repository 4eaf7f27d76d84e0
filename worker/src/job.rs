//! A job's stages: `Received` -> `Decoded` -> `Executed`, and from any of them a `Verdict` that `settle` carries
//! out. Each stage consumes the one before, so a job that has not been answered has no way to be acknowledged.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use lapin::message::Delivery;
use lapin::types::FieldTable;
use vramq_schemas::{Encoding, Job, JobHeaders, Output, Reason, Traceparent, codec, fields, headers};

use crate::amqp::message::{self, Address, JOB_HEADER_BYTES_MAX, PART_BYTES};
use crate::amqp::wire_size::wire_bytes;
use crate::disposition::Disposition;
use crate::engine::Item;
use crate::fingerprint::fingerprint;
use crate::model::Model;
use crate::refusal::Refusal;

/// A caller of a long job sees something at least this often, if anything of it is finished.
const PART_AFTER: Duration = Duration::from_secs(1);

/// The items of a job that are yet to run, each with its index within the job; in order.
pub type Items = VecDeque<(u32, Item)>;

/// A delivery as it came, with the moment it did.
#[derive(Debug)]
pub struct Received {
    pub delivery: Delivery,
    /// What tells this message from any other: from those of publishers that give the same ids, and from the same job at
    /// another attempt.
    pub fingerprint: u64,
    /// It came from the suspects' queue: it runs alone.
    pub suspect: bool,
    /// Workers that vanished while they held it.
    pub crashes: u32,
    pub at: Instant,
    /// Unix time in milliseconds, for comparison with the publisher's clock.
    pub at_ms: u64,
    /// When its first pass here was made.
    pub first_pass_at: Option<Instant>,
    /// Where in a trace it belongs, if its publisher says so.
    pub trace: Option<Traceparent>,
}

/// A job that was understood; its items are with the batcher, its outputs come back pass by pass.
#[derive(Debug)]
pub struct Decoded {
    pub received: Received,
    pub headers: JobHeaders,
    /// Items of the whole job; those before `headers.items_done` were answered before it came here.
    items_total: u32,
    address: Arc<Address>,
    /// Index of the first item whose output was not taken away yet.
    next: u32,
    /// Outputs from item `next` on, each when it is there.
    outputs: VecDeque<Option<Output>>,
    /// How many from the start of `outputs` are there, and about the bytes of a reply with them.
    ready: usize,
    ready_bytes: usize,
    missing: usize,
    /// When the last part was cut.
    part_at: Instant,
    /// Passes with items of the job that fitted.
    pub fitted: u32,
    /// It runs without other jobs, because a pass with others failed.
    pub isolated: bool,
    /// Passes under way with items of the job.
    pub running: usize,
    /// It leaves as soon as what runs of it has come home.
    pub leaving: Option<Leaving>,
    /// A part is on its way to the broker: `done`, and whatever else becomes of the job, waits for it.
    pub part_under_way: bool,
    /// Decided, and waiting for the part.
    pub ending: Option<Disposition>,
}

/// Where a job goes that takes part in no more passes here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Leaving {
    /// It goes on elsewhere.
    Elsewhere,
    /// An operator cancelled it.
    Cancelled,
}

/// A finished run of a job's items, for a reply.
#[derive(Debug)]
pub struct Results {
    pub address: Arc<Address>,
    pub offset: u32,
    pub outputs: Vec<Output>,
    pub items_total: u32,
    pub attempt: u32,
    pub queued: Duration,
    pub first_pass_at: Instant,
    /// Nothing of the job comes after it.
    pub last: bool,
}

/// A job with all its outputs.
#[derive(Debug)]
pub struct Executed {
    pub received: Received,
    /// Where it stands before these results.
    pub headers: JobHeaders,
    pub results: Results,
}

/// Milliseconds since the Unix epoch.
pub fn unix_ms() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |d| u64::try_from(d.as_millis()).unwrap_or(u64::MAX))
}

impl Received {
    pub fn now(delivery: Delivery, suspect: bool) -> Self {
        let fingerprint = fingerprint(&delivery);
        let (at, at_ms) = (Instant::now(), unix_ms());
        let trace = delivery.properties.headers().as_ref().and_then(Traceparent::of);
        Self { delivery, fingerprint, suspect, crashes: 0, at, at_ms, first_pass_at: None, trace }
    }

    /// For logs: what finds the job among its caller's.
    pub fn trace_id(&self) -> Option<&str> {
        self.trace.as_ref().map(Traceparent::trace_id)
    }

    /// How long the job had waited at a moment: since it was published, or, if it does not say, since it came.
    pub fn waited(&self, until: Instant) -> Duration {
        let before = self.published_ms().map_or(0, |ms| self.at_ms.saturating_sub(ms));
        Duration::from_millis(before) + until.duration_since(self.at)
    }

    /// The job's id, for logs and replies: `message_id`, else `correlation_id`.
    pub fn id(&self) -> Option<&str> {
        let properties = &self.delivery.properties;
        let id = properties.message_id().as_ref().or(properties.correlation_id().as_ref())?;
        Some(id.as_str()).filter(|id| !id.is_empty())
    }

    /// How often this message was delivered before, as far as the broker tells, and whether it counts. Where it does not, a
    /// header that says so is whatever a publisher wrote, about its own job.
    pub fn returns(&self) -> (u32, bool) {
        if !self.delivery.redelivered {
            return (0, false);
        }
        let count = self.headers().and_then(headers::delivery_count);
        (count.unwrap_or(1).max(1), count.is_some())
    }

    pub fn headers(&self) -> Option<&FieldTable> {
        self.delivery.properties.headers().as_ref()
    }

    /// When the publisher sent it, in Unix milliseconds. AMQP timestamps are seconds; a value that would be after
    /// the year 5000 is taken for the milliseconds that some clients put there.
    pub fn published_ms(&self) -> Option<u64> {
        let timestamp = (*self.delivery.properties.timestamp())?;
        Some(if timestamp > 100_000_000_000 { timestamp } else { timestamp * 1000 })
    }

    /// When the job's `expiration` passes, in Unix milliseconds: as an earlier attempt knew it, else from the
    /// property and the moment of publishing.
    pub fn expires_at_ms(&self) -> Option<u64> {
        let properties = &self.delivery.properties;
        let told = properties.headers().as_ref().and_then(headers::expires_at_ms);
        told.or_else(|| {
            let ttl_ms = properties.expiration().as_ref()?.as_str().parse::<u64>().ok()?;
            // A timestamp in whole seconds may stand for a moment almost a second later.
            let since = self.published_ms().map_or(self.at_ms, |ms| ms.saturating_add(999)).min(self.at_ms);
            Some(since.saturating_add(ttl_ms))
        })
    }

    /// Whether the job's `expiration` has passed. The broker drops expired jobs from its queue; this is about those
    /// that it delivered in time and that waited here, or that carry the moment they were published.
    pub fn expired(&self) -> bool {
        self.expires_at_ms().is_some_and(|at| unix_ms() > at)
    }

    /// Reads the body and makes its inputs ready. CPU work: not for the runtime's threads.
    ///
    /// # Errors
    /// The delivery comes back with the reason why it can never run.
    pub fn decode(self, model: &Model) -> Result<(Decoded, Items), Box<(Self, Refusal)>> {
        // A library that panics on an input must not take the worker, and then the next one, with it.
        let parsed = catch_unwind(AssertUnwindSafe(|| self.parse(model))).unwrap_or_else(|_| {
            Err(Refusal::new(Reason::EngineFailed, "reading the job panicked; see the worker's log"))
        });
        match parsed {
            Ok((headers, encoding, items_total, items)) => {
                let items: Items = (headers.items_done..).zip(items).collect();
                let decoded = Decoded {
                    address: Arc::new(Address::of(&self, model, encoding)),
                    part_at: self.at,
                    fitted: 0,
                    isolated: self.suspect,
                    running: 0,
                    leaving: None,
                    received: self,
                    items_total,
                    next: headers.items_done,
                    headers,
                    outputs: items.iter().map(|_| None).collect(),
                    ready: 0,
                    ready_bytes: 0,
                    missing: items.len(),
                    part_under_way: false,
                    ending: None,
                };
                Ok((decoded, items))
            }
            Err(refusal) => Err(Box::new((self, refusal))),
        }
    }

    fn parse(&self, model: &Model) -> Result<(JobHeaders, Encoding, u32, Vec<Item>), Refusal> {
        let malformed = |error: String| Refusal::new(Reason::Malformed, error);
        let properties = &self.delivery.properties;
        let echoed = [
            ("message_id", properties.message_id()),
            ("correlation_id", properties.correlation_id()),
            ("reply_to", properties.reply_to()),
        ];
        for (name, value) in echoed {
            if value.as_ref().is_some_and(|text| text.as_str().contains(char::REPLACEMENT_CHARACTER)) {
                return Err(malformed(format!("property {name} is not UTF-8, or holds U+FFFD")));
            }
        }
        if self.id().is_none() {
            return Err(malformed("the job has no id: set the message_id property".to_owned()));
        }
        if let Some(queue) = properties.reply_to()
            && let Some(fault) = message::reply_to_fault(queue.as_str())
        {
            return Err(malformed(format!("reply_to names `{queue}`, {fault}")));
        }
        let no_headers = Default::default();
        let table = properties.headers().as_ref().unwrap_or(&no_headers);
        if let Some(error) = headers::unreadable(table) {
            return Err(malformed(error));
        }
        let bytes = fields::table_bytes(table);
        if bytes > JOB_HEADER_BYTES_MAX {
            let error = format!("the headers take {bytes} bytes, at most {JOB_HEADER_BYTES_MAX} are taken");
            return Err(Refusal::new(Reason::TooLarge, error));
        }
        let mut headers = JobHeaders::read(table).map_err(|e| malformed(e.to_string()))?;
        headers.crashes = headers.crashes.max(self.crashes);
        let encoding =
            Encoding::of(properties.content_type().as_ref().map(|t| t.as_str())).map_err(Refusal::from)?;
        let job: Job = codec::decode(&self.delivery.data, encoding).map_err(Refusal::from)?;
        if job.model != model.name {
            let error = format!("the job is for model `{}`, this queue is for `{}`", job.model, model.name);
            return Err(Refusal::new(Reason::WrongModel, error));
        }
        if job.inputs.is_empty() {
            return Err(malformed("the job has no inputs".to_owned()));
        }
        let done = headers.items_done as usize;
        let Some(inputs) = job.inputs.get(done..) else {
            return Err(malformed(format!(
                "header `items-done` is {done}, the job has {} items",
                job.inputs.len()
            )));
        };
        if self.expired() {
            return Err(Refusal::expired());
        }
        let items = model
            .engine
            .prepare(inputs, &job.params)
            .map_err(|e| Refusal::new(Reason::InvalidInput, e.to_string()))?;
        // Bounded by ITEMS_MAX, which fits.
        Ok((headers, encoding, u32::try_from(job.inputs.len()).unwrap_or(u32::MAX), items))
    }
}

impl Decoded {
    /// Marks the start of a pass. Gives how long the job had waited, if it is its first.
    pub fn started(&mut self) -> Option<Duration> {
        if self.has_started() {
            return None;
        }
        let now = Instant::now();
        (self.received.first_pass_at, self.part_at) = (Some(now), now);
        Some(self.received.waited(now))
    }

    /// How long ago its first pass started, if any has.
    pub fn running_for(&self) -> Option<Duration> {
        self.received.first_pass_at.map(|at| at.elapsed())
    }

    pub fn has_started(&self) -> bool {
        self.received.first_pass_at.is_some()
    }

    /// Whether anything of the job was finished here.
    pub fn has_progress(&self) -> bool {
        self.ready > 0 || self.next > self.headers.items_done
    }

    /// Takes in the output of one item, by its index within the whole job.
    pub fn fill(&mut self, index: u32, output: Output) {
        let at = index.checked_sub(self.next).map(|at| at as usize);
        if let Some(slot) = at.and_then(|at| self.outputs.get_mut(at))
            && slot.replace(output).is_none()
        {
            self.missing -= 1;
        }
        while let Some(Some(output)) = self.outputs.get(self.ready) {
            self.ready_bytes += wire_bytes(output, self.address.encoding);
            self.ready += 1;
        }
    }

    /// Whether every item has its output.
    pub fn is_complete(&self) -> bool {
        self.missing == 0
    }

    /// Whether enough is finished for a part: by its size, or because the caller has seen nothing for a while.
    pub fn has_part(&self) -> bool {
        self.ready_bytes >= PART_BYTES || (self.ready > 0 && self.part_at.elapsed() >= PART_AFTER)
    }

    /// About the bytes of a reply with the finished run that [`take_results`](Self::take_results) would give.
    pub fn ready_bytes(&self) -> usize {
        self.ready_bytes
    }

    /// Outputs that came before those of earlier items, which are missing: they are lost if the job goes elsewhere.
    pub fn scattered(&self) -> usize {
        self.outputs.iter().skip(self.ready).flatten().count()
    }

    /// The first item that is not answered once all that was taken away is.
    pub fn items_done(&self) -> u32 {
        self.next
    }

    /// Takes the finished run away; it may be empty.
    pub fn take_results(&mut self) -> Results {
        let outputs: Vec<_> = self.outputs.drain(..self.ready).flatten().collect();
        let first_pass_at = self.received.first_pass_at.unwrap_or(self.received.at);
        let results = Results {
            address: Arc::clone(&self.address),
            offset: self.next,
            items_total: self.items_total,
            attempt: self.headers.attempt,
            queued: self.received.waited(first_pass_at),
            first_pass_at,
            last: self.outputs.is_empty(),
            outputs,
        };
        // Bounded by ITEMS_MAX, which fits.
        self.next += u32::try_from(results.outputs.len()).unwrap_or(u32::MAX);
        (self.ready, self.ready_bytes, self.part_at) = (0, 0, Instant::now());
        results
    }

    /// The next stage.
    ///
    /// # Errors
    /// The job itself while outputs are missing.
    pub fn executed(mut self) -> Result<Executed, Box<Self>> {
        if !self.is_complete() {
            return Err(Box::new(self));
        }
        let results = self.take_results();
        let headers = JobHeaders { items_done: results.offset, ..self.headers };
        Ok(Executed { received: self.received, headers, results })
    }
}

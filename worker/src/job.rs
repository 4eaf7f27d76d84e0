//! A job's stages: `Received` -> `Decoded` -> `Executed`, and from any of them a `Verdict` that `settle` carries
//! out. Each stage consumes the one before, so a job that has not been answered has no way to be acknowledged.

use std::collections::VecDeque;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use lapin::message::Delivery;
use vramq_schemas::codec::{self, DecodeError};
use vramq_schemas::{Encoding, Job, JobHeaders, Output, Reason};

use crate::amqp::message;
use crate::engine::Item;
use crate::model::Model;

/// The items of a job that are yet to run, each with its index within the job; in order.
pub type Items = VecDeque<(u32, Item)>;

/// A delivery as it came, with the moment it did.
#[derive(Debug)]
pub struct Received {
    pub delivery: Delivery,
    pub at: Instant,
    /// Unix time in milliseconds, for comparison with the publisher's clock.
    pub at_ms: u64,
}

/// A job that was understood; its items are with the batcher, its outputs come back one by one.
#[derive(Debug)]
pub struct Decoded {
    pub received: Received,
    pub headers: JobHeaders,
    pub encoding: Encoding,
    /// Items of the whole job; those before `headers.items_done` are answered already.
    pub items_total: u32,
    /// From item `headers.items_done` on.
    outputs: Vec<Option<Output>>,
    missing: usize,
    first_pass_at: Option<Instant>,
}

/// A job with all its outputs.
#[derive(Debug)]
pub struct Executed {
    pub received: Received,
    pub headers: JobHeaders,
    pub encoding: Encoding,
    pub items_total: u32,
    /// From item `headers.items_done` on.
    pub outputs: Vec<Output>,
    pub first_pass_at: Instant,
}

/// Why a job ends without a result.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    pub reason: Reason,
    /// What, where and what to do, in words.
    pub error: String,
}

impl Refusal {
    pub fn new(reason: Reason, error: impl Into<String>) -> Self {
        Self { reason, error: error.into() }
    }
}

/// Milliseconds since the Unix epoch.
pub fn unix_ms() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |d| u64::try_from(d.as_millis()).unwrap_or(u64::MAX))
}

impl Received {
    pub fn now(delivery: Delivery) -> Self {
        Self { delivery, at: Instant::now(), at_ms: unix_ms() }
    }

    /// The job's id, for logs and replies: `message_id`, else `correlation_id`.
    pub fn id(&self) -> Option<&str> {
        let properties = &self.delivery.properties;
        let id = properties.message_id().as_ref().or(properties.correlation_id().as_ref())?;
        Some(id.as_str()).filter(|id| !id.is_empty())
    }

    /// What tells this message from any other, also from those of publishers that give the same ids.
    pub fn fingerprint(&self) -> u64 {
        let properties = &self.delivery.properties;
        let mut hasher = DefaultHasher::new();
        properties.message_id().hash(&mut hasher);
        properties.correlation_id().hash(&mut hasher);
        properties.reply_to().hash(&mut hasher);
        properties.timestamp().hash(&mut hasher);
        self.delivery.data.hash(&mut hasher);
        hasher.finish()
    }

    /// When the publisher sent it, in Unix milliseconds. AMQP timestamps are seconds; a value that would be after
    /// the year 5000 is taken for the milliseconds that some clients put there.
    pub fn published_ms(&self) -> Option<u64> {
        let timestamp = (*self.delivery.properties.timestamp())?;
        Some(if timestamp > 100_000_000_000 { timestamp } else { timestamp * 1000 })
    }

    /// Whether the job's `expiration` has passed. The broker drops expired jobs from its queue; this is about those
    /// that it delivered in time and that waited here, or that carry the moment they were published.
    pub fn expired(&self) -> bool {
        let ttl_ms =
            self.delivery.properties.expiration().as_ref().and_then(|e| e.as_str().parse::<u64>().ok());
        // A timestamp in whole seconds may stand for a moment almost a second later.
        let since = self.published_ms().map_or(self.at_ms, |ms| ms.saturating_add(999)).min(self.at_ms);
        ttl_ms.is_some_and(|ttl| unix_ms() > since.saturating_add(ttl))
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
                    received: self,
                    headers,
                    encoding,
                    items_total,
                    outputs: vec![None; items.len()],
                    missing: items.len(),
                    first_pass_at: None,
                };
                Ok((decoded, items))
            }
            Err(refusal) => Err(Box::new((self, refusal))),
        }
    }

    fn parse(&self, model: &Model) -> Result<(JobHeaders, Encoding, u32, Vec<Item>), Refusal> {
        let malformed = |error: String| Refusal::new(Reason::Malformed, error);
        if self.id().is_none() {
            return Err(malformed("the job has no id: set the message_id property".to_owned()));
        }
        let properties = &self.delivery.properties;
        if let Some(queue) =
            properties.reply_to().as_ref().filter(|queue| message::is_internal_queue(queue.as_str()))
        {
            return Err(malformed(format!("reply_to names `{queue}`, a queue of jobs or dead letters")));
        }
        let no_headers = Default::default();
        let headers = JobHeaders::read(properties.headers().as_ref().unwrap_or(&no_headers))
            .map_err(|e| malformed(e.to_string()))?;
        let encoding =
            Encoding::of(properties.content_type().as_ref().map(|t| t.as_str())).map_err(refusal)?;
        let job: Job = codec::decode(&self.delivery.data, encoding).map_err(refusal)?;
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
            return Err(expired());
        }
        let items = model
            .engine
            .prepare(inputs, &job.params)
            .map_err(|e| Refusal::new(Reason::InvalidInput, e.to_string()))?;
        // Bounded by ITEMS_MAX, which fits.
        Ok((headers, encoding, u32::try_from(job.inputs.len()).unwrap_or(u32::MAX), items))
    }
}

/// The refusal of a job whose `expiration` passed.
pub fn expired() -> Refusal {
    Refusal::new(Reason::Expired, "the job's expiration passed before it ran")
}

fn refusal(error: DecodeError) -> Refusal {
    let reason = match error {
        DecodeError::ContentType(_) | DecodeError::Version(_) => Reason::UnsupportedEncoding,
        DecodeError::TooLarge { .. } => Reason::TooLarge,
        DecodeError::Malformed(_) => Reason::Malformed,
    };
    Refusal::new(reason, error.to_string())
}

impl Decoded {
    /// Marks the start of the job's first pass.
    pub fn started(&mut self) {
        self.first_pass_at.get_or_insert_with(Instant::now);
    }

    pub fn has_started(&self) -> bool {
        self.first_pass_at.is_some()
    }

    /// Takes in the output of one item, by its index within the whole job.
    pub fn fill(&mut self, index: u32, output: Output) {
        let at = index.checked_sub(self.headers.items_done).map(|at| at as usize);
        if let Some(slot) = at.and_then(|at| self.outputs.get_mut(at))
            && slot.replace(output).is_none()
        {
            self.missing -= 1;
        }
    }

    pub fn is_complete(&self) -> bool {
        self.missing == 0
    }

    /// The next stage.
    ///
    /// # Errors
    /// The job itself while outputs are missing.
    pub fn executed(self) -> Result<Executed, Box<Self>> {
        if !self.is_complete() {
            return Err(Box::new(self));
        }
        Ok(Executed {
            first_pass_at: self.first_pass_at.unwrap_or(self.received.at),
            received: self.received,
            headers: self.headers,
            encoding: self.encoding,
            items_total: self.items_total,
            outputs: self.outputs.into_iter().flatten().collect(),
        })
    }
}

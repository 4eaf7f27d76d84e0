//! The ledger of all jobs, as seen from outside: who published each job, what happened to each copy, and which faults explain
//! duplicates. Checks the invariants about jobs at every step.

use std::collections::{BTreeMap, BTreeSet};

use vramq_schemas::{JobHeaders, Reason};

use super::agenda::Micros;
pub use super::record::{End, Excuses, JobNumber, JobRecord, JobSpec, Nature, ReplyTo, secret_of};
use super::trace::Violation;

/// The number of a message in the ledger. In the broker's model it is the message's body.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Letter(pub u32);

/// What a message is.
#[derive(Clone, Debug)]
pub enum Kind {
    Job { headers: Option<Box<JobHeaders>>, published_ms: Option<u64> },
    Reply { offset: u32, items: u32, is_last: bool },
    DeadLetter { reason: Reason },
    DeadReply { offset: u32, items: u32 },
    Failed,
}

#[derive(Clone, Debug)]
pub struct LetterRecord {
    pub job: JobNumber,
    pub kind: Kind,
    /// The first of all messages with the same bytes.
    pub twin: Letter,
    /// How many successors of this message and its twins the broker has confirmed: an answer, another attempt, or a dead letter.
    followed: u32,
    /// Whether it was acknowledged; `twins_acked` of the first twin counts all acks.
    pub(super) acked: bool,
    twins_acked: u32,
    /// The acks of these whose worker knew the job as withdrawn, without those that ended it.
    withdrawn: u32,
    /// Whether a worker sent another attempt of its job since the message was last lost.
    is_continued: bool,
    /// Whether a caller published it, to the job's own queue.
    pub(super) is_original: bool,
    /// Whether a worker holds it and its queue is gone, so that it will not be redelivered.
    pub(super) is_orphan: bool,
}

/// The most messages with a job, without those after losses: for halving the hint, and for waiting for memory for each item.
const ATTEMPTS_MAX: u32 = 60;
const ATTEMPTS_PER_ITEM: u32 = 16;
/// The most messages after a loss: all attempts may be repeated.
const ATTEMPTS_PER_LOSS: u32 = 24;

/// The fewest losses while a job was alone before it is dead-lettered as a crasher. It needs five losses, and the last three count.
const LOSSES_ALONE_MIN: u32 = 3;

/// The most workers that a job kills. Five are counted, and more deaths can happen before the counted ones are written down.
const KILLS_MAX: u32 = 20;
/// The most kills of an attempt that was published before a worker was lost with the message before it: five, and that death.
const KILLS_OF_A_FORK: u32 = 6;

/// All jobs and all messages of a history.
#[derive(Debug, Default)]
pub struct Ledger {
    pub(super) jobs: Vec<JobRecord>,
    pub(super) letters: Vec<LetterRecord>,
    pub now: Micros,
    pub violation: Option<Violation>,
    /// Jobs with confirmed copies that have not ended yet.
    pub(super) open: usize,
    /// Jobs that the broker has confirmed and no pass has started.
    pub(super) unstarted: BTreeSet<JobNumber>,
    /// When each queue was last flooded, by model and index.
    pub(super) flooded: BTreeMap<(usize, usize), Micros>,
    /// When each reply queue last confirmed nothing, by caller.
    pub(super) silent: BTreeMap<usize, Micros>,
    /// How often a large job was requeued to make room for others.
    pub handed_over: usize,
}

impl Ledger {
    pub fn fail(&mut self, rule: &'static str, text: impl FnOnce() -> String) {
        if self.violation.is_none() {
            self.violation = Some(Violation { at: self.now, rule, text: text() });
        }
    }

    pub fn jobs(&self) -> &[JobRecord] {
        &self.jobs
    }

    pub fn job(&self, job: JobNumber) -> &JobRecord {
        &self.jobs[job.0]
    }

    pub fn excuses_mut(&mut self, job: JobNumber) -> &mut Excuses {
        &mut self.jobs[job.0].excuses
    }

    pub fn letter(&self, letter: Letter) -> &LetterRecord {
        &self.letters[letter.0 as usize]
    }

    pub fn open(&self) -> usize {
        self.open
    }

    /// A caller publishes a new job.
    pub fn publish(&mut self, spec: JobSpec) -> Letter {
        let job = JobNumber(self.jobs.len());
        let kind = Kind::Job {
            headers: (spec.nature != Nature::Malformed).then(|| Box::new(spec.headers.clone())),
            published_ms: spec.published_ms,
        };
        self.jobs.push(JobRecord::new(job, spec, self.now));
        let letter = self.write(job, kind);
        self.letters[letter.0 as usize].is_original = true;
        letter
    }

    /// The same bytes once more.
    pub fn publish_twin(&mut self, of: Letter) -> Letter {
        let LetterRecord { job, kind, twin, .. } = self.letter(of).clone();
        let letter = self.write(job, kind);
        let record = &mut self.letters[letter.0 as usize];
        (record.twin, record.is_original) = (twin, true);
        self.jobs[job.0].copies += 1;
        letter
    }

    /// A worker writes a message about a job.
    pub fn write(&mut self, job: JobNumber, kind: Kind) -> Letter {
        let letter = Letter(u32::try_from(self.letters.len()).unwrap_or(u32::MAX));
        let holds_job = matches!(kind, Kind::Job { .. });
        self.letters.push(LetterRecord {
            job,
            kind,
            twin: letter,
            followed: 0,
            acked: false,
            twins_acked: 0,
            withdrawn: 0,
            is_continued: false,
            is_original: false,
            is_orphan: false,
        });
        if holds_job {
            let record = &mut self.jobs[job.0];
            record.attempts += 1;
            let items = u32::try_from(record.computed.len()).unwrap_or(u32::MAX);
            let most = ATTEMPTS_MAX + ATTEMPTS_PER_ITEM * items + ATTEMPTS_PER_LOSS * record.excuses.repeats;
            let attempts = record.attempts;
            if attempts > most {
                self.fail("attempts are bounded", || format!("job {} was published {attempts} times", job.0));
            }
        }
        letter
    }

    /// The broker confirmed a caller's publish.
    pub fn accepted(&mut self, letter: Letter) {
        let job = self.letter(letter).job;
        let record = &mut self.jobs[job.0];
        let was_open = record.is_open();
        record.accepted += 1;
        let is_open = record.is_open();
        self.open += usize::from(is_open && !was_open);
        if record.accepted == 1 && is_open {
            self.unstarted.insert(job);
        }
    }

    /// The broker refused a message, so that it holds no job.
    pub fn refused(&mut self, letter: Letter) {
        let LetterRecord { job, kind, .. } = self.letter(letter);
        let (job, holds_job) = (*job, matches!(kind, Kind::Job { .. }));
        self.jobs[job.0].attempts -= u32::from(holds_job);
    }

    /// The broker confirmed what follows a message.
    pub fn followed(&mut self, letter: Letter) {
        let twin = self.letter(letter).twin;
        self.letters[twin.0 as usize].followed += 1;
    }

    /// A caller withdraws its job. One without a digest cannot be withdrawn.
    pub fn withdraw(&mut self, job: JobNumber) {
        let record = &mut self.jobs[job.0];
        record.is_withdrawn = record.digest.is_some();
    }

    /// A worker sends the ack of a message. Something confirmed must follow the message by then, unless the worker knows that its job is
    /// withdrawn; that job ends with the ack.
    pub fn acked(&mut self, letter: Letter, is_withdrawn: bool, who: impl std::fmt::Display) {
        let record = &mut self.letters[letter.0 as usize];
        let (job, twin, again) = (record.job, record.twin, record.acked);
        record.acked = true;
        let first = &mut self.letters[twin.0 as usize];
        first.twins_acked += u32::from(!again);
        let (acked, followed) = (first.twins_acked, first.followed);
        // Of two messages with the same bytes one may be answered, and the other one withdrawn at another worker, in any order.
        first.withdrawn += u32::from(is_withdrawn && !again);
        if acked > followed && first.withdrawn > 0 {
            first.withdrawn -= 1;
            first.followed += 1;
            return self.ended(job, End::Withdrawn);
        }
        if acked > followed && followed > 0 && self.jobs[job.0].excuses.repeats > 0 {
            // Two messages with the same bytes cannot be told apart: after a loss, the answer to one may count for the other.
            self.forgive_job(job);
        } else if acked > followed {
            self.fail("an ack comes after what follows is confirmed", || {
                format!(
                    "{who} acknowledged message {} of job {} though nothing confirmed follows it",
                    letter.0, job.0
                )
            });
        }
    }

    /// A worker sends another attempt of the job that a message holds.
    pub fn continued(&mut self, letter: Letter) {
        self.letters[letter.0 as usize].is_continued = true;
    }

    /// A worker lost its session or died while it held a message. Everything may happen to the job once more. If the broker also has
    /// another attempt, the job exists twice from now on.
    pub fn lost(&mut self, letter: Letter) {
        let record = &mut self.letters[letter.0 as usize];
        let (job, is_continued) = (record.job, std::mem::take(&mut record.is_continued));
        self.jobs[job.0].forks += u32::from(is_continued);
        self.jobs[job.0].excuses.repeats += 1;
        self.gone_with_its_queue(letter);
    }

    /// A job has killed the process that held it.
    pub fn killed(&mut self, job: JobNumber) {
        let record = &mut self.jobs[job.0];
        record.kills += 1;
        let (kills, copies, forks) = (record.kills, record.copies, record.forks);
        if kills > KILLS_MAX * copies + KILLS_OF_A_FORK * forks {
            self.fail("a job kills a bounded number of workers", || {
                format!("job {} has killed {kills}, with {forks} attempts beside their own message", job.0)
            });
        }
    }

    /// An output of an item was computed.
    pub fn computed(&mut self, job: JobNumber, item: u32) {
        let record = &mut self.jobs[job.0];
        let Some(count) = record.computed.get_mut(item as usize) else { return };
        *count += 1;
        let (count, in_vain) = (u32::from(*count), u32::from(record.in_vain[item as usize]));
        let repeats = record.excuses.repeats;
        if count > record.copies + repeats + in_vain {
            self.fail("an item is computed once", || {
                format!(
                    "item {item} of job {} was computed {count} times; {repeats} losses, {in_vain} in vain",
                    job.0
                )
            });
        }
    }

    /// A computed output was lost for a known reason.
    pub fn in_vain(&mut self, job: JobNumber, item: u32) {
        if let Some(count) = self.jobs[job.0].in_vain.get_mut(item as usize) {
            *count += 1;
        }
    }

    /// A reply reached its caller, or is stored beside a dead letter.
    pub fn answered(&mut self, job: JobNumber, offset: u32, items: u32) {
        let record = &mut self.jobs[job.0];
        for item in offset..offset.saturating_add(items) {
            match record.answered.get_mut(item as usize) {
                Some(answered) => *answered = true,
                None => {
                    return self
                        .fail("replies hold items of their job", || format!("job {}: item {item}", job.0));
                }
            }
        }
    }

    /// A job has ended.
    pub fn ended(&mut self, job: JobNumber, end: End) {
        let record = &mut self.jobs[job.0];
        let was_open = record.is_open();
        record.ends += 1;
        record.last_end = Some(end);
        self.unstarted.remove(&job);
        self.open -= usize::from(was_open && !record.is_open());
        let Excuses { repeats, unconfirmed, .. } = record.excuses;
        let (ends, copies) = (record.ends, record.copies);
        let first = record.spec.headers.items_done as usize;
        let missing = record.answered.iter().skip(first).position(|answered| !answered);
        if ends > copies + repeats + unconfirmed {
            self.fail("a job ends once", || {
                format!(
                    "job {} ended {ends} times, now with {end:?}; {copies} copies, {repeats} losses",
                    job.0
                )
            });
        }
        if end == End::Done
            && let Some(item) = missing
        {
            let item = item + first;
            self.fail("a job that is done has every answer", || {
                format!("job {}: item {item} was never answered", job.0)
            });
        }
        let is_for_others = |record: &JobRecord| record.spec.moves || record.excuses.out_of_memory_alone;
        if end == End::Moved && !is_for_others(&self.jobs[job.0]) {
            self.fail("a job goes to other workers for a reason", || format!("job {}", job.0));
        }
        if let End::DeadLetter(reason) = end {
            self.check_blame(job, reason);
        }
    }

    /// Checks that the reason of a dead letter is the job's own.
    fn check_blame(&mut self, job: JobNumber, reason: Reason) {
        let record = &self.jobs[job.0];
        let (nature, excuses) = (record.spec.nature, &record.excuses);
        let is_crasher = matches!(
            nature,
            Nature::PoisonDecode | Nature::PoisonPass | Nature::Hanging | Nature::DeviceKiller
        );
        let is_just = match reason {
            Reason::Crashed => {
                is_crasher || excuses.died_alone >= LOSSES_ALONE_MIN || record.spec.headers.crashes > 0
            }
            Reason::TimedOut => nature == Nature::Hanging || excuses.hung_alone,
            Reason::EngineFailed => nature == Nature::Failing || excuses.failed_alone,
            // A rule may name a routing key without a queue.
            Reason::InvalidInput => nature == Nature::Invalid || record.spec.moves,
            Reason::OutOfMemory => excuses.out_of_memory_alone,
            Reason::Cancelled => excuses.cancelled,
            Reason::Unroutable => excuses.replies_refused || record.spec.moves,
            Reason::Expired => record.spec.ttl_ms.is_some(),
            Reason::Malformed => {
                nature == Nature::Malformed
                    || record.spec.headers.items_done as usize > record.spec.costs.len()
            }
            Reason::TooLarge => {
                let is_above_cap = record.spec.is_above_cap(record.spec.headers.items_done);
                nature == Nature::Huge || record.spec.is_unencodable || is_above_cap
            }
            Reason::WrongRevision => record.spec.revision.is_some(),
            Reason::ReferenceMissing => excuses.reference_missing,
            _ => false,
        };
        if !is_just {
            let excuses = excuses.clone();
            self.fail("nobody is blamed for others", || {
                format!("job {} ({nature:?}) was dead-lettered as {reason}; {excuses:?}", job.0)
            });
        }
    }

    /// A model's dead letters were deleted for a while. Jobs that the broker dead-lettered meanwhile are gone.
    pub fn forgive(&mut self, model: usize) {
        let gone = |job: &JobRecord| job.spec.ttl_ms.is_some() || job.spec.nature == Nature::Huge;
        let is_gone = |job: &JobRecord| job.spec.model == model && job.is_open() && gone(job);
        let jobs: Vec<_> =
            (0..self.jobs.len()).filter(|at| is_gone(&self.jobs[*at])).map(JobNumber).collect();
        jobs.into_iter().for_each(|job| self.forgive_job(job));
    }

    /// At the end: checks that every copy that the broker accepted has ended.
    pub fn check_all_ended(&mut self) {
        let lost = self.jobs.iter().position(JobRecord::is_open);
        if let Some(job) = lost {
            let JobRecord { spec, published_at, accepted, ends, .. } = &self.jobs[job];
            let text = format!(
                "job {job} ({:?}, {} items, published at {}) ended {ends} of {accepted} times",
                spec.nature,
                spec.costs.len(),
                super::trace::Clock(*published_at)
            );
            self.fail("every job ends", || text);
        }
    }
}

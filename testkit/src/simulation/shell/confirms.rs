//! Confirms that do not come in time, handled as in `amqp/src/ledger.rs` and `worker/src/broker/publisher.rs`. If a reply queue is silent,
//! only the reply is lost. If a message to the worker's own queues is not confirmed, or the broker confirms nothing at all, the session
//! ends.

use vramq_core::event::{Event, PublicationOutcome};
use vramq_core::ids::JobKey;

use super::Shell;
use crate::simulation::env::Env;
use crate::simulation::ledger::{Kind, Letter, ReplyTo};

/// How many seconds the broker has for a confirm, without the time in which it blocks publishers.
pub(super) const CONFIRM_MAX: u64 = 30;

/// A message whose confirm is awaited.
#[derive(Debug)]
pub(super) struct Sent {
    pub(super) job: JobKey,
    pub(super) letter: Letter,
    pub(super) is_returned: bool,
    /// The second in which its wait began.
    since: u64,
    /// Whether the broker has confirmed a later message, and so has read this one.
    is_read: bool,
    /// Whether its confirm was given up.
    pub(super) is_late: bool,
}

/// State of a session's confirms.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Confirms {
    seconds: u64,
    /// The highest confirmed number, and when a confirm last came.
    last: u64,
    last_at: u64,
    /// Whether nothing was confirmed for as long as a confirm may take, and nothing since.
    is_silent: bool,
}

impl Confirms {
    pub(super) fn sent(&self, job: JobKey, letter: Letter) -> Sent {
        Sent { job, letter, is_returned: false, since: self.seconds, is_read: false, is_late: false }
    }

    pub(super) fn confirmed(&mut self, number: u64) {
        (self.last, self.last_at, self.is_silent) = (self.last.max(number), self.seconds, false);
    }
}

impl Shell {
    /// A second has passed. Gives up overdue confirms.
    pub(super) fn judge_confirms(&mut self, env: &mut Env) {
        let Some(session) = self.session.as_mut().filter(|_| !self.is_blocked && !self.is_closing) else {
            return;
        };
        let clock = &mut session.judge;
        clock.seconds += 1;
        let (mut overdue, mut unread) = (Vec::new(), Vec::new());
        for (number, sent) in session.confirms.iter_mut().filter(|(_, sent)| !sent.is_late) {
            if !sent.is_read {
                sent.is_read = clock.last > *number;
                sent.since = sent.since.max(if sent.is_read { clock.seconds } else { clock.last_at });
            }
            if clock.seconds - sent.since > CONFIRM_MAX {
                if sent.is_read { &mut overdue } else { &mut unread }.push(*number);
            }
        }
        if !unread.is_empty() {
            if clock.is_silent {
                return self.session_failed(env, "publish: the broker confirms nothing");
            }
            overdue.extend(unread.first());
            (clock.is_silent, clock.last_at) = (true, clock.seconds);
        }
        for number in overdue {
            self.give_up_confirm(env, number);
        }
    }

    /// Gives up a confirm. The broker may have the message nevertheless.
    fn give_up_confirm(&mut self, env: &mut Env, number: u64) {
        let Some(session) = &mut self.session else { return };
        let Some(sent) = session.confirms.get_mut(&number) else { return };
        sent.is_late = true;
        let (job, letter) = (sent.job, sent.letter);
        let record = env.ledger.letter(letter);
        let (number, is_last) = match record.kind {
            Kind::Reply { is_last, .. } => (record.job, is_last),
            Kind::Failed => (record.job, false),
            _ => return self.session_failed(env, "publish: a queue of the worker's own confirms nothing"),
        };
        env.ledger.excuses_mut(number).unconfirmed += u32::from(is_last);
        if let ReplyTo::Caller(caller) = env.ledger.job(number).spec.reply_to {
            env.ledger.fell_silent(caller);
        }
        let outcome =
            PublicationOutcome::Unreachable { destination: "somewhere".to_owned(), why: "did not confirm" };
        if let Some(outcome) = self.publish_answered(env, job, letter, Some(outcome)) {
            self.handle(env, Event::Published { job, outcome });
        }
    }
}

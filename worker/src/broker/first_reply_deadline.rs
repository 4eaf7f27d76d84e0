//! Decides when the wait for the confirm of a first reply ends. Pure.

use vramq_amqp::ConfirmTime;

/// What a missing confirm means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Overdue {
    /// The broker answered other messages meanwhile, so the queue is silent.
    QueueIsSilent,
    /// The broker answered nothing. This reply is given up: its dead letter shows whether the broker answers.
    GivenUp,
    /// The broker answered nothing for twice `confirm_s` and the time for the bytes that may be on their way.
    BrokerIsSilent(ConfirmTime),
}

/// The deadline of one first reply, which is the only message on its channel.
#[derive(Debug)]
pub(super) struct FirstReplyDeadline {
    confirm_s: u32,
    /// The second from which on the broker could have confirmed the reply.
    since: u32,
    /// The bytes up to the reply's end that may still be on their way, when last looked at.
    unread: u64,
    /// The broker's answers to other messages when the reply was sent.
    answers_before: u64,
    /// The broker had answered others at the last look, which was after the deadline.
    has_answered: bool,
}

impl FirstReplyDeadline {
    /// `second`: the current one; `answers`: those of the broker so far.
    pub(super) fn new(confirm_s: u32, second: u32, answers: u64) -> Self {
        Self { confirm_s, since: second, unread: 0, answers_before: answers, has_answered: false }
    }

    /// A second has passed. `unread`: the bytes up to the reply's end that may still be on their way; `gives_up`: whether to give this reply
    /// up, and no other, while the broker answers nothing.
    pub(super) fn look(
        &mut self,
        second: u32,
        unread: u64,
        answers: u64,
        gives_up: impl FnOnce() -> bool,
    ) -> Option<Overdue> {
        if unread < self.unread {
            // The broker reads what was published before this reply, on other channels.
            (self.since, self.has_answered) = (second, false);
            // Answers up to now do not show that it also answers what came after.
            self.answers_before = answers;
        }
        self.unread = unread;
        let time = ConfirmTime::new(self.confirm_s, unread);
        let waited = second.saturating_sub(self.since);
        if waited <= time.seconds() {
            return None;
        }
        if answers != self.answers_before {
            // After the broker was silent, its answers arrive together. Allow the own one a moment.
            let had_a_moment = std::mem::replace(&mut self.has_answered, true);
            return had_a_moment.then_some(Overdue::QueueIsSilent);
        }
        if gives_up() {
            return Some(Overdue::GivenUp);
        }
        let twice = time.and(ConfirmTime::new(self.confirm_s, 0));
        (waited > twice.seconds()).then_some(Overdue::BrokerIsSilent(twice))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONFIRM_S: u32 = 3;
    const LARGE: u64 = 16 << 20;
    /// At 64 KiB/s.
    const LARGE_S: u32 = 256;

    /// Looks each second. The first result that ends the wait, and how many seconds after `start` it came.
    fn end(
        deadline: &mut FirstReplyDeadline,
        start: u32,
        unread: u64,
        answers: u64,
        gives_up: bool,
    ) -> (u32, Overdue) {
        (1..10_000)
            .find_map(|at| {
                let overdue = deadline.look(start + at, unread, answers, || gives_up)?;
                Some((at, overdue))
            })
            .unwrap()
    }

    #[test]
    fn a_silent_queue_is_told_from_a_silent_broker() {
        let deadline = || FirstReplyDeadline::new(CONFIRM_S, 10, 7);
        let queue = end(&mut deadline(), 10, 1, 8, false);
        assert_eq!(queue, (CONFIRM_S + 2, Overdue::QueueIsSilent), "a moment more than its time");
        assert_eq!(end(&mut deadline(), 10, 1, 7, true), (CONFIRM_S + 1, Overdue::GivenUp));
        let twice = ConfirmTime { confirm_s: 2 * CONFIRM_S, transfer_s: 0 };
        let broker = end(&mut deadline(), 10, 1, 7, false);
        assert_eq!(broker, (2 * CONFIRM_S + 1, Overdue::BrokerIsSilent(twice)));
    }

    #[test]
    fn a_reply_has_the_time_for_what_was_published_before_it() {
        let mut deadline = FirstReplyDeadline::new(CONFIRM_S, 0, 0);
        let last = CONFIRM_S + LARGE_S;
        assert!((1..=last).all(|second| deadline.look(second, LARGE, 0, || true).is_none()));
        // The large message has arrived; the reply has the whole time once more, and no longer that of the large one.
        assert_eq!(deadline.look(last, 0, 1, || true), None);
        assert_eq!(end(&mut deadline, last, 0, 2, true), (CONFIRM_S + 2, Overdue::QueueIsSilent));
    }

    /// The large message may never arrive. It has its time once.
    #[test]
    fn a_silent_broker_is_noticed_behind_a_large_message() {
        let mut deadline = FirstReplyDeadline::new(CONFIRM_S, 0, 0);
        let twice = ConfirmTime { confirm_s: 2 * CONFIRM_S, transfer_s: LARGE_S };
        let after = 2 * CONFIRM_S + LARGE_S + 1;
        assert_eq!(end(&mut deadline, 0, LARGE, 0, false), (after, Overdue::BrokerIsSilent(twice)));
    }

    /// The broker confirmed a large message before this reply, then nothing.
    #[test]
    fn a_broker_that_falls_silent_after_it_read_more_is_told_from_a_silent_queue() {
        let once = Overdue::GivenUp;
        let twice = Overdue::BrokerIsSilent(ConfirmTime { confirm_s: 2 * CONFIRM_S, transfer_s: 0 });
        for (gives_up, expected) in [(true, (CONFIRM_S + 1, once)), (false, (2 * CONFIRM_S + 1, twice))] {
            let mut deadline = FirstReplyDeadline::new(CONFIRM_S, 0, 7);
            assert_eq!(deadline.look(1, LARGE, 7, || true), None);
            assert_eq!(deadline.look(2, 1, 8, || true), None);
            assert_eq!(end(&mut deadline, 2, 1, 8, gives_up), expected);
        }
    }
}

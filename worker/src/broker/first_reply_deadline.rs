//! Decides when the wait for the confirm of a first reply ends, and the wait for its channel. Pure.

use vramq_amqp::{ConfirmTime, OnItsWay};

/// What a missing confirm means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Overdue {
    /// The broker confirmed a message that was published after the reply, so the queue is silent.
    QueueIsSilent,
    /// The broker confirmed none. This reply is given up: its dead letter shows whether the broker answers.
    GivenUp,
    /// The broker confirmed none for twice `confirm_s` and the time for all bytes that may be on their way.
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
    /// The broker had passed the reply at the last look, which was after the deadline.
    was_passed: bool,
}

impl FirstReplyDeadline {
    /// `second`: the current one.
    pub(super) fn new(confirm_s: u32, second: u32) -> Self {
        Self { confirm_s, since: second, unread: 0, was_passed: false }
    }

    /// A second has passed. `on_its_way`: what the reply's channel knows of the connection; `gives_up`: whether to give this reply up, and no
    /// other, while the broker confirms nothing.
    pub(super) fn look(
        &mut self,
        second: u32,
        on_its_way: OnItsWay,
        gives_up: impl FnOnce() -> bool,
    ) -> Option<Overdue> {
        let (waited, time) = self.waited(second, on_its_way);
        if waited <= time.seconds() {
            return None;
        }
        if on_its_way.is_last_passed {
            // After the broker was silent, its confirms arrive together. Allow the own one a moment.
            let had_a_moment = std::mem::replace(&mut self.was_passed, true);
            return had_a_moment.then_some(Overdue::QueueIsSilent);
        }
        if gives_up() {
            return Some(Overdue::GivenUp);
        }
        self.look_at_broker(second, on_its_way).map(Overdue::BrokerIsSilent)
    }

    /// A second has passed. `Some` after twice the time: the broker does not answer. Used alone for a request, whose answer depends on no queue.
    /// `up_to_last_bytes` is then what was published before the request.
    pub(super) fn look_at_broker(&mut self, second: u32, on_its_way: OnItsWay) -> Option<ConfirmTime> {
        let (waited, time) = self.waited(second, on_its_way);
        // What was published after this reply may be large, and nothing behind it can be confirmed.
        let behind = on_its_way.all_bytes.saturating_sub(on_its_way.up_to_last_bytes);
        let twice = time.and(ConfirmTime::new(self.confirm_s, behind));
        (waited > twice.seconds()).then_some(twice)
    }

    /// How many seconds the broker has had, and how many it has.
    fn waited(&mut self, second: u32, on_its_way: OnItsWay) -> (u32, ConfirmTime) {
        let unread = on_its_way.up_to_last_bytes;
        if unread < self.unread {
            // The broker reads what was published before this reply, on other channels.
            (self.since, self.was_passed) = (second, false);
        }
        self.unread = unread;
        (second.saturating_sub(self.since), ConfirmTime::new(self.confirm_s, unread))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONFIRM_S: u32 = 3;
    const LARGE: u64 = 16 << 20;
    /// At 64 KiB/s.
    const LARGE_S: u32 = 256;

    /// Nothing was published after the reply.
    fn unread(bytes: u64) -> OnItsWay {
        OnItsWay { up_to_last_bytes: bytes, all_bytes: bytes, is_last_passed: false }
    }

    /// The broker has confirmed a later message.
    const PASSED: OnItsWay = OnItsWay { up_to_last_bytes: 0, all_bytes: 0, is_last_passed: true };

    /// Looks each second. The first result that ends the wait, and how many seconds after `start` it came.
    fn end(
        deadline: &mut FirstReplyDeadline,
        start: u32,
        on_its_way: OnItsWay,
        gives_up: bool,
    ) -> (u32, Overdue) {
        (1..10_000)
            .find_map(|at| {
                let overdue = deadline.look(start + at, on_its_way, || gives_up)?;
                Some((at, overdue))
            })
            .unwrap()
    }

    #[test]
    fn a_silent_queue_is_told_from_a_silent_broker() {
        let deadline = || FirstReplyDeadline::new(CONFIRM_S, 10);
        let queue = end(&mut deadline(), 10, PASSED, false);
        assert_eq!(queue, (CONFIRM_S + 2, Overdue::QueueIsSilent), "a moment more than its time");
        assert_eq!(end(&mut deadline(), 10, unread(1), true), (CONFIRM_S + 1, Overdue::GivenUp));
        let twice = ConfirmTime { confirm_s: 2 * CONFIRM_S, transfer_s: 0 };
        let broker = end(&mut deadline(), 10, unread(1), false);
        assert_eq!(broker, (2 * CONFIRM_S + 1, Overdue::BrokerIsSilent(twice)));
    }

    #[test]
    fn a_reply_has_the_time_for_what_was_published_before_it() {
        let mut deadline = FirstReplyDeadline::new(CONFIRM_S, 0);
        let last = CONFIRM_S + LARGE_S;
        assert!((1..=last).all(|second| deadline.look(second, unread(LARGE), || true).is_none()));
        // The large message has arrived; the reply has the whole time once more, and no longer that of the large one.
        assert_eq!(deadline.look(last, PASSED, || true), None);
        assert_eq!(end(&mut deadline, last, PASSED, true), (CONFIRM_S + 2, Overdue::QueueIsSilent));
    }

    /// The large message may never arrive. It has its time once.
    #[test]
    fn a_silent_broker_is_noticed_behind_a_large_message() {
        let mut deadline = FirstReplyDeadline::new(CONFIRM_S, 0);
        let twice = ConfirmTime { confirm_s: 2 * CONFIRM_S, transfer_s: LARGE_S };
        let after = 2 * CONFIRM_S + LARGE_S + 1;
        assert_eq!(end(&mut deadline, 0, unread(LARGE), false), (after, Overdue::BrokerIsSilent(twice)));
    }

    /// The dead letter of a reply that was given up may be as large as that.
    #[test]
    fn the_broker_is_not_silent_while_a_large_message_behind_the_reply_may_be_on_its_way() {
        let mut deadline = FirstReplyDeadline::new(CONFIRM_S, 0);
        let on_its_way = OnItsWay { up_to_last_bytes: 1, all_bytes: LARGE + 1, is_last_passed: false };
        let twice = ConfirmTime { confirm_s: 2 * CONFIRM_S, transfer_s: LARGE_S };
        let after = 2 * CONFIRM_S + LARGE_S + 1;
        assert_eq!(end(&mut deadline, 0, on_its_way, false), (after, Overdue::BrokerIsSilent(twice)));
    }

    /// The frame that asks for a channel was lost. The broker reads what was published before it, and goes on to confirm the others.
    #[test]
    fn a_channel_that_is_not_opened_is_not_awaited_for_ever() {
        let mut deadline = FirstReplyDeadline::new(CONFIRM_S, 0);
        assert_eq!(deadline.look_at_broker(1, unread(LARGE)), None);
        let silent = (2..1000).find_map(|second| Some((second, deadline.look_at_broker(second, unread(0))?)));
        let twice = ConfirmTime { confirm_s: 2 * CONFIRM_S, transfer_s: 0 };
        assert_eq!(silent, Some((2 + 2 * CONFIRM_S + 1, twice)));
    }

    /// The broker confirmed messages before this reply, then nothing: that says nothing about the reply's queue.
    #[test]
    fn confirms_of_earlier_messages_do_not_make_a_queue_silent() {
        let once = Overdue::GivenUp;
        let twice = Overdue::BrokerIsSilent(ConfirmTime { confirm_s: 2 * CONFIRM_S, transfer_s: 0 });
        for (gives_up, expected) in [(true, (CONFIRM_S + 1, once)), (false, (2 * CONFIRM_S + 1, twice))] {
            let mut deadline = FirstReplyDeadline::new(CONFIRM_S, 0);
            assert_eq!(deadline.look(1, unread(LARGE), || true), None);
            assert_eq!(deadline.look(2, unread(1), || true), None);
            assert_eq!(end(&mut deadline, 2, unread(1), gives_up), expected);
        }
    }
}

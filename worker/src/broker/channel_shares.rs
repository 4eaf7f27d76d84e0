//! Divides the channels for first replies among callers. Does not open them.
//!
//! A reply to a queue that confirms nothing keeps its channel for up to two minutes: until `broker.confirm_s` is over, and until the broker
//! has closed the channel. So no caller may have all channels, however many such queues it has.

use std::collections::{HashMap, VecDeque};

use tokio::sync::oneshot;

/// The most channels, including those that the broker is still closing. They are opened on demand; a worker whose queues all confirm has a
/// few. RabbitMQ allows a connection 2,047 unless its configuration says otherwise.
const CHANNELS_MAX: usize = 64;

/// The most channels of one caller. More would not be faster: each carries one reply at a time, and most queues confirm in milliseconds.
const OF_CALLER_MAX: usize = 16;

/// The same while at least half of all channels are taken. So it needs 18 callers, each with silent queues, to take all of them.
const OF_CALLER_SCARCE: usize = 2;

/// Which callers have a channel, and which wait for one.
#[derive(Debug, Default)]
pub(super) struct ChannelShares {
    taken: usize,
    /// How many channels each caller has, if it has any. All unknown callers are one, with an empty name.
    of_callers: HashMap<String, usize>,
    /// Replies that wait, in order. Bounded by the unacknowledged jobs.
    waiting: VecDeque<(String, oneshot::Sender<()>)>,
}

impl ChannelShares {
    /// Takes a channel for a caller. If the caller has to wait for it, returns a receiver that is notified when it has the channel.
    pub(super) fn take(&mut self, caller: &str) -> Option<oneshot::Receiver<()>> {
        if self.may_take(caller) {
            self.count_taken(caller);
            return None;
        }
        let (sender, receiver) = oneshot::channel();
        self.waiting.push_back((caller.to_owned(), sender));
        Some(receiver)
    }

    /// A caller's channel is free again. Passes it on to the first reply that waits and whose caller may have another channel.
    pub(super) fn give_back(&mut self, caller: &str) {
        self.taken = self.taken.saturating_sub(1);
        if let Some(own) = self.of_callers.get_mut(caller) {
            *own -= 1;
            if *own == 0 {
                self.of_callers.remove(caller);
            }
        }
        while let Some(next) = self.waiting.iter().position(|(caller, _)| self.may_take(caller)) {
            let Some((caller, sender)) = self.waiting.remove(next) else { return };
            // An `Err`: the reply is not published any more.
            if sender.send(()).is_ok() {
                self.count_taken(&caller);
            }
        }
    }

    fn may_take(&self, caller: &str) -> bool {
        let most = if self.taken < CHANNELS_MAX / 2 { OF_CALLER_MAX } else { OF_CALLER_SCARCE };
        self.taken < CHANNELS_MAX && self.of_callers.get(caller).is_none_or(|own| *own < most)
    }

    fn count_taken(&mut self, caller: &str) {
        self.taken += 1;
        *self.of_callers.entry(caller.to_owned()).or_default() += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How many channels a caller with very many silent queues gets.
    fn takes_all(shares: &mut ChannelShares, caller: &str) -> usize {
        (0..100).filter(|_| shares.take(caller).is_none()).count()
    }

    fn has_one(waiting: Option<oneshot::Receiver<()>>) -> bool {
        waiting.is_none_or(|mut waiting| waiting.try_recv().is_ok())
    }

    #[test]
    fn the_silent_queues_of_seventeen_callers_leave_a_channel_to_another() {
        let mut shares = ChannelShares::default();
        let taken: Vec<_> = (0..17).map(|at| takes_all(&mut shares, &format!("silent {at}"))).collect();
        assert_eq!(taken[..3], [OF_CALLER_MAX, OF_CALLER_MAX, OF_CALLER_SCARCE], "{taken:?}");
        for reply in 0..100 {
            assert!(shares.take("neighbour").is_none(), "its reply {reply} waits");
            shares.give_back("neighbour");
        }
        assert_eq!(takes_all(&mut shares, "silent 17"), OF_CALLER_SCARCE);
        assert_eq!(shares.taken, CHANNELS_MAX);
        assert!(!has_one(shares.take("neighbour")));
    }

    #[test]
    fn a_channel_goes_to_the_first_reply_whose_caller_may_have_it() {
        let mut shares = ChannelShares::default();
        assert!((0..OF_CALLER_MAX).all(|_| shares.take("busy").is_none()));
        let [mut first, mut second] = [(); 2].map(|()| shares.take("busy").unwrap());
        assert!(shares.take("other").is_none());
        shares.give_back("other");
        assert!(first.try_recv().is_err(), "its caller has as many as it may");
        shares.give_back("busy");
        assert!(first.try_recv().is_ok() && second.try_recv().is_err());
        shares.give_back("busy");
        assert!(second.try_recv().is_ok());
        (0..OF_CALLER_MAX).for_each(|_| shares.give_back("busy"));
        assert_eq!((shares.taken, shares.of_callers.len(), shares.waiting.len()), (0, 0, 0));
    }

    #[test]
    fn a_reply_that_waits_no_longer_takes_no_channel() {
        let mut shares = ChannelShares::default();
        assert_eq!(takes_all(&mut shares, "gone"), OF_CALLER_MAX);
        shares.give_back("gone");
        assert_eq!(shares.taken, OF_CALLER_MAX - 1);
    }

    #[test]
    fn when_channels_are_no_longer_scarce_a_caller_may_have_more() {
        let mut shares = ChannelShares::default();
        takes_all(&mut shares, "silent 0");
        takes_all(&mut shares, "silent 1");
        let mut replies: Vec<_> = (0..4).map(|_| shares.take("other")).collect();
        assert_eq!(replies.iter().filter(|reply| reply.is_none()).count(), OF_CALLER_SCARCE);
        (0..OF_CALLER_MAX).for_each(|_| shares.give_back("silent 0"));
        assert!(replies.drain(..).all(has_one));
    }
}

//! Divides the channels for first replies among callers. Does not open them.
//!
//! A reply to a queue that confirms nothing keeps its channel until the deadline for its confirm, which is `broker.confirm_s` and the time for
//! large messages on their way, and then until the broker has closed the channel (RabbitMQ: up to 65 s). So no caller may have all
//! channels, however many such queues it has.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;

/// The most channels, including those that the broker is still closing. They are opened on demand; a worker whose queues all confirm has a
/// few. RabbitMQ allows a connection 2,047 unless its configuration says otherwise.
const CHANNELS_MAX: usize = 64;

/// The most channels of one caller. More would not be faster: each carries one reply at a time, and most queues confirm in milliseconds.
const OF_CALLER_MAX: usize = 16;

/// The same while at least half of all channels are taken. So it needs 18 callers, each with silent queues, to take all of them.
const OF_CALLER_SCARCE: usize = 2;

/// Which callers have a channel, and which wait for one. Clones share that.
#[derive(Clone, Debug, Default)]
pub(super) struct ChannelShares {
    shares: Arc<Mutex<Shares>>,
}

#[derive(Debug, Default)]
struct Shares {
    taken: usize,
    /// How many channels each caller has, if it has any. All unknown callers are one, with an empty name.
    of_callers: HashMap<String, usize>,
    /// Replies that wait, in order. Bounded by the unacknowledged jobs.
    waiting: VecDeque<(String, oneshot::Sender<Permit>)>,
}

/// A caller's permit for one channel. Returns it when dropped.
#[derive(Debug)]
pub(super) struct Permit {
    shares: ChannelShares,
    caller: String,
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.shares.give_back(&self.caller);
    }
}

impl ChannelShares {
    /// Waits until the caller may have a channel. Cancel-safe: a permit that a dropped future would have received goes to the next reply.
    pub(super) async fn permit(&self, caller: &str) -> Permit {
        match self.take(caller) {
            Ok(permit) => permit,
            Err(waiting) => match waiting.await {
                Ok(permit) => permit,
                // Without a sender no permit can come. `self` keeps the senders.
                Err(_) => std::future::pending().await,
            },
        }
    }

    /// A permit, or the receiver of one if the caller has to wait.
    fn take(&self, caller: &str) -> Result<Permit, oneshot::Receiver<Permit>> {
        let mut shares = self.lock();
        if shares.may_take(caller) {
            shares.count_taken(caller);
            return Ok(self.permit_of(caller.to_owned()));
        }
        let (sender, receiver) = oneshot::channel();
        shares.waiting.push_back((caller.to_owned(), sender));
        Err(receiver)
    }

    /// A caller's channel is free again. Passes it on to the first reply that waits and whose caller may have another channel.
    fn give_back(&self, caller: &str) {
        self.lock().count_free(caller);
        loop {
            let next = self.lock().next();
            let Some((caller, sender)) = next else { return };
            // Without the lock: if the reply is not published any more, the permit comes back here.
            drop(sender.send(self.permit_of(caller)));
        }
    }

    fn permit_of(&self, caller: String) -> Permit {
        Permit { shares: self.clone(), caller }
    }

    /// Nothing panics while it holds the lock.
    fn lock(&self) -> MutexGuard<'_, Shares> {
        self.shares.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Shares {
    /// Takes the channel for the first reply that waits and whose caller may have another one.
    fn next(&mut self) -> Option<(String, oneshot::Sender<Permit>)> {
        self.waiting.retain(|(_, sender)| !sender.is_closed());
        let next = self.waiting.iter().position(|(caller, _)| self.may_take(caller))?;
        let (caller, sender) = self.waiting.remove(next)?;
        self.count_taken(&caller);
        Some((caller, sender))
    }

    fn may_take(&self, caller: &str) -> bool {
        let most = if self.taken < CHANNELS_MAX / 2 { OF_CALLER_MAX } else { OF_CALLER_SCARCE };
        self.taken < CHANNELS_MAX && self.of_callers.get(caller).is_none_or(|own| *own < most)
    }

    fn count_taken(&mut self, caller: &str) {
        self.taken += 1;
        *self.of_callers.entry(caller.to_owned()).or_default() += 1;
    }

    fn count_free(&mut self, caller: &str) {
        self.taken = self.taken.saturating_sub(1);
        if let Some(own) = self.of_callers.get_mut(caller) {
            *own -= 1;
            if *own == 0 {
                self.of_callers.remove(caller);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The channels that a caller with very many silent queues gets.
    fn take_all(shares: &ChannelShares, caller: &str) -> Vec<Permit> {
        (0..100).filter_map(|_| shares.take(caller).ok()).collect()
    }

    fn has_one(waiting: &mut Result<Permit, oneshot::Receiver<Permit>>) -> bool {
        match waiting {
            Ok(_) => true,
            Err(receiver) => match receiver.try_recv() {
                Ok(permit) => {
                    *waiting = Ok(permit);
                    true
                }
                Err(_) => false,
            },
        }
    }

    #[test]
    fn the_silent_queues_of_seventeen_callers_leave_a_channel_to_another() {
        let shares = ChannelShares::default();
        let taken: Vec<_> = (0..17).map(|at| take_all(&shares, &format!("silent {at}"))).collect();
        let counts: Vec<_> = taken.iter().map(Vec::len).collect();
        assert_eq!(counts[..3], [OF_CALLER_MAX, OF_CALLER_MAX, OF_CALLER_SCARCE], "{counts:?}");
        for reply in 0..100 {
            assert!(shares.take("neighbour").is_ok(), "its reply {reply} waits");
        }
        let others = take_all(&shares, "silent 17");
        assert_eq!(others.len(), OF_CALLER_SCARCE);
        assert_eq!(shares.lock().taken, CHANNELS_MAX);
        assert!(shares.take("neighbour").is_err());
    }

    #[test]
    fn a_channel_goes_to_the_first_reply_whose_caller_may_have_it() {
        let shares = ChannelShares::default();
        let mut busy = take_all(&shares, "busy");
        assert_eq!(busy.len(), OF_CALLER_MAX);
        let [mut first, mut second] = [(); 2].map(|()| shares.take("busy"));
        drop(shares.take("other").unwrap());
        assert!(!has_one(&mut first), "its caller has as many as it may");
        busy.pop();
        assert!(has_one(&mut first) && !has_one(&mut second));
        busy.pop();
        assert!(has_one(&mut second));
        drop((busy, first, second));
        let shares = shares.lock();
        assert_eq!((shares.taken, shares.of_callers.len(), shares.waiting.len()), (0, 0, 0));
    }

    #[tokio::test]
    async fn a_reply_that_waits_no_longer_takes_no_channel() {
        let shares = ChannelShares::default();
        let mut taken = take_all(&shares, "gone");
        assert_eq!(taken.len(), OF_CALLER_MAX);
        // One leaves before a permit comes, one after it has been sent.
        let (before, after) = (shares.take("gone").unwrap_err(), shares.take("gone").unwrap_err());
        let mut last = shares.take("gone");
        drop(before);
        taken.pop();
        assert!(!has_one(&mut last), "it was sent to the one before");
        drop(after);
        assert!(has_one(&mut last));
        drop((taken, last));
        let shares = shares.lock();
        assert_eq!((shares.taken, shares.waiting.len()), (0, 0));
    }

    #[test]
    fn when_channels_are_no_longer_scarce_a_caller_may_have_more() {
        let shares = ChannelShares::default();
        let [busy, _other_busy] = ["silent 0", "silent 1"].map(|caller| take_all(&shares, caller));
        let mut replies: Vec<_> = (0..4).map(|_| shares.take("other")).collect();
        assert_eq!(replies.iter().filter(|reply| reply.is_ok()).count(), OF_CALLER_SCARCE);
        drop(busy);
        assert!(replies.iter_mut().all(has_one));
    }
}

//! Performs the broker's steps, delivers its frames to clients, and breaks connections.

use super::super::agenda::{Happening, MILLI};
use super::super::broker::{ChannelId, ConnectionId, Emitted, Frame, Step};
use super::super::ledger::Letter;
use super::{Env, Owner, letter_of};

/// The most rounds of broker steps without time passing. Further steps happen a moment later.
const ROUNDS_MAX: usize = 24;

/// The most acknowledged deliveries of a channel that may come back after a restart of the broker: it had read their acks but not stored
/// them.
const RESTART_WINDOW: usize = 256;

impl Env {
    /// Performs everything that the broker can do now, in random order.
    pub fn run_broker(&mut self) {
        if self.broker_at.is_none_or(|at| at > self.now) {
            return;
        }
        self.broker_at = None;
        if self.broker_is_down {
            return;
        }
        let mut only_offers = false;
        for _ in 0..ROUNDS_MAX {
            if let Some(only) = self.run_broker_once() {
                only_offers = only;
            } else {
                if let Some(at) = self.broker.next_time() {
                    let at = (at * MILLI).max(self.now + 100 * MILLI);
                    self.wake_broker(at);
                }
                return;
            }
        }
        self.wake_broker(self.now + if only_offers { 100 * MILLI } else { MILLI });
    }

    /// Performs one round. `None` if the broker could do nothing. Otherwise whether it only offered dead letters, which a full queue may
    /// refuse repeatedly.
    fn run_broker_once(&mut self) -> Option<bool> {
        let millis = self.millis();
        let mut steps = self.broker.steps(millis);
        if self.confirms_are_slow {
            steps.retain(|step| !matches!(step, Step::Confirm { .. }));
        }
        let is_offer = |step: &Step| matches!(step, Step::DeadLetter(_) | Step::ApplyDead { .. });
        let only_offers = (!steps.is_empty()).then(|| steps.iter().all(is_offer));
        while !steps.is_empty() {
            let step = steps.swap_remove(self.random.below(steps.len()));
            if let Step::ConsumerTimeout(channel) = step {
                self.note_losses(&[channel], 0);
                self.check_timeout(channel);
            }
            for emitted in self.broker.perform(&step, millis) {
                self.emit(emitted);
            }
        }
        only_offers
    }

    /// Checks that workers settle or return their jobs before the broker's time limit, unless that limit is shorter than theirs.
    fn check_timeout(&mut self, channel: ChannelId) {
        let owner = self.channels.get(&channel).and_then(|connection| self.owners.get(connection));
        // A job may wait for its turn nearly as long as the limit, and then be in a pass that hangs.
        let since = self.now.saturating_sub(2 * self.plan.consumer_timeout_ms * MILLI);
        let hung = self.devices.iter().any(|device| device.hung_at(self.now).is_some_and(|at| at >= since));
        if let Some(Owner::Worker(life)) = owner
            && !self.plan.has_short_timeout()
            && !hung
        {
            let worker = life.worker;
            self.ledger
                .fail("no job is held for too long", || format!("worker-{worker}: {channel:?} was closed"));
        }
    }

    /// A frame goes on its way to its client.
    pub(super) fn emit(&mut self, emitted: Emitted) {
        if let (Some(channel), Frame::Deliver { delivery, .. } | Frame::GetOk { delivery, .. }) =
            (emitted.channel, &emitted.frame)
            && let Some(letter) = letter_of(&delivery.message)
        {
            let tags = self.delivered.entry(channel).or_default();
            tags.push(letter);
            if tags.len() as u64 != delivery.delivery_tag {
                let tag = delivery.delivery_tag;
                self.ledger
                    .fail("the model numbers deliveries without gaps", || format!("{channel:?}: {tag}"));
            }
        }
        if !self.owners.contains_key(&emitted.connection) {
            return;
        }
        let latency = if self.random.chance(2) { 200 * MILLI } else { 2 * MILLI };
        let at = self.soon(latency).max(self.wires.get(&emitted.connection).copied().unwrap_or(0));
        self.wires.insert(emitted.connection, at);
        self.agenda.at(at, Happening::Frame(Box::new(emitted)));
    }

    /// The message of a delivery.
    pub fn delivered_letter(&self, channel: ChannelId, tag: u64) -> Option<Letter> {
        let at = usize::try_from(tag.checked_sub(1)?).ok()?;
        self.delivered.get(&channel)?.get(at).copied()
    }

    /// Records that unsettled deliveries of these channels will be redelivered, and that the last `window` acknowledged ones may be.
    fn note_losses(&mut self, channels: &[ChannelId], window: usize) {
        let mut lost = Vec::new();
        for channel in channels {
            let unacked = self.broker.unacked_tags(*channel);
            lost.extend(unacked.iter().filter_map(|tag| self.delivered_letter(*channel, *tag)));
            let all = self.delivered.get(channel).map_or(&[][..], Vec::as_slice);
            lost.extend_from_slice(&all[all.len().saturating_sub(window)..]);
        }
        if let [only] = lost[..] {
            let job = self.ledger.letter(only).job;
            self.ledger.excuses_mut(job).died_alone += 1;
        }
        lost.iter().for_each(|letter| self.ledger.lost(*letter));
    }

    /// Records deliveries of these channels that will not be redelivered because their queue is gone. Includes deliveries on a channel that
    /// the broker closed: the broker has forgotten them, but the worker held the jobs until now.
    fn note_orphans(&mut self, channels: &[ChannelId]) {
        for letter in channels.iter().filter_map(|channel| self.delivered.get(channel)).flatten() {
            self.ledger.gone_with_its_queue(*letter);
        }
    }

    fn channels_of(&self, connection: ConnectionId) -> Vec<ChannelId> {
        self.channels.iter().filter(|(_, of)| **of == connection).map(|(channel, _)| *channel).collect()
    }

    /// A client gives up its connection. The broker may not have noticed.
    pub fn forget(&mut self, connection: ConnectionId) {
        self.owners.remove(&connection);
    }

    /// The broker finds a connection gone.
    pub fn lose(&mut self, connection: ConnectionId) {
        self.owners.remove(&connection);
        self.wires.remove(&connection);
        let channels = self.channels_of(connection);
        self.note_losses(&channels, 0);
        self.note_orphans(&channels);
        self.broker.lose(connection);
        for channel in channels {
            self.channels.remove(&channel);
            self.delivered.remove(&channel);
        }
        let at = self.soon(MILLI);
        self.wake_broker(at);
    }

    /// Lets the broker read everything that a connection sent, before an orderly close.
    pub fn flush(&mut self, connection: ConnectionId) {
        let millis = self.millis();
        for channel in self.channels_of(connection) {
            for _ in 0..10_000 {
                let receive = Step::Receive(channel);
                if !self.broker.steps(millis).contains(&receive) {
                    break;
                }
                for emitted in self.broker.perform(&receive, millis) {
                    self.emit(emitted);
                }
            }
        }
    }

    /// Restarts the broker's node. Returns the owners of all connections. Messages on their way to readers still arrive: readers use no
    /// acks, and no worker could repeat what they lose.
    pub fn restart_broker(&mut self) -> Vec<Owner> {
        let channels: Vec<_> = self.channels.keys().copied().collect();
        self.note_losses(&channels, RESTART_WINDOW);
        self.note_orphans(&channels);
        let millis = self.millis();
        self.broker.restart(millis);
        self.channels.clear();
        self.delivered.clear();
        self.wires.clear();
        let owners = self.owners.values().copied().collect();
        self.owners.retain(|_, owner| *owner == Owner::Readers);
        owners
    }
}

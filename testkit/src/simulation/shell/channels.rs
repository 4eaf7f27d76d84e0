//! The channels for models' jobs in a session, as in `worker/src/broker/model_channels.rs`: for each model one for its own queue, its large
//! jobs and its quarantine, and one for each further queue.

use vramq_core::ids::{self, JobKey, ModelIndex, QueueIndex};

use crate::simulation::broker::ChannelId;

/// A channel that a model's jobs are delivered on.
#[derive(Debug)]
pub(super) struct JobChannel {
    /// As the core knows it.
    pub(super) id: ids::ChannelId,
    /// As the broker knows it.
    pub(super) wire: ChannelId,
    pub(super) queue: QueueIndex,
    /// The jobs by their delivery tags.
    pub(super) tags: Vec<JobKey>,
    /// Whether the broker closed it, or a newer channel has replaced it.
    is_over: bool,
}

/// All channels of a session. Older channels of a queue are included, because acks for their deliveries may follow.
#[derive(Debug, Default)]
pub(super) struct Channels(Vec<JobChannel>);

impl Channels {
    /// A queue was found, and this channel consumes it from now on.
    pub(super) fn found(&mut self, model: ModelIndex, queue: QueueIndex, wire: ChannelId) {
        self.lost(model, queue);
        let number = self.0.iter().filter(|channel| channel.id.model == model).count();
        let id = ids::ChannelId { model, number: u32::try_from(number).unwrap_or(u32::MAX) };
        self.0.push(JobChannel { id, wire, queue, tags: Vec::new(), is_over: false });
    }

    /// A queue cannot be consumed. Returns its channel, if it had one.
    pub(super) fn lost(&mut self, model: ModelIndex, queue: QueueIndex) {
        let of_queue = |channel: &&mut JobChannel| (channel.id.model, channel.queue) == (model, queue);
        self.0.iter_mut().filter(of_queue).for_each(|channel| channel.is_over = true);
    }

    /// The channel that a queue is consumed on.
    pub(super) fn of(&self, model: ModelIndex, queue: QueueIndex) -> Option<&JobChannel> {
        self.live().find(|channel| (channel.id.model, channel.queue) == (model, queue))
    }

    /// The channel of a model's own queue, which is opened with the session.
    pub(super) fn own(&self, model: ModelIndex) -> Option<ChannelId> {
        Some(self.of(model, QueueIndex::OWN)?.wire)
    }

    pub(super) fn live(&self) -> impl Iterator<Item = &JobChannel> {
        self.0.iter().filter(|channel| !channel.is_over)
    }

    pub(super) fn by_wire(&mut self, wire: ChannelId) -> Option<&mut JobChannel> {
        self.0.iter_mut().find(|channel| channel.wire == wire)
    }

    pub(super) fn by_id(&self, id: ids::ChannelId) -> Option<&JobChannel> {
        self.0.iter().find(|channel| channel.id == id)
    }
}

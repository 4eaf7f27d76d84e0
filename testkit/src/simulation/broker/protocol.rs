//! The messages between clients and the broker: AMQP 0-9-1 without its bytes.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::message::{Message, Millis, Name, Properties};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ConnectionId(pub u32);

/// A channel; unique over all connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ChannelId(pub u32);

/// What a client does on a channel.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Command {
    /// `basic.qos` with `global: false`: for consumers that start later. 0 is no limit.
    Qos {
        prefetch: u16,
    },
    Consume {
        queue: Name,
        tag: Name,
        no_ack: bool,
        priority: i32,
    },
    Cancel {
        tag: Name,
    },
    Get {
        queue: Name,
        no_ack: bool,
    },
    Ack {
        tag: u64,
        multiple: bool,
    },
    /// `basic.nack`; with `multiple: false` also `basic.reject`.
    Nack {
        tag: u64,
        multiple: bool,
        requeue: bool,
    },
    ConfirmSelect,
    Publish {
        exchange: Name,
        routing_key: Name,
        mandatory: bool,
        properties: Box<Properties>,
        body: Arc<[u8]>,
    },
    DeclareQueue {
        name: Name,
        options: Box<QueueOptions>,
    },
    /// A passive `queue.declare`: how many messages are ready, and how many consumers there are.
    Count {
        queue: Name,
    },
    DeleteQueue {
        name: Name,
        if_unused: bool,
        if_empty: bool,
    },
    Purge {
        queue: Name,
    },
    DeclareExchange {
        name: Name,
        kind: ExchangeKind,
    },
    Bind {
        queue: Name,
        exchange: Name,
        routing_key: Name,
    },
    Unbind {
        queue: Name,
        exchange: Name,
        routing_key: Name,
    },
    Close,
}

/// What the broker sends on a channel.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Frame {
    QosOk,
    ConsumeOk {
        tag: Name,
    },
    CancelOk {
        tag: Name,
    },
    /// The broker ends a consumer, because its queue is gone.
    Cancelled {
        tag: Name,
    },
    Deliver {
        tag: Name,
        delivery: Delivery,
    },
    GetOk {
        delivery: Delivery,
        ready: u32,
    },
    GetEmpty,
    /// A mandatory message that no queue takes (312, NO_ROUTE).
    Return {
        message: Arc<Message>,
    },
    Ack {
        tag: u64,
        multiple: bool,
    },
    Nack {
        tag: u64,
        multiple: bool,
    },
    ConfirmSelectOk,
    DeclareOk {
        messages: u32,
        consumers: u32,
    },
    DeleteOk {
        messages: u32,
    },
    PurgeOk {
        messages: u32,
    },
    ExchangeDeclareOk,
    BindOk,
    UnbindOk,
    CloseOk,
    /// The broker closes the channel with this reply code.
    Closed {
        code: u16,
    },
    /// The broker closes the whole connection.
    ConnectionClosed {
        code: u16,
    },
    /// The broker reads no more of this connection (a memory or disk alarm), until `Unblocked`.
    Blocked,
    Unblocked,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Delivery {
    pub delivery_tag: u64,
    pub redelivered: bool,
    /// The header `x-delivery-count` of quorum queues.
    pub delivery_count: Option<u32>,
    pub message: Arc<Message>,
}

/// A frame, and where it goes.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Emitted {
    pub connection: ConnectionId,
    /// None for what concerns the whole connection.
    pub channel: Option<ChannelId>,
    pub frame: Frame,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ExchangeKind {
    Direct,
    Fanout,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Deserialize, Serialize)]
pub enum QueueKind {
    #[default]
    Classic,
    Quorum,
}

/// What happens at `x-max-length`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Overflow {
    #[default]
    DropHead,
    RejectPublish,
}

/// How a queue was declared. Queues are durable.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct QueueOptions {
    pub kind: QueueKind,
    pub max_length: Option<u32>,
    pub overflow: Overflow,
    /// `x-max-priority`, classic queues only.
    pub max_priority: Option<u8>,
    pub message_ttl: Option<Millis>,
    pub dead_letter_exchange: Option<Name>,
    pub dead_letter_routing_key: Option<Name>,
    /// `x-dead-letter-strategy: at-least-once`, quorum queues only. Holds with `reject-publish` alone, with or without a length.
    pub dead_letter_at_least_once: bool,
    /// `x-delivery-limit`, quorum queues only; negative is no limit (4.0).
    pub delivery_limit: Option<i64>,
}

impl QueueOptions {
    /// Whether the broker keeps what it dead-letters until another queue has it. With `drop-head` it falls back to at most once,
    /// whatever the queue was declared with (`dlh/5` of RabbitMQ's `rabbit_quorum_queue.erl`).
    pub fn dead_letters_at_least_once(&self) -> bool {
        self.dead_letter_at_least_once && self.overflow == Overflow::RejectPublish
    }
}

/// Reply codes of AMQP that the broker closes channels and connections with.
pub mod code {
    pub const NOT_FOUND: u16 = 404;
    pub const PRECONDITION_FAILED: u16 = 406;
    pub const CONNECTION_FORCED: u16 = 320;
    pub const NOT_ALLOWED: u16 = 530;
    pub const NOT_IMPLEMENTED: u16 = 540;
}

//! The arguments with which each kind of queue is declared.

use lapin::types::{AMQPValue, FieldTable};
use vramq_schemas::topology::{DEAD_EXCHANGE, RETRY_EXCHANGE};

use crate::config::{BrokerConfig, QueueType};

/// Priorities of a classic job queue are 0 to 9. Each costs the broker an internal queue, and more than ten are not useful.
const CLASSIC_PRIORITY_MAX: i64 = 9;

/// How many times the broker delivers a job before it dead-letters it. This is RabbitMQ 4's default for quorum queues, set explicitly so
/// that 3.x behaves the same. The poison policy handles most jobs long before; this limit is for jobs that kill a worker before it can
/// count them.
const DELIVERY_LIMIT: i64 = 20;

/// A limit that is never reached. Viewing dead letters must not delete them, and workers themselves count the crashes of quarantined jobs.
/// -1 does not work everywhere: RabbitMQ 4 (whose default is 20) reads it as no limit, but 3.10 then drops a message when it is first given
/// back.
const NO_DELIVERY_LIMIT: i64 = i32::MAX as i64;

const LENGTH: &str = "x-max-length";
const OVERFLOW: &str = "x-overflow";
const REJECT_PUBLISH: &str = "reject-publish";

pub(super) fn job_arguments(broker: &BrokerConfig, key: &str) -> FieldTable {
    let mut arguments = typed(broker);
    bound(&mut arguments, broker);
    dead_letters(&mut arguments, broker, key);
    match broker.queue_type {
        QueueType::Quorum => {
            arguments.insert("x-delivery-limit".into(), AMQPValue::LongLongInt(DELIVERY_LIMIT));
        }
        QueueType::Classic => {
            arguments.insert("x-max-priority".into(), AMQPValue::LongLongInt(CLASSIC_PRIORITY_MAX));
        }
    }
    arguments
}

/// The arguments of the job queue, without a length limit: messages here come from a queue that has one. Workers move no more jobs here
/// once it holds `broker.queue_length_max`. `x-overflow` is kept: RabbitMQ dead-letters from a quorum queue at least once only if it is
/// `reject-publish`, and otherwise at most once.
pub(super) fn bulk_arguments(broker: &BrokerConfig, key: &str) -> FieldTable {
    let of_jobs = job_arguments(broker, key);
    let kept = of_jobs.into_iter().filter(|(name, _)| name.as_str() != LENGTH);
    kept.map(|(name, value)| (name.clone(), value.clone()))
        .collect::<std::collections::BTreeMap<_, _>>()
        .into()
}

/// The arguments of the bulk queue, with unlimited deliveries and without priorities. Workers count the crashes of these jobs, and take one
/// at a time.
pub(super) fn quarantine_arguments(broker: &BrokerConfig, key: &str) -> FieldTable {
    let mut arguments = typed(broker);
    dead_letters(&mut arguments, broker, key);
    arguments.insert(OVERFLOW.into(), text(REJECT_PUBLISH));
    if broker.queue_type == QueueType::Quorum {
        arguments.insert("x-delivery-limit".into(), AMQPValue::LongLongInt(NO_DELIVERY_LIMIT));
    }
    arguments
}

/// Always quorum queues. Classic ones would drop a message if its queue is full at the end of the delay.
pub(super) fn delay_arguments(key: &str, ms: u64) -> FieldTable {
    let mut arguments = FieldTable::default();
    arguments.insert("x-queue-type".into(), text(QueueType::Quorum.as_str()));
    arguments.insert("x-message-ttl".into(), AMQPValue::LongLongInt(ms.cast_signed()));
    arguments.insert("x-dead-letter-exchange".into(), text(RETRY_EXCHANGE));
    arguments.insert("x-dead-letter-routing-key".into(), text(key));
    arguments.insert("x-dead-letter-strategy".into(), text("at-least-once"));
    arguments.insert(OVERFLOW.into(), text(REJECT_PUBLISH));
    arguments
}

/// Everything that the broker itself removes from a queue becomes a dead letter: jobs that expire, that were delivered too often, or that a
/// worker rejects.
fn dead_letters(arguments: &mut FieldTable, broker: &BrokerConfig, key: &str) {
    arguments.insert("x-dead-letter-exchange".into(), text(DEAD_EXCHANGE));
    arguments.insert("x-dead-letter-routing-key".into(), text(key));
    if broker.queue_type == QueueType::Quorum {
        // So that dead letters arrive even if the broker fails while it moves them.
        arguments.insert("x-dead-letter-strategy".into(), text("at-least-once"));
    }
}

pub(super) fn dead_arguments(broker: &BrokerConfig) -> FieldTable {
    let mut arguments = typed(broker);
    if broker.queue_type == QueueType::Quorum {
        arguments.insert("x-delivery-limit".into(), AMQPValue::LongLongInt(NO_DELIVERY_LIMIT));
    }
    arguments
}

pub(super) fn reply_arguments(broker: &BrokerConfig) -> FieldTable {
    let mut arguments = typed(broker);
    bound(&mut arguments, broker);
    arguments
}

fn typed(broker: &BrokerConfig) -> FieldTable {
    let mut arguments = FieldTable::default();
    arguments.insert("x-queue-type".into(), text(broker.queue_type.as_str()));
    arguments
}

/// A full queue rejects publishes; it never drops a message.
fn bound(arguments: &mut FieldTable, broker: &BrokerConfig) {
    arguments.insert(LENGTH.into(), AMQPValue::LongLongInt(broker.queue_length_max.into()));
    arguments.insert(OVERFLOW.into(), text(REJECT_PUBLISH));
}

fn text(value: &str) -> AMQPValue {
    AMQPValue::LongString(value.into())
}

#[cfg(test)]
mod tests {
    use vramq_schemas::topology::DELAYS_MS;

    use super::*;

    fn of_broker(queue_type: QueueType) -> BrokerConfig {
        BrokerConfig {
            url: "amqp://localhost".parse().unwrap(),
            connect: std::time::Duration::ZERO,
            declare: true,
            queue_type,
            queue_length_max: 7,
            confirm_s: 1,
            control: true,
        }
    }

    /// RabbitMQ ignores the strategy of a quorum queue whose overflow is `drop-head`, which is the default.
    #[test]
    fn every_quorum_queue_that_dead_letters_does_so_at_least_once() {
        let broker = of_broker(QueueType::Quorum);
        let delays = DELAYS_MS.map(|ms| delay_arguments("m", ms));
        let of_jobs = [job_arguments, bulk_arguments, quarantine_arguments].map(|of| of(&broker, "m"));
        for arguments in of_jobs.iter().chain(&delays) {
            let argument = |name: &str| arguments.inner().get(name);
            assert!(argument("x-dead-letter-exchange").is_some());
            assert_eq!(argument("x-dead-letter-strategy"), Some(&text("at-least-once")), "{arguments:?}");
            assert_eq!(argument(OVERFLOW), Some(&text(REJECT_PUBLISH)), "{arguments:?}");
            // A queue that expires drops its jobs.
            assert!(argument("x-expires").is_none(), "{arguments:?}");
        }
    }

    #[test]
    fn queues_that_take_over_jobs_have_no_length_limit() {
        for queue_type in [QueueType::Quorum, QueueType::Classic] {
            let broker = of_broker(queue_type);
            assert!(job_arguments(&broker, "m").inner().contains_key(LENGTH));
            for arguments in [bulk_arguments(&broker, "m"), quarantine_arguments(&broker, "m")] {
                assert!(!arguments.inner().contains_key(LENGTH), "{arguments:?}");
            }
        }
    }
}

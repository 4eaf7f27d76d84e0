//! Which queues can take replies at all, whatever an operator permits. Pure.

use vramq_schemas::topology::{bulk_queue, dead_queue, jobs_queue, suspects_queue};

use super::direct_address::{self, DIRECT_REPLIES};

/// Why no reply may be sent to the queue `name`, if so: it would come back as a job, or crash the broker's channel that it is
/// published on.
pub(super) fn fault(name: &str) -> Option<String> {
    if is_internal_queue(name) {
        return Some("which is not a queue for replies".to_owned());
    }
    let forgery = direct_address::check(name).err()?;
    Some(format!(
        "which is not an address that RabbitMQ gives a caller for direct replies: {forgery}. Callers write `{DIRECT_REPLIES}` alone, and the \
         broker completes it"
    ))
}

/// Whether a queue cannot take replies: because workers consume or fill it, so that a reply would come back as a job; or
/// because it is the placeholder that the broker replaces by a caller's own address.
pub fn is_internal_queue(name: &str) -> bool {
    let ours =
        [jobs_queue(""), bulk_queue(""), suspects_queue(""), dead_queue(""), "vramq.delay.".to_owned()];
    ours.iter().any(|prefix| name.starts_with(prefix)) || name == DIRECT_REPLIES
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_placeholder_for_direct_replies_is_no_queue_for_replies() {
        assert!(is_internal_queue("amq.rabbitmq.reply-to"));
        assert!(!is_internal_queue("amq.rabbitmq.reply-to.g1h2"));
    }
}

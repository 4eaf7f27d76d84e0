//! Which queues can never take replies, whatever an operator permits. Pure.

use vramq_schemas::topology::{bulk_queue, dead_queue, jobs_queue, suspects_queue};

use super::direct_address::{self, DIRECT_REPLIES};

/// Why the queue `name` must not get replies, if so: they would come back as jobs, go to another queue than the job named, or crash the
/// broker's channel on which they are published.
pub(super) fn fault(name: &str) -> Option<String> {
    if is_internal_queue(name) {
        return Some("which is not a queue for replies".to_owned());
    }
    if name.contains(char::REPLACEMENT_CHARACTER) {
        return Some("which is not UTF-8, or holds U+FFFD: a reply would go to another queue".to_owned());
    }
    let forgery = direct_address::check(name).err()?;
    Some(format!(
        "which is not an address that RabbitMQ gives a caller for direct replies: {forgery}. Callers write `{DIRECT_REPLIES}` alone, and the \
         broker completes it"
    ))
}

/// Whether a queue cannot take replies. Either workers consume or fill it, and a reply would come back as a job; or it is the placeholder
/// that the broker replaces by a caller's own address.
pub fn is_internal_queue(name: &str) -> bool {
    let ours =
        [jobs_queue(""), bulk_queue(""), suspects_queue(""), dead_queue(""), "vramq.delay.".to_owned()];
    ours.iter().any(|prefix| name.starts_with(prefix)) || name == DIRECT_REPLIES
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes that are not UTF-8 are read as U+FFFD, and a queue may have that name.
    #[test]
    fn a_name_that_could_not_be_read_is_no_queue_for_replies() {
        assert!(fault("\u{fffd}").is_some() && fault("replies.\u{fffd}").is_some());
        assert_eq!(fault("replies.ä"), None);
    }

    #[test]
    fn the_placeholder_for_direct_replies_is_no_queue_for_replies() {
        assert!(is_internal_queue("amq.rabbitmq.reply-to"));
        assert!(!is_internal_queue("amq.rabbitmq.reply-to.g1h2"));
    }
}

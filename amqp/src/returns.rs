//! Which publish a returned message belongs to. lapin does not say: see [`Confirms`](crate::confirms::Confirms).

use std::collections::HashMap;

use lapin::BasicProperties;
use lapin::types::ShortString;
use vramq_schemas::fields::integer;
use vramq_schemas::headers::PUBLISH_SEQ;

/// By what a returned message is matched with its publish.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MatchBy {
    /// By a number that the publisher adds as the header `publish-seq`. It makes every copy of a message different.
    PublishSeq,
    /// By the property `message_id`, which the caller keeps unique among the messages in flight. The message is sent as it
    /// is, so a copy that is published again is the same message.
    MessageId,
}

/// What is needed to match the returned messages of a channel.
#[derive(Debug, Default)]
pub(crate) enum Returns {
    /// The number is in the message.
    #[default]
    ByPublishSeq,
    /// The messages without an outcome.
    ByMessageId { sequences: HashMap<ShortString, u64>, ids: HashMap<u64, ShortString> },
}

impl Returns {
    pub(crate) fn new(match_by: MatchBy) -> Self {
        match match_by {
            MatchBy::PublishSeq => Self::ByPublishSeq,
            MatchBy::MessageId => Self::ByMessageId { sequences: HashMap::new(), ids: HashMap::new() },
        }
    }

    /// A message is about to be published, and may be returned.
    pub(crate) fn register(&mut self, sequence: u64, message_id: Option<&ShortString>) {
        if let (Self::ByMessageId { sequences, ids }, Some(id)) = (self, message_id) {
            sequences.insert(id.clone(), sequence);
            ids.insert(sequence, id.clone());
        }
    }

    /// The publish that a returned message belongs to.
    pub(crate) fn sequence_of(&self, returned: &BasicProperties) -> Option<u64> {
        match self {
            Self::ByPublishSeq => {
                let sequence = integer(returned.headers().as_ref()?.inner().get(PUBLISH_SEQ))?;
                u64::try_from(sequence).ok()
            }
            Self::ByMessageId { sequences, .. } => sequences.get(returned.message_id().as_ref()?).copied(),
        }
    }

    /// Forgets a publish whose outcome is known.
    pub(crate) fn forget(&mut self, sequence: u64) {
        if let Self::ByMessageId { sequences, ids } = self
            && let Some(id) = ids.remove(&sequence)
            // The id may belong to a younger message by now.
            && sequences.get(&id) == Some(&sequence)
        {
            sequences.remove(&id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with_id(id: &str) -> BasicProperties {
        BasicProperties::default().with_message_id(id.into())
    }

    #[test]
    fn an_id_that_is_used_again_belongs_to_the_younger_message() {
        let mut returns = Returns::new(MatchBy::MessageId);
        returns.register(1, Some(&"a".into()));
        returns.register(2, Some(&"a".into()));
        returns.register(3, None);
        assert_eq!(returns.sequence_of(&with_id("a")), Some(2));
        returns.forget(1);
        assert_eq!(returns.sequence_of(&with_id("a")), Some(2));
        returns.forget(2);
        assert_eq!(returns.sequence_of(&with_id("a")), None);
        assert_eq!(returns.sequence_of(&BasicProperties::default()), None);
    }
}

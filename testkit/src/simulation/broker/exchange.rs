//! Exchanges and their bindings.

use std::collections::BTreeSet;

use super::message::Name;
use super::protocol::ExchangeKind;

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Exchange {
    pub kind: ExchangeKind,
    /// Queue and routing key.
    pub bindings: BTreeSet<(Name, Name)>,
}

impl Exchange {
    pub fn new(kind: ExchangeKind) -> Self {
        Self { kind, bindings: BTreeSet::new() }
    }

    /// The queues that a message with this key goes to, each once.
    pub fn route(&self, routing_key: &Name) -> BTreeSet<Name> {
        self.bindings
            .iter()
            .filter(|(_, key)| self.kind == ExchangeKind::Fanout || key == routing_key)
            .map(|(queue, _)| queue.clone())
            .collect()
    }
}

//! The turns of consumers: by priority, and in rotation among equals.

use super::ConsumerKey;

/// First come, first served within a priority; higher priorities first.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Rotation(Vec<(i32, ConsumerKey)>);

impl Rotation {
    /// To the end of its priority's line.
    pub fn push(&mut self, priority: i32, key: ConsumerKey) {
        let at = self.0.iter().position(|(other, _)| *other < priority).unwrap_or(self.0.len());
        self.0.insert(at, (priority, key));
    }

    /// To the front of its priority's line.
    pub fn push_front(&mut self, priority: i32, key: ConsumerKey) {
        let at = self.0.iter().position(|(other, _)| *other <= priority).unwrap_or(self.0.len());
        self.0.insert(at, (priority, key));
    }

    pub fn first(&self) -> Option<&ConsumerKey> {
        self.0.first().map(|(_, key)| key)
    }

    pub fn pop(&mut self) -> Option<(i32, ConsumerKey)> {
        (!self.0.is_empty()).then(|| self.0.remove(0))
    }

    pub fn contains(&self, key: &ConsumerKey) -> bool {
        self.0.iter().any(|(_, other)| other == key)
    }

    pub fn retain(&mut self, mut keep: impl FnMut(&ConsumerKey) -> bool) {
        self.0.retain(|(_, key)| keep(key));
    }

    /// Takes those out for which `leaves` holds, in order.
    pub fn split(&mut self, mut leaves: impl FnMut(&ConsumerKey) -> bool) -> Vec<(i32, ConsumerKey)> {
        let (out, stay) = std::mem::take(&mut self.0).into_iter().partition(|(_, key)| leaves(key));
        self.0 = stay;
        out
    }

    pub fn keys(&self) -> impl Iterator<Item = &ConsumerKey> {
        self.0.iter().map(|(_, key)| key)
    }
}

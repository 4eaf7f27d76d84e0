//! Whether the gateway still takes requests, or drains.

/// Whether the gateway serves, drains, or ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Drain {
    Serving,
    /// Takes no new requests.
    Draining,
    /// Requests that still wait are answered with 503.
    Over,
}

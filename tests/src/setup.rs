//! The set-ups that a test body runs on: both kinds of queue, JSON and bincode, for some tests MessagePack.

use anyhow::Context as _;
use lapin::types::{AMQPValue, FieldTable};
use vramq_schemas::Encoding;

/// The kind of queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Queue {
    Quorum,
    Classic,
}

/// One way to run a test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Setup {
    pub queue: Queue,
    pub encoding: Encoding,
}

/// Why a test failed, shown as its causes alone.
pub struct Failed(anyhow::Error);

impl From<anyhow::Error> for Failed {
    fn from(error: anyhow::Error) -> Self {
        Self(error)
    }
}

impl std::fmt::Debug for Failed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:#}", self.0)
    }
}

/// Whether tests run at the full length that takes minutes: `VRAMQ_TEST_FULL=1`.
pub fn full() -> bool {
    std::env::var_os("VRAMQ_TEST_FULL").is_some_and(|value| value == "1")
}

/// A number in the environment, if it is set.
///
/// # Errors
/// It is not a number.
pub fn number_from(name: &str) -> anyhow::Result<Option<u64>> {
    let value = std::env::var(name).ok();
    value.map(|value| value.parse().with_context(|| format!("{name}={value} is not a number"))).transpose()
}

impl Setup {
    pub const fn new(queue: Queue, encoding: Encoding) -> Self {
        Self { queue, encoding }
    }
}

impl Queue {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Quorum => "quorum",
            Self::Classic => "classic",
        }
    }

    /// Arguments of a queue of this kind.
    pub fn arguments(self) -> FieldTable {
        let mut arguments = FieldTable::default();
        arguments.insert("x-queue-type".into(), AMQPValue::LongString(self.as_str().into()));
        arguments
    }
}

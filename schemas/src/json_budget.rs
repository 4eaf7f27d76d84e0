//! Limits the bytes of a reply's JSON outputs. Workers count exactly as clients do while they read, so workers publish no reply that its
//! caller cannot read.

use std::cell::Cell;
use std::io;
use std::ops::Add;

use serde::de;
use serde_json::Value;

use crate::limits::BODY_BYTES_MAX;

/// The most memory that the JSON outputs of one reply may take once parsed. A parsed value can take a hundred times its text (`{"":0}`), so
/// this bounds what a hostile reply costs.
const MEMORY_MAX: usize = 4 * BODY_BYTES_MAX;

/// The most bytes of the outputs as JSON text. More do not fit a JSON body. In MessagePack one byte may become six bytes of text.
pub(crate) const TEXT_MAX: usize = BODY_BYTES_MAX;

/// The peak memory that serde_json allocates: for a value in a list that doubles, for a list's first four items, and for an object's first
/// tree node.
const VALUE: usize = 96;
const LIST: usize = 4 * 32;
const OBJECT: usize = 704;

/// What JSON values take.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct JsonSize {
    /// Bytes as JSON text.
    pub text: usize,
    /// An upper bound of the bytes that they take once parsed.
    pub memory: usize,
}

/// JSON outputs that no client reads in one reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the JSON outputs take {} bytes as text (the limit of a reply is {TEXT_MAX}) and {} bytes in memory (the limit is {MEMORY_MAX}; \
     {VALUE} for each value, {LIST} more for a list, {OBJECT} more for an object, and the text); send large results as bytes or by \
     reference",
    .0.text, .0.memory
)]
pub struct JsonTooLarge(pub JsonSize);

impl JsonSize {
    /// Clients can read every JSON reply of at most this many bytes, whatever it contains: no byte costs more memory than the one that
    /// begins an object.
    pub const TEXT_ALWAYS_READABLE: usize = MEMORY_MAX / (1 + VALUE + OBJECT);

    /// What a value takes. Costs as much as writing it.
    pub fn of(value: &Value) -> Self {
        let mut meter = Meter::default();
        // A value always has a text, and the meter takes all of it.
        let _ = serde_json::to_writer(&mut meter, value);
        meter.size()
    }

    fn of_text(text: &str) -> Self {
        let mut meter = Meter::default();
        meter.read(text.as_bytes());
        meter.size()
    }

    /// # Errors
    /// No client reads a reply with outputs that take so much together.
    pub fn check(self) -> Result<(), JsonTooLarge> {
        if self.text <= TEXT_MAX && self.memory <= MEMORY_MAX { Ok(()) } else { Err(JsonTooLarge(self)) }
    }
}

impl Add for JsonSize {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self { text: self.text.saturating_add(other.text), memory: self.memory.saturating_add(other.memory) }
    }
}

/// Measures one value by its text.
#[derive(Default)]
struct Meter {
    text: usize,
    unfolded: usize,
    in_string: bool,
    is_escaped: bool,
}

impl Meter {
    fn read(&mut self, text: &[u8]) {
        self.text += text.len();
        for byte in text {
            match byte {
                _ if self.is_escaped => self.is_escaped = false,
                b'\\' => self.is_escaped = self.in_string,
                b'"' => self.in_string = !self.in_string,
                _ if self.in_string => {}
                b',' => self.unfolded += VALUE,
                b'[' => self.unfolded += VALUE + LIST,
                b'{' => self.unfolded += VALUE + OBJECT,
                _ => {}
            }
        }
    }

    fn size(&self) -> JsonSize {
        JsonSize { text: self.text, memory: self.text + VALUE + self.unfolded }
    }
}

impl io::Write for Meter {
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        self.read(text);
        Ok(text.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The JSON outputs of a reply that is being read.
#[derive(Default)]
pub(crate) struct JsonBudget(Cell<JsonSize>);

impl JsonBudget {
    /// Parses the text of one more output.
    pub(crate) fn parse<E: de::Error>(&self, text: &str) -> Result<Value, E> {
        let size = self.0.get() + JsonSize::of_text(text);
        size.check().map_err(E::custom)?;
        self.0.set(size);
        serde_json::from_str(text).map_err(E::custom)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;
    use crate::{Encoding, Output, Outputs, codec};

    const ENCODINGS: [Encoding; 3] = [Encoding::Json, Encoding::MessagePack, Encoding::Bincode];

    fn reply(outputs: Vec<Output>) -> Outputs {
        Outputs { model: "m".to_owned(), outputs }
    }

    /// Whether the outputs are within the bounds, and whether every client reads a reply with them.
    fn written_and_read(outputs: &Outputs) -> (bool, bool) {
        let sizes = outputs.outputs.iter().map(|output| match output {
            Output::Json(value) => JsonSize::of(value),
            _ => JsonSize::default(),
        });
        let is_written = sizes.fold(JsonSize::default(), Add::add).check().is_ok();
        let is_read = ENCODINGS.into_iter().all(|encoding| {
            let body = codec::encode(outputs, encoding).unwrap();
            // A worker publishes no larger body, whatever is in it.
            body.len() > BODY_BYTES_MAX || codec::decode::<Outputs>(&body, encoding).is_ok()
        });
        (is_written, is_read)
    }

    /// So many values that they are just within the bound, or just above it.
    #[test]
    fn a_worker_writes_what_a_client_reads_up_to_the_last_value() {
        for value in [json!(0), json!(-0.123_456_789_012_345_6), json!([]), json!({}), json!({"key": null})] {
            let each = JsonSize::of(&json!([value, value])).memory - JsonSize::of(&json!([value])).memory;
            let most = (MEMORY_MAX - JsonSize::of(&json!([])).memory) / each;
            let list = |count: usize| Output::Json(vec![value.clone(); count].into());
            for (count, is_within) in [(most - 1, true), (most, true), (most + 2, false)] {
                let outputs = reply(vec![list(count)]);
                assert_eq!(written_and_read(&outputs), (is_within, is_within), "{count} of {value}");
            }
            // All outputs of a reply share the bound.
            let outputs = reply(vec![list(most / 2), list(most / 2), list(9)]);
            assert_eq!(written_and_read(&outputs), (false, false), "three lists of {value}");
        }
    }

    #[test]
    fn a_text_of_escapes_is_measured_as_it_is_read() {
        // MessagePack has a byte for what JSON needs six for.
        for (count, is_within) in [(TEXT_MAX / 6 - 1, true), (TEXT_MAX / 6 + 1, false)] {
            let outputs = reply(vec![Output::Json("\u{1}".repeat(count).into())]);
            let (is_written, is_read) = written_and_read(&outputs);
            assert_eq!((is_written, is_read), (is_within, is_within), "{count}");
        }
    }

    #[test]
    fn nothing_unfolds_more_than_what_is_always_readable() {
        for dearest in ["{}", "{},", "[{},{}]", "[[],[]]"] {
            let text = dearest.repeat(JsonSize::TEXT_ALWAYS_READABLE / dearest.len());
            assert!(JsonSize::of_text(&text).check().is_ok(), "{dearest}");
        }
    }

    /// Values that unfold much, as deep as a few levels.
    fn value() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<i64>().prop_map(Value::from),
            any::<f64>().prop_map(Value::from),
            ".{0,9}".prop_map(Value::from),
            "[\\x00-\\x20\"\\\\,\\[{]{0,9}".prop_map(Value::from),
        ];
        leaf.prop_recursive(4, 64, 8, |inner| {
            let object = prop::collection::btree_map("[a\"\\\\{]{0,3}", inner.clone(), 0..8);
            let list = prop::collection::vec(inner, 0..8);
            prop_oneof![
                list.prop_map(Value::from),
                object.prop_map(|map| Value::Object(map.into_iter().collect()))
            ]
        })
    }

    proptest! {
        // Each case is some dozens of megabytes.
        #![proptest_config(ProptestConfig::with_cases(8))]

        /// Replies about as large as a client reads: what is within the bounds is read.
        #[test]
        fn values_within_the_bounds_are_read(values in prop::collection::vec(value(), 1..6), more in 0usize..3) {
            for value in &values {
                prop_assert_eq!(JsonSize::of(value), JsonSize::of_text(&value.to_string()));
            }
            let each = Value::from(values);
            let copies = MEMORY_MAX / JsonSize::of(&each).memory - 1 + more;
            let (is_written, is_read) = written_and_read(&reply(vec![Output::Json(vec![each; copies].into())]));
            prop_assert!(is_read || !is_written);
        }
    }
}

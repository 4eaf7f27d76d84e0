//! Reads texts, and lists of bounded length.

use std::fmt;

use serde::Deserializer;
use serde::de::{self, DeserializeSeed, SeqAccess, Visitor};

use crate::limits::ITEMS_MAX;

/// Reads a text that is borrowed first, so that its length is checked before anything is allocated (see [`codec`](crate::codec)).
pub(crate) fn text<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    Text.deserialize(deserializer)
}

/// Like [`text`], but accepts nothing that only resembles a text: MessagePack also has bytes.
pub(crate) struct Text;

impl<'de> DeserializeSeed<'de> for Text {
    type Value = String;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<String, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl Visitor<'_> for Text {
    type Value = String;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a text")
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<String, E> {
        Ok(text.to_owned())
    }
}

/// A bounded list under construction; shared with replies, which have the same cap.
pub(crate) struct Items<S> {
    pub(crate) name: &'static str,
    /// Reads one item.
    pub(crate) seed: S,
}

impl<'de, S: DeserializeSeed<'de> + Copy> Visitor<'de> for Items<S> {
    type Value = Vec<S::Value>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a list of at most {ITEMS_MAX} {}", self.name)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Vec<S::Value>, A::Error> {
        let mut items = Vec::new();
        loop {
            let at = items.len();
            let item = seq
                .next_element_seed(self.seed)
                .map_err(|e| de::Error::custom(format_args!("{}[{at}]: {e}", self.name)))?;
            match item {
                None => return Ok(items),
                Some(_) if at == ITEMS_MAX => return Err(de::Error::invalid_length(at + 1, &self)),
                Some(item) => items.push(item),
            }
        }
    }
}

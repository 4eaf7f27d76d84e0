//! Computes the cost of an item, in the unit that the model's memory grows with.

use std::str::FromStr;

use super::item::Item;
use super::media;

/// What the memory of a pass goes by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Unit {
    Items,
    Bytes,
    Characters,
    /// Of images, read from their headers.
    Pixels,
    /// Of audio, read from its headers.
    Seconds,
}

impl Unit {
    const ALL: [Self; 5] = [Self::Items, Self::Bytes, Self::Characters, Self::Pixels, Self::Seconds];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Items => "items",
            Self::Bytes => "bytes",
            Self::Characters => "characters",
            Self::Pixels => "pixels",
            Self::Seconds => "seconds",
        }
    }

    /// All of them, for messages.
    pub fn names() -> String {
        Self::ALL.map(Self::as_str).join(", ")
    }
}

impl FromStr for Unit {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|unit| unit.as_str() == text);
        found.ok_or_else(|| format!("is {text:?}; it must be one of {}", Self::names()))
    }
}

/// An item's costs. An item has no cost in a unit that does not apply to it: a text has no pixels.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Costs {
    bytes: u64,
    characters: Option<u64>,
    pixels: Option<u64>,
    seconds: Option<f64>,
}

impl Costs {
    /// Reads at most the headers of images and audio; decodes nothing.
    pub fn new(item: &Item) -> Self {
        let (bytes, characters, data) = match item {
            Item::Text(text) => (text.len(), Some(text.chars().count() as u64), None),
            Item::Bytes { bytes, .. } => (bytes.len(), None, Some(&bytes[..])),
            Item::Json(value) => {
                let text = value.as_str();
                (text.len(), Some(text.chars().count() as u64), None)
            }
            Item::Uri(uri) => (uri.len(), None, None),
        };
        Self {
            bytes: bytes as u64,
            characters,
            pixels: data.and_then(media::pixels),
            seconds: data.and_then(media::seconds),
        }
    }

    /// The cost in one unit, if the item has it.
    pub fn of(&self, unit: Unit) -> Option<f64> {
        match unit {
            Unit::Items => Some(1.0),
            Unit::Bytes => Some(self.bytes as f64),
            Unit::Characters => self.characters.map(|count| count as f64),
            Unit::Pixels => self.pixels.map(|count| count as f64),
            Unit::Seconds => self.seconds,
        }
    }
}

/// The cost of a pass, if each of its items has one in this unit.
pub fn of_pass<'a>(items: impl IntoIterator<Item = &'a Costs>, unit: Unit) -> Option<f64> {
    items.into_iter().map(|costs| costs.of(unit)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn items_cost_what_they_have() {
        let text = Costs::new(&Item::Text("gr\u{fc}n".to_owned()));
        assert_eq!(text.of(Unit::Characters), Some(4.0));
        assert_eq!(text.of(Unit::Bytes), Some(5.0));
        assert_eq!(text.of(Unit::Items), Some(1.0));
        assert_eq!((text.of(Unit::Pixels), text.of(Unit::Seconds)), (None, None));
        let bytes = Costs::new(&Item::Bytes { media_type: None, bytes: vec![0; 7] });
        assert_eq!(bytes.of(Unit::Bytes), Some(7.0));
        assert_eq!(bytes.of(Unit::Characters), None);
    }

    #[test]
    fn a_pass_costs_the_sum_if_all_items_have_a_cost() {
        let [one, two] = ["abc", "de"].map(|text| Costs::new(&Item::Text(text.to_owned())));
        let image = Costs::new(&Item::Bytes { media_type: None, bytes: vec![0; 7] });
        assert_eq!(of_pass([&one, &two], Unit::Characters), Some(5.0));
        assert_eq!(of_pass([&one, &image], Unit::Characters), None);
        assert_eq!(of_pass([&one, &image], Unit::Bytes), Some(10.0));
    }
}

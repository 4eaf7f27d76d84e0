//! What a program takes: kinds of items, and media types of bytes.

use serde::{Deserialize, Serialize};

use super::item::Item;
use super::protocol::ItemKind;

/// The longest media type: the two names of RFC 6838, 4.2.
const MEDIA_BYTES_MAX: usize = 127 + 1 + 127;

/// Other names of media types that [`Item::bytes`] recognises.
const ALIASES: [(&str, &str); 10] = [
    ("image/jpg", "image/jpeg"),
    ("image/x-ms-bmp", "image/bmp"),
    ("audio/x-wav", "audio/wav"),
    ("audio/wave", "audio/wav"),
    ("audio/vnd.wave", "audio/wav"),
    ("audio/x-flac", "audio/flac"),
    ("audio/mp3", "audio/mpeg"),
    ("audio/opus", "audio/ogg"),
    ("audio/vorbis", "audio/ogg"),
    ("application/ogg", "audio/ogg"),
];

/// What a program takes, as its `ready` says. Empty: everything.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Accepts(pub Vec<Accepted>);

/// One thing that a program takes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Accepted {
    Kind(ItemKind),
    /// Bytes of one media type, `image/png`, or of several, `image/*`. In lower case.
    Media(String),
}

impl Accepts {
    /// Whether the program names this kind. One that takes everything names none.
    pub fn names(&self, kind: ItemKind) -> bool {
        self.0.contains(&Accepted::Kind(kind))
    }

    /// Why the program does not take an item: what the item is, and what the program takes. A program that takes any media type also takes
    /// bytes of an unknown media type.
    pub fn refusal(&self, item: &Item) -> Option<String> {
        if self.0.is_empty() || self.names(item.kind()) {
            return None;
        }
        let is_by_media = self.0.iter().any(|accepted| matches!(accepted, Accepted::Media(_)));
        let what = match item {
            Item::Bytes { media_type, .. } if is_by_media => {
                let media_type = media_type.as_deref()?;
                if self.0.iter().any(|accepted| accepted.is_of(media_type)) {
                    return None;
                }
                media_type.to_owned()
            }
            other => format!("of kind {}", other.kind().as_str()),
        };
        let takes: Vec<_> = self.0.iter().map(Accepted::as_str).collect();
        Some(format!("is {what}; the model takes {}", takes.join(", ")))
    }
}

impl Accepted {
    fn as_str(&self) -> &str {
        match self {
            Self::Kind(kind) => kind.as_str(),
            Self::Media(media_type) => media_type,
        }
    }

    /// Whether bytes of this media type are meant.
    fn is_of(&self, media_type: &str) -> bool {
        let Self::Media(meant) = self else { return false };
        let (meant, found) = (canonical(meant), canonical(media_type));
        match meant.strip_suffix("/*") {
            Some("*") => true,
            Some(group) => found.split_once('/').is_some_and(|(of, _)| of == group),
            None => meant == found,
        }
    }
}

fn canonical(media_type: &str) -> &str {
    ALIASES.iter().find(|(alias, _)| *alias == media_type).map_or(media_type, |(_, name)| *name)
}

impl TryFrom<String> for Accepted {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        if let Some(kind) = ItemKind::ALL.into_iter().find(|kind| kind.as_str() == text) {
            return Ok(Self::Kind(kind));
        }
        // Media types of items have no parameters, so a type with parameters would match nothing.
        if text.contains(';') {
            return Err(format!(
                "`accepts` has {text:?}, which has parameters after `;`: name the media type alone, as image/png"
            ));
        }
        let is_name = |name: &str| !name.is_empty() && name.chars().all(|c| c.is_ascii_graphic() && c != '/');
        let is_media = text.split_once('/').is_some_and(|(group, name)| is_name(group) && is_name(name));
        if is_media && text.len() <= MEDIA_BYTES_MAX {
            return Ok(Self::Media(text.to_ascii_lowercase()));
        }
        let kinds = ItemKind::ALL.map(ItemKind::as_str).join(", ");
        Err(format!(
            "`accepts` has {text:?}, which is none of {kinds}, and no media type as image/png or image/*"
        ))
    }
}

impl From<Accepted> for String {
    fn from(accepted: Accepted) -> Self {
        accepted.as_str().to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn accepts(texts: &[&str]) -> Accepts {
        Accepts(texts.iter().map(|text| Accepted::try_from((*text).to_owned()).unwrap()).collect())
    }

    fn bytes(media_type: Option<&str>) -> Item {
        Item::Bytes { media_type: media_type.map(str::to_owned), bytes: Vec::new() }
    }

    #[test]
    fn a_refusal_names_what_the_item_is_and_what_the_model_takes() {
        let text = Item::Text("a".to_owned());
        assert_eq!(Accepts::default().refusal(&text), None);
        let audio = accepts(&["json", "audio/*"]);
        let refusal = |item: &Item| audio.refusal(item).unwrap();
        assert_eq!(refusal(&text), "is of kind text; the model takes json, audio/*");
        assert_eq!(refusal(&bytes(Some("image/png"))), "is image/png; the model takes json, audio/*");
        assert_eq!(audio.refusal(&bytes(Some("audio/flac"))), None);
        assert_eq!(audio.refusal(&bytes(None)), None, "the program finds out");
        assert_eq!(
            accepts(&["text"]).refusal(&bytes(None)).unwrap(),
            "is of kind bytes; the model takes text"
        );
        assert_eq!(accepts(&["bytes", "image/png"]).refusal(&bytes(Some("audio/wav"))), None);
    }

    #[test]
    fn media_types_have_aliases_and_groups() {
        for (meant, found, is_of) in [
            ("image/jpg", "image/jpeg", true),
            ("audio/x-wav", "audio/wav", true),
            ("audio/opus", "audio/ogg", true),
            ("audio/vorbis", "audio/ogg", true),
            ("application/ogg", "audio/ogg", true),
            ("audio/opus", "audio/mpeg", false),
            ("IMAGE/PNG", "image/png", true),
            ("*/*", "audio/wav", true),
            ("image/*", "audio/wav", false),
            ("image/png", "image/jpeg", false),
        ] {
            assert_eq!(accepts(&[meant]).refusal(&bytes(Some(found))).is_none(), is_of, "{meant} {found}");
        }
    }

    #[test]
    fn an_entry_that_is_neither_kind_nor_media_type_is_named() {
        let read = |text: &str| serde_json::from_str::<Accepts>(text);
        assert_eq!(read(r#"["text", "image/*"]"#).unwrap(), accepts(&["text", "image/*"]));
        assert_eq!(serde_json::to_string(&accepts(&["uri", "image/*"])).unwrap(), r#"["uri","image/*"]"#);
        for wrong in ["", "texts", "image/", "/png", "image/a/b", "image/a b"] {
            let error = read(&serde_json::to_string(&[wrong]).unwrap()).unwrap_err().to_string();
            assert!(error.contains("which is none of text, bytes, json, uri"), "{error}");
        }
        for wrong in ["audio/ogg;codecs=opus", "image/png; q=1"] {
            let error = read(&serde_json::to_string(&[wrong]).unwrap()).unwrap_err().to_string();
            assert!(error.contains("has parameters after `;`"), "{error}");
        }
    }
}

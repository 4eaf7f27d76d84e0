//! Detects when the file of API keys has stopped changing. A file that is still being written may lack keys without being invalid.

use sha2::{Digest as _, Sha256};

/// Tells the texts of the file apart. No text is kept: somebody may have written a key into a comment.
pub(super) type TextDigest = [u8; 32];

pub(super) fn digest_of(text: &str) -> TextDigest {
    Sha256::digest(text).into()
}

/// Accepts a changed text only when two checks in a row saw the same text.
#[derive(Debug)]
pub(super) struct StableFile {
    known: Option<TextDigest>,
    /// A changed text that only the last check has seen.
    seen: Option<TextDigest>,
}

impl StableFile {
    /// `known`: the text that the gateway has read before, if it has read one.
    pub(super) fn new(known: Option<TextDigest>) -> Self {
        Self { known, seen: None }
    }

    /// Whether a text is new, and the check before saw the same text.
    pub(super) fn is_new(&mut self, text: &str) -> bool {
        let text = Some(digest_of(text));
        if self.known == text {
            self.seen = None;
            return false;
        }
        if self.seen != text {
            self.seen = text;
            return false;
        }
        self.known = self.seen.take();
        true
    }

    /// The file cannot be read, so the next text counts as new. Returns whether a text was known.
    pub(super) fn forget(&mut self) -> bool {
        self.seen = None;
        self.known.take().is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_being_written_is_not_taken() {
        let mut file = StableFile::new(Some(digest_of("old")));
        for (text, is_new) in [
            ("old", false),
            ("", false),
            ("ne", false),
            ("new", false),
            ("new", true),
            ("new", false),
            ("", false),
            ("new", false),
            ("", false),
            ("", true),
        ] {
            assert_eq!(file.is_new(text), is_new, "{text}");
        }
        assert!(file.forget() && !file.forget());
        assert!(!file.is_new("") && file.is_new(""));
    }
}

//! Finds out when the file of API keys has stopped changing. A file that is still being written may lack keys and yet have no fault.

/// Tells that a file has changed, and is complete: its text was the same at two looks in a row.
#[derive(Debug)]
pub(super) struct StableFile {
    known: Option<String>,
    /// What is not known yet, and was there at the last look.
    seen: Option<String>,
}

impl StableFile {
    pub(super) fn new(known: Option<String>) -> Self {
        Self { known, seen: None }
    }

    /// Whether a text is new, and was the same at the look before.
    pub(super) fn is_new(&mut self, text: &str) -> bool {
        if self.known.as_deref() == Some(text) {
            self.seen = None;
            return false;
        }
        if self.seen.as_deref() != Some(text) {
            self.seen = Some(text.to_owned());
            return false;
        }
        self.known = self.seen.take();
        true
    }

    /// The file cannot be read: whatever comes next is new. Whether something was known.
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
        let mut file = StableFile::new(Some("old".to_owned()));
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

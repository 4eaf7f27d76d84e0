//! Tells an error that the log does not have yet from one that comes again with each attempt.

/// The error that the log has last. What is tried again and again fails with the same error, which is logged once.
#[derive(Debug, Default)]
pub struct LastError(Option<String>);

impl LastError {
    /// Whether an error differs from the one before it: only then it is to be logged.
    pub fn is_new(&mut self, error: &str) -> bool {
        let is_new = self.0.as_deref() != Some(error);
        if is_new {
            self.0 = Some(error.to_owned());
        }
        is_new
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_is_new_until_it_comes_again() {
        let mut last = LastError::default();
        let errors = ["refused", "refused", "lost", "lost", "refused"];
        assert_eq!(errors.map(|error| last.is_new(error)), [true, false, true, false, true]);
    }
}

//! Decides whether an error is logged: once, and not again at each attempt that fails with the same error.

/// The last error that was logged.
#[derive(Debug, Default)]
pub struct LastError(Option<String>);

impl LastError {
    /// Notes an error. Returns whether it differs from the one before, and so is to be logged.
    pub fn note(&mut self, error: &str) -> bool {
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
        assert_eq!(errors.map(|error| last.note(error)), [true, false, true, false, true]);
    }
}

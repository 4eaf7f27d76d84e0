//! Why `vramq control` ended early, in words and as its exit code; and how long it waits for the broker.

use std::io;
use std::time::Duration;

use anyhow::{Error, Result};
use tokio::time::timeout;

use crate::broker::is_refusal;
use crate::exit;

/// How long the broker may take to declare the queue for answers, and to take the command. A healthy broker takes fractions of a second.
/// One that is short of memory or disk reads nothing that is published until that ends.
pub(super) const BROKER_MAX: Duration = Duration::from_secs(10);

/// The broker gives no answer.
#[derive(Debug, thiserror::Error)]
pub(super) enum NoAnswer {
    #[error(
        "the broker takes no commands now: it is short of memory or disk. Workers may still get this one when that is over"
    )]
    Blocked,
    #[error("the broker does not answer. If the command has reached it, workers may get it nevertheless")]
    Silent,
    #[error("the connection to the broker is lost")]
    Lost,
}

/// Waits for `work`, for `limit` at most. `is_blocked` says whether the broker has said that it takes no publishes.
pub(super) async fn within<T>(
    limit: Duration,
    is_blocked: impl Fn() -> bool,
    work: impl Future<Output = Result<T>>,
) -> Result<T> {
    match timeout(limit, work).await {
        Ok(done) => done,
        Err(_) if is_blocked() => Err(NoAnswer::Blocked.into()),
        Err(_) => Err(NoAnswer::Silent.into()),
    }
}

/// Why a command ended early. lapin's texts contain those of their causes, so none is repeated.
pub(super) fn in_words(error: &Error) -> String {
    let mut text = error.to_string();
    for cause in error.chain().skip(1) {
        let cause = cause.to_string();
        if !text.ends_with(&cause) {
            text += &format!(": {cause}");
        }
    }
    text
}

/// The exit code of a command that ended early.
pub(super) fn code(error: &Error) -> u8 {
    if let Some(error) = error.downcast_ref::<io::Error>() {
        return if error.kind() == io::ErrorKind::BrokenPipe { exit::BROKEN_PIPE } else { exit::FAILED };
    }
    if let Some(error) = error.downcast_ref::<NoAnswer>() {
        return if matches!(error, NoAnswer::Blocked) { exit::REFUSED } else { exit::UNREACHABLE };
    }
    match error.downcast_ref::<lapin::Error>() {
        Some(error) if !is_refusal(error) => exit::UNREACHABLE,
        Some(_) | None => exit::REFUSED,
    }
}

#[cfg(test)]
mod tests {
    use anyhow::Context as _;
    use lapin::ErrorKind;
    use lapin::protocol::{AMQPError, AMQPErrorKind, AMQPHardError, AMQPSoftError};

    use super::*;

    fn protocol_error(kind: impl Into<AMQPErrorKind>) -> lapin::Error {
        ErrorKind::ProtocolError(AMQPError::new(kind.into(), "why".into())).into()
    }

    #[tokio::test]
    async fn a_broker_that_takes_nothing_is_not_waited_for() {
        let limit = Duration::from_millis(10);
        for (is_blocked, expected) in [(true, exit::REFUSED), (false, exit::UNREACHABLE)] {
            let given_up = within(limit, || is_blocked, std::future::pending::<Result<()>>()).await;
            assert_eq!(code(&given_up.unwrap_err()), expected);
        }
        let taken = within(Duration::from_secs(3600), || true, std::future::ready(Ok(7))).await;
        assert_eq!(taken.unwrap(), 7);
    }

    #[test]
    fn a_broker_that_goes_away_has_refused_nothing() {
        for (error, expected) in [
            (protocol_error(AMQPSoftError::NOTFOUND), exit::REFUSED),
            (protocol_error(AMQPSoftError::ACCESSREFUSED), exit::REFUSED),
            (protocol_error(AMQPHardError::NOTALLOWED), exit::REFUSED),
            (protocol_error(AMQPHardError::CONNECTIONFORCED), exit::UNREACHABLE),
            (ErrorKind::MissingHeartbeatError.into(), exit::UNREACHABLE),
        ] {
            let shown = format!("{error:?}");
            let error = Err::<(), _>(error).context("publish").unwrap_err();
            assert_eq!(code(&error), expected, "{shown}");
        }
        assert_eq!(code(&NoAnswer::Lost.into()), exit::UNREACHABLE);
    }

    #[test]
    fn a_cause_is_named_once() {
        let error = Err::<(), _>(protocol_error(AMQPSoftError::NOTFOUND)).context("publish").unwrap_err();
        let text = in_words(&error);
        assert!(text.starts_with("publish: ") && text.ends_with("why"), "{text}");
        assert_eq!(text.matches("why").count(), 1, "{text}");
        let error = Err::<(), _>(io::Error::other("full")).context("write the answers").unwrap_err();
        assert_eq!(in_words(&error), "write the answers: full");
    }

    #[test]
    fn an_output_that_is_closed_is_no_fault() {
        for (kind, expected) in
            [(io::ErrorKind::BrokenPipe, exit::BROKEN_PIPE), (io::ErrorKind::StorageFull, exit::FAILED)]
        {
            let error = Err::<(), _>(io::Error::from(kind)).context("write the answers").unwrap_err();
            assert_eq!(code(&error), expected);
        }
    }
}

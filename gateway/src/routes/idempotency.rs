//! The header `Idempotency-Key`: a caller's name for a request, so that repeating the request creates no second job.

use axum::http::{HeaderMap, HeaderName};

use crate::problem::Problem;

const IDEMPOTENCY_KEY: HeaderName = HeaderName::from_static("idempotency-key");

/// The longest idempotency key, in bytes.
const IDEMPOTENCY_KEY_BYTES_MAX: usize = 255;

/// The request's idempotency key, if it has one.
///
/// # Errors
/// It is too long, or no visible ASCII, or there are several: then nobody could say which one the job has.
pub fn idempotency_key(headers: &HeaderMap) -> Result<Option<String>, Problem> {
    let mut keys = headers.get_all(IDEMPOTENCY_KEY).iter();
    let Some(key) = keys.next() else { return Ok(None) };
    let further = keys.count();
    if further > 0 {
        let message = format!("the request has {} headers Idempotency-Key; it must have one", further + 1);
        return Err(Problem::invalid(message));
    }
    match key.to_str() {
        Ok(key) if (1..=IDEMPOTENCY_KEY_BYTES_MAX).contains(&key.len()) => Ok(Some(key.to_owned())),
        _ => Err(Problem::invalid(format!(
            "the header Idempotency-Key must have 1 to {IDEMPOTENCY_KEY_BYTES_MAX} characters of ASCII"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_short_visible_ascii() {
        let key = |value: &[u8]| {
            let value = axum::http::HeaderValue::from_bytes(value).unwrap();
            idempotency_key(&[(IDEMPOTENCY_KEY, value)].into_iter().collect())
        };
        let [longest, too_long] =
            [IDEMPOTENCY_KEY_BYTES_MAX, IDEMPOTENCY_KEY_BYTES_MAX + 1].map(|n| "k".repeat(n));
        for good in ["my key", longest.as_str()] {
            assert_eq!(key(good.as_bytes()).unwrap().as_deref(), Some(good));
        }
        for bad in ["", too_long.as_str(), "schlüssel"] {
            assert_eq!(key(bad.as_bytes()).unwrap_err().status, 400, "{bad}");
        }
        assert_eq!(idempotency_key(&HeaderMap::new()).unwrap(), None);
        let mut several = HeaderMap::new();
        for key in ["a", "b"] {
            several.append(IDEMPOTENCY_KEY, key.parse().unwrap());
        }
        let refused = idempotency_key(&several).unwrap_err();
        assert!(
            refused.status == 400 && refused.message.contains("2 headers Idempotency-Key"),
            "{refused:?}"
        );
    }
}

//! Withdrawals: a caller takes back its own job, wherever the job is.
//!
//! The caller generates a secret for the job, publishes the job with the secret's digest in the header [`DIGEST`], and keeps the
//! secret. A withdrawal has the job's id and the secret, so that only the job's caller can withdraw it, also when workers have
//! republished the job. It goes to every worker, by the exchange [`WITHDRAWALS_EXCHANGE`](crate::topology::WITHDRAWALS_EXCHANGE).
//! The caller repeats it until the job has ended, so that workers that joined later, or took the job out of a delay queue,
//! receive it, too.
//!
//! A worker that holds a withdrawn job, or receives it within [`REMEMBERED_S`], starts no pass for it, publishes a `failed` with
//! [`Reason::Withdrawn`](crate::Reason::Withdrawn), and acknowledges it. There is no dead letter.

use std::fmt;

use amq_protocol_types::FieldTable;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use crate::fields::as_text;

/// The header of a job: the lower-case hexadecimal SHA-256 of its secret. Jobs without it cannot be withdrawn.
pub const DIGEST: &str = "vramq-withdrawal";

/// The `type` property of a withdrawal.
pub const TYPE: &str = "withdraw";

/// The longest withdrawal, in bytes: an id of 255 and a secret of 64, both escaped. Longer ones are ignored unread.
pub const WITHDRAWAL_BYTES_MAX: usize = 2048;

/// How long, in seconds, a worker remembers a withdrawal of a job that it does not hold. A running caller repeats it more often than this.
/// A caller that ends sends it once, and its job may wait in a queue for long.
pub const REMEMBERED_S: u64 = 3600;

/// The body of a withdrawal, in JSON.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Withdrawal {
    /// The job's id.
    pub job: String,
    /// What the job's header [`DIGEST`] is the digest of.
    pub secret: String,
}

impl fmt::Debug for Withdrawal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Withdrawal").field("job", &self.job).finish_non_exhaustive()
    }
}

impl Withdrawal {
    /// The digest that the job's header must have for this withdrawal to count.
    pub fn digest(&self) -> Digest {
        Digest::of(&self.secret)
    }

    /// The body of its message.
    pub fn to_json(&self) -> Vec<u8> {
        // Two texts: cannot fail.
        serde_json::to_vec(self).unwrap_or_default()
    }
}

/// The SHA-256 of a job's secret. It does not reveal the secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Digest([u8; 32]);

impl Digest {
    pub fn of(secret: &str) -> Self {
        Self(Sha256::digest(secret).into())
    }

    /// Reads a job's header [`DIGEST`]. `None` if it is missing, or not 64 lower-case hexadecimal digits: then the job cannot be withdrawn.
    pub fn read(table: &FieldTable) -> Option<Self> {
        let text = table.inner().get(DIGEST).and_then(as_text)?;
        let digits = text.as_bytes();
        if digits.len() != 64 {
            return None;
        }
        let mut bytes = [0; 32];
        for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
            *byte = value(pair[0])? << 4 | value(pair[1])?;
        }
        Some(Self(bytes))
    }
}

fn value(digit: u8) -> Option<u8> {
    match digit {
        b'0'..=b'9' => Some(digit - b'0'),
        b'a'..=b'f' => Some(digit - b'a' + 10),
        _ => None,
    }
}

/// As the header [`DIGEST`] has it.
impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_withdrawal_shows_the_secret_of_the_jobs_digest() {
        let withdrawal = Withdrawal { job: "one".to_owned(), secret: "abc".to_owned() };
        // The standard's example (FIPS 180-2, B.1).
        let expected = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(withdrawal.digest().to_string(), expected);
        assert_eq!(withdrawal.to_json(), br#"{"job":"one","secret":"abc"}"#);
        assert!(!format!("{withdrawal:?}").contains("abc"));
    }

    #[test]
    fn a_digest_is_read_as_it_is_written_and_nothing_else_is() {
        let header = |value: &str| {
            let mut table = FieldTable::default();
            table.insert(DIGEST.into(), crate::fields::text(value));
            Digest::read(&table)
        };
        let digest = Digest::of("abc");
        assert_eq!(header(&digest.to_string()), Some(digest));
        assert_eq!(Digest::read(&FieldTable::default()), None);
        for wrong in ["", "ab", &digest.to_string().to_uppercase(), &"g".repeat(64), &"0".repeat(65)] {
            assert_eq!(header(wrong), None, "{wrong}");
        }
    }
}

//! Decides whether a large job may be requeued to make room for others. All such requeues together may publish only a small part of the
//! bytes that the worker consumes. Bytes of delivered jobs come in; whether a number of bytes may be published goes out. Pure.

/// For each byte that requeues of large jobs publish, the worker must have consumed so many. So most of what the broker stores comes from
/// callers.
const CONSUMED_PER_BYTE: u64 = 10;

/// The bytes that the worker may publish to requeue large jobs. Unused bytes do not expire: each job has the device for a while before it
/// is requeued, so even a week's allowance is spent slowly.
#[derive(Debug, Default)]
pub(crate) struct RepublishAllowance {
    /// Bytes of consumed jobs that no requeue has used up.
    consumed: u64,
}

impl RepublishAllowance {
    /// A job with a body of so many bytes was delivered.
    pub(crate) fn consumed(&mut self, bytes: usize) {
        self.consumed = self.consumed.saturating_add(bytes as u64);
    }

    /// Uses up the allowance for requeuing a job of so many bytes. False if too little is left.
    pub(crate) fn take(&mut self, bytes: usize) -> bool {
        let Some(left) = self.consumed.checked_sub(cost(bytes)) else { return false };
        self.consumed = left;
        true
    }
}

fn cost(bytes: usize) -> u64 {
    (bytes as u64).saturating_mul(CONSUMED_PER_BYTE)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_job_is_requeued_for_ten_times_its_bytes() {
        let mut bytes = RepublishAllowance::default();
        assert!(!bytes.take(1));
        bytes.consumed(999);
        assert!(!bytes.take(100));
        bytes.consumed(1);
        assert!(bytes.take(100) && !bytes.take(1));
        assert!(!bytes.take(usize::MAX));
    }

    proptest! {
        #[test]
        fn a_tenth_of_what_is_consumed_is_published_again(
            jobs in prop::collection::vec((0usize..1_000_000, any::<bool>()), 0..200),
        ) {
            let (mut bytes, mut consumed, mut again) = (RepublishAllowance::default(), 0, 0);
            for (job, is_requeued) in jobs {
                bytes.consumed(job);
                consumed += job;
                again += if is_requeued && bytes.take(job / 7) { job / 7 } else { 0 };
                prop_assert!(again * 10 <= consumed);
            }
        }
    }
}

//! Names of outputs in a store. A reader computes them from facts about the job alone, so no job can pass off another job's output as its
//! own.

use std::fmt::Write as _;

use sha2::{Digest as _, Sha256};

/// The owner in an output's name: a hash of the model, the job's caller and the job's id. A repeated job overwrites its own outputs, and no
/// other caller's job does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutputOwner(String);

impl OutputOwner {
    /// The caller is the user that RabbitMQ verified, or [`tenant_of`] one that publishes for others.
    pub fn new(model: &str, caller: Option<&str>, id: &str) -> Self {
        let mut hash = Sha256::new();
        hash.update((model.len() as u64).to_le_bytes());
        hash.update(model);
        // Distinguish no caller from an empty name. The length tells where the id begins.
        match caller {
            None => hash.update([0]),
            Some(caller) => {
                hash.update([1]);
                hash.update((caller.len() as u64).to_le_bytes());
                hash.update(caller);
            }
        }
        hash.update(id);
        let digest = hash.finalize();
        Self(digest.iter().fold(String::with_capacity(2 * digest.len()), |mut text, byte| {
            // Writing to a String cannot fail.
            let _ = write!(text, "{byte:02x}");
            text
        }))
    }

    /// The name of the output of the item with this index.
    pub fn name(&self, index: u32) -> String {
        format!("{}-{index}", self.0)
    }
}

/// The caller of a job whose user publishes for others and names a tenant. With the user before it, so that no tenant can take another
/// user's share.
pub fn tenant_of(user: &str, tenant: &str) -> String {
    format!("{user}/{tenant}")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Outputs stay where they are when workers are upgraded. By
    /// `printf '\1\0\0\0\0\0\0\0m\1\1\0\0\0\0\0\0\0ajob' | sha256sum`, and with `\0job` instead of the caller.
    #[test]
    fn names_stay_as_they_are() {
        assert_eq!(
            OutputOwner::new("m", Some("a"), "job").name(7),
            "6c7450a1279571876b4fe44e59d7bbeed8f8db7a7b5a85ec2a007738f28bf9ae-7"
        );
        assert_eq!(
            OutputOwner::new("m", None, "job").name(0),
            "cbf1795462929a26b07570f74d8d3a136176b244fcdbb232c39a4f8bcf60f2e6-0"
        );
    }

    #[test]
    fn no_two_jobs_have_the_same_name() {
        let name = |model, caller, id| OutputOwner::new(model, caller, id).name(0);
        let first = name("m", Some("a"), "job");
        for (model, caller, id) in [
            ("m", None, "job"),
            ("m", Some("b"), "job"),
            ("m", Some("a"), "job2"),
            ("m", Some("aj"), "ob"),
            ("m", None, "ajob"),
            ("ma", Some("a"), "job"),
        ] {
            assert_ne!(name(model, caller, id), first, "{model} {caller:?} {id}");
        }
    }
}

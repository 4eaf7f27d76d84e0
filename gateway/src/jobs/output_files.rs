//! Outputs that a worker wrote to a store: which of them belong to a job, and their ids as files.

use std::fmt;

use serde::{Deserialize, Serialize};
use vramq_producer::Output;
use vramq_schemas::output_name::OutputOwner;
use vramq_stores::reference::Reference;

use crate::keys::is_name;

/// What the ids of outputs begin with. Those of uploads begin with `file-`.
const PREFIX: &str = "output-";

/// The id of an output as a file: `output-INDEX-JOB`. Valid only for the job's owner, like the job's id.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct OutputId {
    pub index: u32,
    pub job: String,
}

impl OutputId {
    /// `None` if the text is not such an id.
    pub fn parse(text: &str) -> Option<Self> {
        let (digits, job) = text.strip_prefix(PREFIX)?.split_once('-')?;
        let index: u32 = digits.parse().ok()?;
        // Every output has exactly one id, so `+1` and `01` are not valid indices.
        (index.to_string() == digits && is_name(job)).then(|| Self { index, job: job.to_owned() })
    }
}

impl fmt::Display for OutputId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{PREFIX}{}-{}", self.index, self.job)
    }
}

/// An output in a store, as a job's view lists it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OutputFile {
    pub index: u32,
    /// An [`OutputId`].
    pub id: String,
    /// Where its bytes are downloaded.
    pub href: String,
}

/// The reference of an output, if a worker wrote the output for this very job. A model may return any reference, for example to another
/// caller's output. The object's name tells: no other caller's job has the same name.
fn own_uri<'a>(owners: &[OutputOwner], index: u32, output: &'a Output) -> Option<&'a str> {
    let Output::Uri(uri) = output else { return None };
    let reference = Reference::parse(uri).ok()?;
    let name = reference.segments.last()?;
    let is_own = owners.iter().any(|owner| owner.name(index).as_bytes() == &name[..]);
    (is_own && reference.sha256.is_some()).then_some(uri)
}

/// The references of a job's own outputs in a store, by index.
pub fn own_uris<'a>(
    owners: &[OutputOwner],
    outputs: impl Iterator<Item = Option<&'a Output>>,
) -> Vec<Option<String>> {
    let indexed = (0..).zip(outputs);
    indexed.map(|(index, output)| own_uri(owners, index, output?).map(str::to_owned)).collect()
}

/// The outputs of a job that are in a store.
pub fn list<'a>(
    owners: &[OutputOwner],
    job: &str,
    outputs: impl Iterator<Item = Option<&'a Output>>,
) -> Vec<OutputFile> {
    let indexed = (0..).zip(outputs).filter_map(|(index, output)| Some((index, output?)));
    let own = indexed.filter(|(index, output)| own_uri(owners, *index, output).is_some());
    own.map(|(index, _)| {
        let id = OutputId { index, job: job.to_owned() }.to_string();
        OutputFile { index, href: format!("/v1/files/{id}/content"), id }
    })
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_names_one_output_of_one_job() {
        let id = OutputId { index: 12, job: "my-job.1".to_owned() };
        assert_eq!(OutputId::parse("output-12-my-job.1"), Some(id.clone()));
        assert_eq!(id.to_string(), "output-12-my-job.1");
        for other in [
            "",
            "output-",
            "output-1",
            "output-1-",
            "output--1-job",
            "output-+1-job",
            "output-01-job",
            "output-4294967296-job",
            "output-1-a/b",
            "output-1-..",
            "file-1-job",
            "output-x-job",
        ] {
            assert_eq!(OutputId::parse(other), None, "{other}");
        }
    }

    #[test]
    fn only_what_was_written_for_this_job_is_its_own() {
        let owner = |user, id| OutputOwner::new("m", user, id);
        let owners = [owner(Some("gateway"), "a/job"), owner(Some("gateway/acme"), "a/job")];
        let digest = "0".repeat(64);
        let at = |name: &str| Output::Uri(format!("file:///srv/out/{name}#sha256={digest}&type=image/png"));
        let names: Vec<_> = owners.iter().map(|owner| owner.name(1)).collect();
        for name in &names {
            assert!(own_uri(&owners, 1, &at(name)).is_some());
            assert!(own_uri(&owners, 0, &at(name)).is_none(), "another item's");
            let undigested = Output::Uri(format!("s3://bucket/{name}"));
            assert!(own_uri(&owners, 1, &undigested).is_none(), "no worker wrote that");
        }
        let others = [owner(Some("gateway"), "b/job").name(1), format!("{}/x", names[0]), "x".to_owned()];
        for name in others {
            assert!(own_uri(&owners, 1, &at(&name)).is_none(), "{name}");
        }
        assert!(own_uri(&owners, 1, &Output::Json(names[0].clone().into())).is_none());
        let outputs = [Some(at("x")), Some(at(&names[1])), None];
        let listed = list(&owners, "job", outputs.iter().map(Option::as_ref));
        let (id, href) = ("output-1-job".to_owned(), "/v1/files/output-1-job/content".to_owned());
        assert_eq!(listed, [OutputFile { index: 1, id, href }]);
    }
}

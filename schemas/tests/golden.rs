//! The frozen bytes of the wire format: every version reads and writes exactly these.
//!
//! For a deliberate change run `VRAMQ_WRITE_GOLDEN=1 cargo test -p vramq-schemas --test golden`, and review the diff.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::fmt::Debug;
use std::path::Path;

use common::{ENCODINGS, as_read, extension, failure, job_of, jobs, outputs, progress, sparse};
use sha2::{Digest as _, Sha256};
use vramq_schemas::codec::Body;
use vramq_schemas::{BODY_BYTES_MAX, DecodeError, Encoding, Job, codec};

fn check<T: Body + PartialEq + Debug>(name: &str, value: &T, as_read: impl Fn(&T, Encoding) -> T) {
    for encoding in ENCODINGS {
        let written = codec::encode(value, encoding).unwrap();
        let frozen = frozen(&format!("{name}.{}", extension(encoding)), &written);
        assert_eq!(written, frozen, "{name} in {encoding:?} is written in another way");
        assert_eq!(codec::decode::<T>(&frozen, encoding), Ok(as_read(value, encoding)));
    }
}

/// The frozen bytes; `written` instead if they are to be written.
fn frozen(name: &str, written: &[u8]) -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("golden").join(name);
    if std::env::var_os("VRAMQ_WRITE_GOLDEN").is_some() {
        std::fs::write(&path, written).unwrap();
    }
    std::fs::read(&path).unwrap_or_else(|e| panic!("read {}: {e}", path.display()))
}

#[test]
fn jobs_are_written_as_frozen() {
    for (name, job) in jobs() {
        check(name, &job, as_read);
    }
}

#[test]
fn replies_are_written_as_frozen() {
    check("outputs", &outputs(), |outputs, _| outputs.clone());
    check("sparse", &sparse(), |outputs, _| outputs.clone());
    check("failure", &failure(), |failure, _| failure.clone());
    check("progress", &progress(), |progress, _| progress.clone());
}

/// The largest body by its digest: 16 MiB stay out of the repository.
#[test]
fn the_largest_job_is_written_as_frozen_and_one_byte_more_is_refused() {
    for encoding in ENCODINGS {
        let job = job_of(BODY_BYTES_MAX, encoding);
        let body = codec::encode(&job, encoding).unwrap();
        let digest = Sha256::digest(&body);
        let digest = digest.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        let written = format!("{} bytes, sha256 {digest}\n", body.len());
        let frozen = frozen(&format!("job-largest.{}.digest", extension(encoding)), written.as_bytes());
        assert_eq!(written, String::from_utf8(frozen).unwrap());
        assert_eq!(codec::decode::<Job>(&body, encoding).unwrap(), job);

        let larger = codec::encode(&job_of(BODY_BYTES_MAX + 1, encoding), encoding).unwrap();
        assert_eq!(
            codec::decode::<Job>(&larger, encoding),
            Err(DecodeError::TooLarge { bytes: BODY_BYTES_MAX + 1, cap: BODY_BYTES_MAX })
        );
    }
}

/// JSON as a foreign producer may write it: any order and spacing, no params.
#[test]
fn foreign_json_is_read() {
    let body = br#" { "inputs" : ["a", {"bytes":"AP8="}, {"uri":"s3:\/\/x"}, { "json" : {"a": 1} }],
        "model":"\u006dinilm" } "#;
    let job: Job = codec::decode(body, Encoding::Json).unwrap();
    assert_eq!(job.model, "minilm");
    assert_eq!(
        job.inputs.iter().map(|input| input.kind()).collect::<Vec<_>>(),
        ["text", "bytes", "uri", "json"]
    );
}

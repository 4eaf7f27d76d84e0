//! Any bytes as a job, in both encodings: an error, or a job that is written and read back the same.

#![no_main]

use libfuzzer_sys::fuzz_target;
use vramq_schemas::{Encoding, Job, codec};

fuzz_target!(|bytes: &[u8]| {
    for encoding in [Encoding::Json, Encoding::Bincode] {
        let Ok(job) = codec::decode::<Job>(bytes, encoding) else {
            continue;
        };
        for encoding in [Encoding::Json, Encoding::Bincode] {
            let body = codec::encode(&job, encoding).expect("a job can be written");
            // Only the size may change: escapes.
            if body.len() <= vramq_schemas::BODY_BYTES_MAX {
                let again = codec::decode::<Job>(&body, encoding).expect("what was written can be read");
                assert_eq!(again.inputs, job.inputs);
                assert_eq!(again.model, job.model);
            }
        }
    }
});

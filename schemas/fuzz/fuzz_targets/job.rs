//! Any bytes as a job, in every encoding: an error, or a job that is written and read back the same.

#![no_main]

use libfuzzer_sys::fuzz_target;
use vramq_schemas::{Encoding, Input, Job, codec};

/// An input, of JSON the value alone: MessagePack does not carry its text.
fn value(input: &Input) -> Input {
    match input {
        Input::Json(text) => {
            let value: serde_json::Value = serde_json::from_str(text.as_str()).expect("it was checked");
            Input::Json(value.into())
        }
        other => other.clone(),
    }
}

fuzz_target!(|bytes: &[u8]| {
    for encoding in [Encoding::Json, Encoding::MessagePack, Encoding::Bincode] {
        let Ok(job) = codec::decode::<Job>(bytes, encoding) else {
            continue;
        };
        for encoding in [Encoding::Json, Encoding::MessagePack, Encoding::Bincode] {
            let body = codec::encode(&job, encoding).expect("a job can be written");
            // Only the size may change: escapes.
            if body.len() <= vramq_schemas::BODY_BYTES_MAX {
                let again = codec::decode::<Job>(&body, encoding).expect("what was written can be read");
                assert!(again.inputs.iter().map(value).eq(job.inputs.iter().map(value)));
                assert_eq!(again.model, job.model);
            }
        }
    }
});

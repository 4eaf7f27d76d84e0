//! Any bytes as a reply's body, in every encoding: an error, or a value that can be written again, but for reasons that are not known.

#![no_main]

use libfuzzer_sys::fuzz_target;
use vramq_schemas::{Encoding, Failure, Outputs, Reason, codec};

fuzz_target!(|bytes: &[u8]| {
    for encoding in [Encoding::Json, Encoding::MessagePack, Encoding::Bincode] {
        if let Ok(outputs) = codec::decode::<Outputs>(bytes, encoding) {
            // Bincode has a form for every value, and reads its own writing back bit for bit.
            let body = codec::encode(&outputs, Encoding::Bincode).expect("outputs can be written");
            let again = codec::decode::<Outputs>(&body, Encoding::Bincode).expect("and read");
            let twice = codec::encode(&again, Encoding::Bincode).expect("and written");
            assert_eq!(body, twice);
            // JSON refuses elements that are not finite, and nothing else.
            let _ = codec::encode(&outputs, Encoding::Json);
        }
        if let Ok(failure) = codec::decode::<Failure>(bytes, encoding) {
            match codec::encode(&failure, encoding) {
                Ok(body) => assert_eq!(codec::decode::<Failure>(&body, encoding), Ok(failure)),
                Err(error) => assert_eq!(failure.reason, Reason::Other, "{error}"),
            }
        }
    }
});

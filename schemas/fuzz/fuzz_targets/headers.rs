//! Any table of headers, as it stands on the wire: an error, or headers that are written and read back the same.

#![no_main]

use amq_protocol_types::{FieldTable, parsing::parse_field_table};
use libfuzzer_sys::fuzz_target;
use vramq_schemas::{DeadLetter, Encoding, JobHeaders, ReplyHeaders};

fuzz_target!(|bytes: &[u8]| {
    if let Ok(text) = std::str::from_utf8(bytes) {
        let _ = Encoding::of(Some(text));
    }
    let Ok((_, table)) = parse_field_table(bytes) else {
        return;
    };
    if let Ok(headers) = JobHeaders::read(&table) {
        let mut written = table.clone();
        headers.write(&mut written);
        let again = JobHeaders::read(&written).expect("what was written can be read");
        assert_eq!(again.batch_hint, headers.batch_hint);
        assert_eq!(again.items_done, headers.items_done);
        assert_eq!(again.history.len(), headers.history.len());
    }
    if let Ok(headers) = ReplyHeaders::read(&table) {
        let _ = ReplyHeaders::read(&headers.to_table()).expect("what was written can be read");
    }
    if let Some(letter) = DeadLetter::read(&table) {
        letter.write(&mut FieldTable::default());
    }
});

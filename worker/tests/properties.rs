//! Message properties as lapin reads them (with third-party/amq-protocol-types). Whatever a publisher writes is read completely, and can be
//! written again.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use lapin::protocol::basic::parse_properties;
use lapin::types::generation::gen_field_table;
use lapin::types::parsing::parse_field_table;
use lapin::types::{AMQPValue, FieldTable};
use proptest::prelude::*;
use vramq_schemas::headers::{UNREADABLE, unreadable};

fn long(bytes: &[u8]) -> Vec<u8> {
    [&u32::try_from(bytes.len()).unwrap().to_be_bytes()[..], bytes].concat()
}

fn short(bytes: &[u8]) -> Vec<u8> {
    [&[u8::try_from(bytes.len()).unwrap()][..], bytes].concat()
}

/// A table with these bytes as its entries.
fn read(entries: &[u8]) -> FieldTable {
    let bytes = long(entries);
    let (rest, table) = parse_field_table(&bytes[..]).unwrap();
    assert!(rest.is_empty());
    table
}

fn written(table: &FieldTable) -> Vec<u8> {
    gen_field_table(table)(Vec::new().into()).unwrap().write
}

/// `{"n": {"n": …}}`, or lists within each other.
fn nested(depth: usize, list: bool) -> Vec<u8> {
    let mut inner = Vec::new();
    for at in (0..depth).rev() {
        let name = if list && at > 0 { Vec::new() } else { short(b"n") };
        inner = [&name[..], if list { b"A" } else { b"F" }, &long(&inner)].concat();
    }
    inner
}

/// Bytes that look like entries: names, types and lengths are mostly right.
fn entries() -> impl Strategy<Value = Vec<u8>> {
    let name = prop_oneof![
        Just(short(b"attempt")),
        prop::collection::vec(any::<u8>(), 0..6).prop_map(|n| short(&n))
    ];
    let leaf = prop_oneof![
        prop::sample::select(&b"tbBsUuIiLlfdDSATFxV"[..]).prop_flat_map(|tag| {
            prop::collection::vec(any::<u8>(), 0..10).prop_map(move |bytes| [&[tag][..], &bytes].concat())
        }),
        prop::sample::select(&b"SxAF"[..]).prop_flat_map(|tag| {
            prop::collection::vec(any::<u8>(), 0..40)
                .prop_map(move |bytes| [&[tag][..], &long(&bytes)].concat())
        }),
    ];
    prop::collection::vec((name, leaf), 0..6)
        .prop_map(|entries| entries.into_iter().flat_map(|(name, value)| [name, value].concat()).collect())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4096))]

    #[test]
    fn any_headers_are_read_and_can_be_written(entries in prop_oneof![entries(), prop::collection::vec(any::<u8>(), 0..200)]) {
        let table = read(&entries);
        let again = read(&written(&table)[4..]);
        // Compared as bytes, because NaN is not equal to itself.
        prop_assert_eq!(written(&again), written(&table));
        prop_assert_eq!(unreadable(&again), unreadable(&table));
        if let Some(AMQPValue::ByteArray(kept)) = table.inner().get(UNREADABLE) {
            prop_assert!(entries.ends_with(kept.as_slice()));
        }
    }

    #[test]
    fn any_bytes_as_properties_do_no_harm(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = parse_properties(&bytes[..]);
    }

    #[test]
    fn any_texts_are_read(texts in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..=255), 10)) {
        // All properties that are texts.
        let flags: u16 = 0b1100_0111_1011_1100;
        let mut bytes = flags.to_be_bytes().to_vec();
        texts.iter().for_each(|text| bytes.extend(short(text)));
        let (rest, properties) = parse_properties(&bytes[..]).unwrap();
        prop_assert!(rest.is_empty());
        let id = properties.message_id().as_ref().unwrap().as_str();
        prop_assert!(id.len() <= 255);
        match str::from_utf8(&texts[5]) {
            Ok(text) => prop_assert_eq!(id, text),
            Err(_) => prop_assert!(id.contains(char::REPLACEMENT_CHARACTER)),
        }
    }
}

#[test]
fn unreadable_headers_are_named_and_kept() {
    let good = b"\x04goodI\0\0\0\x01";
    let bad: [&[u8]; 5] = [
        b"\x03badZ\0",
        b"\x03badS\xff\xff\xff\xff",
        b"\x03badF\0\0\0\x06\x01aI\0\0\0",
        b"\x03badA\0\0\0\x03I\0\0",
        &[short(b"bad"), nested(40, false)[2..].to_vec()].concat(),
    ];
    for bad in bad {
        let table = read(&[good, bad, good].concat());
        assert_eq!(table.inner().get("good"), Some(&AMQPValue::LongInt(1)));
        let kept = AMQPValue::ByteArray([bad, good].concat().into());
        assert_eq!(table.inner().get(UNREADABLE), Some(&kept));
        assert_eq!(table.inner().len(), 2);
        assert!(
            unreadable(&table).is_some_and(|error| error.contains("\"bad\"")),
            "{:?}",
            unreadable(&table)
        );
    }
    assert_eq!(unreadable(&read(good)), None);
}

#[test]
fn nesting_ends_at_32() {
    for list in [false, true] {
        assert_eq!(unreadable(&read(&nested(31, list))), None);
        assert!(unreadable(&read(&nested(32, list))).is_some());
        assert!(unreadable(&read(&nested(20_000, list))).is_some());
    }
}

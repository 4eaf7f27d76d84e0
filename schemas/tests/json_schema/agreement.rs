//! The schemas take what the code takes, and have every field that the code has.

use serde_json::{Value, json};
use vramq_schemas::codec::Body;
use vramq_schemas::{Encoding, Failure, ITEMS_MAX, Job, Outputs, codec, headers};

use crate::schemas::schema;
use crate::validate::validate;
use crate::{golden, samples};

/// Schema and decoder take the same of what a body may be changed into: keys left out, values of another type, unknown keys.
fn agree<T: Body>(kind: &str, body: &Value) {
    let schema = schema(kind);
    let object = body.as_object().unwrap();
    let mut changed = vec![json!([]), json!("text"), json!({})];
    for name in object.keys() {
        let mut without = object.clone();
        without.remove(name);
        changed.push(without.into());
        for value in [json!(null), json!(true), json!([[]]), json!(7)] {
            let mut other = object.clone();
            other.insert(name.clone(), value);
            changed.push(other.into());
        }
    }
    let mut more = object.clone();
    more.insert("unknown".to_owned(), json!(1));
    changed.push(more.into());
    for value in changed {
        let decoded = codec::decode::<T>(value.to_string().as_bytes(), Encoding::Json);
        assert_eq!(
            validate(&schema, &value).is_ok(),
            decoded.is_ok(),
            "{kind}: {value}: {:?}",
            decoded.err()
        );
    }
}

#[test]
fn schemas_refuse_what_the_decoder_refuses() {
    agree::<Job>("job", &golden("job-params.json"));
    agree::<Outputs>("outputs", &golden("outputs.json"));
    agree::<Outputs>("outputs", &golden("sparse.json"));
    agree::<Failure>("failure", &golden("failure.json"));
    let of_input = |input: &Value| json!({"model": "m", "inputs": [input]});
    for input in [
        json!("a"),
        json!({"bytes": "AA=="}),
        json!({"uri": "x"}),
        json!({}),
        json!({"text": "a"}),
        json!(1),
        json!(null),
    ] {
        let body = of_input(&input);
        let decoded = codec::decode::<Job>(body.to_string().as_bytes(), Encoding::Json);
        assert_eq!(validate(&schema("job"), &body).is_ok(), decoded.is_ok(), "{body}");
    }
}

#[test]
fn a_job_has_an_input_and_not_too_many() {
    let of = |count: usize| json!({"model": "m", "inputs": vec!["a"; count]});
    let schema = schema("job");
    for (count, is_decoded) in [(1, true), (ITEMS_MAX, true), (ITEMS_MAX + 1, false)] {
        let decoded = codec::decode::<Job>(of(count).to_string().as_bytes(), Encoding::Json);
        assert_eq!(
            (decoded.is_ok(), validate(&schema, &of(count)).is_ok()),
            (is_decoded, is_decoded),
            "{count}"
        );
    }
    // The decoder reads this one, and the worker refuses it (`decode.rs`).
    validate(&schema, &of(0)).unwrap_err();
}

/// A struct's `Debug` names its fields, those too that are left out when they are empty.
#[test]
fn every_field_of_a_heartbeat_is_in_its_schema() {
    let schema = schema("heartbeat");
    for (shown, pointer) in samples::heartbeat_structs() {
        let (structure, fields) = shown.split_once(" { ").unwrap();
        // The fields of a struct within this one are looked for where that one is.
        let fields = fields.split(" { ").next().unwrap();
        let properties = &schema.pointer(pointer).unwrap()["properties"];
        let names = fields.split(", ").filter_map(|field| field.split_once(':')).map(|(name, _)| name);
        for name in names {
            assert!(properties.get(name).is_some(), "{structure}.{name} is in no sample of `samples.rs`");
        }
    }
}

/// A worker and an instance of a program both have a `state`; only the worker's is a word of a closed list.
#[test]
fn an_instance_of_a_program_may_be_in_any_state() {
    let schema = schema("heartbeat");
    let mut heartbeat = samples::heartbeats().remove(0);
    heartbeat["models"][0]["processes"][0]["state"] = "running".into();
    validate(&schema, &heartbeat).unwrap();
    heartbeat["state"] = "running".into();
    validate(&schema, &heartbeat).unwrap_err();
}

#[test]
fn every_header_of_a_job_is_in_its_schema() {
    let schema = schema("job-headers");
    for name in headers::OF_JOBS {
        assert!(schema["properties"].get(name).is_some(), "{name} is in no sample of `samples.rs`");
    }
}

//! The limits in the table `[http]`: how many requests, how large their bodies, and for how long.

use std::time::Duration;

use vramq_schemas::{BODY_BYTES_MAX, ITEMS_MAX};

use super::table::Values;
use super::{MIB, seconds, share_of_key};

/// Requests at a time, of all callers: each holds a body of up to 16 MiB until its job is published, and its results until they
/// are sent. With bodies of some 10 KiB that is little; `BODIES_MIB_MAX` bounds the large ones.
const IN_FLIGHT_MAX: u32 = 1024;

/// Requests of one caller at a time: a quarter, so that it takes four callers to fill the gateway.
const IN_FLIGHT_MAX_PER_KEY: u32 = 256;

/// Connections at a time. An idle one costs 16 KiB (docs/http.md), so that many idle ones take 256 MiB, without TLS.
const CONNECTIONS_MAX: u32 = 16_384;

/// Bytes of request bodies in memory, in MiB: sixteen of the largest allowed.
const BODIES_MIB_MAX: u32 = 256;

/// Bytes of jobs that are read, in memory until they are sent, in MiB: as many as of bodies.
const ANSWERS_MIB_MAX: u32 = 256;

/// Bytes of uploads on their way to their place, in MiB. An upload to a folder takes less than 256 KiB of them, so all requests in flight
/// fit. One to an object store takes up to 10 MiB, so a hundred fit, and with keys 25 of each; further ones wait.
const UPLOADS_MIB_MAX: u32 = 1024;

/// Event streams and downloads at a time, of all callers: a quarter of the connections, so that they leave room for other requests. Of one key
/// a quarter of that: four for each request that it may have in flight.
const STREAMS_MAX: u32 = 4096;

/// How long a caller waits for a result. The OpenAI client gives up after 600 s.
const REQUEST_S: u32 = 300;

/// A request with a longer estimated wait is refused at once with 429, so that its caller can use the time otherwise.
const QUEUE_S_MAX: u32 = 60;

/// What requests may have of the gateway: places, memory, time.
#[derive(Clone, Debug)]
pub struct Limits {
    pub in_flight: usize,
    pub in_flight_per_key: usize,
    pub connections: usize,
    pub body_bytes: usize,
    pub bodies_bytes: usize,
    /// Bytes of the bodies of one caller.
    pub bodies_bytes_per_key: usize,
    /// Bytes of jobs that are read, until they are sent.
    pub answers_bytes: usize,
    pub answers_bytes_per_key: usize,
    /// Bytes of uploads that are not stored yet.
    pub uploads_bytes: usize,
    pub uploads_bytes_per_key: usize,
    /// Event streams and downloads.
    pub streams: usize,
    pub streams_per_key: usize,
    pub items: usize,
    /// How long a caller waits for a result.
    pub request: Duration,
    /// The longest estimated wait with which a job is accepted.
    pub queue: Duration,
}

/// Reads the limits among the keys of `[http]`.
pub(super) fn limits(values: &mut Values, has_keys: bool) -> Limits {
    let body_mib_most = BODY_BYTES_MAX / MIB;
    let body_mib = values.number("http.body_mib_max", u32::try_from(body_mib_most).unwrap_or(u32::MAX), 1);
    if body_mib as usize > body_mib_most {
        values.fault(
            "http.body_mib_max",
            format!("is {body_mib}; a job's message has at most {body_mib_most} MiB"),
        );
    }
    let bodies_mib = values.number("http.bodies_mib_max", BODIES_MIB_MAX, 1);
    if bodies_mib < body_mib {
        values.fault(
            "http.bodies_mib_max",
            format!("is {bodies_mib}, less than a single body of http.body_mib_max"),
        );
    }
    let share_mib = share_of_key(bodies_mib, has_keys).max(body_mib);
    let key_mib = values.number("http.bodies_mib_max_per_key", share_mib, 1);
    if key_mib < body_mib {
        values.fault(
            "http.bodies_mib_max_per_key",
            format!("is {key_mib}, less than a single body of http.body_mib_max"),
        );
    }
    let answers_mib = values.number("http.answers_mib_max", ANSWERS_MIB_MAX, 1);
    let uploads_mib = values.number("http.uploads_mib_max", UPLOADS_MIB_MAX, 1);
    let mut share = |key, all: u32| {
        let share_mib = share_of_key(all, has_keys).max(1);
        values.number(key, share_mib, 1) as usize * MIB
    };
    let answers_bytes_per_key = share("http.answers_mib_max_per_key", answers_mib);
    let uploads_bytes_per_key = share("http.uploads_mib_max_per_key", uploads_mib);
    let streams = values.number("http.streams_max", STREAMS_MAX, 1);
    let key_streams = values.number("http.streams_max_per_key", share_of_key(streams, has_keys).max(1), 1);
    Limits {
        answers_bytes: answers_mib as usize * MIB,
        answers_bytes_per_key,
        uploads_bytes: uploads_mib as usize * MIB,
        uploads_bytes_per_key,
        streams: streams as usize,
        streams_per_key: key_streams as usize,
        in_flight: values.number("http.in_flight_max", IN_FLIGHT_MAX, 1) as usize,
        in_flight_per_key: values.number("http.in_flight_max_per_key", IN_FLIGHT_MAX_PER_KEY, 1) as usize,
        connections: values.number("http.connections_max", CONNECTIONS_MAX, 1) as usize,
        body_bytes: body_mib as usize * MIB,
        bodies_bytes: bodies_mib as usize * MIB,
        bodies_bytes_per_key: key_mib as usize * MIB,
        items: (values.number("http.items_max", 2048, 1) as usize).min(ITEMS_MAX),
        request: seconds(values.number("http.request_s", REQUEST_S, 1)),
        queue: seconds(values.number("http.queue_s_max", QUEUE_S_MAX, 1)),
    }
}

#[cfg(test)]
mod tests {
    use super::super::Config;
    use super::super::tests::KEYS;
    use super::*;

    #[test]
    fn the_bodies_of_a_key_have_a_quarter_unless_the_file_says_otherwise() {
        for (text, key_mib) in [
            ("", 256),
            ("keys = 'KEYS'", 64),
            ("keys = 'KEYS'\nbodies_mib_max = 20", 16),
            ("keys = 'KEYS'\nbodies_mib_max_per_key = 256", 256),
        ] {
            let text = format!("[http]\n{}", text.replace("KEYS", KEYS));
            let limits = Config::read(&text, Vec::new()).unwrap().limits;
            assert_eq!(limits.bodies_bytes_per_key, key_mib * MIB, "{text}");
        }
        let small = "[http]\nbody_mib_max = 3\nbodies_mib_max_per_key = 2";
        let faults = Config::read(small, Vec::new()).unwrap_err().0;
        assert_eq!(faults.len(), 1);
        assert_eq!(faults[0].key, "http.bodies_mib_max_per_key");
    }
}

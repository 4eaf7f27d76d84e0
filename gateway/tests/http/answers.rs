//! What readers, event streams and downloads may take of a gateway at a time.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;

use serde_json::{Value, json};

use crate::files::upload;
use crate::harness::{DEADLINE, ECHO, Gateway, Setup, until};
use crate::hostile::resident_kib;
use crate::jobs::set;

const MIB: usize = 1 << 20;

/// Of a result, in bytes: more than the system's buffers hold.
const LARGE: usize = 12 * MIB;

/// Readers of one result who take nothing of it.
const READERS: usize = 60;

/// A request on a connection of its own, which has its answer's status, and of which nothing else is read.
fn deaf(gateway: &Gateway, path: &str) -> (TcpStream, u16) {
    let mut stream = TcpStream::connect(gateway.url.trim_start_matches("http://")).unwrap();
    stream.set_read_timeout(Some(DEADLINE)).unwrap();
    stream.write_all(format!("GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n").as_bytes()).unwrap();
    let mut line = [0; "HTTP/1.1 200".len()];
    stream.read_exact(&mut line).unwrap();
    (stream, std::str::from_utf8(&line[9..]).unwrap().parse().unwrap())
}

fn put(gateway: &Gateway, id: &str, input: &str) -> Value {
    let job = json!({"model": ECHO, "inputs": [input]});
    let answer = gateway.send("PUT", &format!("/v1/jobs/{id}"), &[("prefer", "wait=60")], Some(&job));
    assert_eq!(answer.status, 200, "{answer:?}");
    answer.json()
}

/// A worker, and gateways with these settings.
fn setup(settings: &[&[String]]) -> Setup {
    let mut setup = Setup::new();
    setup.worker(&[ECHO], &[]);
    for settings in settings {
        setup.gateway(&set(settings));
    }
    setup.wait_for_models(&[ECHO]);
    setup
}

#[test]
fn all_readers_of_a_result_have_one_copy() {
    let setup = setup(&[&[], &[]]);
    for gateway in &setup.gateways {
        put(gateway, "large", &"x".repeat(LARGE));
        let before = resident_kib(gateway);
        let readers: Vec<_> = (0..READERS).map(|_| deaf(gateway, "/v1/jobs/large")).collect();
        assert!(readers.iter().all(|(_, status)| *status == 200));
        let grown = resident_kib(gateway).saturating_sub(before);
        assert!(grown < 10 * LARGE as u64 / 1024, "{grown} KiB for {READERS} readers");
    }
}

/// A gateway that has results from a store reads each for itself. Who finds no room for it waits, and is refused in the end.
#[test]
fn answers_from_the_store_have_a_budget() {
    let folder = tempfile::tempdir().unwrap();
    let results = format!("results.folder={}", folder.path().display());
    let budget = "http.answers_mib_max=32".to_owned();
    let setup = setup(&[&[results.clone()][..], &[results, budget]]);
    put(&setup.gateways[0], "large", &"x".repeat(LARGE));
    let gateway = &setup.gateways[1];
    let readers = [(); 2].map(|()| deaf(gateway, "/v1/jobs/large"));
    assert!(readers.iter().all(|(_, status)| *status == 200));
    let refused = gateway.get("/v1/jobs/large");
    assert_eq!(
        (refused.status, &refused.json()["error"]["code"]),
        (503, &json!("overloaded")),
        "{refused:?}"
    );
    assert_eq!((refused.header("retry-after"), refused.header("x-should-retry")), (Some("5"), Some("true")));
    assert!(refused.text.contains("http.answers_mib_max"), "{refused:?}");
    // Small ones do not wait for the large.
    put(gateway, "small", "x");
    let waits = std::thread::scope(|scope| {
        let waits = scope.spawn(|| gateway.get("/v1/jobs/large"));
        drop(readers);
        waits.join().unwrap()
    });
    assert_eq!((waits.status, waits.text.len() > LARGE), (200, true));
}

#[test]
fn event_streams_and_downloads_are_counted() {
    let folder = tempfile::tempdir().unwrap();
    let files = format!("files.folder={}", folder.path().display());
    let most = "http.streams_max_per_key=1".to_owned();
    let setup = setup(&[&[files.clone(), most.clone()], &[files, most]]);
    let file = upload(&setup.gateways[0], "", &vec![b'x'; LARGE]).json();
    let content = format!("/v1/files/{}/content", file["id"].as_str().unwrap());
    setup.workers[0].signal("STOP");
    for (at, gateway) in setup.gateways.iter().enumerate() {
        let id = format!("waits-{at}");
        let job = json!({"model": ECHO, "inputs": ["x"]});
        assert_eq!(gateway.send("PUT", &format!("/v1/jobs/{id}"), &[], Some(&job)).status, 202);
        let events = format!("/v1/jobs/{id}/events");
        for (open, other) in [(&events, &content), (&content, &events)] {
            let (stream, status) = deaf(gateway, open);
            assert_eq!(status, 200);
            let refused = gateway.get(other);
            let code = &refused.json()["error"]["code"];
            assert_eq!((refused.status, code), (429, &json!("too_many_in_flight")), "{refused:?}");
            // Other requests are not counted with them.
            assert_eq!(gateway.get(&format!("/v1/jobs/{id}")).status, 200);
            drop(stream);
            until("the place is free", || (deaf(gateway, open).1 == 200).then_some(()));
            until("the place is free again", || {
                // Its own stream is over when the gateway has seen that its client is gone.
                (gateway.send("HEAD", &content, &[], None).status == 200).then_some(())
            });
        }
    }
    setup.workers[0].signal("CONT");
}

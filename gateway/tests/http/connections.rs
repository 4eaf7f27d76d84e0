//! Idle and slow connections: they take little memory and no threads, and hold up nobody. The gateway closes slow ones.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde_json::json;
use vramq_tests::setup::full;

use crate::harness::{ECHO, Setup, until};
use crate::hostile::{resident_kib, status_of};

/// Idle connections of the test. Where the system lets this process have fewer descriptors, `scripts/test` says so, and on a slow machine
/// there are fewer, too; at full length (`VRAMQ_TEST_FULL=1`) the test fails with fewer.
const IDLE: usize = 10_000;

/// How long they are opened for: half the time that the gateway waits for a head (`HEAD_MAX`), so that the first ones are still there
/// when the last one is made.
const OPENING: Duration = Duration::from_secs(15);

/// Who open them: a connection for which the gateway's listener has no room at once waits for a second.
const CALLERS: usize = 16;

/// How long the gateway waits for the head of a request.
const HEAD_MAX: Duration = Duration::from_secs(30);

/// Descriptors that this process and the gateway need for other things.
const OTHER_DESCRIPTORS: u64 = 500;

/// Of these connections, those with a request whose body does not come: fewer than a caller may have in flight.
const UNFINISHED_BODIES: usize = 100;

/// What one of them may take of the gateway's memory.
const CONNECTION_KIB_MAX: u64 = 64;

/// Threads that requests may add to a gateway: those of the pool for blocking work, which come and go.
const THREADS_GROWN_MAX: u64 = 16;

/// How many connections this process may have, with its limit raised as far as the system allows. The gateway inherits it.
fn idle_connections() -> usize {
    let limits = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limits.maximum, maximum: limits.maximum };
    setrlimit(Resource::Nofile, raised).expect("raise the limit of descriptors");
    let most = limits.maximum.map_or(IDLE, |most| most.saturating_sub(OTHER_DESCRIPTORS) as usize);
    let few = "connections: the hard limit of descriptors (ulimit -Hn) allows no more";
    assert!(most >= IDLE || !full(), "{most} instead of {IDLE} {few}");
    // With fewer, less than the limit of the gateway for one caller's requests would be seen.
    assert!(most >= 2 * UNFINISHED_BODIES, "{most} {few}");
    IDLE.min(most)
}

/// Opens a connection that stays idle.
fn open(address: &str, n: usize) -> TcpStream {
    let mut stream = TcpStream::connect(address).expect("connect");
    // A body that was announced; a head that never ends; and nothing at all.
    let head = match n {
        n if n < UNFINISHED_BODIES => {
            "POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n{"
        }
        n if n % 2 == 0 => "GET / HTTP/1.1\r\nX: ",
        _ => "",
    };
    stream.write_all(head.as_bytes()).expect("send");
    stream
}

#[test]
fn idle_and_slow_connections_take_little_and_hold_up_nobody() {
    let count = idle_connections();
    let mut setup = Setup::new();
    setup.worker(&[ECHO], &[]);
    for _ in 0..2 {
        // By default there may be more.
        setup.gateway(&[]);
    }
    setup.wait_for_models(&[ECHO]);
    // All of them at one of two gateways.
    let gateway = &setup.gateways[0];
    let before = resident_kib(gateway);
    let address = gateway.url.trim_start_matches("http://");
    let began = Instant::now();
    let idle: Vec<_> = std::thread::scope(|scope| {
        let callers: Vec<_> = (0..CALLERS)
            .map(|caller| {
                let numbers = (caller..count).step_by(CALLERS);
                let in_time = move |_: &usize| began.elapsed() < OPENING;
                scope.spawn(move || numbers.take_while(in_time).map(|n| open(address, n)).collect::<Vec<_>>())
            })
            .collect();
        callers.into_iter().flat_map(|caller| caller.join().expect("a caller")).collect()
    });
    // As many of each kind at least.
    assert!(idle.len() >= 2 * UNFINISHED_BODIES, "{} connections in {OPENING:?}", idle.len());
    // All but the one that asks. From `HEAD_MAX` on the gateway closes the first ones.
    let connections = || gateway.metric("vramq_gateway_connections ", "") as usize - 1;
    let open = until("the gateway has accepted all of them", || {
        let open = connections();
        (open == idle.len() || began.elapsed() > HEAD_MAX).then_some(open)
    });
    let grown = resident_kib(gateway).saturating_sub(before);
    // The summary of the usual run shows it (.config/nextest.toml).
    println!("{open} of {IDLE} idle connections: {grown} KiB, {:.1} KiB each", grown as f64 / open as f64);
    assert!(open == IDLE || !full(), "{open} of {IDLE} connections: the machine is too slow");
    for gateway in &setup.gateways {
        let job = json!({"model": ECHO, "inputs": ["x"]});
        let served = gateway.send("POST", "/v1/jobs", &[("prefer", "wait=60")], Some(&job));
        assert_eq!(served.json()["state"], "done");
    }
    assert!(open >= idle.len() / 2, "{open} of {} connections", idle.len());
    assert!(grown < open as u64 * CONNECTION_KIB_MAX, "{grown} KiB for {open} connections");
    drop(idle);
    assert_eq!(gateway.metric("vramq_gateway_requests_total", "status=\"500\""), 0.0);
}

/// Connections of one kind that [`slow_connections_are_closed_while_others_are_served`] makes.
const SLOW_OF_EACH: usize = 50;

/// A slow caller: the number of its gateway, the beginning of its request, the text that it repeats, and the status that it gets in the
/// end, if any.
type Slow = (usize, &'static str, &'static str, Option<&'static str>);

const SLOW: [Slow; 8] = [
    (0, "", "", None),
    (0, "", "G", None),
    (0, "GET /livez HTTP/1.1\r\nX: ", "x", None),
    (0, SLOW_BODY, "", Some("408")),
    (1, SLOW_BODY, " ", Some("408")),
    // The first gateway takes no files, so it refuses the form without waiting for it.
    (0, SLOW_FORM, "x", Some("404")),
    (1, SLOW_FIELD, "", Some("408")),
    (1, SLOW_FIELD, "x", Some("408")),
];

const SLOW_BODY: &str = "POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n\
                         Content-Length: 1000\r\n\r\n";

const SLOW_FORM: &str =
    "POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/form-data; boundary=b\r\n\r\n";

/// A form whose first field, which nobody wants, does not end.
const SLOW_FIELD: &str = "POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/form-data; boundary=b\r\n\
                          Content-Length: 1000000\r\n\r\n--b\r\nContent-Disposition: form-data; name=\"purpose\"\r\n\r\nx";

/// Slow-loris: callers that send a byte now and then keep no connection, whatever they are slow with.
#[test]
fn slow_connections_are_closed_while_others_are_served() {
    let mut setup = Setup::new();
    setup.worker(&[ECHO], &[]);
    setup.gateway(&["--set", "files.folder=off"]);
    // The second one takes files.
    setup.gateway(&["--set", &format!("files.folder={}", setup.folder.path().join("files").display())]);
    setup.wait_for_models(&[ECHO]);
    let gateways = &setup.gateways;
    let served = || {
        for gateway in gateways {
            let job = json!({"model": ECHO, "inputs": ["x"]});
            let answer = gateway.send("POST", "/v1/jobs", &[("prefer", "wait=60")], Some(&job));
            assert_eq!(answer.json()["state"], "done", "{answer:?}");
        }
    };
    served();
    let before: Vec<_> = gateways.iter().map(|it| (status_of(it, "Threads:"), resident_kib(it))).collect();
    let connect = |(at, begin, drip, status): Slow| {
        let mut stream = TcpStream::connect(gateways[at].url.trim_start_matches("http://")).unwrap();
        stream.write_all(begin.as_bytes()).unwrap();
        stream.set_nonblocking(true).unwrap();
        (stream, drip, status)
    };
    let mut open: Vec<_> =
        SLOW.iter().flat_map(|kind| (0..SLOW_OF_EACH).map(move |_| connect(*kind))).collect();
    let mut most_memory = vec![0; gateways.len()];
    until("the gateways have closed all of them", || {
        served();
        for ((gateway, most), (threads, _)) in gateways.iter().zip(&mut most_memory).zip(&before) {
            *most = resident_kib(gateway).max(*most);
            assert!(status_of(gateway, "Threads:") <= threads + THREADS_GROWN_MAX);
        }
        open.retain_mut(|(stream, drip, status)| {
            let _ = stream.write_all(drip.as_bytes());
            let mut answer = [0; 4096];
            let answered = match stream.read(&mut answer) {
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return true,
                Ok(bytes) => String::from_utf8_lossy(&answer[..bytes]).into_owned(),
                // Reset: what came before it may be lost.
                Err(_) => return false,
            };
            let expected = status.map(|status| format!("HTTP/1.1 {status}"));
            assert!(
                answered.is_empty() || expected.is_some_and(|start| answered.starts_with(&start)),
                "{answered}"
            );
            // An answer that has come is followed by the end of the connection.
            !answered.is_empty()
        });
        open.is_empty().then_some(())
    });
    for (at, gateway) in gateways.iter().enumerate() {
        let count = (SLOW.iter().filter(|kind| kind.0 == at).count() * SLOW_OF_EACH) as u64;
        let grown = most_memory[at].saturating_sub(before[at].1);
        assert!(grown < count * CONNECTION_KIB_MAX, "{grown} KiB for {count} connections");
        // Its tasks have ended: only the connection that asks is left.
        until("nothing is left of them", || {
            (gateway.metric("vramq_gateway_connections ", "") == 1.0).then_some(())
        });
        assert_eq!(gateway.metric("vramq_gateway_requests_total", "status=\"500\""), 0.0);
    }
}

/// The answer to a request on a connection that stays open.
fn alive(stream: &mut TcpStream) {
    stream.write_all(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
    until_answered(stream);
}

fn until_answered(stream: &mut TcpStream) {
    let mut answer = Vec::new();
    while !answer.ends_with(b"alive\n") {
        let mut byte = [0];
        stream.read_exact(&mut byte).unwrap();
        answer.extend(byte);
    }
}

/// A load balancer keeps connections, and must be the one that ends them.
#[test]
fn a_connection_may_be_idle_for_a_time_of_its_own() {
    let mut setup = Setup::new();
    setup.gateway(&["--set", "http.idle_s=1"]);
    // The default.
    setup.gateway(&[]);
    let connect = |at: usize| {
        let mut stream = TcpStream::connect(setup.gateways[at].url.trim_start_matches("http://")).unwrap();
        stream.set_read_timeout(Some(HEAD_MAX / 2)).unwrap();
        alive(&mut stream);
        stream
    };
    // Before any of them is idle: to make the others may take long.
    let began = Instant::now();
    let (mut long, mut short) = (connect(1), connect(0));
    // A head that is slow, but not too slow, is no idle connection. It begins at once: its connection may not be idle for longer either.
    let mut slow = connect(0);
    let head = b"GET /livez HTTP/1.1\r\nHost: localhost\r\nX: ";
    slow.write_all(head).unwrap();
    let all_made = Instant::now();
    assert_eq!(short.read(&mut [0]).unwrap(), 0, "it was idle for too long");
    assert!(began.elapsed() >= Duration::from_millis(500), "{:?}", began.elapsed());
    slow.write_all(b"x\r\n\r\n").unwrap();
    until_answered(&mut slow);
    // Longer than a head may take.
    until("the time of a head is over", || {
        (all_made.elapsed() > HEAD_MAX + Duration::from_secs(2)).then_some(())
    });
    alive(&mut long);
}

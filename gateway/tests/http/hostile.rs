//! Hostile callers: they cause no 500s and no unbounded memory, and others are served meanwhile.

use std::io::{Read as _, Write as _};
use std::net::{Shutdown, TcpStream};
use std::time::Duration;

use serde_json::json;

use crate::files::form_begin;
use crate::harness::{Answer, DEADLINE, ECHO, Gateway, Setup, until};
use crate::keys::{send, until_served, with_keys};

/// Sends bytes, and reads what comes until the gateway closes the connection.
pub fn raw(gateway: &Gateway, bytes: &[u8]) -> String {
    let mut stream = TcpStream::connect(gateway.url.trim_start_matches("http://")).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    // The gateway may close it before all is sent.
    let _ = stream.write_all(bytes);
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    String::from_utf8_lossy(&answer).into_owned()
}

pub fn resident_kib(gateway: &Gateway) -> u64 {
    status_of(gateway, "VmRSS:")
}

/// A number that the system has about the gateway.
pub fn status_of(gateway: &Gateway, field: &str) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", gateway.program.pid())).unwrap();
    let line = status.lines().find(|line| line.starts_with(field)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

#[test]
fn malformed_requests_are_the_clients_fault() {
    let setup = Setup::with(&[ECHO]);
    let post = |head: &str, body: &str| {
        format!("POST /v1/embeddings HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{head}\r\n{body}")
    };
    let get = |url: &str, hosts: &str| format!("GET {url} HTTP/1.1\r\nConnection: close\r\n{hosts}\r\n");
    let long = "x".repeat(200_000);
    let cases = [
        ("garbage\r\n\r\n".to_owned(), "400"),
        (post("Content-Type: application/json\r\nContent-Length: 2\r\n", "{]"), "400"),
        (post("Content-Type: application/json\r\nContent-Length: 999999999\r\n", ""), "413"),
        (post("Content-Type: application/json\r\nContent-Length: -1\r\n", ""), "400"),
        (post(&format!("X-Long: {long}\r\n"), ""), "431"),
        (post("Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n", "zz\r\n"), "400"),
        (post("Authorization: Bearer \u{1f600}\r\nContent-Length: 0\r\n", ""), "415"),
        (format!("GET /{long} HTTP/1.1\r\nHost: localhost\r\n\r\n"), "4"),
        (get("/v1/models", "Host: localhost\r\nHost: evil.example\r\n"), "400"),
        (get("/v1/models", ""), "400"),
        (get("http://evil.example/v1/models", "Host: localhost\r\n"), "403"),
        (get("http://localhost/v1/models", "Host: localhost\r\n"), "200"),
    ];
    for (bytes, status) in cases {
        let answer = raw(setup.next(), bytes.as_bytes());
        let head: String = bytes.chars().take(80).collect();
        assert!(answer.starts_with(&format!("HTTP/1.1 {status}")), "{head}: {answer}");
    }
    let deep = "[".repeat(100_000);
    let nested =
        post(&format!("Content-Type: application/json\r\nContent-Length: {}\r\n", deep.len()), &deep);
    // A method has no limit of its own.
    let odd = format!("{} /odd HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", "X".repeat(50_000));
    for gateway in &setup.gateways {
        assert!(raw(gateway, odd.as_bytes()).starts_with("HTTP/1.1 4"));
        let lines = gateway.lines();
        let line = lines.iter().find(|line| line["path"] == "/odd").expect("its line in the log");
        assert_eq!(line["method"], "_OTHER");
        assert!(raw(gateway, nested.as_bytes()).starts_with("HTTP/1.1 400"));
        assert_eq!(gateway.metric("vramq_gateway_requests_total", "status=\"500\""), 0.0);
        assert_eq!(gateway.get("/livez").status, 200);
    }
}

#[test]
fn malformed_forms_leave_nothing_in_the_store() {
    let mut setup = Setup::new();
    let folder = setup.folder.path().join("files");
    for _ in 0..2 {
        setup.gateway(&["--set", &format!("files.folder={}", folder.display())]);
    }
    let send = |kind: &str, body: &[u8]| {
        Answer::of(
            ureq::post(&format!("{}/v1/files", setup.next().url)).set("content-type", kind).send_bytes(body),
        )
    };
    let upload = |kind: &str, body: &[u8]| send(kind, body).status;
    let form = "multipart/form-data; boundary=b";
    let start = b"--b\r\nContent-Disposition: form-data; name=\"file\"; filename=\"../../x\"\r\n\r\n";
    for kind in ["text/plain", "application/json", "application/x-www-form-urlencoded", "multipart/form-data"]
    {
        assert_eq!(upload(kind, b"x"), 415, "{kind}");
    }
    let other = b"--b\r\nContent-Disposition: form-data; name=\"a\"\r\n\r\n1\r\n";
    for (body, fault) in [
        (b"no boundary".to_vec(), "is malformed: incomplete multipart stream"),
        (b"--b--\r\n".to_vec(), "has no field `file`"),
        (start.to_vec(), "received with incomplete data"),
        ([&start[..], b"content without an end"].concat(), "received with incomplete data"),
        (other.repeat(20), "not among the first 16 fields"),
        ([&other.repeat(16)[..], &start[..], b"x\r\n--b--\r\n"].concat(), "not among the first 16 fields"),
    ] {
        let refused = send(form, &body);
        assert!(refused.status == 400 && refused.text.contains(fault), "{refused:?} has not: {fault}");
    }
    // A broken upload is answered at once, and removed after it.
    until("nothing is left of them", || {
        let owners = std::fs::read_dir(&folder).unwrap().flatten();
        owners.flat_map(|owner| std::fs::read_dir(owner.path())).flatten().next().is_none().then_some(())
    });
    // A name that points elsewhere is only a name.
    assert_eq!(upload(form, &[&start[..], b"x\r\n--b--\r\n"].concat()), 200);
    assert!(!setup.folder.path().join("x").exists());
    assert_eq!(upload(form, &[&other.repeat(15)[..], &start[..], b"x\r\n--b--\r\n"].concat()), 200);
}

/// The log and the metrics do not count them as malformed.
#[test]
fn clients_that_hang_up_while_they_send_are_counted_as_such() {
    let mut setup = Setup::new();
    let folder = format!("files.folder={}", setup.folder.path().join("files").display());
    for _ in 0..2 {
        setup.gateway(&["--set", &folder]);
    }
    let head = |path: &str, kind: &str, length: &str| {
        format!("POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\n{length}\r\n\r\n")
    };
    let (json, form) = ("application/json", "multipart/form-data; boundary=b");
    let (known, chunked) = ("Content-Length: 100000", "Transfer-Encoding: chunked");
    let requests = [
        head("/v1/jobs", json, known) + "{",
        head("/v1/jobs", json, chunked) + "1\r\n{\r\n",
        head("/v1/files", form, known) + "--b\r\n",
        head("/v1/files", form, known) + &form_begin("x") + "content",
    ];
    for gateway in &setup.gateways {
        for request in &requests {
            let mut connection = TcpStream::connect(gateway.url.trim_start_matches("http://")).unwrap();
            connection.write_all(request.as_bytes()).unwrap();
        }
        let counted =
            |status: &str| gateway.metric("vramq_gateway_requests_total", &format!("status=\"{status}\""));
        until("all are counted", || (counted("499") == requests.len() as f64).then_some(()));
        assert_eq!(counted("400"), 0.0);
        // This client waits for its answer.
        let malformed = head("/v1/jobs", json, &format!("Connection: close\r\n{chunked}")) + "zz\r\n";
        let answer = raw(gateway, malformed.as_bytes());
        assert!(answer.starts_with("HTTP/1.1 400"), "{answer}");
        // These close only their sending side, and still read.
        for request in &requests {
            let mut connection = TcpStream::connect(gateway.url.trim_start_matches("http://")).unwrap();
            connection.set_read_timeout(Some(DEADLINE)).unwrap();
            connection.write_all(request.as_bytes()).unwrap();
            connection.shutdown(Shutdown::Write).unwrap();
            let mut answer = String::new();
            connection.read_to_string(&mut answer).unwrap();
            assert!(answer.starts_with("HTTP/1.1 499 "), "{answer}");
        }
    }
}

/// Keys that are guessed in [`guessed_keys_open_nothing`].
const GUESSES: usize = 3_000;

/// What one of them may take of a gateway's memory, the gateway's own growth included.
const GUESS_KIB_MAX: u64 = 4;

/// Callers that guess keys are refused, one after the other and many at once; they learn nothing, and take no memory.
#[test]
fn guessed_keys_open_nothing() {
    let (setup, keys) = with_keys(&[("a", "")]);
    until_served(&setup, &keys["a"], ECHO);
    let secret = keys["a"].trim_start_matches("Bearer ");
    let guess = |n: usize| match n % 4 {
        // Of the right form, one that is cut off, and one that goes on.
        0 => format!("Bearer vramq-{n:064x}"),
        1 => format!("Bearer {}", &secret[..n % secret.len()]),
        2 => format!("bearer {secret}{n}"),
        _ => format!("Basic {secret}"),
    };
    let before: Vec<_> = setup.gateways.iter().map(resident_kib).collect();
    std::thread::scope(|scope| {
        for caller in 0..6 {
            let (setup, guess) = (&setup, &guess);
            scope.spawn(move || {
                for n in (caller..GUESSES).step_by(6) {
                    let headers = [("authorization", guess(n))];
                    let headers = headers.each_ref().map(|(name, key)| (*name, key.as_str()));
                    let refused = setup.next().send("GET", "/v1/jobs/one", &headers, None);
                    assert_eq!((refused.status, refused.header("x-should-retry")), (401, None), "{n}");
                }
            });
        }
    });
    for (gateway, before) in setup.gateways.iter().zip(before) {
        let grown = resident_kib(gateway).saturating_sub(before);
        assert!(grown < GUESSES as u64 * GUESS_KIB_MAX, "{grown} KiB");
        let counted =
            |status: &str| gateway.metric("vramq_gateway_requests_total", &format!("status=\"{status}\""));
        assert_eq!((counted("401"), counted("500")), (GUESSES as f64 / 2.0, 0.0));
        // The key itself opens, in each of the ways that clients write it.
        for name in [keys["a"].as_str(), &format!("bearer  {secret}"), &format!("BEARER {secret}")] {
            assert_eq!(send(gateway, name, "GET", "/v1/models", None).status, 200, "{name}");
        }
        assert!(!gateway.program.log().contains(secret), "a key was logged");
    }
}

#[test]
fn bodies_in_memory_are_bounded() {
    let mut setup = Setup::new();
    for _ in 0..2 {
        setup.gateway(&["--set", "http.bodies_mib_max=4", "--set", "http.body_mib_max=2"]);
    }
    for gateway in &setup.gateways {
        its_bodies_are_bounded(gateway);
    }
}

fn its_bodies_are_bounded(gateway: &Gateway) {
    let address = gateway.url.trim_start_matches("http://");
    // Bodies that were announced and do not come: two of them fill the memory for bodies, so that one of three is refused.
    let announced: Vec<_> = (0..3)
        .map(|_| {
            let mut stream = TcpStream::connect(address).unwrap();
            let head = "POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 2097152\r\n\r\n{";
            stream.write_all(head.as_bytes()).unwrap();
            stream.set_nonblocking(true).unwrap();
            stream
        })
        .collect();
    until("one of the announced bodies is refused", || {
        let waits = |mut stream: &TcpStream| {
            stream.read(&mut [0; 1024]).is_err_and(|e| e.kind() == std::io::ErrorKind::WouldBlock)
        };
        announced.iter().any(|stream| !waits(stream)).then_some(())
    });
    let refused = gateway.post("/v1/jobs", &json!({"model": ECHO, "inputs": ["x"]}));
    assert_eq!((refused.status, &refused.json()["error"]["code"]), (429, &json!("overloaded")));
    assert_eq!((refused.header("retry-after"), refused.header("x-should-retry")), (Some("1"), Some("true")));
    drop(announced);
    until("the room is free again", || {
        let answer = gateway.post("/v1/jobs", &json!({"model": ECHO, "inputs": ["x"]}));
        (answer.status != 429).then_some(())
    });
}

/// Bodies without a length have no more memory than those with one, and values no more than texts.
#[test]
fn bodies_without_a_length_are_bounded_as_well() {
    let mut setup = Setup::new();
    for _ in 0..2 {
        setup.gateway(&["--set", "http.bodies_mib_max=4", "--set", "http.body_mib_max=4"]);
    }
    for gateway in &setup.gateways {
        its_bodies_without_a_length_are_bounded(gateway);
    }
}

fn its_bodies_without_a_length_are_bounded(gateway: &Gateway) {
    const MIB: usize = 1 << 20;
    let head = "POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n";
    let chunk = |size: usize| format!("{size:x}\r\n{}\r\n", " ".repeat(size));
    // One body that does not end has three quarters of the memory. It is sent again each time: if the gateway reads the other one
    // first, this one finds no room.
    let large = format!("{head}{}", chunk(3 * MIB));
    let other = format!("{head}{}", chunk(2 * MIB));
    let mut unfinished = None;
    until("another one finds no room", || {
        drop(unfinished.take());
        let mut connection = TcpStream::connect(gateway.url.trim_start_matches("http://")).unwrap();
        let sent = connection.write_all(large.as_bytes());
        unfinished = Some(connection);
        std::thread::sleep(Duration::from_millis(200));
        let is_refused = raw(gateway, format!("{other}0\r\n\r\n").as_bytes()).contains("overloaded");
        (sent.is_ok() && is_refused).then_some(())
    });
    drop(unfinished);
    until("the room is free again", || {
        (!raw(gateway, format!("{other}0\r\n\r\n").as_bytes()).contains("overloaded")).then_some(())
    });
    // A million empty texts are 3 MiB, and would be tens of MiB when they are parsed.
    let texts = format!(r#"{{"model": "echo", "inputs": [{}""]}}"#, "\"\",".repeat(1_000_000));
    let request = format!(
        "POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{texts}",
        texts.len()
    );
    let answer = raw(gateway, request.as_bytes());
    assert!(answer.contains("send fewer or smaller inputs"), "{answer}");
}

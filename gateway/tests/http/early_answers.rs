//! Requests that are answered before all of their body has come: a client that still sends gets the answer, and keeps its connection.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::TcpStream;

use crate::files::{FORM_END, form_begin};
use crate::foreign::node;
use crate::harness::{DEADLINE, ECHO, Gateway, Setup, until};

/// A body that is too large.
const LARGE_BYTES: usize = 20 << 20;

/// The next answer on a connection; `None` if the connection ends before it.
fn answer(stream: &mut TcpStream) -> Option<String> {
    let (mut head, mut byte) = (Vec::new(), [0]);
    while !head.ends_with(b"\r\n\r\n") {
        stream.read_exact(&mut byte).ok()?;
        head.push(byte[0]);
    }
    let head = String::from_utf8_lossy(&head).to_ascii_lowercase();
    let length = head.lines().find_map(|line| line.strip_prefix("content-length: ")?.parse().ok())?;
    stream.read_exact(&mut vec![0; length]).ok()?;
    Some(head)
}

/// The answer to a request whose body comes in two parts, the second one after the answer. `None` if the connection breaks meanwhile, or
/// takes no further request.
fn answered_early(gateway: &Gateway, path: &str, media_type: &str, body: [&[u8]; 2]) -> Option<String> {
    let mut stream = TcpStream::connect(gateway.url.trim_start_matches("http://")).unwrap();
    stream.set_read_timeout(Some(DEADLINE)).unwrap();
    let [first, rest] = body;
    let length = first.len() + rest.len();
    let head = format!(
        "POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {media_type}\r\nContent-Length: {length}\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).ok()?;
    stream.write_all(first).ok()?;
    let answered = answer(&mut stream)?;
    stream.write_all(rest).ok()?;
    stream.write_all(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n").ok()?;
    answer(&mut stream)?.starts_with("http/1.1 200").then_some(answered)
}

#[test]
fn a_client_that_still_sends_gets_its_answer_and_keeps_its_connection() {
    let mut setup = Setup::new();
    let folder = format!("files.folder={}", setup.folder.path().join("files").display());
    for _ in 0..2 {
        setup.gateway(&["--set", &folder]);
    }
    let form = "multipart/form-data; boundary=b";
    // OpenAI's client for Node.js sends the purpose behind the file.
    let file = form_begin("x") + "content\r\n--b\r\nContent-Disposition: form-data; name=\"purpose\"\r\n\r\n";
    let purpose = format!("user_data{FORM_END}");
    let large = vec![b' '; LARGE_BYTES];
    for gateway in &setup.gateways {
        for (path, media_type, body, status) in [
            ("/v1/embeddings", "application/json", [&b"{"[..], &large[..]], 413),
            ("/v1/jobs", "text/plain", [&b"x"[..], &large[..]], 415),
            ("/v1/files", form, [file.as_bytes(), purpose.as_bytes()], 200),
        ] {
            // A client that stands still for too long meanwhile loses its connection.
            let answered =
                until("the client keeps its connection", || answered_early(gateway, path, media_type, body));
            assert!(answered.starts_with(&format!("http/1.1 {status} ")), "{path}: {answered}");
        }
    }
}

/// The rest of the body is dropped after the answer, when the connection has nothing else to do.
#[test]
fn a_connection_whose_body_ends_after_the_answer_is_idle_for_no_longer_than_others() {
    let mut setup = Setup::new();
    for _ in 0..2 {
        setup.gateway(&["--set", "http.idle_s=1"]);
    }
    for gateway in &setup.gateways {
        let mut stream = TcpStream::connect(gateway.url.trim_start_matches("http://")).unwrap();
        stream.set_read_timeout(Some(DEADLINE)).unwrap();
        let begin = "POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Type: text/plain\r\nContent-Length: 10\r\n\r\n12345";
        stream.write_all(begin.as_bytes()).unwrap();
        assert!(answer(&mut stream).expect("an answer").starts_with("http/1.1 415 "));
        // An `Err`: the gateway has waited too long for the rest, because this test stood still, and has closed the connection.
        let _ = stream.write_all(b"67890");
        match stream.read(&mut [0]) {
            Ok(read) => assert_eq!(read, 0),
            Err(error) => assert_eq!(error.kind(), ErrorKind::ConnectionReset, "{error}"),
        }
    }
}

/// A client takes a broken connection for a network fault, and sends the request again.
#[test]
fn openais_client_for_node_learns_that_a_request_is_too_large() {
    let mut setup = Setup::new();
    for _ in 0..2 {
        setup.gateway(&[]);
    }
    for gateway in &setup.gateways {
        node("openai_client.mjs", &["oversized", &gateway.url, ECHO]);
    }
}

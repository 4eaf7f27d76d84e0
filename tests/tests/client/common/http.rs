//! RabbitMQ's management API over a few lines of HTTP/1.1.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::time::Duration;

use base64::{Engine as _, engine::general_purpose::STANDARD};

pub struct Management {
    host: String,
    authorization: String,
}

impl Management {
    /// `url` as `http://user:password@host:port`.
    pub fn new(url: &str) -> Self {
        let rest = url.strip_prefix("http://").expect("an http:// URL");
        let (credentials, host) = rest.rsplit_once('@').unwrap_or(("guest:guest", rest));
        Self { host: host.trim_end_matches('/').to_owned(), authorization: STANDARD.encode(credentials) }
    }

    /// A request that must succeed; its body.
    pub fn expect(&self, method: &str, path: &str, body: &str) -> String {
        let (status, answer) = self.request(method, path, body);
        assert!((200..300).contains(&status), "{method} {path}: {status} {answer}");
        answer
    }

    pub fn request(&self, method: &str, path: &str, body: &str) -> (u16, String) {
        let mut stream = TcpStream::connect(&self.host).expect("connect to the management API");
        stream.set_read_timeout(Some(Duration::from_secs(30))).expect("set timeout");
        write!(
            stream,
            "{method} {path} HTTP/1.0\r\nHost: {}\r\nAuthorization: Basic {}\r\n\
             Content-Type: application/json\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
            self.host,
            self.authorization,
            body.len()
        )
        .expect("send request");
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).expect("read answer");
        let answer = String::from_utf8_lossy(&answer).into_owned();
        let (head, body) = answer.split_once("\r\n\r\n").expect("an HTTP answer");
        let status = head.split(' ').nth(1).and_then(|code| code.parse().ok()).expect("a status");
        (status, body.to_owned())
    }
}

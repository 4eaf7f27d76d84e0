//! A TCP proxy before an HTTP server that watches for one kind of request: counts them, and may hold them.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};

/// Bytes that are read at a time.
const BUFFER_BYTES: usize = 64 * 1024;

/// The proxy. Its threads end with the test's process.
pub struct RequestGate {
    address: String,
    shared: Arc<Shared>,
}

struct Shared {
    server: String,
    /// What the first line of such a request contains, and nothing else that is sent.
    mark: &'static [u8],
    seen: AtomicUsize,
    is_open: Mutex<bool>,
    opened: Condvar,
}

impl RequestGate {
    /// A proxy to an endpoint, on a port of its own. If it is not open, connections with such a request wait until it is.
    pub fn to(endpoint: &str, mark: &'static str, is_open: bool) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address").to_string();
        let shared = Arc::new(Shared {
            server: endpoint.trim_start_matches("http://").to_owned(),
            mark: mark.as_bytes(),
            seen: AtomicUsize::new(0),
            is_open: Mutex::new(is_open),
            opened: Condvar::new(),
        });
        let gate = Self { address, shared: Arc::clone(&shared) };
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let shared = Arc::clone(&shared);
                std::thread::spawn(move || shared.forward(client));
            }
        });
        gate
    }

    pub fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    /// How many such requests have come.
    pub fn seen(&self) -> usize {
        self.shared.seen.load(Ordering::SeqCst)
    }

    pub fn open(&self) {
        *self.shared.is_open.lock().unwrap() = true;
        self.shared.opened.notify_all();
    }
}

impl Shared {
    fn forward(&self, mut client: TcpStream) {
        let Ok(mut server) = TcpStream::connect(&self.server) else { return };
        let (mut answers, mut to_client) = (server.try_clone().unwrap(), client.try_clone().unwrap());
        std::thread::spawn(move || {
            // An `Err`: one of them is gone.
            let _ = std::io::copy(&mut answers, &mut to_client);
            let _ = to_client.shutdown(Shutdown::Both);
        });
        let mut buffer = vec![0; BUFFER_BYTES];
        // The end of what came before: a mark may come in two pieces.
        let mut tail = Vec::new();
        while let Ok(read @ 1..) = client.read(&mut buffer) {
            tail.extend_from_slice(&buffer[..read]);
            let marks = tail.windows(self.mark.len()).filter(|window| *window == self.mark).count();
            tail.drain(..tail.len().saturating_sub(self.mark.len() - 1));
            if marks > 0 {
                self.seen.fetch_add(marks, Ordering::SeqCst);
                let is_open = self.is_open.lock().unwrap();
                drop(self.opened.wait_while(is_open, |is_open| !*is_open).unwrap());
            }
            if server.write_all(&buffer[..read]).is_err() {
                break;
            }
        }
        let _ = server.shutdown(Shutdown::Write);
    }
}

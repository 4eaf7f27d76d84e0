//! Requests to stop: SIGTERM, SIGINT, or a request of the process that started this one. The first drains, the second ends the process
//! at once.

use std::io;
use std::os::fd::AsFd as _;

use tokio::io::AsyncReadExt as _;
use tokio::net::unix::pipe;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// Listens for requests to stop.
#[derive(Debug)]
pub struct Signals {
    terminate: Signal,
    interrupt: Signal,
    /// Signals so far.
    signals: u32,
    parent: Option<Parent>,
    /// Requests that `next` has returned.
    given: u32,
}

/// Each byte on standard input is a request. If none came before, so is the end of the input.
#[derive(Debug)]
struct Parent {
    requests: pipe::Receiver,
    count: u32,
    is_gone: bool,
}

impl Signals {
    /// Installs the handlers: from now on these signals do not kill the process.
    ///
    /// # Errors
    /// The system rejects the handlers.
    pub fn listen() -> io::Result<Self> {
        let (terminate, interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
        Ok(Self { terminate, interrupt, signals: 0, parent: None, given: 0 })
    }

    /// The same for a process that another one started for one of its GPUs, and that must not outlive it.
    ///
    /// # Errors
    /// The system rejects the handlers, or standard input is not a pipe.
    pub fn listen_to_parent() -> io::Result<Self> {
        let requests = pipe::Receiver::from_owned_fd(io::stdin().as_fd().try_clone_to_owned()?)?;
        let parent = Some(Parent { requests, count: 0, is_gone: false });
        Ok(Self { parent, ..Self::listen()? })
    }

    /// Waits for the next request and returns its source. Cancel-safe.
    ///
    /// A terminal or a service manager signals the parent and its children, and the parent forwards the signal too. Signals and the
    /// parent's requests are therefore counted separately, so that both together are one request.
    pub async fn next(&mut self) -> &'static str {
        loop {
            let name = tokio::select! {
                _ = self.terminate.recv() => { self.signals += 1; "SIGTERM" }
                _ = self.interrupt.recv() => { self.signals += 1; "SIGINT" }
                name = next_of(&mut self.parent) => name,
            };
            let parent = self.parent.as_ref().map_or(0, |parent| parent.count);
            if self.signals.max(parent) > self.given {
                self.given += 1;
                return name;
            }
        }
    }
}

async fn next_of(parent: &mut Option<Parent>) -> &'static str {
    let Some(parent) = parent.as_mut().filter(|parent| !parent.is_gone) else {
        return std::future::pending().await;
    };
    match parent.requests.read_u8().await {
        Ok(_) => {
            parent.count += 1;
            "the parent's request"
        }
        Err(_) => {
            parent.is_gone = true;
            parent.count = parent.count.max(1);
            "the parent's end"
        }
    }
}

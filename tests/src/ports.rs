//! Ports that tests name in addresses: one where nobody listens, and one for a program that takes no port of the system's choice.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::ops::RangeInclusive;
use std::time::UNIX_EPOCH;

use anyhow::{Result, bail};
use tokio::net::TcpSocket;

use crate::random::Random;

/// Below the range from which Linux takes ports for outgoing connections and for listeners on port 0, and apart from the brokers' ports
/// (`free_port` in `scripts/rabbitmq`).
const PORTS: RangeInclusive<u16> = 10_000..=19_999;

/// Ports that are tried.
const TRIES: usize = 100;

/// A port that refuses connections until this is dropped. It is reserved without listening: the port of a closed listener could soon be
/// another program's.
#[derive(Debug)]
pub struct ClosedPort {
    pub address: SocketAddr,
    _socket: TcpSocket,
}

impl ClosedPort {
    /// # Errors
    /// The system has no port.
    pub fn new() -> Result<Self> {
        let socket = TcpSocket::new_v4()?;
        socket.bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)))?;
        Ok(Self { address: socket.local_addr()?, _socket: socket })
    }
}

/// A port that is free now, outside the range from which the system assigns ports.
///
/// # Errors
/// None is found.
pub fn free_port() -> Result<u16> {
    let (first, count) = (*PORTS.start(), PORTS.len());
    let mut random = Random::new(UNIX_EPOCH.elapsed()?.as_nanos() as u64);
    for _ in 0..TRIES {
        let port = first + u16::try_from(random.below(count))?;
        if TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok() {
            return Ok(port);
        }
    }
    bail!("no port of {PORTS:?} is free")
}

#[cfg(test)]
mod tests {
    use std::io::ErrorKind;
    use std::net::TcpStream;

    use super::*;

    #[test]
    fn a_closed_port_refuses_connections_and_listeners() {
        let closed = ClosedPort::new().unwrap();
        let refused = TcpStream::connect(closed.address).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);
        assert_eq!(TcpListener::bind(closed.address).unwrap_err().kind(), ErrorKind::AddrInUse);
    }
}

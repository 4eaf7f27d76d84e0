//! The address of the HTTP server: a port, or a range of ports of which the first free one is taken.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::ops::RangeInclusive;
use std::str::FromStr;

/// From the port that OpenTelemetry assigns to Prometheus on, twice as many ports as a machine usually has devices.
pub const DEFAULT: &str = "127.0.0.1:9464-9495";

/// An address and its ports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listen {
    pub ip: IpAddr,
    /// `0..=0`: any free port.
    pub ports: RangeInclusive<u16>,
}

impl Listen {
    /// Whether any of several ports is acceptable.
    pub fn is_range(&self) -> bool {
        self.ports.start() < self.ports.end()
    }

    /// Whether a second worker with the same setting would fail.
    pub fn is_one_port(&self) -> bool {
        !self.is_range() && *self.ports.start() != 0
    }
}

impl FromStr for Listen {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let expected = || {
            format!(
                "`{text}` is not an address to listen on: IP:PORT, IP:FIRST-LAST for the first free port of these, or `off`"
            )
        };
        let (first, last) = match text.rsplit_once(':').and_then(|(_, ports)| ports.split_once('-')) {
            None => (text, None),
            Some((_, last)) => {
                let first = &text[..text.len() - last.len() - 1];
                (first, Some(last.parse::<u16>().map_err(|_| expected())?))
            }
        };
        let address: SocketAddr = first.parse().map_err(|_| expected())?;
        let last = last.unwrap_or(address.port());
        if last < address.port() || (last > address.port() && address.port() == 0) {
            return Err(expected());
        }
        Ok(Self { ip: address.ip(), ports: address.port()..=last })
    }
}

impl fmt::Display for Listen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (first, last) = (*self.ports.start(), *self.ports.end());
        write!(f, "{}", SocketAddr::new(self.ip, first))?;
        if self.is_range() { write!(f, "-{last}") } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_and_written() {
        for text in [DEFAULT, "0.0.0.0:9464", "[::1]:9000-9001", "127.0.0.1:0", "[::]:1"] {
            assert_eq!(text.parse::<Listen>().unwrap().to_string(), text);
        }
        for text in [
            "",
            "9464",
            ":9464",
            "host:9464",
            "127.0.0.1",
            "127.0.0.1:2-1",
            "127.0.0.1:0-5",
            "::1:70000",
            "1.2.3.4:5-x",
        ] {
            assert!(text.parse::<Listen>().unwrap_err().contains("IP:PORT"), "{text}");
        }
    }
}

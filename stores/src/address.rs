//! Which addresses are public: a job must not make a worker ask services inside its own network.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Whether an address is public, by IANA's registries of special-purpose addresses.
pub fn is_public(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => is_public_v4(address),
        IpAddr::V6(address) => is_public_v6(address),
    }
}

fn is_public_v4(address: Ipv4Addr) -> bool {
    let special = match address.octets() {
        // This network, private, loopback, link-local (cloud metadata is there), private.
        [0 | 10 | 127, ..] | [169, 254, ..] | [192, 168, ..] => true,
        // Carrier-grade NAT, private, benchmarking.
        [100, 64..=127, ..] | [172, 16..=31, ..] | [198, 18..=19, ..] => true,
        // Protocol assignments, documentation, the relays of 6to4.
        [192, 0, 0 | 2, _] | [198, 51, 100, _] | [203, 0, 113, _] | [192, 88, 99, _] => true,
        // Azure's host agent, which hands out secrets of the machine. Only its number looks public.
        [168, 63, 129, 16] => true,
        // Multicast, reserved, broadcast.
        [224..=255, ..] => true,
        _ => false,
    };
    !special
}

fn is_public_v6(address: Ipv6Addr) -> bool {
    if let Some(inner) = address.to_ipv4_mapped() {
        return is_public_v4(inner);
    }
    match address.segments() {
        // NAT64 and 6to4 addresses contain the IPv4 address that a connection reaches.
        [0x64, 0xff9b, 0, 0, 0, 0, a, b] => is_public_v4(joined(a, b)),
        [0x2002, a, b, ..] => is_public_v4(joined(a, b)),
        // Protocol assignments (Teredo among them), documentation.
        [0x2001, 0..=0x1ff, ..] | [0x2001, 0xdb8, ..] => false,
        // All that is assigned globally; the rest is loopback, local, multicast or reserved.
        [first, ..] => (0x2000..0x3ff0).contains(&first),
    }
}

fn joined(a: u16, b: u16) -> Ipv4Addr {
    let ([a, b], [c, d]) = (a.to_be_bytes(), b.to_be_bytes());
    Ipv4Addr::new(a, b, c, d)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_anybody_could_ask_is_public() {
        for public in [
            "1.1.1.1",
            "8.8.8.8",
            "172.32.0.1",
            "100.128.0.1",
            "168.63.129.17",
            "2606:4700::1111",
            "::ffff:1.1.1.1",
            "64:ff9b::101:101",
        ] {
            assert!(is_public(public.parse().unwrap()), "{public}");
        }
        for special in [
            "0.0.0.0",
            "10.1.2.3",
            "127.0.0.1",
            "127.9.9.9",
            "169.254.169.254",
            "172.16.0.1",
            "172.31.255.255",
            "192.168.1.1",
            "100.64.0.1",
            "192.0.2.1",
            "198.18.0.1",
            "168.63.129.16",
            "224.0.0.1",
            "240.0.0.1",
            "255.255.255.255",
            "::",
            "::1",
            "fe80::1",
            "fc00::1",
            "fd12::1",
            "ff02::1",
            "::ffff:127.0.0.1",
            "::ffff:10.0.0.1",
            "64:ff9b::7f00:1",
            "64:ff9b::a00:1",
            // The prefix of NAT64 inside of networks.
            "64:ff9b:1::808:808",
            "2002:7f00:1::",
            "2001::1",
            "2001:db8::1",
            "::127.0.0.1",
        ] {
            assert!(!is_public(special.parse().unwrap()), "{special}");
        }
    }
}

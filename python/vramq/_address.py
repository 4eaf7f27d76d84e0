"""Which addresses are public: a reference in a reply must not make a client ask services inside its own network."""

import ipaddress

# After IANA's registries of special-purpose addresses.
_SPECIAL_V4 = [ipaddress.ip_network(network) for network in (
    # This network, private, loopback, link-local (cloud metadata is there), private.
    "0.0.0.0/8", "10.0.0.0/8", "127.0.0.0/8", "169.254.0.0/16", "192.168.0.0/16",
    # Carrier-grade NAT, private, benchmarking.
    "100.64.0.0/10", "172.16.0.0/12", "198.18.0.0/15",
    # Protocol assignments, documentation, the relays of 6to4.
    "192.0.0.0/24", "192.0.2.0/24", "198.51.100.0/24", "203.0.113.0/24", "192.88.99.0/24",
    # The host's agent in Azure, which gives secrets of the machine: public by its number alone.
    "168.63.129.16/32",
    # Multicast, reserved, broadcast.
    "224.0.0.0/3",
)]
# All that is assigned globally; the rest is loopback, local, multicast or reserved.
_GLOBAL_V6 = ipaddress.ip_network("2000::/3")
_SPECIAL_V6 = [ipaddress.ip_network(network) for network in (
    # Protocol assignments (Teredo among them), documentation.
    "2001::/23", "2001:db8::/32", "3ff0::/12",
)]
# NAT64 and 6to4 hold the address that is really asked, so many bits from the end.
_EMBEDDED_V4 = [(ipaddress.ip_network("64:ff9b::/96"), 0), (ipaddress.ip_network("2002::/16"), 80)]


def is_public(text):
    """Whether an address is one that anybody on the internet could ask as well."""
    address = ipaddress.ip_address(text.partition("%")[0])
    if address.version == 6 and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    if address.version == 4:
        return not any(address in network for network in _SPECIAL_V4)
    for network, bits in _EMBEDDED_V4:
        if address in network:
            return is_public(str(ipaddress.IPv4Address(int(address) >> bits & 0xFFFFFFFF)))
    return address in _GLOBAL_V6 and not any(address in network for network in _SPECIAL_V6)

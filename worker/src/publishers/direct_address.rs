//! Checks addresses of RabbitMQ's direct reply-to, with which a caller receives replies on a channel instead of from a queue.
//!
//! A caller writes [`DIRECT_REPLIES`] into `reply_to`, and the broker replaces it by `amq.rabbitmq.reply-to.PID.KEY`. RabbitMQ 3.10 to 4.3
//! use the same form. In a broker before 4.1, publishing to an address of another form crashes the channel, and the broker closes the whole
//! connection. A client can write any address, so each one is checked here. The check does not show whether the caller is still connected:
//! see [`direct_replies`](crate::broker::direct_replies).

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;

/// The `reply_to` of a caller that receives replies on its channel. If a publisher that is not such a caller uses it, the broker closes the
/// publisher's channel.
pub const DIRECT_REPLIES: &str = "amq.rabbitmq.reply-to";

/// The first bytes of a process id in Erlang's external term format: version 131, `NEW_PID_EXT`, `ATOM_UTF8_EXT`. Brokers always encode
/// addresses like this, whatever encoding their Erlang would choose.
const PID_HEAD: [u8; 3] = [131, 88, 118];

/// In place of the node's name, an address has this prefix and a hash of the name.
const NODE_PREFIX: &str = "reply@";

/// Hashes are below this (Erlang's `phash2`).
const NODE_HASHES: u32 = 1 << 27;

/// The bits of ids and serials in every Erlang. Newer ones use more.
pub const ID_BITS_MIN: u32 = 15;
pub const SERIAL_BITS_MIN: u32 = 13;

/// The key is 16 random bytes.
const KEY_BYTES: usize = 16;

/// Why an address cannot come from a broker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Forgery {
    #[error("what follows the name is not two parts separated by a dot")]
    Parts,
    #[error("its first part is not the base64 of a process id")]
    ProcessId,
    #[error("its process id does not name a node of a broker")]
    Node,
    #[error("its process id does not say to which start of the node it belongs")]
    Creation,
    #[error("its second part is not the base64 of a key")]
    Key,
}

/// The caller's process in an address, as far as it decides whether a broker closes a connection. Up to 3.10.8 at least, a broker does so
/// for a node that does not run, and for numbers with more bits than its Erlang uses (15 and 13 there). The creation plays no part in that,
/// but distinguishes the starts of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Process {
    /// The hash in the node's name.
    pub node: u32,
    /// Which start of the node it belongs to.
    pub creation: u32,
    /// Bits of its id, at least [`ID_BITS_MIN`].
    pub id_bits: u32,
    /// Bits of its serial, at least [`SERIAL_BITS_MIN`].
    pub serial_bits: u32,
}

/// Whether a reply to this queue goes to a caller's channel, if the address is genuine.
pub fn is_direct(queue: &str) -> bool {
    suffix(queue).is_some()
}

/// Checks that a broker can have created this address for direct replies. Other queue names pass.
///
/// # Errors
/// Why the address cannot come from a broker.
pub fn check(queue: &str) -> Result<(), Forgery> {
    if is_direct(queue) { process(queue).map(drop) } else { Ok(()) }
}

/// The process in an address for direct replies.
///
/// # Errors
/// Why a broker cannot have created the address.
pub fn process(address: &str) -> Result<Process, Forgery> {
    let (pid, key) = suffix(address).and_then(|suffix| suffix.split_once('.')).ok_or(Forgery::Parts)?;
    let process = read_pid(&STANDARD.decode(pid).map_err(|_| Forgery::ProcessId)?)?;
    match STANDARD.decode(key) {
        Ok(key) if key.len() == KEY_BYTES => Ok(process),
        _ => Err(Forgery::Key),
    }
}

fn suffix(queue: &str) -> Option<&str> {
    queue.strip_prefix(DIRECT_REPLIES)?.strip_prefix('.')
}

/// Accepts any ids and serials: how many bits a broker uses depends on its Erlang.
fn read_pid(term: &[u8]) -> Result<Process, Forgery> {
    let rest = term.strip_prefix(&PID_HEAD).ok_or(Forgery::ProcessId)?;
    let (length, rest) = rest.split_first_chunk::<2>().ok_or(Forgery::ProcessId)?;
    let (node, tail) = rest.split_at_checked(u16::from_be_bytes(*length).into()).ok_or(Forgery::ProcessId)?;
    let (numbers, []) = tail.as_chunks::<4>() else { return Err(Forgery::ProcessId) };
    let &[id, serial, creation] = numbers else { return Err(Forgery::ProcessId) };
    let [id, serial, creation] = [id, serial, creation].map(u32::from_be_bytes);
    let text = std::str::from_utf8(node).ok().and_then(|node| node.strip_prefix(NODE_PREFIX));
    // The canonical form of a number: no sign and no leading zeros.
    let hash = text.and_then(|text| text.parse::<u32>().ok().filter(|hash| hash.to_string() == text));
    let node = hash.filter(|hash| *hash < NODE_HASHES).ok_or(Forgery::Node)?;
    // 0 stands for any start of the node, which a broker never writes.
    if creation == 0 {
        return Err(Forgery::Creation);
    }
    Ok(Process {
        node,
        creation,
        id_bits: bits(id).max(ID_BITS_MIN),
        serial_bits: bits(serial).max(SERIAL_BITS_MIN),
    })
}

/// How many bits a number takes, without zeros before it.
fn bits(number: u32) -> u32 {
    u32::BITS - number.leading_zeros()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// From RabbitMQ 3.10.8 and 4.0.5: the `reply_to` of callers on three channels of one node each.
    const GENUINE: [&str; 6] = [
        "amq.rabbitmq.reply-to.g1h2AA9yZXBseUAxMDU3NTA1ODAAAANCAAAAAGsCoh0=.X3Qha+K+dxMpj9egfqbtxg==",
        "amq.rabbitmq.reply-to.g1h2AA9yZXBseUAxMDU3NTA1ODAAAANZAAAAAGsCoh0=.ubDndqare+9LbaT7kmhueQ==",
        "amq.rabbitmq.reply-to.g1h2AA9yZXBseUAxMDU3NTA1ODAAAANwAAAAAGsCoh0=.0EpyRVhCmCsSM9Drt2zQ1A==",
        "amq.rabbitmq.reply-to.g1h2AA5yZXBseUA0MjIyNTcwMAAAAvQAAAAAawKiNQ==.E3Rr+EwmBGnJK6/DyYQfQQ==",
        "amq.rabbitmq.reply-to.g1h2AA5yZXBseUA0MjIyNTcwMAAAAwsAAAAAawKiNQ==.trh8SFodw8Xy570daf4Fvg==",
        "amq.rabbitmq.reply-to.g1h2AA5yZXBseUA0MjIyNTcwMAAAAyIAAAAAawKiNQ==.bVBN679v2c02pKvvalZbUg==",
    ];

    fn address(pid: &[u8], key: &[u8]) -> String {
        format!("{DIRECT_REPLIES}.{}.{}", STANDARD.encode(pid), STANDARD.encode(key))
    }

    /// The form that brokers write, with this node name and these numbers.
    fn pid(node: &[u8], numbers: [u32; 3]) -> Vec<u8> {
        let length = u16::try_from(node.len()).expect("short").to_be_bytes();
        [&PID_HEAD[..], &length, node, &numbers.map(u32::to_be_bytes).concat()].concat()
    }

    const KEY: [u8; KEY_BYTES] = [7; KEY_BYTES];
    const NUMBERS: [u32; 3] = [834, 0, 1_795_334_685];

    #[test]
    fn addresses_that_brokers_made_are_accepted() {
        for genuine in GENUINE {
            assert!(is_direct(genuine));
            assert_eq!(check(genuine), Ok(()), "{genuine}");
        }
    }

    #[test]
    fn an_address_names_a_process() {
        let named = |pid: &[u8]| process(&address(pid, &KEY));
        assert_eq!(
            process(GENUINE[0]),
            Ok(Process { node: 105_750_580, creation: 1_795_334_685, id_bits: 15, serial_bits: 13 })
        );
        let all = pid(b"reply@0", [u32::MAX, 1 << 13, 1]);
        assert_eq!(named(&all), Ok(Process { node: 0, creation: 1, id_bits: 32, serial_bits: 14 }));
        assert_eq!(process("replies"), Err(Forgery::Parts));
    }

    #[test]
    fn names_of_queues_pass() {
        for queue in ["", "replies", "amq.rabbitmq.reply-to", "amq.rabbitmq.reply-toys", "amq.gen-x.y"] {
            assert!(!is_direct(queue), "{queue}");
            assert_eq!(check(queue), Ok(()), "{queue}");
        }
    }

    fn direct(rest: &str) -> String {
        format!("{DIRECT_REPLIES}.{rest}")
    }

    fn assert_forged(addresses: &[String], fault: Forgery) {
        for forged in addresses {
            assert!(is_direct(forged));
            assert_eq!(check(forged), Err(fault), "{forged}");
        }
    }

    #[test]
    fn wrong_parts_and_process_ids_are_distinguished() {
        let good = pid(b"reply@105750580", NUMBERS);
        let (encoded, key) = (STANDARD.encode(&good), STANDARD.encode(KEY));
        assert_eq!(check(&address(&good, &KEY)), Ok(()));

        let of_parts = ["", "forged", &encoded].map(direct);
        let mut of_pid = vec![
            direct("."),
            direct("x.y"),
            direct(&format!(".{key}")),
            direct(&format!(".{encoded}.{key}")),
            direct(&format!("{}.{key}", encoded.trim_end_matches('='))),
            direct(&format!("{}.{key}", encoded.to_lowercase())),
            direct(&format!("{encoded} .{key}")),
        ];
        let other_terms: [&[u8]; 8] = [
            &[],
            &[131],
            // An atom, an integer, a list without end, a binary that claims 4 GiB.
            &[131, 119, 2, b'o', b'k'],
            &[131, 97, 1],
            &[131, 108, 255, 255, 255, 255],
            &[131, 109, 255, 255, 255, 255, 0],
            // A name longer than the term; none at all.
            &[131, 88, 118, 255, 255, 0],
            &[131, 88, 118],
        ];
        of_pid.extend(other_terms.map(|term| address(term, &KEY)));
        of_pid.push(address(&[&good[..], &[0]].concat(), &KEY));
        of_pid.push(address(&good[..good.len() - 1], &KEY));
        // Encodings of process ids that Erlang knows, and no broker uses.
        of_pid.push(address(&[&[131, 103, 118], &good[3..]].concat(), &KEY));
        of_pid.push(address(&[&[131, 88, 119], &good[4..]].concat(), &KEY));
        of_pid.push(address(&[&[131, 88, 100], &good[3..]].concat(), &KEY));
        assert_forged(&of_parts, Forgery::Parts);
        assert_forged(&of_pid, Forgery::ProcessId);
    }

    #[test]
    fn wrong_nodes_creations_and_keys_are_distinguished() {
        let good = pid(b"reply@105750580", NUMBERS);
        let (encoded, key) = (STANDARD.encode(&good), STANDARD.encode(KEY));
        let nodes: [&[u8]; 12] = [
            b"rabbit@localhost",
            b"reply@",
            b"reply@x",
            b"reply@-1",
            b"reply@+1",
            b"reply@01",
            b"reply@1 ",
            b"reply@134217728",
            b"reply@99999999999999999999",
            b"reply",
            b"\xff\xfe",
            b"",
        ];
        let of_node = nodes.map(|node| address(&pid(node, NUMBERS), &KEY));
        let of_creation = [address(&pid(b"reply@1", [1, 0, 0]), &KEY)];
        let of_key = [
            address(&good, &[]),
            address(&good, &KEY[1..]),
            address(&good, &[&KEY[..], &[1]].concat()),
            direct(&format!("{encoded}.key")),
            direct(&format!("{encoded}.{key}.")),
            direct(&format!("{encoded}.{key}=")),
            // The bits beyond the last byte are not 0.
            direct(&format!("{encoded}.X3Qha+K+dxMpj9egfqbtxh==")),
        ];
        assert_forged(&of_node, Forgery::Node);
        assert_forged(&of_creation, Forgery::Creation);
        assert_forged(&of_key, Forgery::Key);
    }

    proptest! {
        #[test]
        fn any_text_has_an_answer(rest in ".*", pid in ".*", key in ".*") {
            let _ = check(&rest);
            let forged = format!("{DIRECT_REPLIES}.{pid}.{key}");
            prop_assert!(check(&forged).is_err());
        }

        #[test]
        fn any_term_has_an_answer(term in prop::collection::vec(any::<u8>(), 0..64)) {
            // A genuine address begins with 5 fixed bytes and a fixed prefix, so random bytes are never one.
            prop_assert!(check(&address(&term, &KEY)).is_err());
        }

        #[test]
        fn an_address_of_any_process_of_any_broker_is_accepted(
            hash in 0..NODE_HASHES, id: u32, serial: u32, creation in 1..=u32::MAX, key: [u8; KEY_BYTES],
        ) {
            let node = format!("{NODE_PREFIX}{hash}");
            prop_assert_eq!(check(&address(&pid(node.as_bytes(), [id, serial, creation]), &key)), Ok(()));
        }

        #[test]
        fn an_address_with_one_changed_byte_is_refused_or_harmless(at: prop::sample::Index, byte: u8) {
            let mut term = pid(b"reply@105750580", NUMBERS);
            let at = at.index(term.len());
            term[at] = byte;
            let answer = check(&address(&term, &KEY));
            let is_number = at >= term.len() - 12 || (11..20).contains(&at);
            prop_assert!(is_number || byte == pid(b"reply@105750580", NUMBERS)[at] || answer.is_err(), "{at}");
        }
    }
}

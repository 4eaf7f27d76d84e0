//! A client that returns each frame of a broker as it comes, in the types of the model.

use std::collections::HashMap;
use std::io::{BufReader, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::sync::mpsc::SyncSender;
use std::time::Duration;

use amq_protocol::frame::{
    AMQPContentHeader, AMQPFrame, ProtocolVersion, WriteContext, gen_frame, parse_frame,
};
use amq_protocol::protocol::{AMQPClass, basic, channel, confirm, connection, exchange, queue};
use amq_protocol::types::{AMQPValue, FieldTable, LongString};
use anyhow::{Context as _, Result, bail, ensure};
use vramq_testkit::simulation::broker::{
    Command, ExchangeKind, Frame, Overflow, Properties, QueueKind, QueueOptions,
};

use crate::content::{Content, Incoming};

/// A frame, with the number of its client and of its channel (0: the connection).
pub type Seen = (usize, u16, Frame);

/// How long a broker may take to shake hands.
const HANDSHAKE: Duration = Duration::from_secs(60);

/// Where a broker is, and which.
#[derive(Clone, Debug)]
pub struct Address {
    pub host: String,
    pub user: String,
    pub password: String,
}

impl Address {
    /// Reads `VRAMQ_TEST_AMQP_URL`, if it is set.
    pub fn from_environment() -> Result<Option<Self>> {
        let Ok(url) = std::env::var("VRAMQ_TEST_AMQP_URL") else { return Ok(None) };
        let rest = url.strip_prefix("amqp://").with_context(|| format!("{url} is not amqp://"))?;
        let (login, rest) = rest.split_once('@').unwrap_or(("guest:guest", rest));
        let (user, password) = login.split_once(':').context("a login without a password")?;
        let host = rest.split('/').next().unwrap_or(rest);
        Ok(Some(Self { host: host.to_owned(), user: user.to_owned(), password: password.to_owned() }))
    }
}

/// A connection. Dropping it breaks it.
#[derive(Debug)]
pub struct Client {
    stream: TcpStream,
    /// The broker's version.
    pub version: String,
}

impl Drop for Client {
    fn drop(&mut self) {
        // The broker may have closed it already.
        let _ = self.stream.shutdown(Shutdown::Both);
    }
}

impl Client {
    /// `number` marks the frames that it hands to `frames`.
    pub fn connect(address: &Address, number: usize, frames: SyncSender<Seen>) -> Result<Self> {
        let stream =
            TcpStream::connect(&address.host).with_context(|| format!("connect to {}", address.host))?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(HANDSHAKE))?;
        let mut reader = BufReader::new(stream.try_clone()?);
        let mut writer = stream.try_clone()?;
        write(&mut writer, &AMQPFrame::ProtocolHeader(ProtocolVersion::amqp_0_9_1()))?;
        let AMQPClass::Connection(connection::AMQPMethod::Start(start)) = read_method(&mut reader)? else {
            bail!("the broker does not start");
        };
        let version = match start.server_properties.inner().get("version") {
            Some(AMQPValue::LongString(version)) => String::from_utf8_lossy(version.as_bytes()).into_owned(),
            other => bail!("the broker's version is {other:?}"),
        };
        let mut capabilities = FieldTable::default();
        for name in ["publisher_confirms", "consumer_cancel_notify", "basic.nack", "connection.blocked"] {
            capabilities.insert(name.into(), AMQPValue::Boolean(true));
        }
        let mut client_properties = FieldTable::default();
        client_properties.insert("capabilities".into(), AMQPValue::FieldTable(capabilities));
        let start_ok = connection::StartOk {
            client_properties,
            mechanism: "PLAIN".into(),
            response: format!("\0{}\0{}", address.user, address.password).as_str().into(),
            locale: "en_US".into(),
        };
        method(&mut writer, 0, AMQPClass::Connection(connection::AMQPMethod::StartOk(start_ok)))?;
        let AMQPClass::Connection(connection::AMQPMethod::Tune(tune)) = read_method(&mut reader)? else {
            bail!("the broker refuses the login");
        };
        let tune_ok =
            connection::TuneOk { channel_max: tune.channel_max, frame_max: tune.frame_max, heartbeat: 0 };
        method(&mut writer, 0, AMQPClass::Connection(connection::AMQPMethod::TuneOk(tune_ok)))?;
        let open = connection::Open { virtual_host: "/".into() };
        method(&mut writer, 0, AMQPClass::Connection(connection::AMQPMethod::Open(open)))?;
        let AMQPClass::Connection(connection::AMQPMethod::OpenOk(_)) = read_method(&mut reader)? else {
            bail!("the broker does not open the virtual host");
        };
        stream.set_read_timeout(None)?;
        // It ends with the connection.
        std::thread::spawn(move || {
            read_frames(&mut reader, |channel, frame| frames.send((number, channel, frame)).is_ok());
        });
        Ok(Self { stream, version })
    }

    /// Confirms that the broker closed a channel. Until then the broker reads nothing on it; a later confirm would close the connection.
    pub fn agree_to_close(&mut self, number: u16) -> Result<()> {
        let ok = channel::AMQPMethod::CloseOk(channel::CloseOk {});
        method(&mut self.stream, number, AMQPClass::Channel(ok))
    }

    /// Opens a channel; its `OpenOk` is not shown.
    pub fn open_channel(&mut self, number: u16) -> Result<()> {
        method(&mut self.stream, number, AMQPClass::Channel(channel::AMQPMethod::Open(channel::Open {})))
    }

    pub fn send(&mut self, number: u16, command: &Command) -> Result<()> {
        let (class, content) = encode(command);
        let mut bytes = encoded(&AMQPFrame::Method(number, class))?;
        if let Some((properties, body)) = content {
            let header = AMQPContentHeader { class_id: 60, body_size: body.len() as u64, properties };
            bytes.extend(encoded(&AMQPFrame::Header(number, header))?);
            bytes.extend(encoded(&AMQPFrame::Body(number, body))?);
        }
        self.stream.write_all(&bytes).context("write to the broker")
    }
}

fn encoded(frame: &AMQPFrame) -> Result<Vec<u8>> {
    let context = gen_frame(frame)(WriteContext::from(Vec::new())).context("encode a frame")?;
    Ok(context.write)
}

fn write(stream: &mut TcpStream, frame: &AMQPFrame) -> Result<()> {
    stream.write_all(&encoded(frame)?).context("write to the broker")
}

fn method(stream: &mut TcpStream, number: u16, class: AMQPClass) -> Result<()> {
    write(stream, &AMQPFrame::Method(number, class))
}

fn read_frame(reader: &mut impl Read) -> Result<AMQPFrame> {
    let mut head = [0; 7];
    reader.read_exact(&mut head)?;
    let size = u32::from_be_bytes([head[3], head[4], head[5], head[6]]) as usize;
    let mut bytes = head.to_vec();
    // The size plus the octet that ends a frame.
    bytes.resize(7 + size + 1, 0);
    reader.read_exact(&mut bytes[7..])?;
    let (rest, frame) = parse_frame(&bytes[..]).map_err(|error| anyhow::anyhow!("a frame: {error}"))?;
    ensure!(rest.is_empty(), "a frame's end");
    Ok(frame)
}

fn read_method(reader: &mut impl Read) -> Result<AMQPClass> {
    match read_frame(reader)? {
        AMQPFrame::Method(_, class) => Ok(class),
        other => bail!("{other} instead of a method"),
    }
}

/// Reads until the connection ends, and puts methods and their contents together.
fn read_frames(reader: &mut impl Read, show: impl Fn(u16, Frame) -> bool) {
    let mut contents: HashMap<u16, Content> = HashMap::new();
    while let Ok(frame) = read_frame(reader) {
        let shown = match frame {
            AMQPFrame::Method(number, class) => match Incoming::of(class) {
                Incoming::Frame(frame) => Some((number, frame)),
                Incoming::WithContent(content) => {
                    contents.insert(number, content);
                    None
                }
                Incoming::Nothing => None,
            },
            AMQPFrame::Header(number, header) => contents
                .get_mut(&number)
                .and_then(|content| content.header(header))
                .map(|frame| (number, frame)),
            AMQPFrame::Body(number, body) => {
                contents.get_mut(&number).and_then(|content| content.body(&body)).map(|frame| (number, frame))
            }
            _ => None,
        };
        if let Some((number, frame)) = shown
            && !show(number, frame)
        {
            return;
        }
    }
}

fn encode(command: &Command) -> (AMQPClass, Option<(basic::AMQPProperties, Vec<u8>)>) {
    use basic::AMQPMethod as Basic;
    let name = |name: &Arc<str>| (&**name).into();
    let method = match command {
        Command::Publish { exchange, routing_key, mandatory, properties, body } => {
            let publish = basic::Publish {
                exchange: name(exchange),
                routing_key: name(routing_key),
                mandatory: *mandatory,
                immediate: false,
            };
            let content = (encode_properties(properties), body.to_vec());
            return (AMQPClass::Basic(Basic::Publish(publish)), Some(content));
        }
        Command::Qos { prefetch } => Basic::Qos(basic::Qos { prefetch_count: *prefetch, global: false }),
        Command::Consume { queue, tag, no_ack, priority } => {
            let mut arguments = FieldTable::default();
            if *priority != 0 {
                arguments.insert("x-priority".into(), AMQPValue::LongInt(*priority));
            }
            Basic::Consume(basic::Consume {
                queue: name(queue),
                consumer_tag: name(tag),
                no_local: false,
                no_ack: *no_ack,
                exclusive: false,
                nowait: false,
                arguments,
            })
        }
        Command::Cancel { tag } => Basic::Cancel(basic::Cancel { consumer_tag: name(tag), nowait: false }),
        Command::Get { queue, no_ack } => Basic::Get(basic::Get { queue: name(queue), no_ack: *no_ack }),
        Command::Ack { tag, multiple } => Basic::Ack(basic::Ack { delivery_tag: *tag, multiple: *multiple }),
        Command::Nack { tag, multiple, requeue } => {
            Basic::Nack(basic::Nack { delivery_tag: *tag, multiple: *multiple, requeue: *requeue })
        }
        other => return (encode_other(other), None),
    };
    (AMQPClass::Basic(method), None)
}

fn encode_other(command: &Command) -> AMQPClass {
    match command {
        Command::ConfirmSelect => {
            AMQPClass::Confirm(confirm::AMQPMethod::Select(confirm::Select { nowait: false }))
        }
        Command::DeclareExchange { name: exchange, kind } => {
            AMQPClass::Exchange(exchange::AMQPMethod::Declare(exchange::Declare {
                exchange: (&**exchange).into(),
                kind: match kind {
                    ExchangeKind::Direct => "direct".into(),
                    ExchangeKind::Fanout => "fanout".into(),
                },
                passive: false,
                durable: true,
                auto_delete: false,
                internal: false,
                nowait: false,
                arguments: FieldTable::default(),
            }))
        }
        Command::Close => AMQPClass::Channel(channel::AMQPMethod::Close(channel::Close {
            reply_code: 200,
            reply_text: "".into(),
            class_id: 0,
            method_id: 0,
        })),
        of_queues => encode_of_queues(of_queues),
    }
}

fn encode_of_queues(command: &Command) -> AMQPClass {
    let name = |name: &Arc<str>| (&**name).into();
    let declare = |queue: &Arc<str>, passive: bool, arguments: FieldTable| {
        AMQPClass::Queue(queue::AMQPMethod::Declare(queue::Declare {
            queue: (&**queue).into(),
            passive,
            durable: true,
            exclusive: false,
            auto_delete: false,
            nowait: false,
            arguments,
        }))
    };
    match command {
        Command::Count { queue } => declare(queue, true, FieldTable::default()),
        Command::DeclareQueue { name, options } => declare(name, false, arguments(options)),
        Command::DeleteQueue { name: queue, if_unused, if_empty } => {
            AMQPClass::Queue(queue::AMQPMethod::Delete(queue::Delete {
                queue: name(queue),
                if_unused: *if_unused,
                if_empty: *if_empty,
                nowait: false,
            }))
        }
        Command::Purge { queue } => {
            AMQPClass::Queue(queue::AMQPMethod::Purge(queue::Purge { queue: name(queue), nowait: false }))
        }
        Command::Bind { queue, exchange, routing_key } => {
            AMQPClass::Queue(queue::AMQPMethod::Bind(queue::Bind {
                queue: name(queue),
                exchange: name(exchange),
                routing_key: name(routing_key),
                nowait: false,
                arguments: FieldTable::default(),
            }))
        }
        Command::Unbind { queue, exchange, routing_key } => {
            AMQPClass::Queue(queue::AMQPMethod::Unbind(queue::Unbind {
                queue: name(queue),
                exchange: name(exchange),
                routing_key: name(routing_key),
                arguments: FieldTable::default(),
            }))
        }
        other => unreachable!("{other:?} is of class basic"),
    }
}

fn encode_properties(properties: &Properties) -> basic::AMQPProperties {
    let mut encoded =
        basic::AMQPProperties::default().with_delivery_mode(if properties.persistent { 2 } else { 1 });
    if let Some(priority) = properties.priority {
        encoded = encoded.with_priority(priority);
    }
    if let Some(expiration) = properties.expiration {
        encoded = encoded.with_expiration(expiration.to_string().as_str().into());
    }
    encoded
}

fn arguments(options: &QueueOptions) -> FieldTable {
    let mut table = FieldTable::default();
    let text = |value: &str| AMQPValue::LongString(LongString::from(value));
    let quorum = options.kind == QueueKind::Quorum;
    table.insert("x-queue-type".into(), text(if quorum { "quorum" } else { "classic" }));
    if let Some(max) = options.max_length {
        table.insert("x-max-length".into(), AMQPValue::LongLongInt(i64::from(max)));
        let overflow = match options.overflow {
            Overflow::DropHead => "drop-head",
            Overflow::RejectPublish => "reject-publish",
        };
        table.insert("x-overflow".into(), text(overflow));
    }
    if let Some(max) = options.max_priority {
        table.insert("x-max-priority".into(), AMQPValue::LongLongInt(i64::from(max)));
    }
    if let Some(ttl) = options.message_ttl {
        table.insert("x-message-ttl".into(), AMQPValue::LongLongInt(ttl as i64));
    }
    if let Some(exchange) = &options.dead_letter_exchange {
        table.insert("x-dead-letter-exchange".into(), text(exchange));
    }
    if let Some(key) = &options.dead_letter_routing_key {
        table.insert("x-dead-letter-routing-key".into(), text(key));
    }
    if options.dead_letter_at_least_once {
        table.insert("x-dead-letter-strategy".into(), text("at-least-once"));
    }
    if let Some(limit) = options.delivery_limit {
        table.insert("x-delivery-limit".into(), AMQPValue::LongLongInt(limit));
    }
    table
}

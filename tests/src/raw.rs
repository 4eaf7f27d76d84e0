//! A publisher that writes AMQP frames itself: for messages that no well-behaved library sends.

use anyhow::{Context as _, Result, ensure};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::TcpStream;
use vramq_schemas::topology::JOBS_EXCHANGE;

const METHOD: u8 = 1;
const HEADER: u8 = 2;
const BODY: u8 = 3;
const FRAME_END: u8 = 0xCE;
const BASIC: u16 = 60;

/// Properties in bytes rather than in text. Those that are empty are absent.
#[derive(Clone, Debug, Default)]
pub struct RawProperties {
    pub content_type: Vec<u8>,
    pub content_encoding: Vec<u8>,
    /// A field table, without its length.
    pub headers: Vec<u8>,
    pub correlation_id: Vec<u8>,
    pub reply_to: Vec<u8>,
    pub message_id: Vec<u8>,
    pub kind: Vec<u8>,
    pub user_id: Vec<u8>,
    pub app_id: Vec<u8>,
    pub cluster_id: Vec<u8>,
}

impl RawProperties {
    /// Flags and values, in their order (AMQP 0-9-1, class basic).
    fn encoded(&self) -> Vec<u8> {
        let in_order = [
            (15, &self.content_type),
            (14, &self.content_encoding),
            (13, &self.headers),
            (10, &self.correlation_id),
            (9, &self.reply_to),
            (7, &self.message_id),
            (5, &self.kind),
            (4, &self.user_id),
            (3, &self.app_id),
            (2, &self.cluster_id),
        ];
        let (mut flags, mut values) = (0u16, Vec::new());
        for (bit, value) in in_order.into_iter().filter(|(_, value)| !value.is_empty()) {
            flags |= 1 << bit;
            values.extend(if bit == 13 { long(value) } else { short(value) });
        }
        [&flags.to_be_bytes()[..], &values].concat()
    }
}

/// Publishes one message to a model's jobs, and returns when the broker has it.
///
/// # Errors
/// The broker does not take it.
pub async fn publish(url: &str, model: &str, properties: &RawProperties, body: &[u8]) -> Result<()> {
    let mut stream = open(url).await?;
    method(&mut stream, 1, (85, 10), &[0]).await?;
    expect(&mut stream, (85, 11)).await?;
    let to = [&[0, 0][..], &short(JOBS_EXCHANGE.as_bytes()), &short(model.as_bytes()), &[0]].concat();
    method(&mut stream, 1, (BASIC, 40), &to).await?;
    let header =
        [&BASIC.to_be_bytes()[..], &[0, 0], &(body.len() as u64).to_be_bytes(), &properties.encoded()];
    frame(&mut stream, HEADER, 1, &header.concat()).await?;
    frame(&mut stream, BODY, 1, body).await?;
    expect(&mut stream, (BASIC, 80)).await
}

/// Takes a message of a queue, and disconnects without settling it, so that the broker delivers it again.
///
/// # Errors
/// None comes.
pub async fn take_and_leave(url: &str, queue: &str) -> Result<()> {
    let mut stream = open(url).await?;
    let from = [&[0, 0][..], &short(queue.as_bytes()), &short(b"taker"), &[0], &long(b"")].concat();
    method(&mut stream, 1, (BASIC, 20), &from).await?;
    expect(&mut stream, (BASIC, 21)).await?;
    expect(&mut stream, (BASIC, 60)).await
}

/// A connection with a channel.
async fn open(url: &str) -> Result<BufReader<TcpStream>> {
    let (address, vhost) = url
        .split_once('@')
        .and_then(|(_, rest)| rest.split_once('/'))
        .context("a URL with a host and a virtual host")?;
    let mut stream = BufReader::new(TcpStream::connect(address).await?);
    stream.write_all(b"AMQP\0\0\x09\x01").await?;
    expect(&mut stream, (10, 10)).await?;
    let credentials = long(b"\0guest\0guest");
    let start_ok = [&long(b"")[..], &short(b"PLAIN"), &credentials, &short(b"en_US")].concat();
    method(&mut stream, 0, (10, 11), &start_ok).await?;
    expect(&mut stream, (10, 30)).await?;
    // 2,047 channels, frames of 128 KiB, no heartbeats.
    method(&mut stream, 0, (10, 31), &[0x07, 0xff, 0, 2, 0, 0, 0, 0]).await?;
    let open = [&short(vhost.as_bytes())[..], &short(b""), &[0]].concat();
    method(&mut stream, 0, (10, 40), &open).await?;
    expect(&mut stream, (10, 41)).await?;
    method(&mut stream, 1, (20, 10), &short(b"")).await?;
    expect(&mut stream, (20, 11)).await?;
    Ok(stream)
}

/// The start of a field table nested `depth` times: `{"n": {"n": …}}`.
pub fn nested_table(depth: usize) -> Vec<u8> {
    const ENTRY: usize = 2 + 1 + 4;
    let mut table = Vec::with_capacity(depth * ENTRY);
    for level in (0..depth).rev() {
        table.extend(short(b"n"));
        table.push(b'F');
        table.extend(((level * ENTRY) as u32).to_be_bytes());
    }
    table
}

fn short(text: &[u8]) -> Vec<u8> {
    [&[text.len() as u8][..], text].concat()
}

fn long(text: &[u8]) -> Vec<u8> {
    [&(text.len() as u32).to_be_bytes()[..], text].concat()
}

async fn method(
    stream: &mut BufReader<TcpStream>,
    channel: u16,
    (class, method): (u16, u16),
    arguments: &[u8],
) -> Result<()> {
    let payload = [&class.to_be_bytes()[..], &method.to_be_bytes(), arguments].concat();
    frame(stream, METHOD, channel, &payload).await
}

async fn frame(stream: &mut BufReader<TcpStream>, kind: u8, channel: u16, payload: &[u8]) -> Result<()> {
    let head = [&[kind][..], &channel.to_be_bytes(), &(payload.len() as u32).to_be_bytes()].concat();
    stream.write_all(&[&head[..], payload, &[FRAME_END]].concat()).await?;
    Ok(())
}

/// Reads a method frame, which must be this one.
async fn expect(stream: &mut BufReader<TcpStream>, expected: (u16, u16)) -> Result<()> {
    let (kind, _channel) = (stream.read_u8().await?, stream.read_u16().await?);
    let mut payload = vec![0; stream.read_u32().await? as usize];
    stream.read_exact(&mut payload).await?;
    ensure!(stream.read_u8().await? == FRAME_END && kind == METHOD, "not a method frame");
    let method = (u16::from_be_bytes([payload[0], payload[1]]), u16::from_be_bytes([payload[2], payload[3]]));
    ensure!(method == expected, "method {method:?}, not {expected:?}: {}", String::from_utf8_lossy(&payload));
    Ok(())
}

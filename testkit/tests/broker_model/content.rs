//! Converts frames of a broker to the types of the model: methods, and the messages that follow some of them.

use std::collections::BTreeMap;
use std::sync::Arc;

use amq_protocol::frame::AMQPContentHeader;
use amq_protocol::protocol::{AMQPClass, basic, channel, confirm, connection, exchange, queue};
use amq_protocol::types::{AMQPValue, FieldTable};
use vramq_testkit::simulation::broker::{
    Death, DeathPlace, DeathReason, Delivery, Frame, Message, Name, Properties,
};

/// What a method means for the check.
#[allow(clippy::large_enum_variant, reason = "one at a time")]
pub enum Incoming {
    Frame(Frame),
    /// A header and a body follow.
    WithContent(Content),
    Nothing,
}

/// A message that comes in pieces.
pub struct Content {
    method: basic::AMQPMethod,
    header: Option<AMQPContentHeader>,
    body: Vec<u8>,
}

impl Incoming {
    pub fn of(class: AMQPClass) -> Self {
        use basic::AMQPMethod as Basic;
        let frame = match class {
            AMQPClass::Basic(method) => match method {
                Basic::Deliver(_) | Basic::GetOk(_) | Basic::Return(_) => {
                    return Self::WithContent(Content { method, header: None, body: Vec::new() });
                }
                Basic::QosOk(_) => Frame::QosOk,
                Basic::ConsumeOk(ok) => Frame::ConsumeOk { tag: name(ok.consumer_tag.as_str()) },
                Basic::CancelOk(ok) => Frame::CancelOk { tag: name(ok.consumer_tag.as_str()) },
                Basic::Cancel(cancel) => Frame::Cancelled { tag: name(cancel.consumer_tag.as_str()) },
                Basic::GetEmpty(_) => Frame::GetEmpty,
                Basic::Ack(ack) => Frame::Ack { tag: ack.delivery_tag, multiple: ack.multiple },
                Basic::Nack(nack) => Frame::Nack { tag: nack.delivery_tag, multiple: nack.multiple },
                _ => return Self::Nothing,
            },
            AMQPClass::Confirm(confirm::AMQPMethod::SelectOk(_)) => Frame::ConfirmSelectOk,
            AMQPClass::Queue(method) => match method {
                queue::AMQPMethod::DeclareOk(ok) => {
                    Frame::DeclareOk { messages: ok.message_count, consumers: ok.consumer_count }
                }
                queue::AMQPMethod::DeleteOk(ok) => Frame::DeleteOk { messages: ok.message_count },
                queue::AMQPMethod::PurgeOk(ok) => Frame::PurgeOk { messages: ok.message_count },
                queue::AMQPMethod::BindOk(_) => Frame::BindOk,
                queue::AMQPMethod::UnbindOk(_) => Frame::UnbindOk,
                _ => return Self::Nothing,
            },
            AMQPClass::Exchange(exchange::AMQPMethod::DeclareOk(_)) => Frame::ExchangeDeclareOk,
            AMQPClass::Channel(channel::AMQPMethod::Close(close)) => Frame::Closed { code: close.reply_code },
            AMQPClass::Channel(channel::AMQPMethod::CloseOk(_)) => Frame::CloseOk,
            AMQPClass::Connection(method) => match method {
                connection::AMQPMethod::Close(close) => Frame::ConnectionClosed { code: close.reply_code },
                connection::AMQPMethod::Blocked(_) => Frame::Blocked,
                connection::AMQPMethod::Unblocked(_) => Frame::Unblocked,
                _ => return Self::Nothing,
            },
            _ => return Self::Nothing,
        };
        Self::Frame(frame)
    }
}

impl Content {
    /// The frame, if there is no body to wait for.
    pub fn header(&mut self, header: AMQPContentHeader) -> Option<Frame> {
        let size = header.body_size;
        self.header = Some(header);
        (size == 0).then(|| self.frame())
    }

    /// The frame, if the body is complete.
    pub fn body(&mut self, bytes: &[u8]) -> Option<Frame> {
        self.body.extend(bytes);
        let size = self.header.as_ref().map_or(0, |header| header.body_size);
        (self.body.len() as u64 >= size).then(|| self.frame())
    }

    fn frame(&self) -> Frame {
        match &self.method {
            basic::AMQPMethod::Deliver(deliver) => Frame::Deliver {
                tag: name(deliver.consumer_tag.as_str()),
                delivery: self.delivery(
                    deliver.delivery_tag,
                    deliver.redelivered,
                    deliver.exchange.as_str(),
                    deliver.routing_key.as_str(),
                ),
            },
            basic::AMQPMethod::GetOk(ok) => Frame::GetOk {
                delivery: self.delivery(
                    ok.delivery_tag,
                    ok.redelivered,
                    ok.exchange.as_str(),
                    ok.routing_key.as_str(),
                ),
                ready: ok.message_count,
            },
            basic::AMQPMethod::Return(returned) => Frame::Return {
                message: self.message(returned.exchange.as_str(), returned.routing_key.as_str()),
            },
            other => unreachable!("{other:?} has no content"),
        }
    }

    fn delivery(&self, delivery_tag: u64, redelivered: bool, exchange: &str, routing_key: &str) -> Delivery {
        let headers = self.headers();
        let delivery_count = headers.get("x-delivery-count").map(|value| number(value) as u32);
        Delivery { delivery_tag, redelivered, delivery_count, message: self.message(exchange, routing_key) }
    }

    fn headers(&self) -> BTreeMap<String, AMQPValue> {
        let headers = self.header.as_ref().and_then(|header| header.properties.headers().as_ref());
        headers
            .map(|table| {
                table.inner().iter().map(|(key, value)| (key.as_str().to_owned(), value.clone())).collect()
            })
            .unwrap_or_default()
    }

    fn message(&self, exchange: &str, routing_key: &str) -> Arc<Message> {
        let headers = self.headers();
        let properties = self.header.as_ref().map(|header| &header.properties);
        let deaths = match headers.get("x-death") {
            Some(AMQPValue::FieldArray(deaths)) => deaths.as_slice().iter().filter_map(death).collect(),
            _ => Vec::new(),
        };
        Arc::new(Message {
            exchange: name(exchange),
            routing_key: name(routing_key),
            properties: Properties {
                priority: properties.and_then(|properties| *properties.priority()),
                expiration: properties
                    .and_then(|properties| properties.expiration().as_ref())
                    .and_then(|text| text.as_str().parse().ok()),
                persistent: properties.and_then(|properties| *properties.delivery_mode()) == Some(2),
                ..Properties::default()
            },
            body: self.body.as_slice().into(),
            deaths,
            first_death: place(&headers, "first"),
            last_death: place(&headers, "last"),
            carried_failures: None,
        })
    }
}

fn name(text: &str) -> Name {
    text.into()
}

fn text(value: &AMQPValue) -> Name {
    match value {
        AMQPValue::LongString(text) => name(&String::from_utf8_lossy(text.as_bytes())),
        AMQPValue::ShortString(text) => name(text.as_str()),
        other => name(&format!("{other:?}")),
    }
}

fn number(value: &AMQPValue) -> i64 {
    match value {
        AMQPValue::LongLongInt(number) => *number,
        AMQPValue::LongInt(number) => i64::from(*number),
        AMQPValue::ShortShortInt(number) => i64::from(*number),
        AMQPValue::ShortShortUInt(number) => i64::from(*number),
        AMQPValue::ShortInt(number) => i64::from(*number),
        AMQPValue::LongUInt(number) => i64::from(*number),
        // Not a number: -1 differs from every count in the model.
        _ => -1,
    }
}

fn reason(text: &str) -> Option<DeathReason> {
    Some(match text {
        "rejected" => DeathReason::Rejected,
        "expired" => DeathReason::Expired,
        "maxlen" => DeathReason::MaxLength,
        "delivery_limit" => DeathReason::DeliveryLimit,
        _ => return None,
    })
}

fn death(value: &AMQPValue) -> Option<Death> {
    let AMQPValue::FieldTable(table) = value else { return None };
    let field = |table: &FieldTable, key: &str| table.inner().get(key).cloned();
    let routing_key = match field(table, "routing-keys")? {
        AMQPValue::FieldArray(keys) => text(keys.as_slice().first()?),
        _ => return None,
    };
    Some(Death {
        queue: text(&field(table, "queue")?),
        reason: reason(&text(&field(table, "reason")?))?,
        count: number(&field(table, "count")?) as u32,
        exchange: text(&field(table, "exchange")?),
        routing_key,
        original_expiration: field(table, "original-expiration").and_then(|value| text(&value).parse().ok()),
    })
}

fn place(headers: &BTreeMap<String, AMQPValue>, which: &str) -> Option<DeathPlace> {
    let field = |what: &str| headers.get(&format!("x-{which}-death-{what}")).map(text);
    Some(DeathPlace {
        reason: reason(&field("reason")?)?,
        queue: field("queue")?,
        exchange: field("exchange")?,
    })
}

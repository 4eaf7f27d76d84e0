//! Commands and frames in one short line each, for the report of a disagreement.

use std::fmt::Write as _;

use vramq_testkit::simulation::broker::{Command, Delivery, Frame, Message, Properties, QueueOptions};

pub fn command(command: &Command) -> String {
    match command {
        Command::Publish { exchange, routing_key, mandatory, properties, body } => {
            let mandatory = if *mandatory { " mandatory" } else { "" };
            format!("publish {} to '{exchange}' {routing_key}{}{mandatory}", text(body), said(properties))
        }
        Command::DeclareQueue { name, options } => format!("declare {name}{}", arguments(options)),
        other => format!("{other:?}"),
    }
}

pub fn frame(frame: &Frame) -> String {
    match frame {
        Frame::Deliver { tag, delivery } => format!("deliver {tag} {}", delivered(delivery)),
        Frame::GetOk { delivery, ready } => format!("get-ok {} ready {ready}", delivered(delivery)),
        Frame::Return { message } => format!("return {}", described(message)),
        other => format!("{other:?}"),
    }
}

/// The arguments that differ from a plain queue.
pub fn arguments(options: &QueueOptions) -> String {
    let mut words = format!(" {:?}", options.kind);
    if let Some(max) = options.max_length {
        let _ = write!(words, " max-length={max} {:?}", options.overflow);
    }
    if let Some(max) = options.max_priority {
        let _ = write!(words, " max-priority={max}");
    }
    if let Some(ttl) = options.message_ttl {
        let _ = write!(words, " ttl={ttl}");
    }
    if let Some(exchange) = &options.dead_letter_exchange {
        let _ = write!(words, " dead-letter={exchange:?}/{:?}", options.dead_letter_routing_key);
    }
    if options.dead_letter_at_least_once {
        words.push_str(" at-least-once");
    }
    if let Some(limit) = options.delivery_limit {
        let _ = write!(words, " delivery-limit={limit}");
    }
    words
}

fn delivered(delivery: &Delivery) -> String {
    let mut words = format!("#{} {}", delivery.delivery_tag, described(&delivery.message));
    if delivery.redelivered {
        words.push_str(" redelivered");
    }
    if let Some(count) = delivery.delivery_count {
        let _ = write!(words, " count={count}");
    }
    words
}

fn described(message: &Message) -> String {
    let mut words = format!(
        "{} via '{}' {}{}",
        text(&message.body),
        message.exchange,
        message.routing_key,
        said(&message.properties)
    );
    for death in &message.deaths {
        let _ = write!(
            words,
            " died[{:?} in {} x{}, of '{}' {}",
            death.reason, death.queue, death.count, death.exchange, death.routing_key
        );
        if let Some(expiration) = death.original_expiration {
            let _ = write!(words, " expiration={expiration}");
        }
        words.push(']');
    }
    for (which, place) in [("first", &message.first_death), ("last", &message.last_death)] {
        if let Some(place) = place {
            let _ = write!(words, " {which}[{:?} {} '{}']", place.reason, place.queue, place.exchange);
        }
    }
    words
}

fn said(properties: &Properties) -> String {
    let mut words = String::new();
    if let Some(priority) = properties.priority {
        let _ = write!(words, " priority={priority}");
    }
    if let Some(expiration) = properties.expiration {
        let _ = write!(words, " expiration={expiration}");
    }
    if !properties.persistent {
        words.push_str(" transient");
    }
    words
}

fn text(body: &[u8]) -> String {
    format!("<{}>", String::from_utf8_lossy(body))
}

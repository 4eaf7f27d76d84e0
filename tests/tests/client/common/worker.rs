//! A consumer that follows the wire contract and answers as the test instructs it.

use std::sync::Arc;

use futures_util::StreamExt as _;
use lapin::options::{BasicAckOptions, BasicConsumeOptions, BasicPublishOptions, BasicQosOptions};
use lapin::types::FieldTable;
use lapin::{BasicProperties, Channel};
use tokio::task::JoinHandle;
use vramq_producer::{Embedding, Encoding, Input, Job, Output, Values};
use vramq_schemas::topology::{default_reply_queue, jobs_queue};
use vramq_schemas::{Failure, JobHeaders, Outputs, Reason, ReplyHeaders, ReplyKind, codec};

use super::Broker;

/// A job as the worker got it.
pub struct Received {
    pub job: Job,
    pub properties: BasicProperties,
    pub headers: JobHeaders,
    pub encoding: Encoding,
}

/// One reply message.
pub struct Answer {
    pub properties: BasicProperties,
    pub body: Vec<u8>,
}

impl Received {
    pub fn id(&self) -> &str {
        self.properties.message_id().as_ref().expect("an id").as_str()
    }

    pub fn text(&self, item: usize) -> &str {
        match &self.job.inputs[item] {
            Input::Text(text) => text,
            other => panic!("no text: {other:?}"),
        }
    }

    /// All items in one `done`.
    pub fn done(&self) -> Answer {
        self.part(0..self.job.inputs.len())
    }

    /// Some of the items, in a `done` if the last is among them, else in a `part`.
    pub fn part(&self, items: std::ops::Range<usize>) -> Answer {
        let outputs = items.clone().map(|item| embed(self.text(item))).collect::<Vec<_>>();
        let total = self.job.inputs.len();
        let kind = if items.end == total { ReplyKind::Done } else { ReplyKind::Part };
        let headers = ReplyHeaders {
            offset: u32::try_from(items.start).expect("small"),
            items: u32::try_from(items.len()).expect("small"),
            items_total: u32::try_from(total).expect("small"),
            worker: "test".to_owned(),
            ..ReplyHeaders::default()
        };
        self.outputs(kind, &headers, outputs)
    }

    /// Any claim.
    pub fn outputs(&self, kind: ReplyKind, headers: &ReplyHeaders, outputs: Vec<Output>) -> Answer {
        let model = self.job.model.clone();
        let body = codec::encode(&Outputs { model, outputs }, self.encoding).expect("encode");
        self.answer(kind.as_str(), headers.to_table(), body)
    }

    pub fn failed(&self, reason: Reason, error: &str) -> Answer {
        let failure = Failure { reason, error: error.to_owned() };
        let body = codec::encode(&failure, self.encoding).expect("encode");
        self.answer(ReplyKind::Failed.as_str(), FieldTable::default(), body)
    }

    pub fn answer(&self, kind: &str, headers: FieldTable, body: Vec<u8>) -> Answer {
        let correlation_id = self.properties.correlation_id().clone().expect("an id");
        let properties = BasicProperties::default()
            .with_correlation_id(correlation_id)
            .with_type(kind.into())
            .with_content_type(self.encoding.content_type().into())
            .with_headers(headers);
        Answer { properties, body }
    }
}

/// A small vector that tells its text.
pub fn embed(text: &str) -> Output {
    Output::Embedding(Embedding { values: Values::F32(vector(text)), base64: false })
}

pub fn vector(text: &str) -> Vec<f32> {
    let sum = text.bytes().map(u32::from).sum::<u32>();
    vec![text.len() as f32, sum as f32, 0.1]
}

/// Declares the model and answers its jobs until the test ends.
pub async fn work(
    broker: &Broker,
    model: &str,
    answer: impl Fn(&Received) -> Vec<Answer> + Send + Sync + 'static,
) -> JoinHandle<()> {
    let connection = broker.connect().await;
    let channel = connection.create_channel().await.expect("channel");
    broker.declare(&channel, model, FieldTable::default()).await;
    channel.basic_qos(256, BasicQosOptions::default()).await.expect("qos");
    let mut consumer = channel
        .basic_consume(
            jobs_queue(model).into(),
            "worker".into(),
            BasicConsumeOptions::default(),
            FieldTable::default(),
        )
        .await
        .expect("consume");
    let answer = Arc::new(answer);
    tokio::spawn(async move {
        let _connection = connection;
        while let Some(Ok(delivery)) = consumer.next().await {
            let received = receive(&delivery);
            for answer in answer(&received) {
                reply(&channel, &received, answer).await;
            }
            delivery.acker.ack(BasicAckOptions::default()).await.expect("ack");
        }
    })
}

pub fn receive(delivery: &lapin::message::Delivery) -> Received {
    let properties = delivery.properties.clone();
    let content_type = properties.content_type().as_ref().map(|name| name.as_str());
    let encoding = Encoding::of(content_type).expect("a content type");
    let headers = properties.headers().clone().unwrap_or_default();
    Received {
        job: codec::decode(&delivery.data, encoding).expect("a job"),
        headers: JobHeaders::read(&headers).expect("headers"),
        encoding,
        properties,
    }
}

async fn reply(channel: &Channel, received: &Received, answer: Answer) {
    let queue = match received.properties.reply_to() {
        Some(queue) => queue.clone(),
        None => default_reply_queue(&received.job.model).into(),
    };
    channel
        .basic_publish("".into(), queue, BasicPublishOptions::default(), &answer.body, answer.properties)
        .await
        .expect("reply");
}

//! Messages that a publisher sends.

use lapin::BasicProperties;
use lapin::types::{AMQPValue, FieldTable};
use vramq_schemas::topology::{JOBS_EXCHANGE, RETRY_EXCHANGE};
use vramq_schemas::{Encoding, Input, Job, Params, codec};

use anyhow::Result;

/// A message as it is published: any body, any properties.
#[derive(Clone, Debug, PartialEq)]
pub struct Message {
    pub properties: BasicProperties,
    pub body: Vec<u8>,
    /// Published through the exchange of workers, whose headers are believed.
    pub as_worker: bool,
}

impl Message {
    /// A good job: texts in, an id, a reply queue, a correlation id that is not the id.
    ///
    /// # Errors
    /// The texts have no form in the encoding.
    pub fn texts<T: Into<String>>(
        encoding: Encoding,
        model: &str,
        id: &str,
        reply_to: &str,
        texts: impl IntoIterator<Item = T>,
    ) -> Result<Self> {
        let inputs = texts.into_iter().map(|text| Input::Text(text.into())).collect();
        Self::inputs(encoding, model, id, reply_to, inputs)
    }

    /// The same with inputs of any kind.
    ///
    /// # Errors
    /// The inputs have no form in the encoding.
    pub fn inputs(
        encoding: Encoding,
        model: &str,
        id: &str,
        reply_to: &str,
        inputs: Vec<Input>,
    ) -> Result<Self> {
        let job = Job { model: model.to_owned(), inputs, params: Params::default() };
        let properties = BasicProperties::default()
            .with_content_type(encoding.content_type().into())
            .with_delivery_mode(2)
            .with_message_id(id.into())
            .with_correlation_id(correlation_of(id).into())
            .with_reply_to(reply_to.into());
        Ok(Self { properties, body: codec::encode(&job, encoding)?, as_worker: false })
    }

    /// With other properties.
    #[must_use]
    pub fn with(self, change: impl FnOnce(BasicProperties) -> BasicProperties) -> Self {
        Self { properties: change(self.properties), ..self }
    }

    /// With another body.
    #[must_use]
    pub fn with_body(self, body: impl Into<Vec<u8>>) -> Self {
        Self { body: body.into(), ..self }
    }

    /// Published as workers publish it.
    #[must_use]
    pub fn as_worker(self) -> Self {
        Self { as_worker: true, ..self }
    }

    /// The exchange that it is published to.
    pub fn exchange(&self) -> &'static str {
        if self.as_worker { RETRY_EXCHANGE } else { JOBS_EXCHANGE }
    }

    /// With one more header.
    #[must_use]
    pub fn with_header(self, name: &str, value: AMQPValue) -> Self {
        self.with(|properties| {
            let mut headers = properties.headers().clone().unwrap_or_default();
            headers.insert(name.into(), value);
            properties.with_headers(headers)
        })
    }

    pub fn headers(&self) -> FieldTable {
        self.properties.headers().clone().unwrap_or_default()
    }
}

/// The correlation id that [`Message::texts`] gives to a job.
pub fn correlation_of(id: &str) -> String {
    format!("correlation of {id}")
}

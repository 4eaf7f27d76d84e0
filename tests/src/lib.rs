//! Building blocks of the end-to-end tests: a virtual host per test, real worker processes, an AMQP client, the broker's own
//! view.
//!
//! A test is an async function over a [`TestEnv`](test_env::TestEnv), listed in `on_all_setups!` or `on_queue_types!`.
//! The harness fails it, beyond its own assertions, when it leaves a message in any queue, a worker that does not
//! drain, or a WARN or ERROR line in a worker's log that it did not announce.

pub mod answers;
pub mod at_rest;
pub mod authority;
pub mod bert;
pub mod blocked_device;
pub mod blocked_reply_queue;
pub mod broker;
pub mod caller;
pub mod client;
pub mod dead_letters;
pub mod direct;
pub mod doc_runner;
pub mod encoders;
pub mod fake_cuda;
pub mod fleet;
pub mod flow;
pub mod frames;
pub mod http;
pub mod job;
pub mod job_ledger;
pub mod lengths;
pub mod logs;
pub mod losses;
pub mod management;
mod matrix;
pub mod metrics;
pub mod named_pipe;
pub mod node;
pub mod object_server;
pub mod operator;
pub mod pass_tickets;
pub mod permissions;
pub mod ports;
pub mod programs;
pub mod prometheus;
pub mod promql;
pub mod proxy;
mod publish_counter;
pub mod publishers;
pub mod random;
pub mod raw;
pub mod rejections;
pub mod reply_counter;
pub mod resized;
#[path = "../../schemas/tests/json_schema/validate.rs"]
mod schema;
pub mod setup;
pub mod shared_device;
pub mod span_collector;
pub mod terminal;
pub mod test_env;
pub mod wait;
pub mod web_server;
mod weights;
pub mod worker;

//! All communication with RabbitMQ.

/// Compile-time check for the patch in `third-party/lapin`, which adds this constant. The published lapin ends a session over headers that
/// the broker made larger than a frame.
const _: () = assert!(lapin::HEADER_FRAME_FACTOR > 1);

pub mod aux_channel;
mod channel_shares;
pub mod commands;
pub mod consumer_timeouts;
pub mod control_plane;
mod deadline;
mod direct_link;
pub mod direct_replies;
pub mod fingerprint;
mod first_replies;
mod first_reply_deadline;
pub mod heartbeats;
pub mod job_channel;
pub mod message;
pub mod model_channels;
pub mod opening;
mod own_queue;
mod progress_replies;
mod progress_turns;
mod proven_nodes;
pub mod publisher;
mod queue_arguments;
pub mod received;
mod reply_connection;
mod reply_queues;
mod republished;
pub mod session;
pub mod silent_queues;
pub mod topology;
pub mod topology_watch;
pub mod withdrawals;

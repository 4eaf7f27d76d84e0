//! Upper limits for what a message may hold.

use crate::fields::TEXT_BYTES_MAX;

/// The largest body, in bytes: 16 MiB, the largest message that RabbitMQ 4 takes by default. Larger inputs and
/// outputs travel by reference.
pub const BODY_BYTES_MAX: usize = 16 * 1024 * 1024;

/// The most bytes of a message's headers. They share a frame of 128 KiB with the other properties; the broker closes the connection over more.
pub const HEADER_BYTES_MAX: usize = 120 * 1024;

/// The most inputs of one job. Bounds the memory of a body with many tiny inputs: an input takes as little as 3 bytes of JSON but 32 bytes
/// once decoded, so the decoded list takes 2 MiB at most.
pub const ITEMS_MAX: usize = 65_536;

/// The most bytes of a job's `params`, as JSON text. They are settings, not data; parsed JSON can take ten times
/// its text.
pub const PARAMS_BYTES_MAX: usize = 64 * 1024;

/// The longest name of a model, in bytes: with the prefixes of [`topology`](crate::topology) it still fits an
/// AMQP short string of 255.
pub const MODEL_NAME_BYTES_MAX: usize = 128;

/// The longest revision that a job may demand, in bytes: the longest that a reply's header holds, so that every revision that a reply
/// names can be demanded.
pub const MODEL_REVISION_BYTES_MAX: usize = TEXT_BYTES_MAX;

/// The longest name of a tenant (`vramq-tenant`), in bytes. It is copied into the headers of each attempt.
pub const TENANT_BYTES_MAX: usize = 128;

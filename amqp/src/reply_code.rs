//! The codes with which the broker closes a channel or a connection.

use lapin::ErrorKind;

/// A wrong user or password, or no permission.
pub const ACCESS_REFUSED: u16 = 403;

/// There is no such queue or exchange, or the queue's node is down.
pub const NOT_FOUND: u16 = 404;

/// Another connection has the queue for itself.
pub const RESOURCE_LOCKED: u16 = 405;

/// There is no such virtual host, or the user may not do this at all, for example open another channel.
pub const NOT_ALLOWED: u16 = 530;

/// The code with which the broker closed a channel or a connection; `None` for other errors.
pub fn reply_code(error: &lapin::Error) -> Option<u16> {
    match error.kind() {
        ErrorKind::ProtocolError(refused) => Some(refused.get_id()),
        _ => None,
    }
}

/// Whether the broker refused because it has no such queue or exchange, or the queue's node is down.
pub fn is_missing(error: &lapin::Error) -> bool {
    reply_code(error) == Some(NOT_FOUND)
}

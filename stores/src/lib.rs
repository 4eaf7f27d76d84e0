//! Stored bytes: references to them, and the folders, web servers and object stores that hold them. Knows nothing of jobs or
//! AMQP.

// Nothing that a message, a peer or a device does may panic.
#![cfg_attr(not(test), warn(clippy::expect_used, clippy::panic, clippy::unreachable))]
// What is `pub` can be used elsewhere.
#![warn(unreachable_pub)]

pub mod address;
mod body;
pub mod cloud;
pub mod download;
pub mod folder;
pub mod http;
mod http_client;
pub mod reference;

use std::ffi::OsString;
use std::path::PathBuf;

/// Why an object was not read. The texts name the reference.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The reader may not have it.
    Denied(String),
    /// It is not there.
    Missing(String),
    /// It has other bytes than the reference says.
    Mismatch(String),
    TooLarge(String),
    /// The store did not work. It may work later.
    Unavailable(String),
}

/// The folder that a `file:` URL with these segments names.
pub fn folder_of(segments: &[Vec<u8>]) -> PathBuf {
    use std::os::unix::ffi::OsStringExt as _;
    let mut path = PathBuf::from("/");
    path.extend(segments.iter().map(|segment| OsString::from_vec(segment.clone())));
    path
}

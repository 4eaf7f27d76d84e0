//! The table `[operator]`: the user of the broker that acts on dead letters, and the folder of the log and the archives.

use std::path::PathBuf;

use vramq_amqp::{Address, Credentials};
use vramq_program::no_folder_to_write;

use super::broker::with_credentials;
use super::table::Values;
use super::{Broker, Http};

/// The user of the broker that retries and archives dead letters. A gateway's own user may not.
#[derive(Clone, Debug)]
pub struct Operator {
    pub address: Address,
    /// The folder of the action log and the archives.
    pub folder: PathBuf,
}

/// Reads `[operator]`. `None`: dead letters can be read, but not retried or dropped.
pub(super) fn operator(
    values: &mut Values,
    broker: Option<&Broker>,
    http: Option<&Http>,
) -> Option<Operator> {
    let url = values.text("operator.broker_url");
    let password_file = values.text("operator.broker_password_file").map(PathBuf::from);
    let folder = values.text("operator.folder").map(PathBuf::from);
    let (url, folder) = match (url, folder) {
        (Some(url), Some(folder)) => (url, folder),
        (Some(_), None) => {
            values.fault(
                "operator.folder",
                "is missing: operator.broker_url needs a folder for its log and its archives",
            );
            return None;
        }
        (None, Some(_)) => {
            values.fault("operator.broker_url", "is missing: operator.folder is for what that user does");
            return None;
        }
        (None, None) => {
            if password_file.is_some() {
                values.fault("operator.broker_password_file", "has no effect without operator.broker_url");
            }
            return None;
        }
    };
    if let Some(what) = no_folder_to_write(&folder) {
        values.fault("operator.folder", format!("is {}, which {what}", folder.display()));
    }
    let address =
        url.parse::<Address>().map_err(|e| values.fault("operator.broker_url", e.to_string())).ok()?;
    // Their faults are already reported.
    let (broker, http) = (broker?, http?);
    if address.user() == broker.address.user() {
        values.fault(
            "operator.broker_url",
            "has the user of broker.url: operators act as a user of their own, with rights of its own",
        );
    }
    if !http.keys.required() {
        values.fault("operator.broker_url", "needs http.keys: only the holder of an operator's key may act");
    }
    let address = broker.ca_pem.iter().cloned().fold(address, Address::trusting);
    // The gateway's certificate, for brokers that demand one, with the operator's password.
    let credentials = Credentials { password_file, ..broker.address.credentials().clone() };
    let address = with_credentials(values, "operator.broker_", address, credentials)?;
    Some(Operator { address, folder })
}

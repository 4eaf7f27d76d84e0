//! The table `[broker]`: where the broker is, and as which user the gateway connects.

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use vramq_amqp::{Address, Credentials, InvalidCredentials};
use vramq_program::read_text;

use super::seconds;
use super::table::Values;

/// A broker that is started together with the gateway is ready within this time.
const CONNECT_S: u32 = 30;

#[derive(Clone)]
pub struct Broker {
    pub url: String,
    pub address: Address,
    pub ca_pem: Option<String>,
    /// How long the gateway tries to connect at its start.
    pub connect: Duration,
    /// Whether jobs leave out the URL's user.
    pub anonymous: bool,
}

impl fmt::Debug for Broker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Broker")
            .field("address", &self.address)
            .field("connect", &self.connect)
            .field("anonymous", &self.anonymous)
            .finish_non_exhaustive()
    }
}

pub(super) fn broker(values: &mut Values) -> Option<Broker> {
    let url = values.text("broker.url").unwrap_or_else(|| "amqp://guest:guest@localhost:5672/%2f".to_owned());
    let address = url.parse::<Address>().map_err(|e| values.fault("broker.url", e.to_string())).ok();
    let ca_pem = values.text("broker.ca").and_then(|file| match read_text(Path::new(&file)) {
        Ok(pem) if pem.contains("-----BEGIN CERTIFICATE-----") => Some(pem),
        Ok(_) => {
            values.fault("broker.ca", format!("is {file}, which holds no certificate in PEM"));
            None
        }
        Err(what) => {
            values.fault("broker.ca", format!("is {file}, which {what}"));
            None
        }
    });
    let connect = seconds(values.number("broker.connect_s", CONNECT_S, 0));
    let credentials = Credentials {
        certificate: values.text("broker.certificate").map(PathBuf::from),
        key: values.text("broker.key").map(PathBuf::from),
        password_file: values.text("broker.password_file").map(PathBuf::from),
    };
    let anonymous = values.flag("broker.anonymous");
    let address = ca_pem.iter().cloned().fold(address?, Address::trusting);
    let address = with_credentials(values, "broker.", address, credentials)?;
    Some(Broker { url, address, ca_pem, connect, anonymous })
}

/// Records faults of the credentials under their keys, which begin with `prefix`.
pub(super) fn with_credentials(
    values: &mut Values,
    prefix: &str,
    address: Address,
    credentials: Credentials,
) -> Option<Address> {
    let report = |faults: Vec<InvalidCredentials>| {
        for InvalidCredentials { field, what, .. } in faults {
            values.fault(format!("{prefix}{field}"), what);
        }
    };
    address.with_credentials(credentials).map_err(report).ok()
}

#[cfg(test)]
mod tests {
    use super::super::Config;
    use super::super::tests::KEYS;

    fn faults(text: &str) -> Vec<String> {
        Config::read(text, Vec::new()).unwrap_err().0.into_iter().map(|fault| fault.key).collect()
    }

    #[test]
    fn credentials_are_checked_with_the_url_that_they_belong_to() {
        let folder = tempfile::tempdir().unwrap();
        let password = folder.path().join("password");
        std::fs::write(&password, "hunter2\n").unwrap();
        let password = password.display();
        let own = format!("[broker]\nurl = \"amqp://gateway@h/v\"\npassword_file = \"{password}\"\n");
        let config = Config::read(&own, Vec::new()).unwrap();
        assert!(!format!("{config:?}").contains("hunter2"));
        let twice = own.replace("gateway@", "gateway:secret@");
        assert_eq!(faults(&twice), ["broker.password_file"]);
        assert_eq!(faults(&format!("{own}key = \"{password}\"\n")), ["broker.certificate", "broker.key"]);
        let alone = format!("{own}[operator]\nbroker_password_file = \"{password}\"\n");
        assert_eq!(faults(&alone), ["operator.broker_password_file"]);
        let operator = format!(
            "{own}[http]\nkeys = \"{KEYS}\"\n[operator]\nbroker_url = \"amqp://operator@h/v\"\nfolder = \"f\"\n\
             broker_password_file = "
        );
        assert!(Config::read(&format!("{operator}\"{password}\"\n"), Vec::new()).is_ok());
        assert_eq!(faults(&format!("{operator}\"/nowhere\"\n")), ["operator.broker_password_file"]);
    }
}

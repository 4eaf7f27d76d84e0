//! The certificate and the key of `[http]`, read for TLS.

use std::path::Path;
use std::sync::Arc;

use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use vramq_program::read_text;

use super::table::Values;

const CERTIFICATE: &str = "http.tls_certificate";
const KEY: &str = "http.tls_key";

/// Reads the files for TLS. `None`: the gateway serves plain HTTP, or there was a fault.
pub(super) fn tls(values: &mut Values) -> Option<Arc<ServerConfig>> {
    let (certificate, key) = (values.text(CERTIFICATE), values.text(KEY));
    if certificate.is_some() != key.is_some() {
        values.fault(CERTIFICATE, "and http.tls_key belong together: one of them is missing");
    }
    let chain = certificate.and_then(|file| read(values, CERTIFICATE, &file, chain));
    let private = key.and_then(|file| read(values, KEY, &file, private));
    let (chain, private) = (chain?, private?);
    let provider = Arc::new(tokio_rustls::rustls::crypto::ring::default_provider());
    let config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .and_then(|builder| builder.with_no_client_auth().with_single_cert(chain, private));
    config
        .map_err(|error| {
            values.fault(CERTIFICATE, format!("and http.tls_key cannot be used together: {error}"));
        })
        .ok()
        .map(Arc::new)
}

fn read<T>(
    values: &mut Values,
    key: &'static str,
    file: &str,
    parse: fn(&str) -> Result<T, String>,
) -> Option<T> {
    let read = read_text(Path::new(file)).and_then(|text| parse(&text));
    read.map_err(|what| values.fault(key, format!("is {file}, which {what}"))).ok()
}

fn chain(text: &str) -> Result<Vec<CertificateDer<'static>>, String> {
    let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(text.as_bytes()).collect();
    match chain {
        Ok(chain) if chain.is_empty() => Err("holds no certificate in PEM: name a PEM file".to_owned()),
        Ok(chain) => Ok(chain),
        Err(error) => Err(format!("is no PEM file of certificates: {error}")),
    }
}

fn private(text: &str) -> Result<PrivateKeyDer<'static>, String> {
    PrivateKeyDer::from_pem_slice(text.as_bytes())
        .map_err(|_| "holds no private key in PEM, without a passphrase: name a PEM file".to_owned())
}

#[cfg(test)]
mod tests {
    use vramq_tests::authority::Authority;

    use super::super::Config;

    #[test]
    fn each_file_of_tls_has_its_own_fault() {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str, text: &str| {
            let path = folder.path().join(name);
            std::fs::write(&path, text).unwrap();
            path.display().to_string()
        };
        let (one, other) = (Authority::new().unwrap(), Authority::new().unwrap());
        let (certificate, key) = (file("cert.pem", &one.certificate), file("key.pem", &one.key));
        let (foreign, empty) = (file("other.pem", &other.key), file("empty.pem", ""));
        let faults = |certificate: &str, key: &str| {
            let text = format!("[http]\ntls_certificate = '{certificate}'\ntls_key = '{key}'");
            let faults = Config::read(&text, Vec::new()).map(drop).map_err(|invalid| invalid.0);
            faults.err().unwrap_or_default().into_iter().map(|fault| fault.to_string()).collect::<Vec<_>>()
        };
        assert_eq!(faults(&certificate, &key), [""; 0]);
        for (certificate, key, expected) in [
            (&*empty, &*empty, &["http.tls_certificate: is", "http.tls_key: is"][..]),
            ("/nowhere", &key, &["http.tls_certificate: is /nowhere, which cannot be read"]),
            (&certificate, "/", &["http.tls_key: is /, which is a folder"]),
            (&certificate, &foreign, &["http.tls_certificate: and http.tls_key cannot be used together"]),
        ] {
            let found = faults(certificate, key);
            assert_eq!(found.len(), expected.len(), "{found:?}");
            assert!(found.iter().zip(expected).all(|(found, start)| found.starts_with(start)), "{found:?}");
        }
    }
}

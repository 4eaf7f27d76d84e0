//! An authority for certificates, for tests of TLS.

use anyhow::Result;
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DistinguishedName, DnType, IsCa, KeyPair,
    KeyUsagePurpose,
};

use crate::node::Node;
use crate::ports::free_port;

/// The common name in the client's certificate.
pub const CLIENT: &str = "a-client";

/// A private authority, with a certificate for 127.0.0.1 and one for the client [`CLIENT`], and their keys; all in PEM.
#[derive(Debug)]
pub struct Authority {
    pub ca: String,
    pub certificate: String,
    pub key: String,
    pub client_certificate: String,
    pub client_key: String,
}

impl Authority {
    /// # Errors
    /// The system has no random numbers.
    pub fn new() -> Result<Self> {
        let mut params = CertificateParams::default();
        // Unlike the certificate's name: OpenSSL takes a certificate with its issuer's name for a self-signed one.
        params.distinguished_name.push(DnType::CommonName, "an authority of the tests");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        // Python from 3.13 on requires this of an authority, and that certificates name their authority's key.
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate()?)?;
        let key = KeyPair::generate()?;
        let mut params = CertificateParams::new(["127.0.0.1".to_owned()])?;
        params.use_authority_key_identifier_extension = true;
        let certificate = params.signed_by(&key, &issuer)?;
        let client_key = KeyPair::generate()?;
        let mut client = CertificateParams::default();
        client.distinguished_name = DistinguishedName::new();
        client.distinguished_name.push(DnType::CommonName, CLIENT);
        client.use_authority_key_identifier_extension = true;
        let client = client.signed_by(&client_key, &issuer)?;
        Ok(Self {
            ca: issuer.pem(),
            certificate: certificate.pem(),
            key: key.serialize_pem(),
            client_certificate: client.pem(),
            client_key: client_key.serialize_pem(),
        })
    }

    /// Restarts a node so that it accepts TLS with the certificate for 127.0.0.1; `more` are further lines of its configuration.
    /// Gives the port.
    ///
    /// # Errors
    /// The node does not start.
    pub async fn serve_tls(&self, node: &Node, more: &str) -> Result<u16> {
        let port = free_port()?;
        let (ca, certificate, key) = (
            node.put("ca.pem", &self.ca)?,
            node.put("broker.pem", &self.certificate)?,
            node.put("broker.key", &self.key)?,
        );
        node.configure(&format!(
            "listeners.ssl.1 = 127.0.0.1:{port}\nssl_options.cacertfile = {ca}\nssl_options.certfile = {certificate}\n\
             ssl_options.keyfile = {key}\n{more}"
        ))
        .await?;
        Ok(port)
    }
}

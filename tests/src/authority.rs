//! An authority for certificates, for tests of TLS.

use anyhow::Result;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair, KeyUsagePurpose};

/// A private authority, with a certificate for 127.0.0.1 and its key; all in PEM.
#[derive(Debug)]
pub struct Authority {
    pub ca: String,
    pub certificate: String,
    pub key: String,
}

impl Authority {
    /// # Errors
    /// The system has no random numbers.
    pub fn new() -> Result<Self> {
        let mut params = CertificateParams::default();
        // Another name than the certificate's: OpenSSL takes a certificate with its issuer's name for one that signs itself.
        params.distinguished_name.push(DnType::CommonName, "an authority of the tests");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        // Python from 3.13 on takes no authority without it, and no certificate that does not name its authority's key.
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate()?)?;
        let key = KeyPair::generate()?;
        let mut params = CertificateParams::new(["127.0.0.1".to_owned()])?;
        params.use_authority_key_identifier_extension = true;
        let certificate = params.signed_by(&key, &issuer)?;
        Ok(Self { ca: issuer.pem(), certificate: certificate.pem(), key: key.serialize_pem() })
    }
}

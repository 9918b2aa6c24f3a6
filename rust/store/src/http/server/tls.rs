//! The certificate and the private key of a server.

use std::fmt;
use std::sync::Arc;

use rustls::client::danger::ServerCertVerifier;
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::{CertificateError, Error, ServerConfig};
use tokio_rustls::TlsAcceptor;

use crate::error::StoreError;
use crate::http::tls::{Verifier, certificates_in, provider, what_is_in};

/// The certificate of a server, and its private key.
#[derive(Clone)]
pub struct ServerTls {
    acceptor: TlsAcceptor,
    chain: Vec<CertificateDer<'static>>,
}

impl ServerTls {
    /// From PEM: a certificate, with those that lead to its authority behind it, and its private key.
    ///
    /// # Errors
    /// [`StoreError::Invalid`] if they are none, or do not belong together.
    pub fn from_pem(certificates: &[u8], private_key: &[u8]) -> Result<Self, StoreError> {
        let invalid = |what: &str, error: &dyn fmt::Display| StoreError::Invalid(format!("tls: {what}: {error}"));
        let chain = certificates_in(certificates).map_err(|error| invalid("the certificate cannot be read", &error))?;
        let key = private_key_in(private_key).map_err(|error| invalid("the private key cannot be read", &error))?;
        let builder = ServerConfig::builder_with_provider(provider()).with_safe_default_protocol_versions();
        let builder = builder.map_err(|error| invalid("no protocol", &error))?;
        let config = builder.with_no_client_auth().with_single_cert(chain.clone(), key);
        let mut config = config.map_err(|error| invalid("the certificate does not fit its key", &error))?;
        // A client closes a connection on which something comes between two requests.
        config.send_tls13_tickets = 0;
        Ok(ServerTls { acceptor: TlsAcceptor::from(Arc::new(config)), chain })
    }

    /// The problem if the certificate has expired, or is not valid yet. Clients that trust its authority refuse it then.
    pub fn validity_problem(&self) -> Option<String> {
        let (first, others) = self.chain.split_first()?;
        let verifier = Verifier::new(self.chain.clone()).ok()?;
        let name = ServerName::try_from("localhost").ok()?;
        // The dates are looked at first: any other error is about trust, which is the client's concern.
        let verified = verifier.authorities.verify_server_cert(first, others, &name, &[], UnixTime::now());
        let Err(Error::InvalidCertificate(error)) = verified else { return None };
        let is_of_dates = matches!(
            error,
            CertificateError::Expired
                | CertificateError::ExpiredContext { .. }
                | CertificateError::NotValidYet
                | CertificateError::NotValidYetContext { .. }
        );
        is_of_dates.then(|| error.to_string())
    }

    pub(super) fn acceptor(&self) -> &TlsAcceptor {
        &self.acceptor
    }
}

fn private_key_in(pem: &[u8]) -> Result<PrivateKeyDer<'static>, String> {
    // Keys of PKCS#8, and those of older forms, whose second line says it.
    let is_encrypted = |line: &[u8]| line.starts_with(b"-----BEGIN ENCRYPTED") || line == b"Proc-Type: 4,ENCRYPTED";
    if pem.split(|byte| *byte == b'\n').any(|line| is_encrypted(line.trim_ascii())) {
        return Err("it is encrypted: decrypt it with `openssl pkey -in KEY -out DECRYPTED`".to_owned());
    }
    // The error says nothing of the key.
    PrivateKeyDer::from_pem_slice(pem).map_err(|error| match error {
        pem::Error::NoItemsFound => format!("the file {}", what_is_in(pem)),
        other => other.to_string(),
    })
}

impl fmt::Debug for ServerTls {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("ServerTls(…)")
    }
}

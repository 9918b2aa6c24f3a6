//! The certificate and the private key of a server.

use std::fmt;
use std::sync::Arc;

use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::TlsAcceptor;

use crate::error::StoreError;
use crate::http::tls::provider;

/// The certificate of a server, and its private key.
#[derive(Clone)]
pub struct ServerTls(TlsAcceptor);

impl ServerTls {
    /// From PEM: a certificate, with those that lead to its authority behind it, and its private key.
    ///
    /// # Errors
    /// [`StoreError::Invalid`] if they are none, or do not belong together.
    pub fn from_pem(certificates: &[u8], private_key: &[u8]) -> Result<Self, StoreError> {
        let invalid = |what: &str, error: &dyn fmt::Display| StoreError::Invalid(format!("tls: {what}: {error}"));
        let chain: Vec<CertificateDer<'static>> = CertificateDer::pem_slice_iter(certificates)
            .collect::<Result<_, _>>()
            .map_err(|error| invalid("the certificate cannot be read", &error))?;
        let key = PrivateKeyDer::from_pem_slice(private_key);
        // The error says nothing of the key.
        let key = key.map_err(|error| invalid("the private key cannot be read", &error))?;
        let builder = ServerConfig::builder_with_provider(provider()).with_safe_default_protocol_versions();
        let builder = builder.map_err(|error| invalid("no protocol", &error))?;
        let config = builder.with_no_client_auth().with_single_cert(chain, key);
        let mut config = config.map_err(|error| invalid("the certificate does not fit its key", &error))?;
        // A client closes a connection on which something comes between two requests.
        config.send_tls13_tickets = 0;
        Ok(ServerTls(TlsAcceptor::from(Arc::new(config))))
    }

    pub(super) fn acceptor(&self) -> &TlsAcceptor {
        &self.0
    }
}

impl fmt::Debug for ServerTls {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("ServerTls(…)")
    }
}

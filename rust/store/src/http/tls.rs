//! TLS by rustls: the certificates that a client trusts.

use std::fmt;
use std::sync::Arc;

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, ring, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{
    ClientConfig, DigitallySignedStruct, Error, RootCertStore, SignatureScheme, client::VerifierBuilderError,
};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::{Connect, TlsConnector};

use crate::error::StoreError;

/// The cryptography of servers and clients: that of ring.
pub(super) fn provider() -> Arc<CryptoProvider> {
    Arc::new(ring::default_provider())
}

/// The certificates in a PEM file: at least one.
pub(super) fn certificates_in(pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, String> {
    let found: Vec<_> =
        CertificateDer::pem_slice_iter(pem).collect::<Result<_, _>>().map_err(|error| error.to_string())?;
    if found.is_empty() { Err(format!("the file {}", what_is_in(pem))) } else { Ok(found) }
}

/// What a PEM file without the wanted part has instead.
pub(super) fn what_is_in(pem: &[u8]) -> String {
    let text = String::from_utf8_lossy(pem);
    let labels: Vec<_> =
        text.lines().filter_map(|line| line.trim().strip_prefix("-----BEGIN ")?.strip_suffix("-----")).collect();
    match &labels[..] {
        [] if text.trim().is_empty() => "is empty".to_owned(),
        [] => "has no line \"-----BEGIN …-----\", so it is not PEM".to_owned(),
        _ => format!("has only: {}", labels.join(", ")),
    }
}

/// Servers that a client trusts.
#[derive(Clone)]
pub struct ClientTls(TlsConnector);

impl ClientTls {
    /// Trusts the servers that show one of these certificates, or one that an authority among them has signed for
    /// their address; all in PEM.
    ///
    /// # Errors
    /// [`StoreError::Invalid`] if there is none, or one cannot be read.
    pub fn trusting(certificates: &[u8]) -> Result<Self, StoreError> {
        let invalid =
            |reason: &dyn fmt::Display| StoreError::Invalid(format!("tls: no certificate to trust: {reason}"));
        let pinned = certificates_in(certificates).map_err(|reason| invalid(&reason))?;
        let verifier = Verifier::new(pinned).map_err(|error| invalid(&error))?;
        let builder = ClientConfig::builder_with_provider(provider()).with_safe_default_protocol_versions();
        let builder = builder.map_err(|error| invalid(&error))?;
        let config = builder.dangerous().with_custom_certificate_verifier(Arc::new(verifier)).with_no_client_auth();
        Ok(ClientTls(TlsConnector::from(Arc::new(config))))
    }

    /// Begins TLS on `stream`, which leads to the process that serves at `owner` (`host:port`).
    pub(super) fn connect<S>(&self, owner: &str, stream: S) -> Result<Connect<S>, StoreError>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        let host = owner.rsplit_once(':').map_or(owner, |(host, _)| host).trim_matches(['[', ']']);
        let invalid = |reason: &dyn fmt::Display| StoreError::Invalid(format!("{owner}: {reason}"));
        let name = ServerName::try_from(host.to_owned()).map_err(|error| invalid(&error))?;
        Ok(self.0.connect(name, stream))
    }
}

impl fmt::Debug for ClientTls {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("ClientTls(…)")
    }
}

/// Trusts certificates that are pinned, whatever name they are for, and those that an authority among them signed.
#[derive(Debug)]
pub(super) struct Verifier {
    pinned: Vec<CertificateDer<'static>>,
    pub(super) authorities: Arc<WebPkiServerVerifier>,
    provider: Arc<CryptoProvider>,
}

impl Verifier {
    pub(super) fn new(pinned: Vec<CertificateDer<'static>>) -> Result<Self, VerifierBuilderError> {
        let mut roots = RootCertStore::empty();
        roots.add_parsable_certificates(pinned.iter().cloned());
        let provider = provider();
        let builder = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), Arc::clone(&provider));
        Ok(Verifier { pinned, authorities: builder.build()?, provider })
    }
}

impl ServerCertVerifier for Verifier {
    fn verify_server_cert(
        &self,
        certificate: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        if self.pinned.iter().any(|pinned| pinned == certificate) {
            return Ok(ServerCertVerified::assertion());
        }
        self.authorities.verify_server_cert(certificate, intermediates, name, ocsp_response, now)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls12_signature(message, certificate, signed, &self.provider.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, certificate, signed, &self.provider.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

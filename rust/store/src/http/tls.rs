//! TLS by rustls: the certificates that a client trusts, and the certificate and private key of a server.

use std::fmt;
use std::sync::Arc;

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, ring, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, Error, RootCertStore, ServerConfig, SignatureScheme,
    client::VerifierBuilderError,
};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::{Connect, TlsAcceptor, TlsConnector};

use crate::error::StoreError;

/// The cryptography of servers and clients: that of ring.
fn provider() -> Arc<CryptoProvider> {
    Arc::new(ring::default_provider())
}

/// The certificates in a PEM file: at least one.
fn certificates_in(pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, String> {
    let found: Vec<_> = CertificateDer::pem_slice_iter(pem).collect::<Result<_, _>>().map_err(pem_fault)?;
    if found.is_empty() { Err(format!("the file {}", what_is_in(pem))) } else { Ok(found) }
}

/// The fault of a PEM file, in words. It shows nothing of the file, which may have a private key.
fn pem_fault(error: pem::Error) -> String {
    let fault = match error {
        pem::Error::MissingSectionEnd { .. } => "its last part has no line \"-----END …-----\"".to_owned(),
        pem::Error::IllegalSectionStart { .. } => {
            "a line begins with \"-----BEGIN\" and does not end with \"-----\"".to_owned()
        }
        pem::Error::Base64Decode(_) => "the text between the lines BEGIN and END is not base64".to_owned(),
        other => other.to_string(),
    };
    format!("{fault}: copy the file again, whole and line by line")
}

/// The fault of a server's certificate, in words, and what to do about it.
pub(super) fn certificate_fault(error: &CertificateError) -> String {
    let own = "call trust(ADDR, token=…, tls=CERTIFICATE) with the file that it serves with, or with that of the \
               authority that signed it (--certificate for the command)";
    match error {
        // The signature of an issuer of the same name, such as of the certificate that was there before.
        CertificateError::UnknownIssuer | CertificateError::BadSignature => {
            format!("its certificate is none of those to trust, and none of them signed it: {own}")
        }
        // webpki's error for a certificate that names itself an authority, as `openssl req -x509` makes them.
        CertificateError::Other(reason) if reason.to_string() == "CaUsedAsEndEntity" => {
            format!("its certificate is that of an authority (CA:TRUE), and none of those to trust: {own}")
        }
        CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. } => format!(
            "{error}: serve with a certificate for this address (subjectAltName), or trust that certificate itself"
        ),
        other if is_of_dates(other) => format!("{other}: serve with a certificate that is valid now"),
        other => format!("its certificate is refused ({other}): serve with another one"),
    }
}

fn is_of_dates(error: &CertificateError) -> bool {
    matches!(
        error,
        CertificateError::Expired
            | CertificateError::ExpiredContext { .. }
            | CertificateError::NotValidYet
            | CertificateError::NotValidYetContext { .. }
    )
}

/// What a PEM file without the wanted part has instead.
fn what_is_in(pem: &[u8]) -> String {
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
struct Verifier {
    pinned: Vec<CertificateDer<'static>>,
    authorities: Arc<WebPkiServerVerifier>,
    provider: Arc<CryptoProvider>,
}

impl Verifier {
    fn new(pinned: Vec<CertificateDer<'static>>) -> Result<Self, VerifierBuilderError> {
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
        is_of_dates(&error).then(|| error.to_string())
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
        other => pem_fault(other),
    })
}

impl fmt::Debug for ServerTls {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("ServerTls(…)")
    }
}

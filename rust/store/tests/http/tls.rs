//! Servers and clients that speak TLS.

use tundish_store::http::{Client, ClientTls, Server, ServerOptions, ServerTls, Token, Trust, WorkerClient};
use tundish_store::{ProcessStore, ShardId, StoreError};

use crate::common::{LIMITS, pattern, put, whole, within};
use crate::raw_http::Owner;

#[test]
fn a_certificate_that_is_none_is_refused() {
    let pem = rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).unwrap();
    let other = rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).unwrap();
    let (certificate, key) = (pem.cert.pem(), pem.signing_key.serialize_pem());
    assert!(ServerTls::from_pem(b"", key.as_bytes()).is_err());
    assert!(ServerTls::from_pem(certificate.as_bytes(), b"").is_err());
    let unfit = ServerTls::from_pem(certificate.as_bytes(), other.signing_key.serialize_pem().as_bytes());
    assert!(unfit.unwrap_err().to_string().contains("does not fit"));
    let tls = ServerTls::from_pem(certificate.as_bytes(), key.as_bytes()).unwrap();
    let store = tundish_store::ProcessStore::new(LIMITS);
    let options = ServerOptions { tls: Some(tls), ..ServerOptions::default() };
    let server = Server::start(store.clone(), "127.0.0.1", 0, options).unwrap();
    assert!(server.address().ip().is_loopback() && store.stats().current_step.is_none());
}

/// A certificate for the loopback addresses, and its key; signed by the authority, or by itself.
fn certificate(authority: Option<&rcgen::Issuer<'_, rcgen::KeyPair>>) -> (String, String) {
    let key = rcgen::KeyPair::generate().unwrap();
    let params = rcgen::CertificateParams::new(vec!["127.0.0.1".to_owned(), "localhost".to_owned()]).unwrap();
    let certificate = match authority {
        Some(authority) => params.signed_by(&key, authority).unwrap(),
        None => params.self_signed(&key).unwrap(),
    };
    (certificate.pem(), key.serialize_pem())
}

fn serving(certificate: &str, key: &str, token: Option<&str>) -> Owner {
    let tls = ServerTls::from_pem(certificate.as_bytes(), key.as_bytes()).unwrap();
    let token = token.map(|token| Token::new(token).unwrap());
    Owner::serving(ServerOptions { tls: Some(tls), token, ..ServerOptions::default() })
}

fn trusting(certificates: &str) -> ClientTls {
    ClientTls::trusting(certificates.as_bytes()).unwrap()
}

fn fetch(owner: &Owner, id: &ShardId, len: u64, trust: Trust) -> Result<Vec<u8>, StoreError> {
    let (consumer, client) = (ProcessStore::new(LIMITS), Client::of_sockets());
    client.trust(&owner.address(), trust);
    let wanted = [whole(&owner.address(), id, len)];
    let mut views = Vec::new();
    // Twice, so that the connection is used again.
    for _ in 0..2 {
        views = within(20.0, |time_limit| consumer.fetch(&wanted, &client, time_limit))?;
        consumer.clear_buffer(None);
    }
    Ok(views[0].bytes().to_vec())
}

#[test]
fn shards_travel_encrypted_to_clients_that_trust_the_certificate_or_its_authority() {
    let mut params = rcgen::CertificateParams::new(Vec::new()).unwrap();
    params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let key = rcgen::KeyPair::generate().unwrap();
    let authority = params.self_signed(&key).unwrap();
    let (signed, signed_key) = certificate(Some(&rcgen::Issuer::new(params, key)));
    let (pinned, pinned_key) = certificate(None);
    let bytes = pattern(1, 5 << 20);
    for (certificate, key, trusted) in [(&signed, &signed_key, authority.pem()), (&pinned, &pinned_key, pinned.clone())]
    {
        let owner = serving(certificate, key, Some("s3cret"));
        let id = put(&owner.store, std::slice::from_ref(&bytes)).unwrap().remove(0);
        let token = Some(Token::new("s3cret").unwrap());
        let trust = Trust { token: token.clone(), tls: Some(trusting(&trusted)) };
        assert!(fetch(&owner, &id, bytes.len() as u64, trust).unwrap() == bytes);
        let worker = WorkerClient::new(&owner.address(), token, Some(trusting(&trusted)));
        let first = within(20.0, |time_limit| worker.request("GET", "/stats", b"", time_limit)).unwrap();
        assert_eq!(first.0, 200);
        let number = worker.connection_number();
        within(20.0, |time_limit| worker.request("GET", "/stats", b"", time_limit)).unwrap();
        assert_eq!(worker.connection_number(), number, "the connection is kept");
    }
}

#[test]
fn a_client_that_trusts_another_certificate_or_speaks_no_tls_gets_nothing() {
    let ((own, key), (other, _)) = (certificate(None), certificate(None));
    let owner = serving(&own, &key, None);
    let id = put(&owner.store, &[b"secret".to_vec()]).unwrap().remove(0);
    let error = fetch(&owner, &id, 6, Trust { token: None, tls: Some(trusting(&other)) }).unwrap_err();
    assert!(matches!(&error, StoreError::Unreachable { reason, .. } if reason.contains("certificate")), "{error}");
    let error = fetch(&owner, &id, 6, Trust::default()).unwrap_err();
    assert!(matches!(&error, StoreError::Unreachable { .. }), "{error}");
    assert!(ClientTls::trusting(b"").is_err());
}

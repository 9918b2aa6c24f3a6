//! Servers and clients that speak TLS.

use tundish_store::http::{Client, ClientTls, ServerOptions, ServerTls, Token, Trust, WorkerClient};
use tundish_store::{ShardId, StoreError, TensorStore};

use crate::common::{LIMITS, pattern, put, whole, within};
use crate::raw_http::Owner;

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

/// `openssl pkey -aes256` of any key begins like this.
const ENCRYPTED: &str = "-----BEGIN ENCRYPTED PRIVATE KEY-----\nMIIB\n-----END ENCRYPTED PRIVATE KEY-----\n";
const OLD_ENCRYPTED: &str =
    "-----BEGIN RSA PRIVATE KEY-----\nProc-Type: 4,ENCRYPTED\nDEK-Info: A\n\nMIIB\n-----END RSA PRIVATE KEY-----\n";

#[test]
fn a_file_without_certificate_or_key_is_refused_with_what_it_is() {
    let (own, key) = certificate(None);
    let refused = |certificate: &str, key: &str| {
        ServerTls::from_pem(certificate.as_bytes(), key.as_bytes()).unwrap_err().to_string()
    };
    for (certificate, key, what) in [
        (&own, ENCRYPTED, "the private key cannot be read: it is encrypted"),
        (&own, OLD_ENCRYPTED, "the private key cannot be read: it is encrypted"),
        (&own, "\n", "the private key cannot be read: the file is empty"),
        (&own, &own, "the private key cannot be read: the file has only: CERTIFICATE"),
        (&String::new(), &key, "the certificate cannot be read: the file is empty"),
        (&key, &key, "the certificate cannot be read: the file has only: PRIVATE KEY"),
        (&"text".to_owned(), &key, "the certificate cannot be read: the file has no line \"-----BEGIN"),
    ] {
        let error = refused(certificate, key);
        assert!(error.contains(what), "{error}");
    }
    let error = refused(&own, &certificate(None).1);
    assert!(error.contains("does not fit"), "{error}");
    let error = ClientTls::trusting(b"").unwrap_err().to_string();
    assert!(error.contains("no certificate to trust: the file is empty"), "{error}");
}

#[test]
fn a_certificate_that_has_expired_says_so() {
    let key = rcgen::KeyPair::generate().unwrap();
    let problem = |from: i32, to: i32| {
        let mut params = rcgen::CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
        (params.not_before, params.not_after) = (rcgen::date_time_ymd(from, 1, 1), rcgen::date_time_ymd(to, 1, 1));
        let own = params.self_signed(&key).unwrap().pem();
        ServerTls::from_pem(own.as_bytes(), key.serialize_pem().as_bytes()).unwrap().validity_problem()
    };
    assert_eq!(problem(2020, 4000), None);
    assert!(problem(2020, 2021).unwrap().contains("expired"));
    assert!(problem(3999, 4000).unwrap().contains("not valid yet"));
}

#[test]
fn plain_text_to_a_server_of_tls_and_the_reverse_are_told_apart() {
    let (own, key) = certificate(None);
    let owner = serving(&own, &key, None);
    let answer = owner.ask("GET", "/health", "", b"");
    assert_eq!(answer.status, 400);
    assert!(answer.text().contains("speaks TLS"), "{}", answer.text());
    let asked = |address: &str, tls| {
        let worker = WorkerClient::new(address, None, tls);
        within(20.0, |time_limit| worker.request("GET", "/health", b"", time_limit))
    };
    let (status, body) = asked(&owner.address(), None).unwrap();
    assert_eq!(status, 400, "{}", String::from_utf8_lossy(&body));
    let error = asked(&Owner::new().address(), Some(trusting(&own))).unwrap_err().to_string();
    assert!(error.contains("does not serve over TLS: call trust(ADDR, token=…) for it without tls"), "{error}");
    assert!(!error.contains("still run"), "{error}");
}

#[test]
fn a_plain_client_of_any_server_that_answers_in_tls_is_told_that_it_may_need_tls() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let server = std::thread::spawn(move || {
        use std::io::{Read, Write};

        let (mut stream, _) = listener.accept().unwrap();
        let _ = stream.read(&mut [0; 1000]).unwrap();
        // An alert of TLS, `unexpected_message`, as servers send it to plain text.
        stream.write_all(&[0x15, 3, 1, 0, 2, 2, 10]).unwrap();
    });
    let worker = WorkerClient::new(&address, None, None);
    let error = within(20.0, |time_limit| worker.request("GET", "/health", b"", time_limit)).unwrap_err().to_string();
    assert!(error.contains("it may serve over TLS: call trust(ADDR, token=…, tls=CERTIFICATE)"), "{error}");
    server.join().unwrap();
}

#[test]
fn a_damaged_pem_file_is_described_in_words_that_show_nothing_of_it() {
    let (own, key) = certificate(None);
    let in_one_line = |pem: &str| pem.replace('\n', "");
    for (text, what) in [
        (own.replace("-----END CERTIFICATE-----", ""), "no line \"-----END"),
        (own.replace("-----BEGIN CERTIFICATE-----", "-----BEGIN CERTIFICATE"), "begins with \"-----BEGIN\""),
        (own.replace("MII", "?!?"), "is not base64"),
    ] {
        let error = ServerTls::from_pem(text.as_bytes(), key.as_bytes()).unwrap_err().to_string();
        assert!(error.contains(what) && error.contains("copy the file again") && !error.contains('['), "{error}");
    }
    let error = ServerTls::from_pem(own.as_bytes(), in_one_line(&key).as_bytes()).unwrap_err().to_string();
    let secret = key.lines().nth(1).unwrap();
    assert!(error.contains("the private key cannot be read") && !error.contains(secret), "{error}");
}

#[test]
fn a_certificate_that_is_not_trusted_is_described_with_what_to_do() {
    let serving_at = |name: &str, is_authority: bool| {
        let key = rcgen::KeyPair::generate().unwrap();
        let mut params = rcgen::CertificateParams::new(vec![name.to_owned()]).unwrap();
        if is_authority {
            params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        }
        let own = params.self_signed(&key).unwrap().pem();
        serving(&own, &key.serialize_pem(), None)
    };
    let (other, _) = certificate(None);
    for (name, is_authority, what) in [
        ("127.0.0.1", true, "is that of an authority (CA:TRUE), and none of those to trust"),
        ("127.0.0.1", false, "is none of those to trust, and none of them signed it"),
    ] {
        let owner = serving_at(name, is_authority);
        let worker = WorkerClient::new(&owner.address(), None, Some(trusting(&other)));
        let error =
            within(20.0, |time_limit| worker.request("GET", "/health", b"", time_limit)).unwrap_err().to_string();
        assert!(error.contains(what) && error.contains("call trust(ADDR, token=…, tls=CERTIFICATE)"), "{error}");
        assert!(!error.contains("CaUsed") && !error.contains("still run"), "{error}");
    }
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
    let (consumer, client) = (TensorStore::new(LIMITS), Client::of_sockets());
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
    assert!(matches!(&error, StoreError::Refused { status: 400, .. }), "{error}");
}

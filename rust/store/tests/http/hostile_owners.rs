//! Owners that answer wrongly: played by a socket that sends prepared bytes.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tundish_store::http::{Client, WorkerClient};
use tundish_store::{ShardId, StoreError, TensorStore, TimeLimit};

use crate::common::{LIMITS, pattern, whole, within};
use crate::raw_http::{meta, shard, with_token};

/// Answers the connections it gets, one after the other, each with the next of these; and keeps what was asked.
struct Liar {
    address: Arc<str>,
    heard: Arc<Mutex<Vec<String>>>,
}

enum Does {
    /// Says this and closes.
    Says(Vec<u8>),
    /// Says this, a moment later.
    SaysLate(Vec<u8>, Duration),
    /// Says this, so many bytes at a time and a moment between them.
    Drips(Vec<u8>, usize),
    /// Says this again and again, as long as anybody listens.
    Repeats(Vec<u8>),
    /// Reads the request and says nothing for so long.
    Waits(Duration),
}

impl Liar {
    fn new(deeds: Vec<Does>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string().into();
        let heard = Arc::new(Mutex::new(Vec::new()));
        let hears = Arc::clone(&heard);
        std::thread::spawn(move || {
            for does in deeds {
                let (mut stream, _) = listener.accept().unwrap();
                let mut request = vec![0; 64 << 10];
                let mut length = 0;
                while !request[..length].ends_with(b"}") && !request[..length].ends_with(b"\r\n\r\n") {
                    match stream.read(&mut request[length..]) {
                        Ok(0) | Err(_) => break,
                        Ok(read) => length += read,
                    }
                }
                hears.lock().unwrap().push(String::from_utf8_lossy(&request[..length]).into_owned());
                match does {
                    Does::Says(bytes) => {
                        let _ = stream.write_all(&bytes);
                    }
                    Does::SaysLate(bytes, pause) => {
                        std::thread::sleep(pause);
                        let _ = stream.write_all(&bytes);
                    }
                    Does::Drips(bytes, some) => {
                        stream.set_nodelay(true).unwrap();
                        for some in bytes.chunks(some) {
                            if stream.write_all(some).is_err() {
                                break;
                            }
                            std::thread::sleep(Duration::from_millis(10));
                        }
                    }
                    Does::Repeats(bytes) => while stream.write_all(&bytes).is_ok() {},
                    Does::Waits(pause) => std::thread::sleep(pause),
                }
                let _ = stream.shutdown(Shutdown::Write);
                stream.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
                let _ = stream.read(&mut [0; 1 << 10]);
            }
        });
        Liar { address, heard }
    }
}

const LEN: u64 = 100_000;

fn body() -> Vec<u8> {
    shard(&meta("uint8", &[LEN]), &pattern(1, LEN as usize))
}

fn answer(body: &[u8]) -> Vec<u8> {
    let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", body.len());
    [head.as_bytes(), body].concat()
}

fn fetch(liar: &Liar, seconds: f64) -> Result<Vec<u8>, StoreError> {
    let (store, id) = (TensorStore::new(LIMITS), "a".parse().unwrap());
    let wanted = [whole(&liar.address, &id, LEN)];
    let got = within(seconds, |time_limit| store.fetch(&wanted, &Client::new(), time_limit));
    let outcome = got.map(|views| views[0].bytes().to_vec());
    if outcome.is_err() {
        let stats = store.stats().buffer;
        assert_eq!((stats.num_entries, stats.in_flight), (0, 0), "nothing of it is kept");
        assert_eq!(store.stats().buffer.memory.used_bytes, 0);
    }
    outcome
}

#[test]
fn damage_is_found_wherever_it_is() {
    let good = body();
    for place in [16, 32, 33, 50_000, good.len() - 1] {
        let mut bad = good.clone();
        bad[place] ^= 0x10;
        let liar = Liar::new(vec![Does::Says(answer(&bad))]);
        let error = fetch(&liar, 5.0).unwrap_err();
        let StoreError::Corrupt { id, owner, .. } = &error else { panic!("{place}: {error}") };
        assert_eq!((id.to_string().as_str(), owner), ("a", &liar.address), "{place}");
    }
    // A byte moved from one place to another.
    let mut moved = good.clone();
    moved[40..60].rotate_left(1);
    assert!(matches!(fetch(&Liar::new(vec![Does::Says(answer(&moved))]), 5.0), Err(StoreError::Corrupt { .. })));
}

#[test]
fn answers_that_make_no_sense_are_errors() {
    let good = body();
    let other = shard(&meta("uint8", &[LEN + 1]), &pattern(1, LEN as usize + 1));
    let huge = b"HTTP/1.1 500 No\r\nContent-Length: 9223372036854775807\r\n\r\n".to_vec();
    type IsRight = fn(&StoreError) -> bool;
    let cases: [(&str, Vec<u8>, IsRight); 7] = [
        ("another tensor", answer(&other), |error| matches!(error, StoreError::Mismatch { .. })),
        ("too short an answer", answer(&good[..good.len() - 1]), |error| matches!(error, StoreError::Corrupt { .. })),
        ("a header that does not end", answer(&good[..20]), |error| matches!(error, StoreError::Corrupt { .. })),
        ("no header", answer(b"abc"), |error| matches!(error, StoreError::Corrupt { .. })),
        ("nothing", answer(b""), |error| matches!(error, StoreError::Corrupt { .. })),
        ("a huge error", huge, |error| matches!(error, StoreError::Refused { .. })),
        ("an error that is no JSON", b"HTTP/1.1 502 Bad\r\nContent-Length: 4\r\n\r\noops".to_vec(), |error| {
            matches!(error, StoreError::Refused { status: 502, .. })
        }),
    ];
    for (what, says, is_right) in cases {
        let error = fetch(&Liar::new(vec![Does::Says(says)]), 5.0).unwrap_err();
        assert!(is_right(&error), "{what}: {error:?}");
    }
    // Bytes after the body spoil only the connection.
    let longer = Liar::new(vec![Does::Says(answer(&[&good[..], b"x"].concat()))]);
    assert_eq!(fetch(&longer, 5.0).unwrap(), pattern(1, LEN as usize));
}

#[test]
fn an_answer_that_breaks_off_is_asked_for_again_and_then_given_up_within_a_second() {
    let whole = answer(&body());
    let liar = Liar::new(vec![
        Does::Says(whole[..whole.len() / 2].to_vec()),
        Does::Says(Vec::new()),
        Does::Says(b"HTTP/1.1 100 Continue\r\n\r\n".iter().chain(&whole).copied().collect()),
    ]);
    assert_eq!(fetch(&liar, 5.0).unwrap(), pattern(1, LEN as usize));
    let broken = (0..20).map(|_| Does::Says(whole[..5000].to_vec())).collect();
    let liar = Liar::new(broken);
    let begin = Instant::now();
    let error = fetch(&liar, 20.0).unwrap_err();
    // time: ten times the promised second; the fetch would try for 20 s
    assert!(begin.elapsed() < Duration::from_secs(10), "{:?}", begin.elapsed());
    let StoreError::Unreachable { id, owner, .. } = &error else { panic!("{error}") };
    assert_eq!((id.to_string().as_str(), owner), ("a", &liar.address));
    assert!(error.to_string().contains(&*liar.address));
}

#[test]
fn a_request_to_a_worker_is_sent_again_only_on_a_connection_that_was_kept() {
    let one = b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\na".to_vec();
    let liar = Liar::new(vec![Does::Says(Vec::new()), Does::Says(one), Does::Says(Vec::new()), Does::Says(Vec::new())]);
    let worker = WorkerClient::new(&liar.address, None, None);
    let ask = |time_limit: &mut TimeLimit<'_>| worker.request("POST", "/step/1/end", b"", time_limit);
    let error = within(5.0, ask).unwrap_err();
    assert!(matches!(error, StoreError::Unanswered { .. }), "{error}");
    assert_eq!(liar.heard.lock().unwrap().len(), 1, "it may have arrived");
    assert_eq!(within(5.0, ask).unwrap(), (200, b"a".to_vec()));
    // The connection was kept, and is closed by now.
    within(5.0, ask).unwrap_err();
    assert_eq!(liar.heard.lock().unwrap().len(), 3);
}

#[test]
fn another_protocol_is_an_error() {
    let liar = Liar::new((0..20).map(|_| Does::Says(b"SSH-2.0-OpenSSH_9.6\r\n".to_vec())).collect());
    let error = fetch(&liar, 5.0).unwrap_err();
    assert!(matches!(&error, StoreError::Unreachable { reason, .. } if reason.contains("HTTP")), "{error}");
}

#[test]
fn a_deadline_holds_and_so_does_a_callers_word() {
    let liar = Liar::new(vec![Does::Waits(Duration::from_secs(10))]);
    let begin = Instant::now();
    let error = fetch(&liar, 0.3).unwrap_err();
    assert!(matches!(&error, StoreError::TimedOut { what } if what.contains(&*liar.address)), "{error}");
    // time: over ten times the deadline of 0.3 s; the owner waits for 10 s
    assert!((0.3..5.0).contains(&begin.elapsed().as_secs_f64()), "{:?}", begin.elapsed());

    let liar = Liar::new(vec![Does::Waits(Duration::from_secs(10))]);
    let (store, id) = (TensorStore::new(LIMITS), "a".parse().unwrap());
    let begin = Instant::now();
    let end = begin + Duration::from_millis(200);
    let mut check_cancelled = || if Instant::now() < end { Ok(()) } else { Err(StoreError::Interrupted) };
    let mut time_limit = TimeLimit::new(begin + Duration::from_secs(10), &mut check_cancelled);
    let error = store.fetch(&[whole(&liar.address, &id, LEN)], &Client::new(), &mut time_limit).unwrap_err();
    assert!(matches!(error, StoreError::Interrupted), "{error}");
    // time: over ten times the 0.2 s; the owner waits for 10 s
    assert!(begin.elapsed() < Duration::from_secs(5), "{:?}", begin.elapsed());
}

#[test]
fn a_deadline_holds_also_where_something_keeps_coming() {
    let head = b"HTTP/1.1 200 OK\r\n".iter().chain(&[b'a'; 10_000]).copied().collect();
    let timed_out = |error: &StoreError| matches!(error, StoreError::TimedOut { .. });
    for (what, bytes) in [("a body", answer(&body())), ("a head", head)] {
        let begin = Instant::now();
        let error = fetch(&Liar::new(vec![Does::Drips(bytes, 20)]), 0.3).unwrap_err();
        assert!(timed_out(&error), "{what}: {error}");
        // time: over ten times the deadline of 0.3 s
        assert!(begin.elapsed() < Duration::from_secs(5), "{what}: {:?}", begin.elapsed());
    }
    // Many shards, each of which comes at once.
    let one = shard(&meta("uint8", &[1]), b"a");
    let liar = Liar::new(vec![Does::Drips(answer(&one.repeat(2000)), one.len())]);
    let ids: Vec<ShardId> = (0..2000).map(|number| format!("a{number}").parse().unwrap()).collect();
    let wanted: Vec<_> = ids.iter().map(|id| whole(&liar.address, id, 1)).collect();
    let begin = Instant::now();
    let error =
        within(0.3, |time_limit| TensorStore::new(LIMITS).fetch(&wanted, &Client::new(), time_limit)).unwrap_err();
    // time: over ten times the deadline of 0.3 s
    assert!(timed_out(&error) && begin.elapsed() < Duration::from_secs(5), "{error}");

    let liar = Liar::new(vec![Does::Drips(answer(&body()), 20)]);
    let (store, id) = (TensorStore::new(LIMITS), "a".parse().unwrap());
    let begin = Instant::now();
    let end = begin + Duration::from_millis(200);
    let mut check_cancelled = || if Instant::now() < end { Ok(()) } else { Err(StoreError::Interrupted) };
    let mut time_limit = TimeLimit::new(begin + Duration::from_secs(60), &mut check_cancelled);
    let error = store.fetch(&[whole(&liar.address, &id, LEN)], &Client::new(), &mut time_limit).unwrap_err();
    assert!(matches!(error, StoreError::Interrupted), "{error}");
    // time: over ten times the 0.2 s; the other limit is 60 s
    assert!(begin.elapsed() < Duration::from_secs(5), "{:?}", begin.elapsed());
}

#[test]
fn an_owner_that_only_announces_its_answer_is_given_up_at_the_deadline() {
    let announces = Does::Repeats(b"HTTP/1.1 100 Continue\r\n\r\n".repeat(1000));
    let begin = Instant::now();
    let error = fetch(&Liar::new(vec![announces]), 0.3).unwrap_err();
    assert!(matches!(&error, StoreError::TimedOut { .. }), "{error}");
    // time: over ten times the deadline of 0.3 s; the owner goes on for ever
    assert!(begin.elapsed() < Duration::from_secs(10), "{:?}", begin.elapsed());
}

#[test]
fn an_answer_without_a_certain_length_is_refused() {
    for fields in ["", "Transfer-Encoding: chunked\r\n", "Content-Length: +5\r\n", "Content-Length: 5, 6\r\n"] {
        let says = format!("HTTP/1.1 200 OK\r\n{fields}\r\n").into_bytes();
        let error = fetch(&Liar::new((0..3).map(|_| Does::Says(says.clone())).collect()), 5.0).unwrap_err();
        assert!(matches!(&error, StoreError::Unreachable { .. }), "{fields}: {error}");
    }
}

#[test]
fn a_head_without_an_end_is_refused() {
    let says = || Does::Says([&b"HTTP/1.1 200 OK\r\na: "[..], &[b'a'; 100_000]].concat());
    let error = fetch(&Liar::new((0..3).map(|_| says()).collect()), 5.0).unwrap_err();
    assert!(matches!(&error, StoreError::Unreachable { reason, .. } if reason.contains("too large")), "{error}");
}

#[test]
fn several_owners_are_asked_at_once() {
    let pause = Duration::from_secs(1);
    let liars: Vec<_> = (0..5).map(|_| Liar::new(vec![Does::SaysLate(answer(&body()), pause)])).collect();
    let (store, id) = (TensorStore::new(LIMITS), "a".parse().unwrap());
    let wanted: Vec<_> = liars.iter().map(|liar| whole(&liar.address, &id, LEN)).collect();
    let begin = Instant::now();
    let views = within(10.0, |time_limit| store.fetch(&wanted, &Client::new(), time_limit)).unwrap();
    assert!(views.iter().all(|view| view.bytes() == pattern(1, LEN as usize)));
    // time: one pause and 3 s of room; one after the other would take five pauses
    assert!(begin.elapsed() < 4 * pause, "{:?}", begin.elapsed());
}

/// A reference to a descriptor that no process has.
fn reference() -> Vec<u8> {
    let mut reference = body()[..32].to_vec();
    reference[7] = 1;
    reference.extend(u32::MAX.to_le_bytes());
    reference.extend([0; 28]);
    reference
}

#[test]
fn a_reference_that_was_not_asked_for_is_an_error() {
    let says = || (0..20).map(|_| Does::Says(answer(&reference()))).collect();
    let id = "a".parse().unwrap();
    for (client, requests) in [(Client::new(), 2), (Client::of_sockets(), 1)] {
        let liar = Liar::new(says());
        let wanted = [whole(&liar.address, &id, LEN)];
        let error =
            within(20.0, |time_limit| TensorStore::new(LIMITS).fetch(&wanted, &client, time_limit)).unwrap_err();
        assert!(matches!(&error, StoreError::Corrupt { reason, .. } if reason.contains("reference")), "{error}");
        assert_eq!(liar.heard.lock().unwrap().len(), requests);
    }
}

#[test]
fn the_size_of_a_refusal_is_bounded() {
    let refuses = |length: usize, said: &[u8]| {
        let head = format!("HTTP/1.1 500 No\r\nContent-Length: {length}\r\n\r\n");
        Does::Says([head.as_bytes(), said].concat())
    };
    let message = |length: usize| [&b"{\"message\":\""[..], &vec![b'y'; length - 14], b"\"}"].concat();
    for says in [refuses(900_000, &message(900_000)), refuses(9_000_000, &message(10_000)), refuses(9_000_000, b"")] {
        let begin = Instant::now();
        let error = fetch(&Liar::new(vec![says]), 60.0).unwrap_err();
        assert!(matches!(error, StoreError::Refused { status: 500, .. }), "{error}");
        assert!(error.to_string().len() < 3000, "{}", error.to_string().len());
        // time: an answer of a megabyte takes milliseconds; the fetch may take 60 s
        assert!(begin.elapsed() < Duration::from_secs(5), "{:?}", begin.elapsed());
    }
}

#[test]
fn memory_that_cannot_be_reached_is_sent_instead_and_not_tried_again() {
    let says = |body: &[u8]| Does::Says(answer(body));
    let liar = Liar::new(vec![says(&reference()), says(&body()), says(&body())]);
    let (client, id) = (Client::new(), "a".parse().unwrap());
    for _ in 0..2 {
        let store = TensorStore::new(LIMITS);
        let views =
            within(5.0, |time_limit| store.fetch(&[whole(&liar.address, &id, LEN)], &client, time_limit)).unwrap();
        assert_eq!(views[0].bytes(), pattern(1, LEN as usize));
    }
    let heard = liar.heard.lock().unwrap();
    let says_where: Vec<_> = heard.iter().map(|request| request.contains("tundish-node: ")).collect();
    assert_eq!(says_where, [true, false, false]);
}

#[test]
fn no_token_is_sent_to_an_address_that_only_a_handle_names() {
    let liar = Liar::new(vec![Does::Says(answer(&body())), Does::Says(answer(&body()))]);
    let (client, id) = (Client::new(), "a".parse().unwrap());
    client.trust("10.0.0.1:7000", with_token("s3cret"));
    // The same machine under another name is another address.
    let port = liar.address.rsplit(':').next().unwrap();
    for owner in [&*liar.address, &format!("localhost:{port}")] {
        within(5.0, |time_limit| TensorStore::new(LIMITS).fetch(&[whole(owner, &id, LEN)], &client, time_limit))
            .unwrap();
    }
    let heard = liar.heard.lock().unwrap();
    assert_eq!(heard.len(), 2);
    assert!(
        heard.iter().all(|request| !request.contains("s3cret") && !request.to_lowercase().contains("authorization"))
    );
}

#[test]
fn unreachable_addresses_fail_within_a_second() {
    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let (store, id) = (TensorStore::new(LIMITS), "a".parse().unwrap());
    let fetch = |owner: &str| {
        let begin = Instant::now();
        let error =
            within(20.0, |time_limit| store.fetch(&[whole(owner, &id, 3)], &Client::new(), time_limit)).unwrap_err();
        (error, begin.elapsed())
    };
    let (error, spent) = fetch(&free);
    assert!(matches!(&error, StoreError::Unreachable { owner, .. } if **owner == *free), "{error}");
    // time: ten times the promised second
    assert!(spent < Duration::from_secs(10), "{spent:?}");
    for text in ["nowhere", "nowhere:", ":80", "nowhere:x", ""] {
        let (error, _) = fetch(text);
        assert!(matches!(error, StoreError::Invalid(_)), "{text:?}: {error}");
    }
}

#[test]
#[allow(unsafe_code)]
fn a_machine_that_does_not_answer_fails_within_a_second() {
    use std::os::fd::AsRawFd;
    let full = TcpListener::bind("127.0.0.1:0").unwrap();
    // SAFETY: the listener's own descriptor; from here on it has space for one connection that nobody takes.
    assert_eq!(unsafe { libc::listen(full.as_raw_fd(), 0) }, 0);
    let address = full.local_addr().unwrap();
    let _first = std::net::TcpStream::connect(address).unwrap();
    let (store, id) = (TensorStore::new(LIMITS), "a".parse().unwrap());
    let begin = Instant::now();
    let wanted = [whole(&address.to_string(), &id, 3)];
    let error = within(20.0, |time_limit| store.fetch(&wanted, &Client::new(), time_limit)).unwrap_err();
    assert!(matches!(&error, StoreError::Unreachable { reason, .. } if reason.contains("machine")), "{error}");
    // time: ten times the promised second; the fetch may take 20 s
    assert!(begin.elapsed() < Duration::from_secs(10), "{:?}", begin.elapsed());
}

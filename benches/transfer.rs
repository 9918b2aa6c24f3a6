//! Shards that one process fetches from another on this machine: over a socket, and where they lie.
//!
//! The owner is a process of its own. Each round fetches what no buffer has, reads every byte of it, and gives it back;
//! the shortest of the rounds is told, and the one in the middle. The last part fetches small shards beside a large
//! one.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tundish_store::http::{Client, Server, ServerOptions};
use tundish_store::{
    Dtype, FetchedTensor, Limits, Selection, ShardId, TensorMeta, TensorStore, TensorToStore, TimeLimit, Wanted,
};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

/// Name, shards, bytes of each, rounds.
const CASES: [(&str, usize, u64, usize); 5] = [
    ("64 KiB", 1, 64 * KIB, 500),
    ("4 MiB", 1, 4 * MIB, 100),
    ("256 MiB", 1, 256 * MIB, 9),
    ("256 x 64 KiB", 256, 64 * KIB, 60),
    ("256 x 4 MiB", 256, 4 * MIB, 5),
];

const LIMITS: Limits = Limits { storage_bytes: 4 << 30, buffer_bytes: 4 << 30 };

/// Shards of the small fetches beside a large one.
const SMALL: usize = 1000;

fn main() {
    if std::env::args().nth(1).as_deref() == Some("owner") {
        return own();
    }
    let owner = Owner::start();
    for (name, client) in [("over a socket", Client::of_sockets()), ("where they lie", Client::new())] {
        println!("{name}");
        for (place, (case, _, bytes, rounds)) in CASES.into_iter().enumerate() {
            let wanted = owner.wanted(place, bytes);
            let store = TensorStore::new(LIMITS);
            let mut times: Vec<_> = (0..rounds + 1).map(|_| fetch(&store, &client, &wanted)).skip(1).collect();
            times.sort();
            let (shortest, middle) = (times[0], times[times.len() / 2]);
            let total = wanted.len() as f64 * bytes as f64;
            let rate = total / shortest.as_secs_f64() / 1e9;
            println!("  {case:>13}: {shortest:>12.2?}, in the middle {middle:>12.2?}; {rate:.2} GB/s");
        }
    }
    beside(&owner);
}

/// How long small shards take while a large one is fetched.
fn beside(owner: &Owner) {
    let (small, large) = (owner.wanted(0, 64 * KIB), owner.wanted(2, 256 * MIB));
    let is_over = AtomicBool::new(false);
    let mut times: Vec<Duration> = std::thread::scope(|scope| {
        scope.spawn(|| {
            let (store, client) = (TensorStore::new(LIMITS), Client::of_sockets());
            while !is_over.load(Ordering::Relaxed) {
                fetch(&store, &client, &large);
            }
        });
        let (store, client) = (TensorStore::new(LIMITS), Client::of_sockets());
        let times = (0..SMALL).map(|_| fetch(&store, &client, &small)).collect();
        is_over.store(true, Ordering::Relaxed);
        times
    });
    times.sort();
    let (middle, late) = (times[SMALL / 2], times[SMALL * 99 / 100]);
    println!("64 KiB beside 256 MiB: in the middle {middle:.2?}, 99 of 100 within {late:.2?}");
}

fn fetch(store: &Arc<TensorStore>, client: &Client, wanted: &[Wanted]) -> Duration {
    let mut check_cancelled = || Ok(());
    let begin = Instant::now();
    let mut time_limit = TimeLimit::new(begin + Duration::from_secs(60), &mut check_cancelled);
    let views = store.fetch(wanted, client, &mut time_limit).expect("shards");
    std::hint::black_box(views.iter().map(sum).fold(0, u64::wrapping_add));
    let spent = begin.elapsed();
    drop(views);
    store.clear_buffer(None);
    spent
}

/// The sum of all words, so that every byte is read.
fn sum(view: &FetchedTensor) -> u64 {
    let words = view.bytes().chunks_exact(8);
    words.map(|word| u64::from_ne_bytes(word.try_into().expect("eight"))).fold(0, u64::wrapping_add)
}

struct Owner {
    process: Child,
    address: Arc<str>,
    shards: Vec<Vec<ShardId>>,
}

impl Owner {
    fn start() -> Self {
        let mut process = Command::new(std::env::current_exe().expect("a path"))
            .arg("owner")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("a process");
        let mut lines = BufReader::new(process.stdout.take().expect("its output")).lines();
        let mut line = || lines.next().expect("a line").expect("text");
        let address: Arc<str> = line().into();
        let ids = |line: String| line.split(' ').map(|id| id.parse().expect("an id")).collect();
        let shards = CASES.iter().map(|_| ids(line())).collect();
        Owner { process, address, shards }
    }

    fn wanted(&self, place: usize, bytes: u64) -> Vec<Wanted> {
        let of = |id: &ShardId| Wanted {
            owner: Arc::clone(&self.address),
            id: id.clone(),
            rows: Selection::All,
            meta: meta(bytes),
        };
        self.shards[place].iter().map(of).collect()
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        drop(self.process.stdin.take());
        self.process.wait().expect("its end");
    }
}

fn meta(bytes: u64) -> TensorMeta {
    TensorMeta::new(Dtype::from_name("float32").expect("a type"), [bytes / 4].as_slice()).expect("a shape")
}

/// Stores the shards of all cases, tells where, and serves until nobody listens.
fn own() {
    let store = TensorStore::new(LIMITS);
    let server = Server::start(store.clone(), "127.0.0.1", 0, ServerOptions::default()).expect("a server");
    println!("{}", server.address());
    for (_, count, bytes, _) in CASES {
        let data: Vec<u8> = (0..bytes).map(|place| (place >> 3) as u8).collect();
        let mut check_cancelled = || Ok(());
        let mut time_limit = TimeLimit::new(Instant::now() + Duration::from_secs(60), &mut check_cancelled);
        let sources: Vec<_> = (0..count).map(|_| TensorToStore::new(meta(bytes), &data).expect("a source")).collect();
        let ids = store.put(&sources, &mut time_limit).expect("space");
        println!("{}", ids.iter().map(ShardId::to_string).collect::<Vec<_>>().join(" "));
    }
    let _ = std::io::stdin().read(&mut [0]);
}

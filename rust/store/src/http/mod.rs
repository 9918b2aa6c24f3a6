//! Shards over HTTP/1.1: the server and the client.
//!
//! | request | answer |
//! |---|---|
//! | `GET /data/<id>` | the shard; 404 where there is none |
//! | `POST /data/batch` `{"shard_ids": […], "rows": [[0, 10], null, …]}` | the shards, in order; 400 with `missing_shard_ids` |
//! | `DELETE /data/clear` `{"shard_ids": […]}` | removes them: `cleared_count`, `freed_bytes`; of what is left `num_tensors`, `total_bytes` |
//! | `DELETE /buffer/clear` `{"shard_ids": […]}` | drops the fetched entries of these, or all with `null` or without a body: `cleared_count` |
//! | `GET /buffer/stats`, `/stats`, `/metrics`, `/health` | counts |
//! | `POST /step/<number>/begin`, `…/claim` `{"shard_ids": […]}` | as long as the connection is open |
//! | `POST /keep` `{"shard_ids": […]}` | fetched entries (`kept_count`) and claimed shards (`kept_shards`) outlive their step |
//! | `POST /step/<number>/end` | the step's counts |
//!
//! A shard is sent as JSON, or as a [header](ShardHeader) and its bytes to clients that name
//! `application/x-tundish-shards` in `Accept`, as the client of this crate does. A client that can read memory of its
//! node names the node, by the number that the kernel draws when it boots. If that is the server's node, references are
//! sent instead of bytes. They open nothing by themselves: the kernel lets only processes of the same user attach.
//!
//! Server and client are hyper's. The server sends shards from the memory that they are stored in. The client runs in
//! the calling thread, and copies what hyper receives into the memory that a shard stays in.
//!
//! Checksums are always verified, while the bytes are in the processor's cache.

use std::fs;
use std::sync::LazyLock;

mod client;
mod fork_safe_sockets;
mod json;
mod peer_user;
mod route;
mod server;
mod shard_header;
mod tls;
mod token;

pub use client::{Client, Trust, WorkerClient};
pub use hyper::Method;
pub use json::{read_batch, read_ids};
pub use route::{MediaType, Refusal, Route};
pub use server::{Server, ServerOptions, Timeouts};
pub use shard_header::{Payload, ShardHeader};
pub use tls::{ClientTls, ServerTls};
pub use token::Token;

/// The header of a request that names the node of the client, if it can attach memory of that node.
const NODE_FIELD: &str = "tundish-node";

static NODE: LazyLock<Option<String>> = LazyLock::new(|| {
    let id = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    Some(id.trim().to_owned()).filter(|id| !id.is_empty())
});

/// This node; `None` where nothing tells.
fn this_node() -> Option<&'static str> {
    NODE.as_deref()
}

//! The wire: shards over HTTP/1.1, which `curl` speaks too.
//!
//! | request | answer |
//! |---|---|
//! | `PUT /data/<id>` | stores the shard in the body |
//! | `GET /data/<id>` | the shard; with `Range: rows=0-9` these rows of it, with `Range: bytes=…` these bytes of the body, where that is no JSON; 404 where there is none |
//! | `POST /data/batch` `{"shard_ids": […], "rows": [[0, 10], null, …]}` | the shards, in order; 400 with `missing_shard_ids` |
//! | `DELETE /data/clear` `{"shard_ids": […]}` | removes them: `cleared_count`, `freed_bytes`; of what is left `num_tensors`, `total_bytes` |
//! | `DELETE /buffer/clear` `{"shard_ids": […]}` | removes what was fetched of them, everything with `null` or without a body: `cleared_count`, of which `kept_count` were kept |
//! | `GET /buffer/stats`, `/stats`, `/metrics`, `/health` | how it stands |
//! | `POST /epoch/<number>/begin`, `…/claim` `{"shard_ids": […]}` | as long as the connection is open |
//! | `POST /keep` `{"shard_ids": […]}` | what was fetched (`kept_count`) and claimed (`kept_shards`) outlives its step; where that is another connection's, as long as this one is open |
//! | `POST /epoch/<number>/flush` | drops what was fetched so far in the step, where it was begun on this connection: `cleared_count` |
//! | `POST /epoch/<number>/close` | gives nobody what the step claimed on this connection any more: it is about to end |
//! | `POST /epoch/<number>/end` | the step's account |
//!
//! A shard is sent as JSON, and to who names `application/x-tundish-shards` in `Accept`, as this crate's client does,
//! as a [header](ShardHeader) and its bytes. It is received as these, or as JSON where `Content-Type` says
//! `application/json`.
//!
//! The server is tokio's sockets and `httparse`, and no HTTP library: it writes bodies from the slabs that they lie in
//! and receives them into those that they stay in, and so copies nothing but into and out of the kernel. hyper 1 would:
//! it hands over a body of 256 MiB in 680 frames of memory of its own, every byte of which is then copied to its place.
//! Over loopback, the shortest of 64 on two busy processors, storing it took 149 ms through hyper and takes 134 ms
//! here, its checksum included; reading it, 141 and 96 ms.
//!
//! Checksums are always verified. While the bytes are in the processor's cache that is 55 GB/s, 5 ms of 256 MiB; XXH3
//! comes to 29 GB/s.
//!
//! The client blocks the thread that calls it: to hand over to another one and back costs as much as a small shard.

mod client;
mod descriptors;
mod head;
mod json;
mod range;
mod refusal;
mod route;
mod same_node;
mod server;
mod shard_header;
mod token;

pub use client::{Client, Held, WorkerClient};
pub use head::{AnswerHead, Form, Method, RequestHead};
pub use json::{read_batch, read_ids, read_tensor};
pub use range::{Asked, Unit};
pub use refusal::Refusal;
pub use route::Route;
pub use server::{Server, Timing};
pub use shard_header::{Payload, ShardHeader};
pub use token::Token;

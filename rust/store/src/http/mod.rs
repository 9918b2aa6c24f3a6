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
//! | `POST /epoch/<number>/close` | gives nobody what the step claimed on this connection any more: it is about to end |
//! | `POST /epoch/<number>/end` | the step's account |
//!
//! A shard is sent as JSON, and to who names `application/x-tundish-shards` in `Accept`, as this crate's client does,
//! as a [header](ShardHeader) and its bytes. It is received as these, or as JSON where `Content-Type` says
//! `application/json`.
//!
//! The server is hyper's, and sends shards from the memory that they are stored in. The client is a small blocking one
//! on `httparse`: it receives into the memory that a shard stays in, and handing a request over to another thread and
//! back would cost as much as fetching a small shard.
//!
//! Checksums are always verified, while the bytes are in the processor's cache.

mod client;
mod json;
mod media_type;
mod range;
mod refusal;
mod route;
mod same_node;
mod server;
mod shard_header;
mod sockets;
mod tls;
mod token;

pub use client::{Client, ResponseHead, Trust, WorkerClient};
pub use hyper::Method;
pub use json::{read_batch, read_ids, read_tensor};
pub use media_type::MediaType;
pub use range::{Asked, Unit};
pub use refusal::Refusal;
pub use route::Route;
pub use server::{Server, ServerOptions, ServerTls, Timeouts};
pub use shard_header::{Payload, ShardHeader};
pub use tls::ClientTls;
pub use token::Token;

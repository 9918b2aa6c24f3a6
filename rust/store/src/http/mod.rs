//! The wire: shards over HTTP/1.1.
#![allow(dead_code)]

mod descriptors;
mod head;
mod json;
mod range;
mod refusal;
mod route;
mod shard_header;
mod token;

//! The wire: shards over HTTP/1.1.
#![allow(dead_code)]

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

pub use client::{Client, Held};
pub use server::{Server, Timing};
pub use token::Token;

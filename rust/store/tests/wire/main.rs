//! What the wire promises, over real sockets and between real processes.

#[path = "../common/mod.rs"]
mod common;
mod curl;
mod fetching;
mod hostile;
mod liars;
mod processes;
mod raw;
mod serving;
mod steps;

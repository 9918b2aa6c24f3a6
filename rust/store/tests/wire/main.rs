//! What the wire promises, over real sockets and between real processes.

#[path = "../common/mod.rs"]
mod common;
mod controller;
mod curl;
mod encrypted;
mod fetching;
mod hostile;
mod liars;
mod processes;
mod raw;
mod serving;
mod steps;
mod users;

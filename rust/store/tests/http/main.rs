//! Servers and clients over real sockets and between real processes.

#[path = "../common/mod.rs"]
mod common;
mod controller;
mod curl;
mod fetching;
mod hostile_clients;
mod hostile_owners;
mod other_users;
mod processes;
mod raw_http;
mod serving;
mod steps;
mod tls;

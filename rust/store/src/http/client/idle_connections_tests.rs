//! Connections that wait for the next request, while owners come and go.

use std::net::TcpListener;
use std::time::{Duration, Instant};

use crate::http::client::connection::{Connection, ConnectionFailure};
use crate::http::client::request::json_request;
use crate::http::client::{Client, Trust};
use crate::http::server::{Server, ServerOptions};
use crate::process_store::ProcessStore;
use crate::stats::Limits;
use crate::time_limit::TimeLimit;

fn ask(client: &Client, server: &Server) {
    let mut check_cancelled = || Ok(());
    let time_limit = &mut TimeLimit::new(Instant::now() + Duration::from_secs(20), &mut check_cancelled);
    let owner = server.address().to_string().into();
    let mut connection = client.take_or_open(&owner, time_limit).unwrap();
    let request = json_request(&owner, None, "GET", "/health", Vec::new()).unwrap();
    connection.send(request, time_limit).unwrap().collect(time_limit).unwrap();
    client.idle_connections.give_back(&owner, connection);
}

fn serve() -> Server {
    let store = ProcessStore::new(Limits { storage_bytes: 1 << 20, buffer_bytes: 1 << 20 });
    Server::start(store, "127.0.0.1", 0, ServerOptions::default()).unwrap()
}

#[test]
fn owners_that_come_and_go_leave_no_connections_behind() {
    let (client, living) = (Client::of_sockets(), serve());
    ask(&client, &living);
    for _ in 0..5 {
        let server = serve();
        ask(&client, &server);
        assert_eq!(client.idle_connections.lock().count, 2, "of the one that lives, and of this one");
        drop(server);
    }
    assert!(client.idle_connections.take(&living.address().to_string()).is_some(), "those that can be used stay");
}

#[test]
fn where_one_address_of_a_name_refuses_the_next_one_is_asked() {
    let living = serve();
    let dead = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let mut check_cancelled = || Ok(());
    let time_limit = &mut TimeLimit::new(Instant::now() + Duration::from_secs(20), &mut check_cancelled);
    assert!(Connection::open("a:1", &[dead, living.address()], &Trust::default(), time_limit).unwrap().is_idle());
    assert!(matches!(
        Connection::open("a:1", &[dead], &Trust::default(), time_limit),
        Err(ConnectionFailure::Broken(_))
    ));
}

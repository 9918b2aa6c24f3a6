//! What a pool of connections promises while owners come and go.

use std::net::TcpListener;
use std::time::{Duration, Instant};

use crate::http::client::Client;
use crate::http::client::connection::{Connection, Trouble};
use crate::http::server::{Server, Timing};
use crate::node::Node;
use crate::patience::Patience;
use crate::stats::Limits;

fn ask(client: &Client, server: &Server) {
    let mut go_on = || Ok(());
    let patience = &mut Patience::new(Instant::now() + Duration::from_secs(20), &mut go_on);
    client.stats(&server.address().to_string().into(), patience).unwrap();
}

fn serve() -> Server {
    let node = Node::new(Limits { storage_bytes: 1 << 20, buffer_bytes: 1 << 20 });
    Server::start(node, "127.0.0.1", 0, None, Timing::default()).unwrap()
}

#[test]
fn owners_that_come_and_go_leave_no_connections_behind() {
    let (client, living) = (Client::of_sockets(), serve());
    ask(&client, &living);
    for _ in 0..5 {
        let server = serve();
        ask(&client, &server);
        assert_eq!(client.pool.lock().count, 2, "of the one that lives, and of this one");
        drop(server);
    }
    assert!(client.pool.take(&living.address().to_string()).is_some(), "those that can be used stay");
}

#[test]
fn where_one_address_of_a_name_refuses_the_next_one_is_asked() {
    let living = serve();
    let dead = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let mut go_on = || Ok(());
    let patience = &mut Patience::new(Instant::now() + Duration::from_secs(20), &mut go_on);
    assert!(Connection::open(&[dead, living.address()], patience).unwrap().is_quiet());
    assert!(matches!(Connection::open(&[dead], patience), Err(Trouble::Broken(_))));
}

//! Connections go to the host in the address and to no other.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use order_timeout::postgres::Database;
use order_timeout_amqp::connect;
use order_timeout_testkit::skip::skipped;
use order_timeout_testkit::{TestEnv, host_and_port, wait_for, with_parts};
use secrecy::{ExposeSecret, SecretString};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

/// Listens at [::1] and 127.0.0.1 on the same port; forwards what arrives at the former.
struct Forwarder {
    port: u16,
    by_ipv6: Arc<AtomicUsize>,
    by_ipv4: Arc<AtomicUsize>,
    tasks: [JoinHandle<()>; 2],
}

impl Forwarder {
    /// `None` on a machine without IPv6.
    async fn before(url: &SecretString) -> Option<Self> {
        let listener = TcpListener::bind("[::1]:0").await.ok()?;
        let port = listener.local_addr().unwrap().port();
        let other = TcpListener::bind(("127.0.0.1", port)).await.expect("the same port is free");
        let server = tokio::net::lookup_host(host_and_port(url)).await.unwrap().next().unwrap();
        let (by_ipv6, by_ipv4) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let tasks = [
            tokio::spawn(forward(listener, server, by_ipv6.clone())),
            tokio::spawn(forward(other, server, by_ipv4.clone())),
        ];
        Some(Self { port, by_ipv6, by_ipv4, tasks })
    }

    fn counts(&self) -> (usize, usize) {
        (self.by_ipv6.load(Ordering::SeqCst), self.by_ipv4.load(Ordering::SeqCst))
    }
}

impl Drop for Forwarder {
    fn drop(&mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

async fn forward(listener: TcpListener, server: SocketAddr, accepted: Arc<AtomicUsize>) {
    while let Ok((mut client, _)) = listener.accept().await {
        accepted.fetch_add(1, Ordering::SeqCst);
        tokio::spawn(async move {
            let mut server = TcpStream::connect(server).await.unwrap();
            let _ = tokio::io::copy_bidirectional(&mut client, &mut server).await;
        });
    }
}

#[test]
fn connects_to_given_ipv6_address() {
    TestEnv::builder().run(async |env| {
        let Some(to_broker) = Forwarder::before(&env.settings.amqp.url).await else {
            return skipped("connects_to_given_ipv6_address", "there is no IPv6 on this machine");
        };
        let to_database = Forwarder::before(&env.settings.database.url).await.unwrap();
        let mut settings = env.settings.clone();
        let address_of = |forwarder: &Forwarder| format!("[::1]:{}", forwarder.port);
        settings.amqp.url = with_parts(&settings.amqp.url, None, Some(&address_of(&to_broker)), None);
        settings.database.url = with_parts(&settings.database.url, None, Some(&address_of(&to_database)), None);
        settings.validate().unwrap();
        settings.validate_database().unwrap();

        let order = env.order(Duration::from_secs(600)).await;
        let publisher = settings.publisher().connect().await.unwrap();
        publisher.schedule(order.order_id().as_str(), order.deadline).await.unwrap();
        wait_for("the alarm", async || env.depth(&env.names().schedule()).await == 1).await;
        assert!(matches!(to_broker.counts(), (1.., 0)), "{:?}", to_broker.counts());
        assert!(connect::place(&settings.amqp).unwrap().starts_with(&address_of(&to_broker)));

        Database::connect(&settings.database, 1).await.unwrap();
        assert!(matches!(to_database.counts(), (1.., 0)), "{:?}", to_database.counts());
    });
}

#[test]
fn absent_ipv6_server_is_not_replaced() {
    TestEnv::builder().run(async |env| {
        // Both servers listen at 127.0.0.1, and not here: 100::/64 is for discarding (RFC 6666).
        let mut settings = env.settings.clone();
        settings.amqp.connect_timeout = Duration::from_millis(500);
        settings.database.acquire_timeout = Duration::from_millis(500);
        let port = |url: &SecretString| host_and_port(url).rsplit_once(':').unwrap().1.to_owned();
        let elsewhere = |url: &SecretString| with_parts(url, None, Some(&format!("[100::1]:{}", port(url))), None);
        settings.amqp.url = elsewhere(&settings.amqp.url);
        settings.database.url = elsewhere(&settings.database.url);
        let error = connect::connect(&settings.amqp, "test").await.map(drop).unwrap_err().to_string();
        assert!(error.contains("the broker at [100::1]:"), "{error}");
        let error = Database::connect(&settings.database, 1).await.map(drop).unwrap_err().to_string();
        assert!(error.contains("the database at [100::1]:"), "{error}");
        assert!(!error.contains(settings.database.url.expose_secret()));
    });
}

//! Acts as a load balancer or a virtual address: one address in front of several servers.

use std::sync::{Arc, Mutex};

use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Runtime;
use tokio::sync::watch;

/// Forwards connections to the first server of its list that accepts. It runs outside the test's runtime, so that it
/// exists before the test environment is built and after it is cleaned up.
pub struct Forwarder {
    pub port: u16,
    servers: Arc<Mutex<Vec<u16>>>,
    cut: watch::Sender<()>,
    runtime: Option<Runtime>,
}

impl Forwarder {
    /// On its own port, in front of servers on these ports.
    pub fn start(servers: Vec<u16>) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
        let port = listener.local_addr().unwrap().port();
        let (servers, cut) = (Arc::new(Mutex::new(servers)), watch::Sender::new(()));
        runtime.spawn(accept(listener, servers.clone(), cut.clone()));
        Self { port, servers, cut, runtime: Some(runtime) }
    }

    /// From now on new connections go to the first of these that accepts.
    pub fn set_servers(&self, servers: Vec<u16>) {
        *self.servers.lock().unwrap() = servers;
    }

    /// Ends every connection.
    pub fn cut(&self) {
        self.cut.send_replace(());
    }
}

impl Drop for Forwarder {
    fn drop(&mut self) {
        // Without waiting: it may be dropped within the test's own runtime.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

async fn accept(listener: TcpListener, servers: Arc<Mutex<Vec<u16>>>, cut: watch::Sender<()>) {
    loop {
        let Ok((client, _)) = listener.accept().await else { continue };
        let candidates = servers.lock().unwrap().clone();
        tokio::spawn(pass_on(client, candidates, cut.subscribe()));
    }
}

async fn pass_on(mut client: TcpStream, candidates: Vec<u16>, mut cut: watch::Receiver<()>) {
    for port in candidates {
        let Ok(mut server) = TcpStream::connect(("127.0.0.1", port)).await else { continue };
        let _ = (client.set_nodelay(true), server.set_nodelay(true));
        tokio::select! {
            // When one side ends the connection, the other sees it.
            _ = tokio::io::copy_bidirectional(&mut client, &mut server) => {}
            _ = cut.changed() => {}
        }
        return;
    }
}

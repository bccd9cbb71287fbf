//! What a load balancer or a virtual address does in a deployment: one address in front of several servers.

use std::sync::{Arc, Mutex};

use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Runtime;
use tokio::sync::watch;

/// Passes connections on to the first server of its list that accepts. It lives outside the test's runtime, so that it
/// can stand before the env is built and after it is cleared away.
pub struct Forwarder {
    pub port: u16,
    servers: Arc<Mutex<Vec<u16>>>,
    cut: watch::Sender<()>,
    runtime: Option<Runtime>,
}

impl Forwarder {
    /// On a port of its own, in front of servers on these ports.
    pub fn start(servers: Vec<u16>) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
        let port = listener.local_addr().unwrap().port();
        let (servers, cut) = (Arc::new(Mutex::new(servers)), watch::Sender::new(()));
        runtime.spawn(accept(listener, servers.clone(), cut.clone()));
        Self { port, servers, cut, runtime: Some(runtime) }
    }

    /// From now on new connections go to these, the first that accepts.
    pub fn set_servers(&self, servers: Vec<u16>) {
        *self.servers.lock().unwrap() = servers;
    }

    /// Ends every connection there is.
    pub fn cut(&self) {
        self.cut.send_replace(());
    }
}

impl Drop for Forwarder {
    fn drop(&mut self) {
        // Not waiting: it may be dropped within the test's own runtime.
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
            // Ended by one side or the other: both see it.
            _ = tokio::io::copy_bidirectional(&mut client, &mut server) => {}
            _ = cut.changed() => {}
        }
        return;
    }
}

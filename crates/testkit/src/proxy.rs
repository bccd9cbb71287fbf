//! A network between a client and a server that a test can break: cut, stalled in either direction, slow, half closed,
//! or cut at chosen bytes.
//!
//! Knows neither AMQP nor Postgres. Its actions depend on the test's calls and on the bytes it reads, never on the
//! time.

use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustix::net::Shutdown;
use secrecy::{ExposeSecret, SecretString};
use tokio::net::{TcpListener, TcpStream, lookup_host};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use url::Url;

use crate::{host_and_port, with_parts};

/// The direction of bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// From the client to the server.
    ToServer,
    /// From the server to the client.
    ToClient,
}

/// What happens to a connection on which the expected bytes are sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Then {
    /// It is cut before the server receives them.
    CutBefore,
    /// They are forwarded, and the connection is cut when the server answers: the client never receives the answer.
    CutAtAnswer,
    /// The server vanishes before it receives them, for all connections and without notice, as with [`Proxy::stall`].
    Vanish,
    /// They are forwarded, and from then on no client receives anything, as with [`Proxy::stall_one_way`].
    StallAnswers,
    /// They are forwarded, and so is what follows on their connection up to a COMMIT; from then on as [`Then::StallAnswers`].
    StallAnswersOfCommit,
}

/// How bytes are forwarded in one direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Flow {
    Free,
    /// Nothing is read or forwarded; the connection stays open.
    Stalled,
    Delayed(Duration),
}

#[derive(Debug, Clone)]
struct Rules {
    refusing: bool,
    /// How many connections are forwarded to the server; further ones are accepted but never answered.
    admitted: usize,
    /// Connections opened at a smaller count are cut.
    cuts: u64,
    half_closes: u64,
    to_server: Flow,
    to_client: Flow,
}

impl Rules {
    fn flow(&self, direction: Direction) -> Flow {
        match direction {
            Direction::ToServer => self.to_server,
            Direction::ToClient => self.to_client,
        }
    }
}

#[derive(Debug)]
struct Trap {
    bytes: Vec<u8>,
    then: Then,
    triggered: Arc<AtomicBool>,
}

/// How often some bytes were seen.
#[derive(Debug, Clone)]
pub struct Count(Arc<AtomicUsize>);

impl Count {
    /// The count so far.
    pub fn get(&self) -> usize {
        self.0.load(Ordering::SeqCst)
    }
}

#[derive(Debug)]
struct Counted {
    direction: Direction,
    bytes: Vec<u8>,
    count: Count,
}

/// State shared by all connections.
#[derive(Debug)]
struct Wire {
    server: SocketAddr,
    rules: watch::Sender<Rules>,
    accepted: AtomicUsize,
    open: AtomicUsize,
    /// Pieces read from clients.
    written: AtomicUsize,
    trap: Mutex<Option<Trap>>,
    counted: Mutex<Vec<Counted>>,
}

/// A proxy in front of one server. Its connections are cut when it is dropped.
#[derive(Debug)]
pub struct Proxy {
    address: String,
    wire: Arc<Wire>,
    accepting: JoinHandle<()>,
}

impl Proxy {
    /// An intact network to the server of this address.
    pub async fn before(url: &SecretString) -> Self {
        let server = lookup_host(host_and_port(url)).await.expect("the server's host has an address");
        let server = server.into_iter().next().expect("the server's host has an address");
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let rules = Rules {
            refusing: false,
            admitted: usize::MAX,
            cuts: 0,
            half_closes: 0,
            to_server: Flow::Free,
            to_client: Flow::Free,
        };
        let wire = Arc::new(Wire {
            server,
            rules: watch::Sender::new(rules),
            accepted: AtomicUsize::new(0),
            open: AtomicUsize::new(0),
            written: AtomicUsize::new(0),
            trap: Mutex::default(),
            counted: Mutex::default(),
        });
        let accepting = tokio::spawn(accept(listener, wire.clone()));
        Self { address, wire, accepting }
    }

    /// The server's address through this proxy, without TLS, because the proxy must read the bytes.
    pub fn address(&self, url: &SecretString) -> SecretString {
        let mut url = Url::parse(with_parts(url, None, Some(&self.address), None).expose_secret()).expect("an address");
        if url.scheme().starts_with("postgres") {
            url.query_pairs_mut().append_pair("sslmode", "disable");
        }
        String::from(url).into()
    }

    /// Resets every connection, and each new one as soon as it is opened.
    pub fn cut(&self) {
        self.wire.rules.send_modify(|rules| {
            rules.cuts += 1;
            rules.refusing = true;
        });
    }

    /// Forwards no more than this many connections altogether; the rest are accepted but get no answer, as from a
    /// broker without file descriptors.
    pub fn admit(&self, connections: usize) {
        self.wire.rules.send_modify(|rules| rules.admitted = connections);
    }

    /// Resets every connection; new ones are forwarded.
    pub fn reset_connections(&self) {
        self.wire.rules.send_modify(|rules| rules.cuts += 1);
    }

    /// Connections stay open and new ones are accepted, but nothing is forwarded: the host has vanished.
    pub fn stall(&self) {
        self.wire.stall();
    }

    /// Forwards nothing in this direction, and everything in the other.
    pub fn stall_one_way(&self, direction: Direction) {
        self.set_flow(direction, Flow::Stalled);
    }

    /// Delays everything in this direction by this much.
    pub fn delay(&self, direction: Direction, by: Duration) {
        self.set_flow(direction, Flow::Delayed(by));
    }

    /// Clients read the end of the stream, while the server still receives what they write.
    pub fn half_close(&self) {
        self.wire.rules.send_modify(|rules| rules.half_closes += 1);
    }

    /// Breaks the connection on which a client next sends these bytes. The returned function tells whether it has
    /// happened.
    pub fn cut_at(&self, bytes: &str, then: Then) -> impl Fn() -> bool + use<> {
        let triggered = Arc::new(AtomicBool::new(false));
        *self.wire.trap.lock().unwrap() = Some(Trap { bytes: bytes.into(), then, triggered: triggered.clone() });
        move || triggered.load(Ordering::SeqCst)
    }

    /// Counts how often these bytes are seen from now on.
    pub fn count(&self, direction: Direction, bytes: &str) -> Count {
        let count = Count(Arc::default());
        self.wire.counted.lock().unwrap().push(Counted { direction, bytes: bytes.into(), count: count.clone() });
        count
    }

    /// How many requests clients have made so far: connections, and pieces written on them.
    pub fn asked(&self) -> usize {
        self.accepted() + self.wire.written.load(Ordering::SeqCst)
    }

    /// Connections accepted so far.
    pub fn accepted(&self) -> usize {
        self.wire.accepted.load(Ordering::SeqCst)
    }

    /// Connections that are open now.
    pub fn open(&self) -> usize {
        self.wire.open.load(Ordering::SeqCst)
    }

    /// Repairs the network and stops waiting for bytes. Stalled connections continue where they stopped.
    pub fn restore(&self) {
        *self.wire.trap.lock().unwrap() = None;
        self.wire.rules.send_modify(|rules| {
            rules.refusing = false;
            (rules.to_server, rules.to_client) = (Flow::Free, Flow::Free);
        });
    }

    fn set_flow(&self, direction: Direction, flow: Flow) {
        self.wire.rules.send_modify(|rules| match direction {
            Direction::ToServer => rules.to_server = flow,
            Direction::ToClient => rules.to_client = flow,
        });
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.cut();
        self.accepting.abort();
    }
}

impl Wire {
    fn stall(&self) {
        self.rules.send_modify(|rules| (rules.to_server, rules.to_client) = (Flow::Stalled, Flow::Stalled));
    }
}

async fn accept(listener: TcpListener, wire: Arc<Wire>) {
    let mut unanswered = Vec::new();
    loop {
        let Ok((client, _)) = listener.accept().await else { return };
        let earlier = wire.accepted.fetch_add(1, Ordering::SeqCst);
        // Subscribed before a test can break it: a cut between here and the connection's first step applies to it too.
        let rules = wire.rules.subscribe();
        let (refusing, admitted, broken) = {
            let rules = rules.borrow();
            (rules.refusing, rules.admitted, (rules.cuts, rules.half_closes))
        };
        if refusing {
            reset(&client);
            continue;
        }
        if earlier >= admitted {
            unanswered.push(client);
            continue;
        }
        let wire = wire.clone();
        tokio::spawn(async move {
            wire.open.fetch_add(1, Ordering::SeqCst);
            forward(&client, &wire, rules, broken).await;
            wire.open.fetch_sub(1, Ordering::SeqCst);
        });
    }
}

/// Makes dropping the stream reset it: no orderly close, and what was not forwarded is lost.
fn reset(stream: &TcpStream) {
    stream.set_zero_linger().expect("an open socket");
}

/// Forwards one connection until its end.
async fn forward(client: &TcpStream, wire: &Wire, mut rules: watch::Receiver<Rules>, (cuts, half_closes): (u64, u64)) {
    let Ok(server) = TcpStream::connect(wire.server).await else { return reset(client) };
    // Each piece is one packet, as the client wrote it.
    client.set_nodelay(true).expect("an open socket");
    server.set_nodelay(true).expect("an open socket");
    let answer_is_lost = AtomicBool::new(false);
    let pump = |direction| {
        let (from, to) = match direction {
            Direction::ToServer => (client, &server),
            Direction::ToClient => (&server, client),
        };
        let rules = wire.rules.subscribe();
        Pump { direction, from, to, wire, rules, answer_is_lost: &answer_is_lost, stalls_at_commit: None }
    };
    let both_directions = async { tokio::try_join!(pump(Direction::ToServer).run(), pump(Direction::ToClient).run()) };
    let broken = async {
        loop {
            {
                let rules = rules.borrow_and_update();
                if rules.cuts > cuts {
                    return;
                }
                if rules.half_closes > half_closes {
                    send_end(client);
                }
            }
            if rules.changed().await.is_err() {
                return;
            }
        }
    };
    tokio::select! {
        ended = both_directions => match ended {
            Ok(_) => {}
            // Cut by the trap, or broken by one of the ends. The server keeps what was forwarded, and reads the end.
            Err(_) => reset(client),
        },
        () = broken => {
            reset(client);
            reset(&server);
        }
    }
}

/// Sends the end of the stream to the other end.
fn send_end(stream: &TcpStream) {
    // An error means that the connection has ended already.
    let _ = rustix::net::shutdown(stream, Shutdown::Write);
}

/// One direction of a connection.
struct Pump<'a> {
    direction: Direction,
    from: &'a TcpStream,
    to: &'a TcpStream,
    wire: &'a Wire,
    rules: watch::Receiver<Rules>,
    answer_is_lost: &'a AtomicBool,
    /// What is to be told when a COMMIT has come, whose answer no client receives.
    stalls_at_commit: Option<Arc<AtomicBool>>,
}

impl Pump<'_> {
    /// Forwards until the end of the stream. An error ends the connection.
    async fn run(mut self) -> io::Result<()> {
        let mut buffer = vec![0; 1 << 16];
        loop {
            self.flowing().await;
            tokio::select! {
                ready = self.from.readable() => ready?,
                _ = self.rules.changed() => continue,
            }
            let count = match self.from.try_read(&mut buffer) {
                Ok(0) => {
                    send_end(self.to);
                    return Ok(());
                }
                Ok(count) => count,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
                Err(error) => return Err(error),
            };
            self.inspect(&buffer[..count])?;
            if let Flow::Delayed(by) = self.flowing().await {
                tokio::time::sleep(by).await;
            }
            self.forward_piece(&buffer[..count]).await?;
        }
    }

    /// Waits while this direction is stalled.
    async fn flowing(&mut self) -> Flow {
        let direction = self.direction;
        let flowing = self.rules.wait_for(|rules| rules.flow(direction) != Flow::Stalled);
        flowing.await.expect("the wire outlives its connections").flow(direction)
    }

    async fn forward_piece(&self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            self.to.writable().await?;
            match self.to.try_write(bytes) {
                Ok(count) => bytes = &bytes[count..],
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn stall_answers(&self) {
        self.wire.rules.send_modify(|rules| rules.to_client = Flow::Stalled);
    }

    /// Counts bytes and triggers the trap. Searches each piece on its own, because the expected bytes come in one
    /// piece.
    fn inspect(&mut self, bytes: &[u8]) -> io::Result<()> {
        for counted in self.wire.counted.lock().unwrap().iter().filter(|counted| counted.direction == self.direction) {
            counted.count.0.fetch_add(occurrences(bytes, &counted.bytes), Ordering::SeqCst);
        }
        if self.direction == Direction::ToClient {
            return if self.answer_is_lost.load(Ordering::SeqCst) { Err(cut_here()) } else { Ok(()) };
        }
        self.wire.written.fetch_add(1, Ordering::SeqCst);
        if let Some(triggered) = self.stalls_at_commit.take_if(|_| occurrences(bytes, b"COMMIT") > 0) {
            triggered.store(true, Ordering::SeqCst);
            self.stall_answers();
        }
        let mut trap = self.wire.trap.lock().unwrap();
        let Some(trap) = trap.take_if(|trap| occurrences(bytes, &trap.bytes) > 0) else { return Ok(()) };
        if trap.then == Then::StallAnswersOfCommit {
            self.stalls_at_commit = Some(trap.triggered);
            return Ok(());
        }
        trap.triggered.store(true, Ordering::SeqCst);
        match trap.then {
            Then::CutBefore => Err(cut_here()),
            Then::Vanish => {
                self.wire.stall();
                Ok(())
            }
            Then::StallAnswers | Then::StallAnswersOfCommit => {
                self.stall_answers();
                Ok(())
            }
            Then::CutAtAnswer => {
                self.answer_is_lost.store(true, Ordering::SeqCst);
                Ok(())
            }
        }
    }
}

fn cut_here() -> io::Error {
    io::Error::new(io::ErrorKind::ConnectionAborted, "cut here by the test")
}

fn occurrences(bytes: &[u8], sought: &[u8]) -> usize {
    bytes.windows(sought.len()).filter(|window| *window == sought).count()
}

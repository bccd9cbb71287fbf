//! A network between a client and a server that a test may break: cut, stalled in either direction, slow, half closed,
//! or cut at exactly the bytes that matter.
//!
//! Knows neither AMQP nor Postgres. What it does follows from what the test says and from what it reads on the wire,
//! never from the time.

use std::io;
use std::net::SocketAddr;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use secrecy::{ExposeSecret, SecretString};
use tokio::net::{TcpListener, TcpStream, lookup_host};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use url::Url;

use super::{place_of, with_parts};

/// Which way bytes go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    ToServer,
    ToClient,
}

/// What becomes of a connection whose bytes a test waited for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Then {
    /// Cut before the server gets them.
    CutBefore,
    /// Handed on, and cut when the server answers: the client never hears what it answered.
    CutAtTheAnswer,
    /// The server vanishes before it gets them, for everybody, and nobody is told; as with [`Proxy::stall`].
    Vanish,
}

/// How bytes go in one direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Flow {
    Free,
    /// Nothing is read and nothing handed on, and nobody is told.
    Stalled,
    Late(Duration),
}

#[derive(Debug, Clone)]
struct Rules {
    refusing: bool,
    /// How many connections are handed on to the server; further ones are accepted and never answered.
    admitted: usize,
    /// Connections opened under a smaller number are cut.
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
    sprung: Arc<AtomicBool>,
}

/// How often some bytes went by.
#[derive(Debug, Clone)]
pub struct Count(Arc<AtomicUsize>);

impl Count {
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

/// What all connections share.
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
    place: String,
    wire: Arc<Wire>,
    accepting: JoinHandle<()>,
}

impl Proxy {
    /// A network in order, to the server of this address.
    pub async fn before(url: &SecretString) -> Self {
        let server = lookup_host(place_of(url)).await.expect("the server's host has an address");
        let server = server.into_iter().next().expect("the server's host has an address");
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let place = listener.local_addr().unwrap().to_string();
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
        Self { place, wire, accepting }
    }

    /// The server's address, by way of this proxy; in the clear, or there would be nothing to read on the wire.
    pub fn address(&self, url: &SecretString) -> SecretString {
        let mut url = Url::parse(with_parts(url, None, Some(&self.place), None).expose_secret()).expect("an address");
        if url.scheme().starts_with("postgres") {
            url.query_pairs_mut().append_pair("sslmode", "disable");
        }
        String::from(url).into()
    }

    /// Resets every connection, and every further one as soon as it is opened.
    pub fn cut(&self) {
        self.wire.rules.send_modify(|rules| {
            rules.cuts += 1;
            rules.refusing = true;
        });
    }

    /// From now on the server gets no more than this many connections, all told; the rest are accepted and hear nothing,
    /// as of a broker without file descriptors.
    #[allow(dead_code)] // used by the tests of setup
    pub fn admit(&self, connections: usize) {
        self.wire.rules.send_modify(|rules| rules.admitted = connections);
    }

    /// Resets every connection; further ones are let through.
    pub fn reset_connections(&self) {
        self.wire.rules.send_modify(|rules| rules.cuts += 1);
    }

    /// Connections stay and new ones are accepted, but nothing goes through: the host has vanished.
    pub fn stall(&self) {
        self.wire.stall();
    }

    /// Nothing goes through in this direction; in the other everything does.
    pub fn stall_one_way(&self, direction: Direction) {
        self.set_flow(direction, Flow::Stalled);
    }

    /// Everything arrives this much later in this direction.
    pub fn delay(&self, direction: Direction, by: Duration) {
        self.set_flow(direction, Flow::Late(by));
    }

    /// Clients read the end of the stream, while what they write still arrives.
    pub fn half_close(&self) {
        self.wire.rules.send_modify(|rules| rules.half_closes += 1);
    }

    /// Cuts the connection on which a client next sends these bytes. Says whether it has happened.
    pub fn cut_at(&self, bytes: &str, then: Then) -> impl Fn() -> bool + use<> {
        let sprung = Arc::new(AtomicBool::new(false));
        *self.wire.trap.lock().unwrap() = Some(Trap { bytes: bytes.into(), then, sprung: sprung.clone() });
        move || sprung.load(Ordering::SeqCst)
    }

    /// Counts from now on how often these bytes go by.
    pub fn count(&self, direction: Direction, bytes: &str) -> Count {
        let count = Count(Arc::default());
        self.wire.counted.lock().unwrap().push(Counted { direction, bytes: bytes.into(), count: count.clone() });
        count
    }

    /// How much clients have asked for so far: connections, and pieces written on them.
    pub fn asked(&self) -> usize {
        self.accepted() + self.wire.written.load(Ordering::SeqCst)
    }

    /// Connections accepted so far.
    pub fn accepted(&self) -> usize {
        self.wire.accepted.load(Ordering::SeqCst)
    }

    /// Connections that stand now.
    pub fn open(&self) -> usize {
        self.wire.open.load(Ordering::SeqCst)
    }

    /// The network is in order again, and nothing is waited for. What was stalled goes on where it stopped.
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
        // Before anybody can break it: a cut between here and the connection's first step is meant for it, too.
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
            carry(&client, &wire, rules, broken).await;
            wire.open.fetch_sub(1, Ordering::SeqCst);
        });
    }
}

/// Whoever drops it now, resets it: no goodbye, and what was not handed on is lost.
fn reset(stream: &TcpStream) {
    stream.set_zero_linger().expect("an open socket");
}

/// One connection, until it ends one way or the other.
async fn carry(client: &TcpStream, wire: &Wire, mut rules: watch::Receiver<Rules>, (cuts, half_closes): (u64, u64)) {
    let Ok(server) = TcpStream::connect(wire.server).await else { return reset(client) };
    // One packet for each piece, as the client wrote it.
    client.set_nodelay(true).expect("an open socket");
    server.set_nodelay(true).expect("an open socket");
    let answer_is_lost = AtomicBool::new(false);
    let pump = |direction| {
        let (from, to) = match direction {
            Direction::ToServer => (client, &server),
            Direction::ToClient => (&server, client),
        };
        Pump { direction, from, to, wire, rules: wire.rules.subscribe(), answer_is_lost: &answer_is_lost }
    };
    let both_ways = async { tokio::try_join!(pump(Direction::ToServer).run(), pump(Direction::ToClient).run()) };
    let broken = async {
        loop {
            {
                let rules = rules.borrow_and_update();
                if rules.cuts > cuts {
                    return;
                }
                if rules.half_closes > half_closes {
                    say_end(client);
                }
            }
            if rules.changed().await.is_err() {
                return;
            }
        }
    };
    tokio::select! {
        ended = both_ways => match ended {
            Ok(_) => {}
            // Sprung, or broken by one of the ends. The server has what was handed on to it: it only hears the end.
            Err(_) => reset(client),
        },
        () = broken => {
            reset(client);
            reset(&server);
        }
    }
}

/// The other end reads the end of the stream.
fn say_end(stream: &TcpStream) {
    // SAFETY: a plain system call on a descriptor that is open as long as the stream is borrowed.
    unsafe { libc::shutdown(stream.as_raw_fd(), libc::SHUT_WR) };
}

/// One direction of a connection.
struct Pump<'a> {
    direction: Direction,
    from: &'a TcpStream,
    to: &'a TcpStream,
    wire: &'a Wire,
    rules: watch::Receiver<Rules>,
    answer_is_lost: &'a AtomicBool,
}

impl Pump<'_> {
    /// Until the sender says it has no more; an error ends the connection.
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
                    say_end(self.to);
                    return Ok(());
                }
                Ok(count) => count,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
                Err(error) => return Err(error),
            };
            self.inspect(&buffer[..count])?;
            if let Flow::Late(by) = self.flowing().await {
                tokio::time::sleep(by).await;
            }
            self.hand_on(&buffer[..count]).await?;
        }
    }

    /// Waits while it is stalled.
    async fn flowing(&mut self) -> Flow {
        let direction = self.direction;
        let flowing = self.rules.wait_for(|rules| rules.flow(direction) != Flow::Stalled);
        flowing.await.expect("the wire outlives its connections").flow(direction)
    }

    async fn hand_on(&self, mut bytes: &[u8]) -> io::Result<()> {
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

    /// Counts, and springs the trap. Looks at one piece at a time: what is looked for is written in one.
    fn inspect(&self, bytes: &[u8]) -> io::Result<()> {
        for counted in self.wire.counted.lock().unwrap().iter().filter(|counted| counted.direction == self.direction) {
            counted.count.0.fetch_add(occurrences(bytes, &counted.bytes), Ordering::SeqCst);
        }
        if self.direction == Direction::ToClient {
            return if self.answer_is_lost.load(Ordering::SeqCst) { Err(cut_here()) } else { Ok(()) };
        }
        self.wire.written.fetch_add(1, Ordering::SeqCst);
        let mut trap = self.wire.trap.lock().unwrap();
        let Some(sprung) = trap.take_if(|trap| occurrences(bytes, &trap.bytes) > 0) else { return Ok(()) };
        sprung.sprung.store(true, Ordering::SeqCst);
        match sprung.then {
            Then::CutBefore => Err(cut_here()),
            Then::Vanish => {
                self.wire.stall();
                Ok(())
            }
            Then::CutAtTheAnswer => {
                self.answer_is_lost.store(true, Ordering::SeqCst);
                Ok(())
            }
        }
    }
}

fn cut_here() -> io::Error {
    io::Error::new(io::ErrorKind::ConnectionAborted, "cut here, as the test wants it")
}

fn occurrences(bytes: &[u8], sought: &[u8]) -> usize {
    bytes.windows(sought.len()).filter(|window| *window == sought).count()
}

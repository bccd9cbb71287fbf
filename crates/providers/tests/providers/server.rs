//! A provider's side: an HTTP server, with or without TLS, that answers as a test says and notes what it was asked.
//!
//! It writes its answers byte by byte, because most tests need answers that no HTTP library would send.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use futures_util::future::BoxFuture;
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use rustls::ServerConfig;
use rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};
use serde_json::Value;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;
use tokio_rustls::TlsAcceptor;

/// A request as the server saw it.
#[derive(Debug, Clone)]
pub struct Seen {
    pub method: String,
    pub path: String,
    /// By name in lower case.
    pub headers: BTreeMap<String, String>,
    pub body: String,
    pub at: Instant,
}

impl Seen {
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap()
    }

    pub fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", String::as_str)
    }
}

/// What the server does with a request.
#[derive(Debug, Clone)]
pub enum Reply {
    /// A whole answer.
    Whole { status: u16, headers: Vec<(String, String)>, body: String },
    /// These bytes, and the connection is closed.
    Raw(Vec<u8>),
    /// These bytes, and the connection is reset.
    Reset(Vec<u8>),
    /// Nothing, forever.
    Hang,
    /// These bytes, and then this reply.
    Then(Vec<u8>, Box<Reply>),
    /// A reply after a while.
    After(Duration, Box<Reply>),
}

pub fn json(status: u16, body: &Value) -> Reply {
    Reply::Whole { status, headers: Vec::new(), body: body.to_string() }
}

pub fn with_headers(status: u16, headers: &[(&str, &str)], body: &str) -> Reply {
    let headers = headers.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
    Reply::Whole { status, headers, body: body.to_owned() }
}

struct State {
    answer: Box<dyn Fn(&Seen) -> Reply + Send + Sync>,
    seen: Mutex<Vec<Seen>>,
    under_way: AtomicUsize,
    most_under_way: AtomicUsize,
}

/// A running server. Ends when dropped.
pub struct Server {
    scheme: &'static str,
    address: SocketAddr,
    state: Arc<State>,
    task: JoinHandle<()>,
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// What a TLS server shows, and the CA that a client must trust, as PEM.
pub struct Identity {
    pub ca: String,
    chain: Vec<rustls::pki_types::CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
}

impl Identity {
    /// A certificate of a CA of its own for these names.
    pub fn new(names: &[&str], change: impl FnOnce(&mut CertificateParams)) -> Self {
        let ca_key = KeyPair::generate().unwrap();
        let mut ca = CertificateParams::new(Vec::new()).unwrap();
        ca.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let ca_certificate = ca.self_signed(&ca_key).unwrap();
        let issuer = Issuer::new(ca, ca_key);
        let key = KeyPair::generate().unwrap();
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        let mut own = CertificateParams::new(names).unwrap();
        change(&mut own);
        let certificate = own.signed_by(&key, &issuer).unwrap();
        Self {
            ca: ca_certificate.pem(),
            chain: vec![certificate.der().clone()],
            key: PrivatePkcs8KeyDer::from(key.serialize_der()).into(),
        }
    }

    fn acceptor(self) -> TlsAcceptor {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
        TlsAcceptor::from(Arc::new(config.with_no_client_auth().with_single_cert(self.chain, self.key).unwrap()))
    }
}

impl Server {
    pub async fn start(answer: impl Fn(&Seen) -> Reply + Send + Sync + 'static) -> Self {
        Self::listen("http", None, answer).await
    }

    pub async fn start_tls(identity: Identity, answer: impl Fn(&Seen) -> Reply + Send + Sync + 'static) -> Self {
        Self::listen("https", Some(identity.acceptor()), answer).await
    }

    async fn listen(
        scheme: &'static str,
        acceptor: Option<TlsAcceptor>,
        answer: impl Fn(&Seen) -> Reply + Send + Sync + 'static,
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let state = Arc::new(State {
            answer: Box::new(answer),
            seen: Mutex::default(),
            under_way: AtomicUsize::new(0),
            most_under_way: AtomicUsize::new(0),
        });
        let shared = Arc::clone(&state);
        let task = tokio::spawn(async move {
            let mut connections = tokio::task::JoinSet::new();
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                connections.spawn(connection(stream, acceptor.clone(), Arc::clone(&shared)));
            }
        });
        Self { scheme, address, state, task }
    }

    pub fn url(&self) -> String {
        format!("{}://localhost:{}", self.scheme, self.address.port())
    }

    pub fn seen(&self) -> Vec<Seen> {
        self.state.seen.lock().unwrap().clone()
    }

    /// How many requests were under way at the same time.
    pub fn most_under_way(&self) -> usize {
        self.state.most_under_way.load(Ordering::SeqCst)
    }
}

async fn connection(stream: TcpStream, acceptor: Option<TlsAcceptor>, state: Arc<State>) {
    // A reset is a close with unsent data discarded.
    let reset = |stream: &TcpStream| stream.set_zero_linger().unwrap();
    match acceptor {
        None => {
            let mut stream = stream;
            if serve(&mut stream, &state).await == End::Reset {
                reset(&stream);
            }
        }
        Some(acceptor) => {
            let Ok(mut stream) = acceptor.accept(stream).await else { return };
            if serve(&mut stream, &state).await == End::Reset {
                reset(stream.get_ref().0);
            }
        }
    }
}

#[derive(PartialEq, Eq)]
enum End {
    Closed,
    Reset,
}

async fn serve(stream: &mut (impl AsyncRead + AsyncWrite + Unpin + Send), state: &State) -> End {
    let mut unread = Vec::new();
    while let Some(seen) = request(stream, &mut unread).await {
        state.seen.lock().unwrap().push(seen.clone());
        let under_way = state.under_way.fetch_add(1, Ordering::SeqCst) + 1;
        state.most_under_way.fetch_max(under_way, Ordering::SeqCst);
        let end = send(stream, (state.answer)(&seen), state).await;
        if let Some(end) = end {
            return end;
        }
    }
    End::Closed
}

/// Writes a reply, and counts the request as done just before. `None`: the connection stays open.
fn send<'a>(
    stream: &'a mut (impl AsyncRead + AsyncWrite + Unpin + Send),
    reply: Reply,
    state: &'a State,
) -> BoxFuture<'a, Option<End>> {
    Box::pin(async move {
        let (bytes, end) = match reply {
            Reply::After(pause, reply) => {
                tokio::time::sleep(pause).await;
                return send(stream, *reply, state).await;
            }
            Reply::Then(bytes, reply) => {
                let _ = stream.write_all(&bytes).await;
                let _ = stream.flush().await;
                return send(stream, *reply, state).await;
            }
            Reply::Hang => {
                // Until the client gives up.
                let _ = stream.read(&mut [0]).await;
                (Vec::new(), Some(End::Closed))
            }
            Reply::Raw(bytes) => (bytes, Some(End::Closed)),
            Reply::Reset(bytes) => (bytes, Some(End::Reset)),
            Reply::Whole { status, headers, body } => {
                let mut text = format!("HTTP/1.1 {status} X\r\n");
                for (name, value) in headers {
                    text += &format!("{name}: {value}\r\n");
                }
                // An answer with 204 has no body, and none is announced.
                if status == 204 {
                    text += "\r\n";
                } else {
                    text += &format!("content-length: {}\r\n\r\n{body}", body.len());
                }
                (text.into_bytes(), None)
            }
        };
        state.under_way.fetch_sub(1, Ordering::SeqCst);
        // The client may be gone.
        let _ = stream.write_all(&bytes).await;
        let _ = stream.flush().await;
        if end == Some(End::Closed) {
            let _ = stream.shutdown().await;
        }
        end
    })
}

async fn request(stream: &mut (impl AsyncRead + Unpin), unread: &mut Vec<u8>) -> Option<Seen> {
    let head_end = loop {
        if let Some(at) = unread.windows(4).position(|window| window == b"\r\n\r\n") {
            break at + 4;
        }
        more(stream, unread).await?;
    };
    let head = String::from_utf8(unread[..head_end].to_vec()).unwrap();
    let mut lines = head.split("\r\n");
    let mut first = lines.next().unwrap().split(' ');
    let (method, path) = (first.next().unwrap().to_owned(), first.next().unwrap().to_owned());
    let headers: BTreeMap<_, _> = lines
        .filter_map(|line| line.split_once(": "))
        .map(|(name, value)| (name.to_ascii_lowercase(), value.to_owned()))
        .collect();
    let length: usize = headers.get("content-length").map_or(0, |length| length.parse().unwrap());
    while unread.len() < head_end + length {
        more(stream, unread).await?;
    }
    let body = String::from_utf8(unread[head_end..head_end + length].to_vec()).unwrap();
    unread.drain(..head_end + length);
    Some(Seen { method, path, headers, body, at: Instant::now() })
}

async fn more(stream: &mut (impl AsyncRead + Unpin), unread: &mut Vec<u8>) -> Option<()> {
    let mut bytes = [0; 4096];
    match stream.read(&mut bytes).await {
        Ok(0) | Err(_) => None,
        Ok(read) => {
            unread.extend_from_slice(&bytes[..read]);
            Some(())
        }
    }
}

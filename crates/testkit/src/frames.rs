//! A proxy in front of the broker that a test can silence: it still accepts connections, but never answers again.

use std::sync::Arc;

use lapin::uri::AMQPUri;
use order_timeout::Settings;
use secrecy::ExposeSecret;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;

use crate::with_parts;

/// An AMQP frame: type, channel and size before the payload, an end octet after it.
const FRAME_HEADER_BYTES: usize = 7;

/// Lives as long as the test's runtime.
pub struct FrameProxy {
    /// The environment's settings, with the broker behind the proxy.
    pub settings: Settings,
    /// One permit for each frame that the broker may still send.
    frames: Arc<Semaphore>,
}

impl FrameProxy {
    /// Lets through this many of the broker's frames, over all connections together.
    pub async fn start(settings: &Settings, frames: usize) -> Self {
        let uri: AMQPUri = settings.amqp.url.expose_secret().parse().unwrap();
        let broker = format!("{}:{}", uri.authority.host, uri.authority.port);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let frames = Arc::new(Semaphore::new(frames));
        tokio::spawn(accept(listener, broker, frames.clone()));
        let mut settings = settings.clone();
        settings.amqp.url = with_parts(&settings.amqp.url, None, Some(&address), None);
        Self { settings, frames }
    }

    /// Holds back every further frame of the broker.
    pub fn fall_silent(&self) {
        self.frames.forget_permits(Semaphore::MAX_PERMITS);
    }
}

async fn accept(listener: TcpListener, broker: String, frames: Arc<Semaphore>) {
    while let Ok((client, _)) = listener.accept().await {
        let server = TcpStream::connect(&broker).await.unwrap();
        let ((from_client, to_client), (from_server, to_server)) = (client.into_split(), server.into_split());
        tokio::spawn(pass_on(from_client, to_server));
        tokio::spawn(pass_frames_on(from_server, to_client, frames.clone()));
    }
}

async fn pass_on(mut from: OwnedReadHalf, mut to: OwnedWriteHalf) {
    let _ended = tokio::io::copy(&mut from, &mut to).await;
}

async fn pass_frames_on(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, frames: Arc<Semaphore>) {
    loop {
        let mut frame = vec![0; FRAME_HEADER_BYTES];
        if from.read_exact(&mut frame).await.is_err() {
            return;
        }
        let size = u32::from_be_bytes(frame[3..].try_into().unwrap()) as usize;
        frame.resize(FRAME_HEADER_BYTES + size + 1, 0);
        if from.read_exact(&mut frame[FRAME_HEADER_BYTES..]).await.is_err() {
            return;
        }
        // Waits forever once the broker is silenced; the connection stays open meanwhile.
        frames.acquire().await.unwrap().forget();
        if to.write_all(&frame).await.is_err() {
            return;
        }
    }
}

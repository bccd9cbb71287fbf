//! The Postgres and the RabbitMQ of one run: private ones, started by `scripts/private` and removed when dropped.
//!
//! Default settings, except for Postgres' commit timestamps, which lateness is measured by.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use tempfile::TempDir;

use crate::Options;

/// Postgres and RabbitMQ.
#[derive(Debug)]
pub struct Servers {
    pub postgres: Postgres,
    pub broker: Broker,
    /// Where logs and charts go.
    pub output: PathBuf,
}

impl Servers {
    pub fn start(options: &Options) -> anyhow::Result<Self> {
        let output = Path::new(env!("CARGO_TARGET_TMPDIR")).join("../load");
        std::fs::create_dir_all(&output)?;
        let output = output.canonicalize()?;
        let broker = match &options.amqp {
            Some(url) => Broker { url: url.clone(), private: None },
            None => Broker::start(&output)?,
        };
        Ok(Self { postgres: Postgres::start(&output)?, broker, output })
    }
}

#[derive(Debug)]
pub struct Postgres {
    private: Private,
    /// A short path, because a socket's name must be short. Writable for the user that the server runs as; sticky, so
    /// that no other user can replace the server's socket.
    sockets: TempDir,
}

impl Postgres {
    fn start(output: &Path) -> anyhow::Result<Self> {
        let sockets = tempfile::Builder::new().prefix("order-timeout-load-").tempdir_in("/tmp")?;
        std::fs::set_permissions(sockets.path(), PermissionsExt::from_mode(0o1777))?;
        let socket_option = format!("unix_socket_directories={}", sockets.path().display());
        let private =
            Private::start("postgres", output, &["-c", "track_commit_timestamp=on", "-c", socket_option.as_str()])?;
        Ok(Self { private, sockets })
    }

    pub fn url_by_tcp(&self) -> &str {
        &self.private.url
    }

    pub fn url_by_socket(&self) -> anyhow::Result<String> {
        let mut url = url::Url::parse(&self.private.url)?;
        url.query_pairs_mut().append_pair("host", &self.sockets.path().display().to_string());
        Ok(url.into())
    }

    pub fn pid(&self) -> u32 {
        self.private.pid
    }
}

#[derive(Debug)]
pub struct Broker {
    pub url: String,
    /// `None` for a given broker: its costs are unknown then.
    private: Option<Private>,
}

impl Broker {
    fn start(output: &Path) -> anyhow::Result<Self> {
        let private = Private::start("broker", output, &["--plugin", "rabbitmq_consistent_hash_exchange"])?;
        Ok(Self { url: private.url.clone(), private: Some(private) })
    }

    pub fn pid(&self) -> Option<u32> {
        self.private.as_ref().map(|private| private.pid)
    }

    /// Stops it as its own tools do; the data stay.
    pub fn stop(&self) -> anyhow::Result<()> {
        self.private("stop")
    }

    /// Starts it again on the same port, with the same data.
    pub fn start_again(&self) -> anyhow::Result<()> {
        self.private("restart")
    }

    fn private(&self, verb: &str) -> anyhow::Result<()> {
        self.private.as_ref().context("only a private broker can be stopped")?.call(verb, &[]).map(drop)
    }

    /// `rabbitmqctl`, if the broker is a private one.
    pub fn ctl(&self, arguments: &[&str]) -> anyhow::Result<String> {
        self.private.as_ref().context("only a private broker can be asked with rabbitmqctl")?.call("ctl", arguments)
    }

    /// The version from the broker's greeting, which lapin reads but does not expose.
    pub fn version(&self) -> anyhow::Result<String> {
        const ENTRY: &[u8] = b"\x07versionS";
        let url = url::Url::parse(&self.url)?;
        let mut stream = TcpStream::connect((url.host_str().unwrap_or("127.0.0.1"), url.port().unwrap_or(5672)))?;
        stream.set_read_timeout(Some(Duration::from_secs(5)))?;
        stream.write_all(b"AMQP\x00\x00\x09\x01")?;
        let mut greeting = vec![0; 4096];
        let length = stream.read(&mut greeting)?;
        let entry = greeting[..length].windows(ENTRY.len()).position(|window| window == ENTRY);
        let at = entry.context("the broker's greeting names no version")? + ENTRY.len();
        let size: [u8; 4] = greeting[at..at + 4].try_into()?;
        let text = &greeting[at + 4..at + 4 + usize::try_from(u32::from_be_bytes(size))?];
        Ok(String::from_utf8_lossy(text).into_owned())
    }
}

/// One server started by `scripts/private`.
#[derive(Debug)]
struct Private {
    kind: &'static str,
    dir: PathBuf,
    url: String,
    pid: u32,
}

impl Private {
    fn start(kind: &'static str, output: &Path, options: &[&str]) -> anyhow::Result<Self> {
        let dir = output.join(format!("{kind}-{}", std::process::id()));
        // Complete before it starts, so that a server that fails halfway is removed as well.
        let mut private = Self { kind, dir, url: String::new(), pid: 0 };
        let printed = private.call("start", options)?;
        private.url = printed.lines().last().context("scripts/private printed no address")?.to_owned();
        let record = std::fs::read_to_string(private.dir.join("env"))?;
        let pid = record.lines().find_map(|line| line.strip_prefix("PID="));
        private.pid = pid.context("scripts/private recorded no PID")?.parse()?;
        Ok(private)
    }

    fn call(&self, verb: &str, arguments: &[&str]) -> anyhow::Result<String> {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/private");
        let output = Command::new(script).arg(self.kind).arg(verb).arg(&self.dir).args(arguments).output()?;
        if !output.status.success() {
            bail!("scripts/private {} {verb} failed: {}", self.kind, String::from_utf8_lossy(&output.stderr).trim());
        }
        let printed = String::from_utf8(output.stdout)?;
        ensure!(verb != "start" || !printed.is_empty(), "scripts/private {} start printed nothing", self.kind);
        Ok(printed)
    }
}

impl Drop for Private {
    fn drop(&mut self) {
        if let Err(error) = self.call("remove", &[]) {
            eprintln!("{error}");
        }
    }
}

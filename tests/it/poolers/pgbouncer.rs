//! A private PgBouncer in front of the tests' Postgres: its own port and directory, stopped and removed afterwards.

use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use order_timeout_testkit::{linux, with_parts};
use secrecy::{ExposeSecret, SecretString};
use tempfile::TempDir;
use url::Url;

const STARTS_WITHIN: Duration = Duration::from_secs(20);

/// A PgBouncer of this test alone.
pub struct Pooler {
    child: Child,
    place: String,
    _dir: TempDir,
}

/// The installed PgBouncer, if any. Debian keeps it off the path of ordinary users.
fn program() -> Option<&'static Path> {
    ["/usr/sbin/pgbouncer", "/usr/bin/pgbouncer", "/usr/local/bin/pgbouncer"]
        .map(Path::new)
        .into_iter()
        .find(|path| path.is_file())
}

impl Pooler {
    /// Starts a PgBouncer in front of the server of this address, with these additional configuration lines; `None` if
    /// it is not installed.
    pub fn start(server: &SecretString, configuration: &str) -> Option<Self> {
        let program = program()?;
        let dir = tempfile::Builder::new().prefix("order-timeout-pgbouncer-").tempdir().unwrap();
        // PgBouncer does not run as root.
        std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o755)).unwrap();
        let url = Url::parse(server.expose_secret()).unwrap();
        let (host, port) = (url.host_str().expect("a host"), url.port().unwrap_or(5432));
        let write = |name: &str, text: String| {
            let path = dir.path().join(name);
            std::fs::File::create(&path).and_then(|mut file| file.write_all(text.as_bytes())).unwrap();
            path.to_str().expect("a path in plain letters").to_owned()
        };
        let users = write("users.txt", format!("\"{}\" \"{}\"\n", url.username(), url.password().unwrap_or_default()));
        let own_port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let settings = write(
            "pgbouncer.ini",
            format!(
                "[databases]\n* = host={host} port={port}\n[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {own_port}\n\
                 unix_socket_dir =\nauth_type = trust\nauth_file = {users}\nmax_client_conn = 100\ndefault_pool_size = 30\n\
                 {configuration}\n"
            ),
        );
        let mut command = Command::new(program);
        if linux::is_root() {
            command.args(["-u", "nobody"]);
        }
        let child = command.arg(settings).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
        let mut pooler =
            Self { child: child.expect("PgBouncer starts"), place: format!("127.0.0.1:{own_port}"), _dir: dir };
        let began = Instant::now();
        while TcpStream::connect(&pooler.place).is_err() {
            let ended = pooler.child.try_wait().unwrap();
            assert!(ended.is_none() && began.elapsed() < STARTS_WITHIN, "PgBouncer does not listen: {ended:?}");
            std::thread::sleep(Duration::from_millis(20));
        }
        Some(pooler)
    }

    /// The same database through the pooler.
    pub fn url_of(&self, url: &SecretString) -> SecretString {
        with_parts(url, None, Some(&self.place), None)
    }
}

impl Drop for Pooler {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

//! The listeners that docs/LISTENING.md names run against a real broker and a real worker, each with the client library
//! of its language. A library that cannot be had on this machine is reported as skipped.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use crate::{amqp_url, database_url, example, on_default_names, root};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use order_timeout_core::delay::Strategy;
use order_timeout_testkit::away::meanwhile;
use order_timeout_testkit::private::Private;
use order_timeout_testkit::skip::skipped;
use order_timeout_testkit::{RunningWorker, TestEnv, wait_for};

/// How long a listener may take to print its next line: a virtual machine starts, a connection is opened again.
const LINE_TIMEOUT: Duration = Duration::from_secs(60);
/// How long the installation of a library may take, as `timeout` reads it.
const INSTALL_TIMEOUT: &str = "180";

/// A running listener, with what it prints. Killed when dropped.
pub struct Listener {
    child: Child,
    lines: Receiver<String>,
}

impl Listener {
    /// Starts the program.
    pub fn start(command: &mut Command) -> Self {
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        let (sender, lines) = channel();
        std::thread::spawn(move || output.lines().map_while(Result::ok).try_for_each(|line| sender.send(line)));
        Self { child, lines }
    }

    /// The next line that does not announce a new connection.
    pub fn line(&self) -> String {
        meanwhile(|| {
            loop {
                let line = self.lines.recv_timeout(LINE_TIMEOUT).expect("a line of the listener's");
                if !line.starts_with("connecting again in a second: ") {
                    return line;
                }
            }
        })
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        let _ended = self.child.kill();
        let _reaped = self.child.wait();
    }
}

/// A folder for a library, kept between runs.
pub fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

/// Runs an installing command within [`INSTALL_TIMEOUT`].
///
/// # Errors
/// The command, and the last line that it printed.
pub fn install(folder: &Path, program: &str, arguments: &[&str]) -> Result<(), String> {
    let mut command = Command::new("timeout");
    let output = command.args([INSTALL_TIMEOUT, program]).args(arguments).current_dir(folder).output().unwrap();
    let printed = String::from_utf8_lossy(&output.stderr).into_owned();
    let last = printed.lines().rfind(|line| !line.trim().is_empty()).unwrap_or_default();
    let failed = || format!("`{program} {}` ended with {}: {last}", arguments.join(" "), output.status);
    output.status.success().then_some(()).ok_or_else(failed)
}

/// Python with the drivers and the package in clients/python, installed once.
///
/// # Errors
/// One sentence if it cannot be had on this machine.
pub fn python() -> Result<Command, String> {
    const IMPORTS: &str = "import asyncpg, pika, psycopg, pytest, sqlalchemy.ext.asyncio";
    const PACKAGES: [&str; 5] = ["asyncpg", "pika", "psycopg[binary]", "pytest", "sqlalchemy[asyncio]"];
    static PYTHON: LazyLock<Result<PathBuf, String>> = LazyLock::new(|| {
        let folder = folder("python");
        let python = folder.join("bin/python");
        if !python.exists() {
            install(&folder, "python3", &["-m", "venv", "."])?;
        }
        if install(&folder, python.to_str().unwrap(), &["-c", IMPORTS]).is_err() {
            let arguments = [&["-m", "pip", "install", "--quiet"][..], &PACKAGES].concat();
            install(&folder, python.to_str().unwrap(), &arguments)?;
        }
        Ok(python)
    });
    let mut command = Command::new(PYTHON.clone()?);
    command.env("PYTHONPATH", root().join("clients/python")).env("PYTHONDONTWRITEBYTECODE", "1");
    Ok(command)
}

/// Node.js with the drivers, and the package in clients/node as `npm pack` makes it; to run in the folder that is returned.
///
/// # Errors
/// One sentence if it cannot be had on this machine.
pub fn node() -> Result<(Command, PathBuf), String> {
    const QUIET: [&str; 3] = ["--silent", "--no-audit", "--no-fund"];
    static FOLDER: LazyLock<Result<PathBuf, String>> = LazyLock::new(|| {
        let folder = folder("node");
        if !folder.join("node_modules/drizzle-orm").exists() {
            let packages = ["install", "--prefix", ".", "amqplib", "pg", "drizzle-orm"];
            install(&folder, "npm", &[&packages[..], &QUIET].concat())?;
        }
        let (package, target) = (root().join("clients/node"), "node_modules/order-timeout");
        install(&folder, "npm", &["pack", "--silent", package.to_str().unwrap()])?;
        std::fs::create_dir_all(folder.join(target)).unwrap();
        let unpack = ["-xzf", "order-timeout-0.1.0.tgz", "--strip-components=1", "-C", target];
        install(&folder, "tar", &unpack)?;
        Ok(folder)
    });
    let folder = FOLDER.clone()?;
    let mut command = Command::new("node");
    command.current_dir(&folder);
    Ok((command, folder))
}

fn python_listener() -> Result<Command, String> {
    let mut command = python()?;
    command.arg(root().join("examples/listeners/python/listen.py"));
    Ok(command)
}

/// Node looks for a program's packages beside the program.
fn node_listener() -> Result<Command, String> {
    let (mut command, folder) = node()?;
    std::fs::copy(root().join("examples/listeners/node/listen.mjs"), folder.join("listen.mjs")).unwrap();
    command.arg("listen.mjs");
    Ok(command)
}

/// With the library as Debian packages it, unpacked and not installed.
fn java() -> Result<Command, String> {
    let folder = folder("listener-java");
    install(&folder, "java", &["--version"])?;
    let library = |name: &str| folder.join("usr/share/java").join(name);
    if !library("amqp-client.jar").exists() {
        let unpack =
            "apt-get download librabbitmq-client-java libslf4j-java && for file in *.deb; do dpkg -x $file .; done";
        install(&folder, "sh", &["-c", unpack])?;
    }
    let path = ["amqp-client.jar", "slf4j-api.jar", "slf4j-nop.jar"].map(|name| library(name).display().to_string());
    let mut command = Command::new("java");
    command.args(["-cp", &path.join(":")]).arg(root().join("examples/listeners/java/Listen.java"));
    Ok(command)
}

fn rust() -> Result<Command, String> {
    Ok(example("listen"))
}

fn check(test: &str, listener: fn() -> Result<Command, String>) {
    match listener() {
        Ok(command) => on_default_names(|env, broker| handle_each_event_once(env, broker, command)),
        Err(why) => skipped(&format!("listeners::{test}"), &why),
    }
}

/// Sends the listener two events, the first of them twice and on two connections.
async fn handle_each_event_once(env: Arc<TestEnv>, broker: Arc<Private>, mut command: Command) {
    const LISTENING: &str = "listening: shop.order-closed";
    command.env("AMQP_URL", amqp_url(&env)).env("DATABASE_URL", database_url(&env)).env("EVENTS", "2");
    let mut listener = Listener::start(&mut command);
    assert_eq!(listener.line(), LISTENING);
    let mut settings = env.settings.clone();
    settings.sweep.grace = Duration::ZERO;
    let worker = RunningWorker::start(settings).await;
    let first = env.order(Duration::from_secs(1)).await;
    let closed = |line: &str, id: uuid::Uuid| line.starts_with("closed: ") && line.contains(&id.to_string());
    let line = listener.line();
    assert!(closed(&line, first.id), "{line}");

    meanwhile(|| broker.ctl(&["close_all_connections", "--global", "a test"]));
    assert_eq!(listener.line(), LISTENING, "on another connection");
    let unsent = "SELECT count(*) FROM event_outbox WHERE sent_at IS NULL";
    wait_for("the event marked as sent", async || env.count(unsent).await == 0).await;
    sqlx::query("UPDATE event_outbox SET sent_at = NULL").execute(&env.pool).await.unwrap();
    wait_for("the event sent again", async || env.count(unsent).await == 0).await;
    let second = env.order(Duration::from_secs(1)).await;
    let line = listener.line();
    assert!(closed(&line, second.id), "{line}");
    assert!(meanwhile(|| listener.child.wait()).unwrap().success());
    worker.stop().await;
    let env = env.reconnected().await;
    wait_for("every event acknowledged", async || env.depth("shop.order-closed").await == 0).await;
}

#[test]
fn python_listener_handles_each_event_once() {
    check("python_listener_handles_each_event_once", python_listener);
}

#[test]
fn node_listener_handles_each_event_once() {
    check("node_listener_handles_each_event_once", node_listener);
}

#[test]
fn java_listener_handles_each_event_once() {
    check("java_listener_handles_each_event_once", java);
}

#[test]
fn rust_listener_handles_each_event_once() {
    check("rust_listener_handles_each_event_once", rust);
}

/// A POST with this signature; returns the answer's status line.
fn post_signed(port: &str, signature: &str) -> String {
    use std::io::{Read, Write};
    let mut stream = std::net::TcpStream::connect(format!("127.0.0.1:{port}")).unwrap();
    let now = std::time::UNIX_EPOCH.elapsed().unwrap().as_secs();
    let signed = format!("webhook-id: 1\r\nwebhook-timestamp: {now}\r\nwebhook-signature: {signature}");
    write!(stream, "POST / HTTP/1.0\r\ncontent-length: 2\r\n{signed}\r\n\r\n{{}}").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer.lines().next().unwrap_or_default().to_owned()
}

#[test]
fn python_webhook_handles_each_event_once() {
    if let Err(why) = install(root(), "python3", &["--version"]) {
        return skipped("listeners::python_webhook_handles_each_event_once", &why);
    }
    TestEnv::builder().run(async |env| {
        let key = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(key.path(), format!("whsec_{}\n", STANDARD.encode([7; 32]))).unwrap();
        let mut command = Command::new("python3");
        command.arg(root().join("examples/listeners/python/receive.py"));
        command.env("WEBHOOK_KEY_FILE", key.path()).env("PORT", "0").env("EVENTS", "2");
        let mut listener = Listener::start(&mut command);
        let line = listener.line();
        let port = line.strip_prefix("listening: ").expect("its port");
        let answer = meanwhile(|| post_signed(port, "v1,bm90aGluZw=="));
        assert!(answer.contains(" 401 "), "{answer}");

        let mut settings = env.settings.clone();
        settings.delay.strategy = Strategy::Database;
        settings.announce.webhook = format!("http://127.0.0.1:{port}/order-events");
        settings.announce.webhook_key_file = key.path().display().to_string();
        let worker = RunningWorker::start(settings).await;
        let unsent = "SELECT count(*) FROM event_outbox WHERE sent_at IS NULL";
        for sent_again in [true, false] {
            let order = env.order(Duration::from_secs(1)).await;
            let line = listener.line();
            assert_eq!(line, format!("closed: order {} by look_ahead", order.id));
            wait_for("the event marked as sent", async || env.count(unsent).await == 0).await;
            if sent_again {
                sqlx::query("UPDATE event_outbox SET sent_at = NULL").execute(&env.pool).await.unwrap();
                wait_for("the event sent again", async || env.count(unsent).await == 0).await;
            }
        }
        assert!(meanwhile(|| listener.child.wait()).unwrap().success());
        worker.stop().await;
    });
}

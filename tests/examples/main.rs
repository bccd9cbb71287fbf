//! The examples of the client and of the worker run against a real broker and database.
//!
//! A test program of its own: what it compiles would slow down other tests that run beside it.

mod listeners;
mod packages;
mod payments;
mod testing;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use order_timeout::Settings;
use order_timeout::config::Listen;
use order_timeout_core::kind::Kind;
use order_timeout_testkit::away::on_private_broker_with;
use order_timeout_testkit::linux::{self, Signal};
use order_timeout_testkit::private::Private;
use order_timeout_testkit::{TestEnv, wait_for};
use secrecy::ExposeSecret;
use serde_json::Value;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Cargo as it runs in a shell. `cargo test` tells its test programs of which package they are and where its build script
/// wrote; some packages (`ring`) are compiled again if that changes, with everything that depends on them.
fn cargo() -> Command {
    let mut command = Command::new(env!("CARGO"));
    for (name, _) in std::env::vars_os() {
        if ["CARGO_PKG_", "CARGO_MANIFEST_", "OUT_DIR"].iter().any(|start| name.to_string_lossy().starts_with(start)) {
            command.env_remove(name);
        }
    }
    command
}

/// The build folder, which contains `debug/deps/examples-…`.
fn build_folder() -> PathBuf {
    std::env::current_exe().unwrap().ancestors().nth(3).unwrap().to_owned()
}

/// The folder of the examples' programs. They are built here, because `cargo test --test it` builds none.
fn examples() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let arguments = ["build", "--examples", "--locked", "--offline", "--quiet"];
        let status = cargo().args(arguments).current_dir(root()).status().unwrap();
        assert!(status.success(), "the examples do not compile");
        build_folder().join("debug/examples")
    })
}

fn example(name: &str) -> Command {
    Command::new(examples().join(name))
}

/// A running example, with what it prints. Killed when dropped.
struct Running {
    child: Child,
    output: BufReader<ChildStdout>,
}

impl Running {
    fn start(command: &mut Command) -> Self {
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        Self { child, output }
    }

    /// The next line; empty at the end.
    fn line(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ended = self.child.kill();
        let _reaped = self.child.wait();
    }
}

/// The examples use the default namespace, lanes and rings.
fn with_default_names<F: Future<Output = ()> + Send + 'static>(test: impl FnOnce(Arc<TestEnv>) -> F + Send + 'static) {
    on_default_names(|env, _| test(env));
}

/// The same, with the private broker.
fn on_default_names<F: Future<Output = ()> + Send + 'static>(
    test: impl FnOnce(Arc<TestEnv>, Arc<Private>) -> F + Send + 'static,
) {
    let defaults = |settings: &mut Settings| {
        let defaults = Settings::defaults();
        settings.namespace = defaults.namespace;
        settings.delay = defaults.delay;
        settings.worker = defaults.worker;
        settings.http.listen = Listen(None);
    };
    // Before the broker is started: a connection ends if its runtime is blocked for long.
    examples();
    on_private_broker_with(&[], defaults, test);
}

fn amqp_url(env: &TestEnv) -> String {
    env.settings.amqp.url.expose_secret().to_owned()
}

fn database_url(env: &TestEnv) -> String {
    env.settings.database.url.expose_secret().to_owned()
}

/// The status code and the body of a POST without a body.
fn post(address: &str, path: &str) -> (u16, String) {
    let mut stream = TcpStream::connect(address).unwrap();
    let request = format!("POST {path} HTTP/1.1\r\nHost: {address}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
}

#[test]
fn schedule_example_fills_lane() {
    with_default_names(async |env| {
        let order = env.order(Duration::from_secs(30 * 60)).await;
        let mut command = example("schedule");
        let output = command.args([&order.id.to_string(), "30"]).env("AMQP_URL", amqp_url(&env)).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        wait_for("the alarm in its lane", async || {
            let mut depth = 0;
            for shard in 0..env.settings.delay.lane_shards {
                depth += env.depth(&env.names().lane_queue(&Kind::ORDER, "30m", shard)).await;
            }
            depth == 1
        })
        .await;
    });
}

#[test]
fn transaction_examples_create_scheduled_orders() {
    with_default_names(async |env| {
        let output = example("schedule_in_transaction").env("DATABASE_URL", database_url(&env)).output().unwrap();
        assert!(output.status.success(), "{output:?}");

        let mut command = example("axum_checkout");
        let mut checkout = Running::start(command.env("DATABASE_URL", database_url(&env)).env("LISTEN", "127.0.0.1:0"));
        let line = checkout.line();
        let address = line.strip_prefix("listening: http://").unwrap_or_else(|| panic!("{line:?}"));
        let (created, body) = post(address, "/orders");
        assert_eq!(created, 201, "{body}");
        let body: Value = serde_json::from_str(&body).unwrap();
        let payment = format!("/orders/{}/payment", body["id"].as_str().unwrap());
        assert_eq!([post(address, &payment).0, post(address, &payment).0], [200, 409], "paid once");

        let scheduled = "SELECT count(*) FROM alarm_outbox a
                         JOIN orders o ON o.id::text = a.order_id AND o.expires_at = a.deadline";
        assert_eq!(env.count(scheduled).await, 2);
        assert_eq!(env.count("SELECT count(*) FROM orders WHERE status = 'paid'").await, 1);
    });
}

#[test]
fn embedded_worker_announces_to_listener() {
    with_default_names(async |env| {
        let mut listener = Running::start(example("listen").env("AMQP_URL", amqp_url(&env)).env("EVENTS", "1"));
        assert_eq!(listener.line(), "listening: shop.order-closed");
        let mut command = example("embed_worker");
        command.env("ORDER_TIMEOUT__AMQP__URL", amqp_url(&env));
        command.env("ORDER_TIMEOUT__DATABASE__URL", database_url(&env)).env("ORDER_TIMEOUT__HTTP__LISTEN", "");
        let mut worker = Running::start(&mut command);
        assert_eq!(worker.line(), "worker started");

        let order = env.order(Duration::from_secs(1)).await;
        assert_eq!(listener.line(), format!("closed: order {} by Sweep", order.id));
        assert!(listener.child.wait().unwrap().success());
        linux::signal(worker.child.id(), Signal::INT).unwrap();
        assert_eq!(worker.line(), "worker stopped; all work finished: true");
        assert!(worker.child.wait().unwrap().success());
    });
}

#[test]
fn client_brings_few_crates() {
    for (features, most) in [(&[][..], 165), (&["--no-default-features", "--features", "postgres"][..], 150)] {
        let mut tree = cargo();
        tree.args([
            "tree",
            "-p",
            "order-timeout-client",
            "-e",
            "normal",
            "--prefix",
            "none",
            "--no-dedupe",
            "--offline",
        ]);
        let output = tree.args(features).current_dir(root()).output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let crates: std::collections::BTreeSet<&str> = text.lines().filter(|line| !line.is_empty()).collect();
        assert!((20..=most).contains(&crates.len()), "{} crates with {features:?}", crates.len());
    }
}

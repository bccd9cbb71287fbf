//! The environment of a run: a private broker and a private database, proxies in front of them that can fail, and the
//! workers. Everything is removed at the end, also after a Ctrl-C; the logs stay.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use order_timeout::Settings;
use order_timeout_amqp::connect;
use order_timeout_providers::settings::LimitsSettings;
use order_timeout_testkit::machine_stall_probe::MachineStallProbe;
use order_timeout_testkit::payment_service::PaymentService;
use order_timeout_testkit::private::Private;
use order_timeout_testkit::proxy::Proxy;
use order_timeout_testkit::{TestEnv, wait_for};
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use crate::workers::Workers;

pub struct Environment {
    /// Reaches the servers directly.
    pub env: Arc<TestEnv>,
    pub broker: Arc<Private>,
    pub database: Arc<Private>,
    /// The proxies through which workers and publisher reach the servers.
    pub to_broker: Proxy,
    pub to_database: Proxy,
    /// Whether it is asked before an order is closed.
    pub provider: Option<Arc<PaymentService>>,
    pub workers: Arc<Workers>,
    pub witness: MachineStallProbe,
    pub logs: PathBuf,
    /// Cancelled by SIGINT or SIGTERM.
    pub interrupted: CancellationToken,
}

/// The provider's name in settings and in `payment_attempts`.
pub const PROVIDER: &str = "card";

/// Runs `work` in its own environment; `adjust` changes the settings before anything is created. Logs and other output
/// go to a folder of this name.
pub fn with_environment<F: Future<Output = ()> + Send + 'static>(
    name: &str,
    provider: Option<PaymentService>,
    adjust: impl FnOnce(&mut Settings),
    work: impl FnOnce(Arc<Environment>) -> F + Send + 'static,
) {
    let logs = empty_folder(name);
    // Registered before the servers start, so that a signal during their start leaves none of them behind.
    let interrupted = CancellationToken::new();
    watch_for_signals(interrupted.clone());
    let (broker, database) = std::thread::scope(|scope| {
        let broker = scope.spawn(|| Private::broker(&[]));
        let database = Private::postgres(&["-c", "track_commit_timestamp=on"]);
        (Arc::new(broker.join().expect("a broker")), Arc::new(database))
    });
    assert!(!interrupted.is_cancelled(), "interrupted before its time");
    let provider = provider.map(Arc::new);
    let asked = provider.clone();
    let adjust_all = |settings: &mut Settings| {
        as_deployed(settings);
        if let Some(provider) = &asked {
            ask(provider, settings);
        }
        adjust(settings);
        settings.amqp.url = broker.url.clone().into();
        settings.database.url = database.url.clone().into();
        settings.database.url = settings.database.url_of(&format!("order_timeout_{}", settings.namespace));
    };
    let servers = (broker.clone(), database.clone(), provider.clone());
    TestEnv::builder().settings(adjust_all).run(move |env| async move {
        let environment = Arc::new(Environment::open(env, servers, logs, interrupted).await);
        let outcome = tokio::spawn(work(environment.clone())).await;
        environment.close();
        if let Err(error) = outcome {
            std::panic::resume_unwind(error.into_panic());
        }
    });
}

/// Small lanes and rings, so that every route through the broker is used within seconds; every timeout as in a
/// deployment.
fn as_deployed(settings: &mut Settings) {
    let defaults = Settings::defaults();
    settings.sweep = defaults.sweep;
    settings.retry = defaults.retry;
    settings.amqp.heartbeat = defaults.amqp.heartbeat;
    settings.amqp.confirm_timeout = defaults.amqp.confirm_timeout;
    settings.database.acquire_timeout = defaults.database.acquire_timeout;
    settings.worker.shutdown_grace = defaults.worker.shutdown_grace;
    settings.log.filter = "info,order_timeout=debug,lapin=off".to_owned();
}

/// Asks this provider about orders. Its timeouts and the pauses are short, so that an order's wait for it ends within
/// seconds of its faults.
///
/// The brake keeps its defaults. Until a thousand answers are known nothing is unusual, and then it is usual here that a
/// third of them says paid; no fault lasts for the three minutes without answers that would trip it. So a run in which it
/// trips has found a fault.
fn ask(provider: &PaymentService, settings: &mut Settings) {
    let limits = LimitsSettings {
        concurrency: 32,
        requests_per_s: 400,
        timeout: Duration::from_secs(1),
        queue_timeout: Duration::from_secs(1),
        // More in a row than orders that the provider never answers have at a time.
        failures_to_open: 10,
        open_for: Duration::from_millis(500),
    };
    provider.join(settings, PROVIDER, limits);
    settings.closing.retry_first = Duration::from_millis(200);
    settings.closing.retry_longest = Duration::from_secs(1);
    settings.closing.max_rounds = 10;
}

/// In the build folder, so that it is easy to find and removed with the build.
fn empty_folder(name: &str) -> PathBuf {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().expect("the build's folder");
    let folder = target.join("chaos").join(name);
    // The folder may not exist.
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).expect("a folder for the logs");
    folder
}

/// Returns once the signal handlers are installed. A separate thread waits for signals until the program ends, so that
/// a blocked runtime does not delay it.
fn watch_for_signals(interrupted: CancellationToken) {
    let (listening, listens) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(async {
            let mut terminate = signal(SignalKind::terminate()).expect("a handler for SIGTERM");
            let mut interrupt = signal(SignalKind::interrupt()).expect("a handler for SIGINT");
            listening.send(()).expect("a receiver");
            tokio::select! {
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
            }
            eprintln!("interrupted: undoing faults and cleaning up");
            interrupted.cancel();
        });
    });
    listens.recv().expect("handlers for signals");
}

impl Environment {
    async fn open(
        env: Arc<TestEnv>,
        (broker, database, provider): (Arc<Private>, Arc<Private>, Option<Arc<PaymentService>>),
        logs: PathBuf,
        interrupted: CancellationToken,
    ) -> Self {
        let to_broker = Proxy::before(&env.settings.amqp.url).await;
        let to_database = Proxy::before(&env.settings.database.url).await;
        let mut settings = env.settings.clone();
        settings.amqp.url = to_broker.address(&settings.amqp.url);
        settings.database.url = to_database.address(&settings.database.url);
        let workers = Arc::new(Workers::new(settings, &logs));
        let witness = MachineStallProbe::open(&env).await;
        Self { env, broker, database, to_broker, to_database, provider, workers, witness, logs, interrupted }
    }

    /// The test environment's settings with the broker behind the proxy.
    pub fn settings_through_proxy(&self) -> Settings {
        let mut settings = self.env.settings.clone();
        settings.amqp.url = self.to_broker.address(&settings.amqp.url);
        settings
    }

    /// The test environment with a working channel: its first one is lost with the first fault.
    pub async fn with_broker_channel(&self) -> TestEnv {
        let amqp = &self.env.settings.amqp;
        wait_for("the broker", async || connect::connect(amqp, "chaos").await.is_ok()).await;
        self.env.reconnected().await
    }

    /// Waits, but ends early when the run is interrupted.
    pub async fn wait(&self, time: Duration) {
        let _waited_or_interrupted = tokio::time::timeout(time, self.interrupted.cancelled()).await;
    }

    /// Prints a line, and appends it to the run's log.
    pub fn print_line(&self, line: &str) {
        use std::io::Write;
        eprintln!("{line}");
        let log = std::fs::OpenOptions::new().append(true).create(true).open(self.logs.join("run.log"));
        writeln!(log.expect("the run's log"), "{line}").expect("the run's log");
    }

    fn close(&self) {
        self.workers.kill_all();
        for (name, server) in [("broker.log", &self.broker), ("database.log", &self.database)] {
            std::fs::write(self.logs.join(name), server.log()).expect("the server's log, kept");
        }
    }
}

//! Where it all happens: a private broker and a private database, networks before them that break, and the workers.
//! Everything is removed at the end, also after a Ctrl-C; the logs stay.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use order_timeout::{Settings, broker};
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use crate::crew::Crew;
use crate::support::disk_stall_probe::DiskStallProbe;
use crate::support::private::Private;
use crate::support::proxy::Proxy;
use crate::support::{TestEnv, wait_for, with_env};

pub struct Premises {
    /// Reaches the servers without a detour.
    pub env: Arc<TestEnv>,
    pub broker: Arc<Private>,
    pub database: Arc<Private>,
    /// What workers and publisher reach them by.
    pub to_broker: Proxy,
    pub to_database: Proxy,
    pub crew: Arc<Crew>,
    pub witness: DiskStallProbe,
    pub logs: PathBuf,
    /// Somebody wants us to end.
    pub interrupted: CancellationToken,
}

/// Runs `work` on premises of its own; `adjust` changes the settings before anything is created. Logs, and whatever else is written there, go to a folder of this name.
pub fn on_premises<F: Future<Output = ()> + Send + 'static>(
    name: &str,
    adjust: impl FnOnce(&mut Settings),
    work: impl FnOnce(Arc<Premises>) -> F + Send + 'static,
) {
    let logs = empty_folder(name);
    // Before anything is started: whoever ends us while the servers start leaves none of them behind.
    let interrupted = CancellationToken::new();
    watch_for_the_end(interrupted.clone());
    let (broker, database) = std::thread::scope(|scope| {
        let broker = scope.spawn(|| Private::broker(&[]));
        let database = Private::postgres(&["-c", "track_commit_timestamp=on"]);
        (Arc::new(broker.join().expect("a broker")), Arc::new(database))
    });
    assert!(!interrupted.is_cancelled(), "interrupted before its time");
    let adjust_all = |settings: &mut Settings| {
        as_deployed(settings);
        adjust(settings);
        settings.amqp.url = broker.url.clone().into();
        settings.database.url = database.url.clone().into();
        settings.database.url = settings.database.url_of(&format!("order_timeout_{}", settings.namespace));
    };
    let servers = (broker.clone(), database.clone());
    with_env(adjust_all, move |env| async move {
        let premises = Arc::new(Premises::open(env, servers, logs, interrupted).await);
        let outcome = tokio::spawn(work(premises.clone())).await;
        premises.close();
        if let Err(error) = outcome {
            std::panic::resume_unwind(error.into_panic());
        }
    });
}

/// Small lanes and rings, so that every way through the broker is taken within seconds; every timeout as a deployment
/// has it.
fn as_deployed(settings: &mut Settings) {
    let defaults = Settings::defaults();
    settings.sweep = defaults.sweep;
    settings.retry = defaults.retry;
    settings.log.filter = "info,order_timeout=debug,lapin=off".to_owned();
}

/// Beside the build, so that it is found and goes with it.
fn empty_folder(name: &str) -> PathBuf {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().expect("the build's folder");
    let folder = target.join("chaos").join(name);
    // There may have been none.
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).expect("a folder for the logs");
    folder
}

/// Returns when a signal would be heard. Then it is listened for until this program ends, by nobody who may be held up.
fn watch_for_the_end(interrupted: CancellationToken) {
    let (listening, listens) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(async {
            let mut terminate = signal(SignalKind::terminate()).expect("a handler for SIGTERM");
            let mut interrupt = signal(SignalKind::interrupt()).expect("a handler for SIGINT");
            listening.send(()).expect("somebody who waits for it");
            tokio::select! {
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
            }
            eprintln!("ending: mending what is broken, and clearing away");
            interrupted.cancel();
        });
    });
    listens.recv().expect("handlers for signals");
}

impl Premises {
    async fn open(
        env: Arc<TestEnv>,
        (broker, database): (Arc<Private>, Arc<Private>),
        logs: PathBuf,
        interrupted: CancellationToken,
    ) -> Self {
        let to_broker = Proxy::before(&env.settings.amqp.url).await;
        let to_database = Proxy::before(&env.settings.database.url).await;
        let mut settings = env.settings.clone();
        settings.amqp.url = to_broker.address(&settings.amqp.url);
        settings.database.url = to_database.address(&settings.database.url);
        let crew = Arc::new(Crew::new(settings, &logs));
        let witness = DiskStallProbe::open(&env).await;
        Self { env, broker, database, to_broker, to_database, crew, witness, logs, interrupted }
    }

    /// The env's settings with the broker behind the network that breaks.
    pub fn behind_the_network(&self) -> Settings {
        let mut settings = self.env.settings.clone();
        settings.amqp.url = self.to_broker.address(&settings.amqp.url);
        settings
    }

    /// The env with a channel that works: its first one is lost with the first fault.
    pub async fn at_the_broker(&self) -> TestEnv {
        let amqp = &self.env.settings.amqp;
        wait_for("the broker", async || broker::connect(amqp, "chaos").await.is_ok()).await;
        self.env.reconnected().await
    }

    /// Waits; not for somebody who wants us to end.
    pub async fn wait(&self, time: Duration) {
        let _waited_or_interrupted = tokio::time::timeout(time, self.interrupted.cancelled()).await;
    }

    /// A line for whoever watches, and for whoever reads the logs afterwards.
    pub fn say(&self, line: &str) {
        use std::io::Write;
        eprintln!("{line}");
        let log = std::fs::OpenOptions::new().append(true).create(true).open(self.logs.join("run.log"));
        writeln!(log.expect("the run's log"), "{line}").expect("the run's log");
    }

    fn close(&self) {
        self.crew.clear();
        for (name, server) in [("broker.log", &self.broker), ("database.log", &self.database)] {
            std::fs::write(self.logs.join(name), server.log()).expect("the server's log, kept");
        }
    }
}

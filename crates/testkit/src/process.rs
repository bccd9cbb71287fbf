//! The real binary as a child process, for tests of the command line and for workers that are killed.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use order_timeout::Settings;
use order_timeout_core::kind::Kind;
use order_timeout_providers::ProviderSettings;
use order_timeout_providers::settings::LimitsSettings;
use secrecy::ExposeSecret;

use crate::linux::{self, Signal, wait_until_stopped};
use crate::paths::{program, scratch_folder};

/// The binary with a clean environment: it gets only the settings of the test environment.
pub fn order_timeout(settings: &Settings) -> Command {
    let mut command = bare();
    command.args(settings_arguments(settings));
    command.env("ORDER_TIMEOUT__AMQP__URL", settings.amqp.url.expose_secret());
    command.env("ORDER_TIMEOUT__DATABASE__URL", settings.database.url.expose_secret());
    command
}

/// The binary without any setting.
pub fn bare() -> Command {
    let mut command = Command::new(program());
    for (key, _) in std::env::vars_os() {
        let key = key.to_string_lossy().into_owned();
        if key.starts_with("ORDER_TIMEOUT") || key == "DATABASE_URL" {
            command.env_remove(key);
        }
    }
    command
}

/// The file from which a test environment's processes read its rings.
pub fn rings_file(settings: &Settings) -> PathBuf {
    scratch_folder().join(format!("{}.toml", settings.namespace))
}

/// The settings of a test environment as `--set` arguments. Rings cannot be given on a command line, so they go into a
/// file in the build directory, together with the lead: neither is accepted without the other.
fn settings_arguments(settings: &Settings) -> Vec<String> {
    let rings: Vec<String> = settings
        .delay
        .rings
        .iter()
        .map(|ring| {
            let early = ring.early.map_or_else(String::new, |early| format!(", early = \"{}\"", millis(early)));
            format!("{{ unit = \"{}\", slots = {}{early} }}", millis(ring.unit), ring.slots)
        })
        .collect();
    let file = rings_file(settings);
    // Replaced atomically: a worker that has just been started may be reading it.
    let mut whole = tempfile::NamedTempFile::new_in(scratch_folder()).unwrap();
    writeln!(whole, "[delay]\nlead = \"{}\"\nrings = [{}]", millis(settings.delay.lead), rings.join(", ")).unwrap();
    whole.write_all(mapping(settings).as_bytes()).unwrap();
    whole.write_all(providers(settings).as_bytes()).unwrap();
    whole.persist(&file).unwrap();
    let lanes: Vec<&str> = settings.delay.lanes.iter().map(|lane| lane.name.as_str()).collect();
    let mut arguments = vec!["--config".to_owned(), file.display().to_string()];
    for (key, value) in [
        ("namespace", settings.namespace.clone()),
        ("delay.strategy", settings.delay.strategy.as_str().to_owned()),
        ("delay.lanes", lanes.join(",")),
        ("delay.lane_shards", settings.delay.lane_shards.to_string()),
        ("amqp.heartbeat", millis(settings.amqp.heartbeat)),
        ("amqp.connect_timeout", millis(settings.amqp.connect_timeout)),
        ("amqp.confirm_timeout", millis(settings.amqp.confirm_timeout)),
        ("database.acquire_timeout", millis(settings.database.acquire_timeout)),
        ("database.statement_timeout", millis(settings.database.statement_timeout)),
        ("database.lock_timeout", millis(settings.database.lock_timeout)),
        ("worker.hold_max", millis(settings.worker.hold_max)),
        ("worker.requeue_after", millis(settings.worker.requeue_after)),
        ("worker.shutdown_grace", millis(settings.worker.shutdown_grace)),
        ("sweep.grace", millis(settings.sweep.grace)),
        ("sweep.first_backlog", settings.sweep.first_backlog.to_string()),
        ("orders.close_sql", settings.orders.close_sql.clone()),
        ("orders.overdue_sql", settings.orders.overdue_sql.clone()),
        ("announce.notify", settings.announce.notify.clone()),
        ("announce.webhook", settings.announce.webhook.clone()),
        ("announce.webhook_key_file", settings.announce.webhook_key_file.clone()),
        ("announce.webhook_timeout", millis(settings.announce.webhook_timeout)),
        ("retry.missing_for", millis(settings.retry.missing_for)),
        ("closing.in_progress_wait", millis(settings.closing.in_progress_wait)),
        ("closing.retry_first", millis(settings.closing.retry_first)),
        ("closing.retry_longest", millis(settings.closing.retry_longest)),
        ("closing.max_rounds", settings.closing.max_rounds.to_string()),
        ("http.listen", settings.http.listen.0.map_or_else(String::new, |address| address.to_string())),
        ("retry.max_attempts", settings.retry.max_attempts.to_string()),
    ] {
        arguments.extend(["--set".to_owned(), format!("{key}={value}")]);
    }
    arguments
}

/// The texts of the files that the settings' mappings were read from.
fn mapping(settings: &Settings) -> String {
    let origins: BTreeSet<&String> = settings.kinds.values().filter_map(|kind| kind.origin.as_ref()).collect();
    origins
        .into_iter()
        .map(|file| format!("\n{}", std::fs::read_to_string(file).expect("the file of the mapping")))
        .collect()
}

/// The payment services that are asked about orders in the default tables.
fn providers(settings: &Settings) -> String {
    let names = settings.providers_of(&Kind::ORDER);
    if names.is_empty() {
        return String::new();
    }
    let mut text = format!("\n[kinds.order]\nproviders = {names:?}\n");
    for name in names {
        let Some(ProviderSettings::Http(provider)) = settings.providers.0.get(name) else {
            panic!("provider {name} is no payment service of the tests")
        };
        let LimitsSettings { concurrency, requests_per_s, timeout, queue_timeout, failures_to_open, open_for } =
            &provider.limits;
        let (timeout, queue_timeout, open_for) = (millis(*timeout), millis(*queue_timeout), millis(*open_for));
        let token = provider.bearer_token_file.as_ref().expect("the token of the tests");
        text += &format!(
            "\n[providers.{name}]\nkind = \"http\"\nurl = {:?}\nbearer_token_file = {token:?}\n\
             [providers.{name}.limits]\nconcurrency = {concurrency}\nrequests_per_s = {requests_per_s}\n\
             timeout = {timeout:?}\nqueue_timeout = {queue_timeout:?}\nfailures_to_open = {failures_to_open}\n\
             open_for = {open_for:?}\n",
            provider.url
        );
    }
    text
}

fn millis(duration: Duration) -> String {
    format!("{}ms", duration.as_millis())
}

/// A command's output as (exit code, standard output, standard error).
pub fn run(command: &mut Command) -> (i32, String, String) {
    let Output { status, stdout, stderr } = command.output().expect("the binary runs");
    (
        status.code().unwrap_or(-1),
        String::from_utf8_lossy(&stdout).into_owned(),
        String::from_utf8_lossy(&stderr).into_owned(),
    )
}

/// Runs the binary with these settings, without blocking the test's runtime.
pub async fn call_with(settings: &Settings, arguments: &[&str]) -> (i32, String, String) {
    let mut command = order_timeout(settings);
    command.args(arguments);
    tokio::task::spawn_blocking(move || run(&mut command)).await.unwrap()
}

/// A worker as a child process. Killed when dropped.
pub struct WorkerProcess {
    child: Child,
}

impl WorkerProcess {
    /// Starts a worker whose log is discarded.
    pub fn start(settings: &Settings) -> Self {
        Self::start_with_stderr(settings, Stdio::null())
    }

    /// Logs to this file, with the filter in the settings.
    pub fn start_with_log(settings: &Settings, log: &Path) -> Self {
        Self::start_with_stderr(settings, File::create(log).expect("a file for the worker's log").into())
    }

    /// Logs to this standard error, with the filter in the settings.
    pub fn start_with_stderr(settings: &Settings, stderr: Stdio) -> Self {
        let mut command = order_timeout(settings);
        command.env("ORDER_TIMEOUT__LOG__FILTER", &settings.log.filter);
        Self::of(command.arg("worker").stdout(Stdio::null()).stderr(stderr))
    }

    /// Starts a worker with this command.
    pub fn of(command: &mut Command) -> Self {
        Self { child: command.spawn().expect("the worker starts") }
    }

    /// The exit code, if the process has ended; -1 if a signal ended it.
    pub fn ended(&mut self) -> Option<i32> {
        let status = self.child.try_wait().expect("a child of ours");
        status.map(|status| status.code().unwrap_or(-1))
    }

    /// SIGSTOP: freezes the worker with everything it holds. Undone by [`Self::go_on`]; a frozen worker can be killed.
    pub fn halt(&self) {
        self.signal(Signal::STOP);
        wait_until_stopped(self.child.id());
    }

    /// SIGCONT: resumes a frozen worker.
    pub fn go_on(&self) {
        self.signal(Signal::CONT);
    }

    /// Lets the worker open no further file handle, not even in place of one that it closes.
    pub fn take_away_handles(&self) {
        self.limit_handles(3);
    }

    /// Undoes [`Self::take_away_handles`].
    pub fn give_handles(&self) {
        self.limit_handles(1_024);
    }

    fn limit_handles(&self, most: u64) {
        // The limit outlives it: it may raise its own up to this.
        linux::limit_handles(self.child.id(), most, 1_024).expect("a child that has not ended");
    }

    fn signal(&self, signal: Signal) {
        linux::signal(self.child.id(), signal).expect("a child that has not been waited for");
    }

    /// kill -9.
    pub fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// SIGTERM; returns the exit code.
    pub fn terminate(mut self, timeout: Duration) -> i32 {
        self.signal(Signal::TERM);
        let began = Instant::now();
        loop {
            if let Some(code) = self.ended() {
                return code;
            }
            assert!(began.elapsed() < timeout, "the worker did not end within {timeout:?} of SIGTERM");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for WorkerProcess {
    fn drop(&mut self) {
        // In most tests it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

//! Private servers that a test may kill, stop and restart. Each has its own ports and directory, removed afterwards.

use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};

use uuid::Uuid;

use crate::linux::{self, Signal, children_of, wait_until_stopped};
use crate::paths::{repository, scratch_folder};
use crate::skip::skipped;

/// A starting broker keeps a core busy for seconds. If several start at once on a small machine, none is up in time.
static STARTING: Mutex<()> = Mutex::new(());

/// A RabbitMQ or Postgres server of one test. Stopped and removed when dropped.
pub struct Private {
    kind: &'static str,
    dir: PathBuf,
    /// Its address, with the account and the password.
    pub url: String,
}

impl Private {
    /// A fresh broker, configured like the compose stack's. `options` are those of `scripts/private broker start`; a
    /// configuration among them replaces ours.
    pub fn broker(options: &[&str]) -> Self {
        let deployed = repository().join("deploy/rabbitmq/advanced.config");
        let deployed = deployed.to_str().expect("a path in plain letters");
        Self::start("broker", &[&["--config", deployed], options].concat())
    }

    /// A fresh database server; `options` are those of `scripts/private postgres start`.
    pub fn postgres(options: &[&str]) -> Self {
        Self::start("postgres", options)
    }

    fn start(kind: &'static str, options: &[&str]) -> Self {
        let dir = scratch_folder().join(format!("{kind}-{}", Uuid::now_v7().simple()));
        let mut private = Self { kind, dir, url: String::new() };
        let _one_at_a_time = STARTING.lock().unwrap_or_else(PoisonError::into_inner);
        let printed = private.call("start", options);
        private.url = printed.lines().last().expect("the address").to_owned();
        private
    }

    /// The version of PostgreSQL that was asked for; `None` for the installed one.
    #[must_use]
    pub fn postgres_version() -> Option<String> {
        std::env::var("ORDER_TIMEOUT_POSTGRES").ok()
    }

    /// Whether this machine can start standbys: an unpacked version of PostgreSQL has no `pg_basebackup`. Reports the test
    /// as skipped if not.
    #[must_use]
    pub fn can_have_standby(test: &str) -> bool {
        let Some(version) = Self::postgres_version() else { return true };
        let can = Path::new("/usr/lib/postgresql").join(&version).join("bin/pg_basebackup").exists();
        if !can {
            skipped(test, &format!("a standby needs pg_basebackup, and PostgreSQL {version} is not installed"));
        }
        can
    }

    /// A standby that replicates this running database server.
    pub fn standby(&self) -> Self {
        Self::start(self.kind, &["--standby-of", self.dir.to_str().expect("a path in plain letters")])
    }

    /// Promotes a standby to a primary, which accepts writes.
    pub fn promote(&self) {
        self.call("promote", &[]);
    }

    /// Kills all its processes (kill -9); the data stay.
    pub fn kill(&self) {
        self.call("kill", &[]);
    }

    /// Has the broker write its declarations to disk. RabbitMQ 3 keeps them in memory for up to two seconds (the cache
    /// of Erlang's `disk_log`). A broker killed in that time comes back without a binding, a queue or an exchange; or
    /// with a queue that never gets a leader, because a separate `dets` table identifies a node's Raft servers.
    pub fn flush_declarations(&self) {
        self.ctl(&["eval", "disk_log:sync(latest_log), [dets:sync(Table) || Table <- dets:all()]."]);
    }

    /// Stops it as its own tools do; the data stay.
    pub fn stop(&self) {
        self.call("stop", &[]);
    }

    /// Restarts it on the same ports, with the same data.
    pub fn restart(&self) {
        self.call("restart", &[]);
    }

    /// Halts all its processes (SIGSTOP): its connections stay open and get no answers. Undone by [`Self::go_on`] or by
    /// stopping the server.
    pub fn halt(&self) {
        self.signal_all(Signal::STOP, wait_until_stopped);
    }

    /// Resumes a halted server (SIGCONT).
    pub fn go_on(&self) {
        self.signal_all(Signal::CONT, |_| ());
    }

    /// The server's own log.
    pub fn log(&self) -> String {
        let name = if self.kind == "broker" { "broker.log" } else { "server.log" };
        let log = std::fs::read(self.dir.join("state/log").join(name)).expect("the server's log");
        String::from_utf8_lossy(&log).into_owned()
    }

    /// The folder of the server's own files.
    pub fn state(&self) -> PathBuf {
        self.dir.join("state")
    }

    /// The value that `scripts/private` has recorded under this name, such as a port.
    pub fn recorded(&self, name: &str) -> String {
        let record = std::fs::read_to_string(self.dir.join("env")).expect("the record of a private server");
        let value = record.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('='));
        value.unwrap_or_else(|| panic!("no {name} is recorded")).to_owned()
    }

    /// Signals its first process, and then the children of that one: a stopped process cannot start further children.
    fn signal_all(&self, signal: Signal, wait: impl Fn(u32)) {
        let first = self.recorded("PID").parse().expect("a pid of a server that runs");
        let send = |pid| {
            // One of the children may have ended a moment ago.
            let sent = linux::signal(pid, signal);
            assert!(sent.is_ok() || pid != first, "the private {} has ended", self.kind);
            wait(pid);
        };
        send(first);
        children_of(first).expect("the processes of this machine").into_iter().for_each(send);
    }

    /// User and password of a broker, as its address contains them.
    pub fn account(&self) -> String {
        let (_, rest) = self.url.split_once("://").expect("an address");
        rest.split_once('@').expect("an account").0.to_owned()
    }

    /// Changes the password of the broker's account. It goes through a file in the private folder, because every user
    /// can read arguments, and `rabbitmqctl change_password` of RabbitMQ 4.3 fails when it reads the password from a
    /// file or a pipe.
    pub fn change_password(&self, password: &str) {
        let file = self.state().canonicalize().expect("the broker's folder").join("new-password");
        std::fs::write(&file, password).unwrap();
        let path = file.to_str().expect("a path in plain letters");
        let change = format!(
            r#"{{ok, Password}} = file:read_file("{path}"),
               ok = rabbit_auth_backend_internal:change_password(<<"guest">>, Password, <<"test">>)."#
        );
        self.ctl(&["eval", &change]);
        std::fs::remove_file(file).unwrap();
    }

    /// Runs `rabbitmqctl` on this broker.
    pub fn ctl(&self, arguments: &[&str]) -> String {
        self.call("ctl", arguments)
    }

    /// Like [`Self::ctl`], run in this folder.
    pub fn ctl_from(&self, folder: &Path, arguments: &[&str]) -> String {
        let mut command = self.command("ctl", arguments);
        command.current_dir(folder);
        self.run(command, "ctl")
    }

    /// Runs the first command of `rabbitmqctl` in a text, as it is printed.
    pub fn run_printed(&self, text: &str) -> String {
        let (_, command) = text.split_once("rabbitmqctl ").expect("a printed command");
        let end = ["`", ", ", "; ", " empties"].iter().filter_map(|end| command.find(end)).min();
        let command = &command[..end.unwrap_or(command.len())];
        let script = format!("set -- {command}; for word; do printf '%s\\n' \"$word\"; done");
        let words = Command::new("sh").args(["-c", &script]).output().expect("a shell");
        let words = String::from_utf8(words.stdout).expect("text");
        self.ctl(&words.lines().collect::<Vec<_>>())
    }

    fn call(&self, verb: &str, arguments: &[&str]) -> String {
        self.run(self.command(verb, arguments), verb)
    }

    fn command(&self, verb: &str, arguments: &[&str]) -> Command {
        let script = repository().join("scripts/private");
        let mut command = Command::new(script);
        // In a process group of its own: a Ctrl-C for the test must not interrupt the script.
        command.arg(self.kind).arg(verb).arg(&self.dir).args(arguments).process_group(0);
        command
    }

    fn run(&self, mut command: Command, verb: &str) -> String {
        let output = command.output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "scripts/private {} {verb} failed: {stderr}", self.kind);
        String::from_utf8_lossy(&output.stdout).into_owned()
    }
}

impl Drop for Private {
    fn drop(&mut self) {
        let script = repository().join("scripts/private");
        let _ = Command::new(script).args([self.kind, "remove"]).arg(&self.dir).process_group(0).output();
    }
}

//! Private servers that a test may kill, stop and restart: their own ports and directories, removed afterwards.

use std::path::{Path, PathBuf};
use std::process::Command;

use uuid::Uuid;

/// A RabbitMQ or Postgres of this test alone. Ended and removed when dropped.
pub struct Private {
    kind: &'static str,
    dir: PathBuf,
    pub url: String,
}

impl Private {
    /// A fresh broker; `options` are those of `scripts/private broker start`.
    pub fn broker(options: &[&str]) -> Self {
        Self::start("broker", options)
    }

    /// A fresh database server.
    #[allow(dead_code)] // used by the tests that break the database
    pub fn postgres(options: &[&str]) -> Self {
        Self::start("postgres", options)
    }

    fn start(kind: &'static str, options: &[&str]) -> Self {
        let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{kind}-{}", Uuid::now_v7().simple()));
        let mut private = Self { kind, dir, url: String::new() };
        let printed = private.call("start", options);
        private.url = printed.lines().last().expect("the address").to_owned();
        private
    }

    pub fn kill(&self) {
        self.call("kill", &[]);
    }

    pub fn stop(&self) {
        self.call("stop", &[]);
    }

    /// On the same ports, with the same data.
    pub fn restart(&self) {
        self.call("restart", &[]);
    }

    /// `rabbitmqctl` on this broker.
    pub fn ctl(&self, arguments: &[&str]) -> String {
        self.call("ctl", arguments)
    }

    fn call(&self, verb: &str, arguments: &[&str]) -> String {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/private");
        let output = Command::new(script).arg(self.kind).arg(verb).arg(&self.dir).args(arguments).output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "scripts/private {} {verb} failed: {stderr}", self.kind);
        String::from_utf8_lossy(&output.stdout).into_owned()
    }
}

impl Drop for Private {
    fn drop(&mut self) {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/private");
        let _ = Command::new(script).args([self.kind, "remove"]).arg(&self.dir).output();
    }
}

//! A program in its own process, and what a process costs beyond its idle use.

use std::fs::File;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use order_timeout_testkit::linux::{self, Signal};

/// How long a program may take to end after SIGTERM.
const STOP_TIMEOUT: Duration = Duration::from_secs(40);
/// A hint for errors.
const LOG: &str = "its log lies in target/load";

/// A child process; killed when dropped.
#[derive(Debug)]
pub struct Program {
    name: String,
    child: Child,
}

impl Program {
    /// Starts it with its standard error in `log`.
    pub fn start(name: &str, mut command: Command, log: &Path) -> anyhow::Result<Self> {
        let errors = File::create(log)?;
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(errors).spawn();
        Ok(Self { name: name.to_owned(), child: child.with_context(|| format!("{name} cannot be started"))? })
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn ensure_runs(&mut self) -> anyhow::Result<()> {
        match self.child.try_wait()? {
            None => Ok(()),
            Some(status) => bail!("{} ended by itself ({status}); {LOG}", self.name),
        }
    }

    /// SIGTERM, and waits until it has ended.
    ///
    /// # Errors
    /// If it does not end, or ends with an error: its results are not reliable then.
    pub async fn stop(mut self) -> anyhow::Result<()> {
        self.ensure_runs()?;
        // Not waited for yet, so the number is still its own.
        linux::signal(self.pid(), Signal::TERM)?;
        let asked = Instant::now();
        while asked.elapsed() < STOP_TIMEOUT {
            if let Some(status) = self.child.try_wait()? {
                ensure!(status.success(), "{} was told to end and failed ({status}); {LOG}", self.name);
                return Ok(());
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        bail!("{} did not end within {STOP_TIMEOUT:?} of SIGTERM; {LOG}", self.name)
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // It has usually ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The additional use while busy over what would have been used idle, each given as processor seconds and duration.
pub fn cpu_beyond_idle_s(idle: (f64, Duration), busy: (f64, Duration)) -> f64 {
    let idle_share = idle.0 / idle.1.as_secs_f64();
    (busy.0 - idle_share * busy.1.as_secs_f64()).max(0.0)
}

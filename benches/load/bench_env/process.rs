//! A program in its own process, and the costs of processes, read from /proc.

use std::fs::File;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};

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
        let pid = i32::try_from(self.pid())?;
        // SAFETY: kill has no memory effects; the child is not reaped yet, so the pid is still its own.
        unsafe { libc::kill(pid, libc::SIGTERM) };
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

/// Processor seconds a process has used so far.
pub fn cpu_s(pid: u32) -> anyhow::Result<f64> {
    let fields = stat(pid)?;
    Ok((fields.user + fields.system) / ticks_per_s())
}

/// The additional use while busy over what would have been used idle, each given as processor seconds and duration.
pub fn cpu_beyond_idle_s(idle: (f64, Duration), busy: (f64, Duration)) -> f64 {
    let idle_share = idle.0 / idle.1.as_secs_f64();
    (busy.0 - idle_share * busy.1.as_secs_f64()).max(0.0)
}

/// Processor seconds that a process and its children have used so far, including ended ones.
pub fn tree_cpu_s(parent: u32) -> anyhow::Result<f64> {
    let own = stat(parent)?;
    let mut ticks = own.user + own.system + own.ended_children;
    for entry in std::fs::read_dir("/proc")? {
        let Some(pid) = entry?.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        // A child that has just ended cannot be read any more.
        if let Ok(child) = stat(pid)
            && child.parent == parent
        {
            ticks += child.user + child.system;
        }
    }
    Ok(ticks / ticks_per_s())
}

/// The largest memory use of a process so far.
pub fn peak_rss_mib(pid: u32) -> anyhow::Result<f64> {
    status_mib(pid, "VmHWM:")
}

/// The current memory use of a process.
pub fn rss_mib(pid: u32) -> anyhow::Result<f64> {
    status_mib(pid, "VmRSS:")
}

fn status_mib(pid: u32, key: &str) -> anyhow::Result<f64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix(key)).with_context(|| format!("no {key}"))?;
    let kib: f64 = line.trim().trim_end_matches("kB").trim().parse()?;
    Ok(kib / 1024.0)
}

struct Stat {
    parent: u32,
    user: f64,
    system: f64,
    ended_children: f64,
}

fn stat(pid: u32) -> anyhow::Result<Stat> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    // The name in the second field may contain spaces and parentheses: count from its last parenthesis.
    let (_, behind) = text.rsplit_once(") ").context("/proc/PID/stat has no name")?;
    let fields: Vec<&str> = behind.split_whitespace().collect();
    let number = |index: usize| fields.get(index).and_then(|field| field.parse::<f64>().ok()).context("short stat");
    Ok(Stat {
        parent: fields.get(1).context("short stat")?.parse()?,
        user: number(11)?,
        system: number(12)?,
        ended_children: number(13)? + number(14)?,
    })
}

fn ticks_per_s() -> f64 {
    // SAFETY: sysconf only reads.
    unsafe { libc::sysconf(libc::_SC_CLK_TCK) as f64 }
}

//! The processes of this machine as Linux shows them: the one reader of `/proc` for tests and benches, and signals.
//!
//! It may not decide what a test expects. A process that has ended is an error, not a panic.

use std::fs::{self, File};
use std::io::{Error, ErrorKind, Result};
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::fs::{Mode, OFlags};
use rustix::process::{Pid, Resource, Rlimit};

pub use rustix::process::Signal;
use rustix::pty::OpenptFlags;

/// A signal reaches a thread within milliseconds, unless the machine is very busy.
const STOPPED_WITHIN: Duration = Duration::from_secs(10);

/// A process or a thread: the fields of its `stat` (proc_pid_stat(5)) that tests and benches need.
#[derive(Debug, PartialEq)]
struct Stat {
    /// `T` is stopped, `Z` has ended.
    state: char,
    parent: u32,
    /// Processor seconds of its own.
    own_s: f64,
    /// Processor seconds of its children that have ended.
    ended_children_s: f64,
}

impl Stat {
    fn of(pid: u32) -> Result<Self> {
        Self::read(&format!("/proc/{pid}/stat"))
    }

    fn read(path: &str) -> Result<Self> {
        let text = fs::read_to_string(path)?;
        Self::parse(&text, ticks_per_s()).ok_or_else(|| unreadable(path, &text))
    }

    /// The name in the second field may contain blanks and brackets, so its end is searched from the end of the line.
    fn parse(text: &str, ticks_per_s: f64) -> Option<Self> {
        let (_, after_name) = text.rsplit_once(") ")?;
        let fields: Vec<&str> = after_name.split_whitespace().collect();
        let seconds = |index: usize| Some(fields.get(index)?.parse::<f64>().ok()? / ticks_per_s);
        Some(Self {
            state: fields.first()?.chars().next()?,
            parent: fields.get(1)?.parse().ok()?,
            own_s: seconds(11)? + seconds(12)?,
            ended_children_s: seconds(13)? + seconds(14)?,
        })
    }
}

fn unreadable(path: &str, text: &str) -> Error {
    Error::new(ErrorKind::InvalidData, format!("{path} is not what proc(5) describes: {text:?}"))
}

fn ticks_per_s() -> f64 {
    // A hundred on every Linux; a double holds it.
    rustix::param::clock_ticks_per_second() as f64
}

/// All processes. One that starts or ends meanwhile may be missing.
///
/// # Errors
/// If `/proc` cannot be read.
pub fn all_processes() -> Result<Vec<u32>> {
    let entries = fs::read_dir("/proc")?.flatten();
    Ok(entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect())
}

/// The child processes of this process.
///
/// # Errors
/// If `/proc` cannot be read.
pub fn children_of(parent: u32) -> Result<Vec<u32>> {
    let mut processes = all_processes()?;
    processes.retain(|pid| Stat::of(*pid).is_ok_and(|stat| stat.parent == parent));
    Ok(processes)
}

/// The program and arguments of a process, separated by blanks.
///
/// # Errors
/// If it has ended.
pub fn arguments(pid: u32) -> Result<String> {
    let bytes = fs::read(format!("/proc/{pid}/cmdline"))?;
    Ok(String::from_utf8_lossy(&bytes).replace('\0', " "))
}

/// The number of the account that a process runs as.
///
/// # Errors
/// If it has ended.
pub fn account(pid: u32) -> Result<u32> {
    Ok(fs::metadata(format!("/proc/{pid}"))?.uid())
}

/// Processor seconds that a process has used so far.
///
/// # Errors
/// If it has ended.
pub fn cpu_s(pid: u32) -> Result<f64> {
    Ok(Stat::of(pid)?.own_s)
}

/// Processor seconds that a process and its children have used so far, including ended ones.
///
/// # Errors
/// If it has ended.
pub fn tree_cpu_s(parent: u32) -> Result<f64> {
    let own = Stat::of(parent)?;
    // A child that has just ended cannot be read any more.
    let children = all_processes()?.into_iter().filter_map(|pid| Stat::of(pid).ok());
    let children_s: f64 = children.filter(|child| child.parent == parent).map(|child| child.own_s).sum();
    Ok(own.own_s + own.ended_children_s + children_s)
}

/// The largest memory use of a process so far, in MiB.
///
/// # Errors
/// If it has ended.
pub fn peak_rss_mib(pid: u32) -> Result<f64> {
    status_mib(pid, "VmHWM:")
}

/// The current memory use of a process, in MiB.
///
/// # Errors
/// If it has ended.
pub fn rss_mib(pid: u32) -> Result<f64> {
    status_mib(pid, "VmRSS:")
}

fn status_mib(pid: u32, key: &str) -> Result<f64> {
    let path = format!("/proc/{pid}/status");
    let text = fs::read_to_string(&path)?;
    let value = text.lines().find_map(|line| line.strip_prefix(key)?.trim().strip_suffix("kB"));
    let kib: Option<f64> = value.and_then(|kib| kib.trim().parse().ok());
    kib.map(|kib| kib / 1024.0).ok_or_else(|| unreadable(&path, &text))
}

/// Sends a signal to a process.
///
/// # Errors
/// If it has ended, or belongs to another account.
pub fn signal(pid: u32, signal: Signal) -> Result<()> {
    Ok(rustix::process::kill_process(raw(pid)?, signal)?)
}

/// Sets how many file handles a process may have open; it may raise that itself up to `most`.
///
/// # Errors
/// If it has ended, or belongs to another account.
pub fn limit_handles(pid: u32, now: u64, most: u64) -> Result<()> {
    let limit = Rlimit { current: Some(now), maximum: Some(most) };
    rustix::process::prlimit(Some(raw(pid)?), Resource::Nofile, limit)?;
    Ok(())
}

/// Whether this process is root's.
pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

fn raw(pid: u32) -> Result<Pid> {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
    pid.ok_or_else(|| Error::new(ErrorKind::InvalidInput, "the kernel gives no process this number"))
}

/// Waits for a SIGSTOP to take effect: a running thread continues for a moment, and may even answer a request. A thread
/// that has ended counts as stopped.
pub fn wait_until_stopped(pid: u32) {
    let began = Instant::now();
    while !is_stopped(pid) {
        assert!(began.elapsed() < STOPPED_WITHIN, "process {pid} still runs");
        sleep(Duration::from_millis(1));
    }
}

fn is_stopped(pid: u32) -> bool {
    let Ok(threads) = fs::read_dir(format!("/proc/{pid}/task")) else { return true };
    threads.flatten().all(|thread| match Stat::read(&format!("{}/stat", thread.path().display())) {
        Ok(stat) => ['T', 'Z'].contains(&stat.state),
        Err(_) => true,
    })
}

/// Both ends of a new terminal: the operator's and the program's.
///
/// # Errors
/// If the system has none left.
pub fn terminal() -> Result<(File, OwnedFd)> {
    let operator = rustix::pty::openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY)?;
    rustix::pty::grantpt(&operator)?;
    rustix::pty::unlockpt(&operator)?;
    let name = rustix::pty::ptsname(&operator, Vec::new())?;
    let program = rustix::fs::open(name.as_c_str(), OFlags::RDWR | OFlags::NOCTTY, Mode::empty())?;
    Ok((operator.into(), program))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stat_is_read_behind_strange_names() {
        let text = "7 (a) b (c) S 3 7 7 0 -1 4194560 1 0 0 0 250 50 30 20 20 0 1 0 5 0 0";
        let expected = Stat { state: 'S', parent: 3, own_s: 3.0, ended_children_s: 0.5 };
        assert_eq!(Stat::parse(text, 100.0), Some(expected));
        assert_eq!(Stat::parse("7 (cut off", 100.0), None);
        assert_eq!(Stat::parse("7 (short) S 3", 100.0), None);
    }

    #[test]
    fn own_process_is_found() {
        let own = std::process::id();
        assert!(all_processes().unwrap().contains(&own));
        assert!(arguments(own).unwrap().contains("order_timeout_testkit"));
        // In this order: other tests of this process use more memory meanwhile.
        let now_mib = rss_mib(own).unwrap();
        assert!(peak_rss_mib(own).unwrap() >= now_mib);
        assert!(tree_cpu_s(own).unwrap() >= 0.0 && cpu_s(own).unwrap() >= 0.0);
        assert_eq!(account(own).unwrap() == 0, is_root());
    }
}

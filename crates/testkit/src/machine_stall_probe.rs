//! Records when the machine stalled: commits one row at short intervals, and in general only a stalled disk, or a machine
//! that runs no process, delays such a commit.
//!
//! It connects to the database directly, with its own thread, connection and table, so no lock and no task of a worker
//! or a shop delays it. A database under load does, but that load has a cause in the test and excuses no late close.
//! The two can be told apart: stalls are rare, and the commits between them are fast. A failed commit is ignored,
//! because the database was unavailable then.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use order_timeout_core::order::Timestamp;
use secrecy::{ExposeSecret, SecretString};
use sqlx::postgres::PgPoolOptions;
use time::OffsetDateTime;
use tokio_util::sync::{CancellationToken, DropGuard};
use uuid::Uuid;

use crate::{TestEnv, linux};

/// Far above the usual lateness of milliseconds: a machine that runs all tests at once may be slow.
const LATEST_MS: f64 = 1_000.0;
const COMMIT_EVERY: Duration = Duration::from_millis(50);
/// A commit takes a few milliseconds. Nothing in a test makes the probe's commit begin and end this late.
const STALL_THRESHOLD: Duration = Duration::from_millis(100);
/// At most one commit in this many may be slow because the machine stalled.
const COMMITS_PER_STALL: usize = 10;

/// The time of a commit that began or ended late.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MachineStall {
    /// When the commit should have begun, by the local clock.
    pub from: Timestamp,
    /// The end of the commit, by the local clock.
    pub until: Timestamp,
}

/// The commits observed so far.
#[derive(Debug, Default)]
struct Seen {
    commits: usize,
    slow: Vec<MachineStall>,
}

impl Seen {
    fn record(&mut self, one: MachineStall) {
        self.commits += 1;
        if one.until.since(one.from) >= STALL_THRESHOLD {
            self.slow.push(one);
        }
    }

    /// None if slow commits are frequent: then the database is slow, and not the machine.
    fn stalls(&self) -> Vec<MachineStall> {
        let are_rare = self.slow.len() * COMMITS_PER_STALL <= self.commits;
        if are_rare { self.slow.clone() } else { Vec::new() }
    }
}

/// Observes the machine from [`Self::open`] until it is dropped.
pub struct MachineStallProbe {
    seen: Arc<Mutex<Seen>>,
    _stop_on_drop: DropGuard,
}

impl MachineStallProbe {
    /// Begins to observe, with a table of its own in the environment's database.
    pub async fn open(env: &TestEnv) -> Self {
        sqlx::query("CREATE TABLE machine_stall_probe AS SELECT 0::bigint AS commits")
            .execute(&env.pool)
            .await
            .unwrap();
        let (seen, stop) = (Arc::<Mutex<Seen>>::default(), CancellationToken::new());
        let (recorded, stopped) = (seen.clone(), stop.clone());
        let url = env.settings.database.url.clone();
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(stopped.run_until_cancelled(watch(url, recorded)));
        });
        Self { seen, _stop_on_drop: stop.drop_guard() }
    }

    /// The machine stalls so far; none if slow commits are frequent.
    pub fn stalls(&self) -> Vec<MachineStall> {
        self.seen.lock().unwrap().stalls()
    }

    /// The lateness of every closed order without the delay that machine stalls added, in milliseconds, sorted. Counts up
    /// to the commit where the server records commit times, else up to `closed_at`.
    pub async fn lateness_ms(&self, env: &TestEnv) -> Vec<(Uuid, f64)> {
        let closed = sqlx::query_as(
            "SELECT id, expires_at, CASE WHEN current_setting('track_commit_timestamp')::boolean
                                         THEN pg_xact_commit_timestamp(xmin) ELSE closed_at END
             FROM orders WHERE status = 'closed'",
        );
        let closed: Vec<(Uuid, OffsetDateTime, OffsetDateTime)> = closed.fetch_all(&env.pool).await.unwrap();
        let stalls = self.stalls();
        let lateness_ms = |(id, deadline, closed_at)| {
            let (deadline, closed_at) = (Timestamp::from(deadline), Timestamp::from(closed_at));
            let late_ms = closed_at.since(deadline).saturating_sub(stalled_time(&stalls, deadline, closed_at));
            (id, late_ms.as_secs_f64() * 1e3)
        };
        let mut late: Vec<(Uuid, f64)> = closed.into_iter().map(lateness_ms).collect();
        late.sort_by(|one, other| one.1.total_cmp(&other.1));
        late
    }

    /// Asserts that no order was closed early, and none late by a second or more, machine stalls excepted.
    pub async fn assert_on_time(&self, env: &TestEnv) {
        let early = env.count("SELECT count(*) FROM orders WHERE closed_at < expires_at").await;
        let late: Vec<_> = self.lateness_ms(env).await.into_iter().filter(|(_, late)| *late >= LATEST_MS).collect();
        let stalled = total_duration(&self.stalls());
        assert!(
            early == 0 && late.is_empty(),
            "{early} closed early; late by ms, without {stalled:?} of machine stalls: {late:?}; {:?}",
            self.seen.lock().unwrap()
        );
    }
}

async fn watch(url: SecretString, seen: Arc<Mutex<Seen>>) {
    let pool = PgPoolOptions::new().max_connections(1).acquire_timeout(Duration::from_secs(1));
    let pool = pool.connect_lazy(url.expose_secret()).unwrap();
    // So that the first commit waits for no connection. If there is none, that commit fails as well.
    drop(pool.acquire().await);
    let mut from = Timestamp::now_by_local_clock();
    loop {
        let commit = sqlx::query("UPDATE machine_stall_probe SET commits = commits + 1").execute(&pool).await;
        let until = Timestamp::now_by_local_clock();
        if commit.is_ok() {
            seen.lock().unwrap().record(MachineStall { from, until });
        }
        let cpu_before = cpu();
        tokio::time::sleep(COMMIT_EVERY).await;
        from = began(until + COMMIT_EVERY, Timestamp::now_by_local_clock(), cpu().saturating_sub(cpu_before));
    }
}

/// The processor time of this process.
fn cpu() -> Duration {
    Duration::from_secs_f64(linux::cpu_s(std::process::id()).unwrap_or_default())
}

/// From when on a commit counts: from when it was planned, so that time in which the machine ran no process is a stall; but
/// from when it was begun if this process used the time in between, because then its own work delayed the commit.
fn began(planned: Timestamp, begun: Timestamp, used_cpu: Duration) -> Timestamp {
    if 2 * used_cpu < begun.since(planned) { planned } else { begun }
}

/// How long the machine stalled altogether.
pub fn total_duration(stalls: &[MachineStall]) -> Duration {
    stalls.iter().map(|one| one.until.since(one.from)).sum()
}

/// How long the machine stalled between these times.
pub fn stalled_time(stalls: &[MachineStall], from: Timestamp, until: Timestamp) -> Duration {
    stalls.iter().map(|one| one.until.min(until).since(one.from.max(from))).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stall_counts_only_within_interval() {
        let at = |ms| Timestamp::from_unix_micros(0) + Duration::from_millis(ms);
        let stalls =
            [(1_000, 1_500), (3_000, 4_000)].map(|(from, until)| MachineStall { from: at(from), until: at(until) });
        let ms = |from, until| stalled_time(&stalls, at(from), at(until)).as_millis();
        assert_eq!(ms(0, 10_000), 1_500);
        assert_eq!(ms(1_200, 3_300), 600);
        assert_eq!((ms(1_500, 3_000), ms(4_000, 9_000)), (0, 0));
    }

    #[test]
    fn own_work_is_no_stall() {
        let at = |ms| Timestamp::from_unix_micros(0) + Duration::from_millis(ms);
        let mut seen = Seen::default();
        for used_cpu_ms in [0, 400] {
            let from = began(at(1_000), at(1_500), Duration::from_millis(used_cpu_ms));
            seen.record(MachineStall { from, until: at(1_510) });
        }
        let stall = MachineStall { from: at(1_000), until: at(1_510) };
        assert_eq!((seen.commits, seen.slow), (2, vec![stall]));
    }

    #[test]
    fn constantly_slow_database_is_no_machine_stall() {
        let at = |ms| Timestamp::from_unix_micros(0) + Duration::from_millis(ms);
        let slow =
            vec![MachineStall { from: at(0), until: at(150) }, MachineStall { from: at(1_000), until: at(1_150) }];
        assert_eq!(Seen { commits: 20, slow: slow.clone() }.stalls(), slow);
        assert_eq!(Seen { commits: 19, slow }.stalls(), []);
    }
}

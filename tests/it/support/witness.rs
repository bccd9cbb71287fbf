//! Knows when the machine's disk stood still: every so often it commits one row, and mostly nothing but the disk keeps a
//! commit waiting.
//!
//! It reaches the database without a detour, on a thread of its own, by a connection and with a table of its own, so no
//! lock and no task of worker or shop keeps it waiting. A database that they keep busy does; that is somebody's doing and
//! excuses nobody. It can be told: a disk stands still now and then, and between whiles commits are quick. A commit that
//! fails says nothing: then the database was away.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use order_timeout::database;
use order_timeout::order::Timestamp;
use secrecy::{ExposeSecret, SecretString};
use sqlx::PgPool;
use sqlx::postgres::PgPoolOptions;
use time::OffsetDateTime;
use tokio_util::sync::{CancellationToken, DropGuard};
use uuid::Uuid;

use super::TestEnv;

/// Far above what is usual, which is milliseconds: a machine that runs all tests at once may be slow.
const LATEST_MS: f64 = 1_000.0;
const COMMIT_EVERY: Duration = Duration::from_millis(50);
/// A commit takes a few milliseconds. One that takes so long is nobody's doing here.
const STANDS_STILL: Duration = Duration::from_millis(100);
/// One commit in so many may take long by the disk's doing.
const NOW_AND_THEN: usize = 10;

/// A commit that took long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Standstill {
    pub from: Timestamp,
    pub until: Timestamp,
}

/// What has been seen so far.
#[derive(Debug, Default)]
struct Seen {
    commits: usize,
    slow: Vec<Standstill>,
}

impl Seen {
    fn standstills(&self) -> Vec<Standstill> {
        let are_now_and_then = self.slow.len() * NOW_AND_THEN <= self.commits;
        if are_now_and_then { self.slow.clone() } else { Vec::new() }
    }
}

pub struct Witness {
    seen: Arc<Mutex<Seen>>,
    _watches_until: DropGuard,
}

impl Witness {
    pub async fn open(env: &TestEnv) -> Self {
        sqlx::query("CREATE TABLE witness AS SELECT 0::bigint AS commits").execute(&env.pool).await.unwrap();
        let (seen, stop) = (Arc::<Mutex<Seen>>::default(), CancellationToken::new());
        let (noted, stopped) = (seen.clone(), stop.clone());
        let url = env.settings.database.url.clone();
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(stopped.run_until_cancelled(watch(url, noted)));
        });
        Self { seen, _watches_until: stop.drop_guard() }
    }

    pub fn standstills(&self) -> Vec<Standstill> {
        self.seen.lock().unwrap().standstills()
    }

    /// Of every closed order, the earliest first; without what the disk added by standing still. By the commit, where the
    /// server keeps when that was.
    pub async fn lateness_ms(&self, env: &TestEnv) -> Vec<(Uuid, f64)> {
        let closed = sqlx::query_as(
            "SELECT id, expires_at, CASE WHEN current_setting('track_commit_timestamp')::boolean
                                         THEN pg_xact_commit_timestamp(xmin) ELSE closed_at END
             FROM orders WHERE status = 'closed'",
        );
        let closed: Vec<(Uuid, OffsetDateTime, OffsetDateTime)> = closed.fetch_all(&env.pool).await.unwrap();
        let standstills = self.standstills();
        let lateness_ms = |(id, deadline, closed_at)| {
            let (deadline, closed_at) = (database::moment(deadline), database::moment(closed_at));
            let late_ms = closed_at.since(deadline).saturating_sub(stood_still(&standstills, deadline, closed_at));
            (id, late_ms.as_secs_f64() * 1e3)
        };
        let mut late: Vec<(Uuid, f64)> = closed.into_iter().map(lateness_ms).collect();
        late.sort_by(|one, other| one.1.total_cmp(&other.1));
        late
    }

    pub async fn assert_on_time(&self, env: &TestEnv) {
        let early = env.count("SELECT count(*) FROM orders WHERE closed_at < expires_at").await;
        let late: Vec<_> = self.lateness_ms(env).await.into_iter().filter(|(_, late)| *late >= LATEST_MS).collect();
        let still = in_all(&self.standstills());
        assert!(
            early == 0 && late.is_empty(),
            "{early} closed early, late by ms, but for {still:?} of the disk: {late:?}; {:?}",
            self.seen.lock().unwrap()
        );
    }
}

async fn watch(url: SecretString, seen: Arc<Mutex<Seen>>) {
    let pool = PgPoolOptions::new().max_connections(1).acquire_timeout(Duration::from_secs(1));
    let pool = pool.connect_lazy(url.expose_secret()).unwrap();
    loop {
        if let Some(one) = commit(&pool).await {
            let mut seen = seen.lock().unwrap();
            seen.commits += 1;
            if one.until.since(one.from) >= STANDS_STILL {
                seen.slow.push(one);
            }
        }
        tokio::time::sleep(COMMIT_EVERY).await;
    }
}

/// From when until when one commit took, if there was one.
async fn commit(pool: &PgPool) -> Option<Standstill> {
    let mut connection = pool.acquire().await.ok()?;
    let from = Timestamp::now_by_local_clock();
    sqlx::query("UPDATE witness SET commits = commits + 1").execute(&mut *connection).await.ok()?;
    Some(Standstill { from, until: Timestamp::now_by_local_clock() })
}

/// How long the disk stood still.
pub fn in_all(standstills: &[Standstill]) -> Duration {
    standstills.iter().map(|one| one.until.since(one.from)).sum()
}

/// For how much of this time the disk stood still.
pub fn stood_still(standstills: &[Standstill], from: Timestamp, until: Timestamp) -> Duration {
    standstills.iter().map(|one| one.until.min(until).since(one.from.max(from))).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_lies_within_the_time_counts() {
        let at = |ms| Timestamp::from_unix_micros(0) + Duration::from_millis(ms);
        let standstills =
            [(1_000, 1_500), (3_000, 4_000)].map(|(from, until)| Standstill { from: at(from), until: at(until) });
        let ms = |from, until| stood_still(&standstills, at(from), at(until)).as_millis();
        assert_eq!(ms(0, 10_000), 1_500);
        assert_eq!(ms(1_200, 3_300), 600);
        assert_eq!((ms(1_500, 3_000), ms(4_000, 9_000)), (0, 0));
    }

    #[test]
    fn a_database_that_is_slow_all_the_while_is_not_taken_for_a_disk_that_stands_still() {
        let at = |ms| Timestamp::from_unix_micros(0) + Duration::from_millis(ms);
        let slow = vec![Standstill { from: at(0), until: at(150) }, Standstill { from: at(1_000), until: at(1_150) }];
        assert_eq!(Seen { commits: 20, slow: slow.clone() }.standstills(), slow);
        assert_eq!(Seen { commits: 19, slow }.standstills(), []);
    }
}

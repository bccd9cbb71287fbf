//! Knows when the machine's disk stood still: every so often it commits one row, for which nothing but the disk waits.
//!
//! It reaches the database without a detour, by a connection and with a table of its own, so nothing that worker or shop
//! do keeps it waiting. A commit that fails says nothing: then the database was away, and that is somebody's doing.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use order_timeout::database;
use order_timeout::order::Moment;
use secrecy::ExposeSecret;
use sqlx::PgPool;
use sqlx::postgres::PgPoolOptions;
use time::OffsetDateTime;
use tokio_util::task::AbortOnDropHandle;
use uuid::Uuid;

use super::Stage;

/// Far above what is usual, which is milliseconds: a machine that runs all tests at once may be slow.
const LATEST_MS: f64 = 1_000.0;
const COMMIT_EVERY: Duration = Duration::from_millis(50);
/// A commit takes a few milliseconds. One that takes so long is nobody's doing here.
const STANDS_STILL: Duration = Duration::from_millis(100);

/// A commit that took long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Standstill {
    pub from: Moment,
    pub until: Moment,
}

pub struct Witness {
    standstills: Arc<Mutex<Vec<Standstill>>>,
    _watching: AbortOnDropHandle<()>,
}

impl Witness {
    pub async fn open(stage: &Stage) -> Self {
        sqlx::query("CREATE TABLE witness AS SELECT 0::bigint AS commits").execute(&stage.pool).await.unwrap();
        let pool = PgPoolOptions::new().max_connections(1).acquire_timeout(Duration::from_secs(1));
        let pool = pool.connect(stage.settings.database.url.expose_secret()).await.unwrap();
        let standstills = Arc::<Mutex<Vec<Standstill>>>::default();
        let watching = tokio::spawn(watch(pool, standstills.clone()));
        Self { standstills, _watching: AbortOnDropHandle::new(watching) }
    }

    pub fn standstills(&self) -> Vec<Standstill> {
        self.standstills.lock().unwrap().clone()
    }

    /// Of every closed order, the earliest first; without what the disk added by standing still.
    pub async fn lateness_ms(&self, stage: &Stage) -> Vec<(Uuid, f64)> {
        let closed = sqlx::query_as("SELECT id, expires_at, closed_at FROM orders WHERE status = 'closed'");
        let closed: Vec<(Uuid, OffsetDateTime, OffsetDateTime)> = closed.fetch_all(&stage.pool).await.unwrap();
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

    pub async fn assert_on_time(&self, stage: &Stage) {
        let early = stage.count("SELECT count(*) FROM orders WHERE closed_at < expires_at").await;
        let late: Vec<_> = self.lateness_ms(stage).await.into_iter().filter(|(_, late)| *late >= LATEST_MS).collect();
        let still = in_all(&self.standstills());
        assert!(
            early == 0 && late.is_empty(),
            "{early} closed early, late by ms, but for {still:?} of the disk: {late:?}"
        );
    }
}

async fn watch(pool: PgPool, standstills: Arc<Mutex<Vec<Standstill>>>) {
    loop {
        if let Some(seen) = commit(&pool).await
            && seen.until.since(seen.from) >= STANDS_STILL
        {
            standstills.lock().unwrap().push(seen);
        }
        tokio::time::sleep(COMMIT_EVERY).await;
    }
}

/// From when until when one commit took, if there was one.
async fn commit(pool: &PgPool) -> Option<Standstill> {
    let mut connection = pool.acquire().await.ok()?;
    let from = Moment::now_by_local_clock();
    sqlx::query("UPDATE witness SET commits = commits + 1").execute(&mut *connection).await.ok()?;
    Some(Standstill { from, until: Moment::now_by_local_clock() })
}

/// How long the disk stood still.
pub fn in_all(standstills: &[Standstill]) -> Duration {
    standstills.iter().map(|one| one.until.since(one.from)).sum()
}

/// For how much of this time the disk stood still.
pub fn stood_still(standstills: &[Standstill], from: Moment, until: Moment) -> Duration {
    standstills.iter().map(|one| one.until.min(until).since(one.from.max(from))).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_lies_within_the_time_counts() {
        let at = |ms| Moment::from_unix_micros(0) + Duration::from_millis(ms);
        let standstills =
            [(1_000, 1_500), (3_000, 4_000)].map(|(from, until)| Standstill { from: at(from), until: at(until) });
        let ms = |from, until| stood_still(&standstills, at(from), at(until)).as_millis();
        assert_eq!(ms(0, 10_000), 1_500);
        assert_eq!(ms(1_200, 3_300), 600);
        assert_eq!((ms(1_500, 3_000), ms(4_000, 9_000)), (0, 0));
    }
}

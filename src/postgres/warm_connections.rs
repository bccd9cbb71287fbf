//! Open connections for work that must not wait for one: closing orders that are due.
//!
//! Kept outside the pool: a pool pings a connection before lending it and again when it is returned, which is a round
//! trip before the work and as much load for the server as a small batch. Knows no statement.

use std::collections::VecDeque;
use std::io::ErrorKind;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use order_timeout_core::clock::ClockSample;
use sqlx::postgres::PgConnection;

use super::{Database, ErrorClass, Lease, classify, clock};

/// How long an unused connection is assumed to be alive. The clock is read each second, on each connection in turn, and
/// there are fewer connections than that (`worker.closers`).
const MAX_IDLE_TIME: Duration = Duration::from_secs(40);
/// How long a connection is kept: a server frees some memory only when a connection ends.
const MAX_LIFETIME: Duration = Duration::from_secs(30 * 60);

/// Warm connections, ordered by last use. Cheap to clone; clones share them.
#[derive(Debug, Clone)]
pub struct WarmConnections {
    database: Database,
    kept: Arc<Mutex<VecDeque<WarmConnection>>>,
}

#[derive(Debug)]
struct WarmConnection {
    connection: Lease,
    /// When it was taken from the pool.
    since: Instant,
    /// When it was last used successfully.
    used: Instant,
    /// Whether the server has planned the work's statement on it, which takes as long as closing some dozen orders.
    planned: bool,
}

impl WarmConnection {
    fn new(connection: Lease) -> Self {
        let now = Instant::now();
        Self { connection, since: now, used: now, planned: false }
    }

    fn is_fit(&self) -> bool {
        self.used.elapsed() < MAX_IDLE_TIME
    }

    fn is_unplanned(&self) -> bool {
        !self.planned
    }

    fn is_old(&self) -> bool {
        self.since.elapsed() >= MAX_LIFETIME
    }

    /// Discards it without a ping: a pool pings a returned connection, waits forever for the answer, and opens no new
    /// connection in the meantime.
    fn discard(self) {
        self.connection.discard();
    }
}

impl WarmConnections {
    /// None is open yet; at most as many as `database` allows.
    #[must_use]
    pub fn new(database: Database) -> Self {
        Self { database, kept: Arc::default() }
    }

    /// The pool that they come from.
    #[must_use]
    pub fn database(&self) -> &Database {
        &self.database
    }

    /// Runs the usual work, which plans its statement, on the connection that was used last: that session has warm
    /// caches.
    ///
    /// # Errors
    /// sqlx's.
    pub async fn run_on_latest<T>(
        &self,
        work: impl AsyncFnOnce(&mut PgConnection) -> Result<T, sqlx::Error>,
    ) -> Result<T, sqlx::Error> {
        self.run_kept(VecDeque::pop_back, Plans(true), work).await
    }

    /// Runs `work` on one of the kept connections, which are ordered by last use, or on one from the pool. The
    /// connection is kept if the work succeeds.
    async fn run_kept<T>(
        &self,
        take: impl FnOnce(&mut VecDeque<WarmConnection>) -> Option<WarmConnection>,
        Plans(plans): Plans,
        work: impl AsyncFnOnce(&mut PgConnection) -> Result<T, sqlx::Error>,
    ) -> Result<T, sqlx::Error> {
        let taken = take(&mut self.kept());
        let mut one = match taken {
            Some(kept) if kept.is_fit() => kept,
            unfit => {
                unfit.into_iter().for_each(WarmConnection::discard);
                WarmConnection::new(self.database.connection().await?)
            }
        };
        let answer = self.database.run_on(&mut one.connection, work).await;
        match &answer {
            Ok(_) => {
                let planned = one.planned || plans;
                self.kept().push_back(WarmConnection { used: Instant::now(), planned, ..one });
            }
            // The failure of one connection may have broken all of them.
            Err(error) if classify(error) == ErrorClass::Away => {
                one.discard();
                self.kept().drain(..).for_each(WarmConnection::discard);
            }
            Err(_) => {}
        }
        answer
    }

    fn kept(&self) -> MutexGuard<'_, VecDeque<WarmConnection>> {
        self.kept.lock().expect("no holder panics")
    }

    /// Whether a connection has not planned the work's statement yet.
    #[must_use]
    pub fn has_unplanned(&self) -> bool {
        self.kept().iter().any(WarmConnection::is_unplanned)
    }

    /// Whether fewer connections are kept than the pool allows.
    #[must_use]
    pub fn lacks_some(&self) -> bool {
        self.database.has_spare_connection()
    }

    /// Runs the usual work on a connection that has not planned its statement.
    ///
    /// # Errors
    /// sqlx's.
    pub async fn run_on_unplanned<T>(
        &self,
        work: impl AsyncFnOnce(&mut PgConnection) -> Result<T, sqlx::Error>,
    ) -> Result<T, sqlx::Error> {
        self.run_kept(|kept| take_first(kept, WarmConnection::is_unplanned), Plans(true), work).await
    }

    /// Runs the usual work on a connection out of the pool, which is kept from then on.
    ///
    /// # Errors
    /// sqlx's.
    pub async fn run_on_another<T>(
        &self,
        work: impl AsyncFnOnce(&mut PgConnection) -> Result<T, sqlx::Error>,
    ) -> Result<T, sqlx::Error> {
        self.run_kept(|_| None, Plans(true), work).await
    }

    /// Ends one connection that is too old, if there is one; returns whether there was. Never all at once, which would
    /// leave none for orders that fall due in the meantime.
    #[must_use]
    pub fn discard_old(&self) -> bool {
        let old = take_first(&mut self.kept(), WarmConnection::is_old);
        old.map(WarmConnection::discard).is_some()
    }

    /// Runs other work than the usual on the least recently used connection.
    ///
    /// # Errors
    /// sqlx's.
    pub async fn run_on_oldest<T>(
        &self,
        work: impl AsyncFnOnce(&mut PgConnection) -> Result<T, sqlx::Error>,
    ) -> Result<T, sqlx::Error> {
        self.run_kept(VecDeque::pop_front, Plans(false), work).await
    }

    /// Reads the database's clock on the least recently used connection, so that each connection is checked in turn.
    ///
    /// # Errors
    /// sqlx's, if it cannot be read.
    pub async fn sample_clock(&self) -> Result<ClockSample, sqlx::Error> {
        match self.run_kept(VecDeque::pop_front, Plans(false), clock::sample).await {
            // The server may have closed just this connection, which was not pinged before its use.
            Err(error) if is_cut_off(&error) => self.run_kept(VecDeque::pop_front, Plans(false), clock::sample).await,
            answer => answer,
        }
    }
}

/// Whether the work causes its statement to be planned.
struct Plans(bool);

fn take_first(kept: &mut VecDeque<WarmConnection>, which: fn(&WarmConnection) -> bool) -> Option<WarmConnection> {
    let place = kept.iter().position(which)?;
    kept.remove(place)
}

/// Whether an open connection was closed, rather than that none could be opened or the answer was late.
fn is_cut_off(error: &sqlx::Error) -> bool {
    match error {
        sqlx::Error::Io(fault) => {
            matches!(fault.kind(), ErrorKind::ConnectionReset | ErrorKind::BrokenPipe | ErrorKind::UnexpectedEof)
        }
        error => error.as_database_error().is_some() && classify(error) == ErrorClass::Away,
    }
}

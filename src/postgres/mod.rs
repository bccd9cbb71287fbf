//! Postgres: a pool on which every call has a time limit. `connect.rs` opens connections, `session.rs` settles their
//! parameters, `migrations.rs` brings the schema up to date, `error.rs` says what an error means, `clock.rs` reads the
//! clock, which `test_clock.rs` makes one that can be moved, `lease.rs` lends connections, `warm_connections.rs` keeps the closers' connections, `contract.rs` checks the
//! statements of an orders table, `catalog.rs` and `survey.rs` describe a table of the shop's, `grants.rs` the rights that a
//! mapping lacks, `lock_holders.rs` what keeps a row, `parked_alarms.rs`, `adoption.rs`, `shop_settings.rs`,
//! `closing_pauses.rs` and `closing_minutes.rs` are tables of ours, `operator.rs` names who asked for a change, `selection.rs`
//! of which rows.
//!
//! Shared by the steps that run SQL; knows none of their statements.

pub mod adoption;
pub mod attempts;
pub mod catalog;
mod clock;
pub mod closing_minutes;
pub mod closing_pauses;
mod connect;
pub mod contract;
mod error;
pub mod grants;
pub mod kind_functions;
mod lease;
pub mod lock_holders;
pub(crate) mod migrations;
mod operator;
pub mod parked_alarms;
pub mod selection;
mod session;
pub mod shop_settings;
pub mod survey;
pub mod test_clock;
pub mod warm_connections;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use sqlx::postgres::{PgConnectOptions, PgPoolOptions, PgSslMode};
use sqlx::{Connection, PgConnection, PgPool};
use tracing::debug;

use crate::config::DatabaseSettings;
pub use clock::{ask_time, now, sample};
pub use connect::place;
use connect::{
    APPLICATION_NAME, address, connect_once, connect_options, first_connection, in_time, parameters, why_not_connected,
};
use error::is_stale_plan;
pub use error::{
    DatabaseError, ErrorClass, classify, is_forbidden, is_read_only, one_line, unusable, without_server_message,
};
pub use lease::Lease;
pub use migrations::{migrate, require_migrated};
pub use operator::Operator;
use session::{ASSUMED, Session, TimeZone};
pub use session::{is_about_pooler, shorten_lock_timeout};

/// How much longer than `database.statement_timeout` a call waits before the server counts as unreachable.
const NO_ANSWER_MARGIN: Duration = Duration::from_secs(1);

/// The time limit of a connection that only diagnoses a failure or cancels a hanging commit.
pub(crate) const DIAGNOSIS_TIMEOUT: Duration = Duration::from_millis(500);

/// A pool of connections on which every call has a time limit. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Database {
    pool: PgPool,
    timeout: Duration,
    target: Arc<Target>,
}

/// The server and how to connect to it.
struct Target {
    options: PgConnectOptions,
    settings: DatabaseSettings,
    session: Session,
}

/// sqlx's own options would show the password.
impl fmt::Debug for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Target").field("address", &address(&self.options)).finish_non_exhaustive()
    }
}

impl Database {
    /// At most `connections`, with timeouts that keep one stuck statement from stopping the worker.
    ///
    /// # Errors
    /// [`DatabaseError`] if the first connection cannot be made.
    pub async fn connect(settings: &DatabaseSettings, connections: u32) -> Result<Self, DatabaseError> {
        let options = connect_options(settings)?;
        // One connection outside the pool: a pool would retry for `acquire_timeout` and then hide the cause.
        let (connection, session) = first_connection(&options, settings, parameters(settings)).await?;
        // The connection is not needed again, so an error while closing it is ignored.
        let _ = connection.close().await;
        let place = address(&options);
        let pool = PgPoolOptions::new()
            .max_connections(connections)
            .acquire_timeout(settings.acquire_timeout)
            .after_connect({
                let session = session.clone();
                move |connection, _| {
                    let session = session.clone();
                    Box::pin(async move { session.settle(connection).await })
                }
            })
            .connect_with(options.clone())
            .await
            .map_err(|error| DatabaseError(why_not_connected(&error, &place, settings.tls_files())))?;
        let target = Arc::new(Target { options, settings: settings.clone(), session });
        Ok(Self { pool, timeout: settings.statement_timeout + NO_ANSWER_MARGIN, target })
    }

    /// A connection from the pool.
    ///
    /// # Errors
    /// sqlx's, with the address and the cause if the server cannot be reached.
    pub async fn connection(&self) -> Result<Lease, sqlx::Error> {
        match self.pool.acquire().await {
            Err(sqlx::Error::PoolTimedOut) => Err(self.diagnose_no_connection().await),
            acquired => acquired.map(Lease::new).map_err(|error| self.with_address(error)),
        }
    }

    /// Adds the server's address to the error of a broken connection.
    fn with_address(&self, error: sqlx::Error) -> sqlx::Error {
        match error {
            sqlx::Error::Io(fault) if fault.get_ref().is_none() => {
                let why =
                    format!("the connection to the database at {} broke ({fault})", address(&self.target.options));
                sqlx::Error::Io(std::io::Error::new(fault.kind(), why))
            }
            error => error,
        }
    }

    /// Connects once to find the cause: a pool that could not connect in time does not report it.
    async fn diagnose_no_connection(&self) -> sqlx::Error {
        let Target { options, settings, session } = &*self.target;
        let connected = match connect_once(options, DIAGNOSIS_TIMEOUT, settings.tls_files()).await {
            Ok(mut connection) => {
                let settled = in_time(options, DIAGNOSIS_TIMEOUT, session.settle(&mut connection)).await;
                // The connection is not needed again, so an error while closing it is ignored.
                let _ = connection.close().await;
                settled
            }
            Err(fault) => Err(fault),
        };
        let why = match connected {
            Ok(()) => {
                let (place, timeout) = (address(options), settings.acquire_timeout);
                format!("the database at {place} is reachable, but the pool had no free connection for {timeout:?}")
            }
            Err(DatabaseError(why)) => why,
        };
        sqlx::Error::Io(std::io::Error::new(std::io::ErrorKind::NotConnected, why))
    }

    /// Runs `work` on a connection, for no longer than a statement may take: a server whose host is down never answers,
    /// not even with an error. The connection of a call that timed out, or was abandoned, is closed.
    ///
    /// # Errors
    /// sqlx's; an I/O error of kind `TimedOut` if there was no answer. It is then unknown whether the work was done.
    pub async fn run<T>(
        &self,
        work: impl AsyncFnOnce(&mut PgConnection) -> Result<T, sqlx::Error>,
    ) -> Result<T, sqlx::Error> {
        let mut connection = self.connection().await?;
        self.run_on(&mut connection, work).await
    }

    /// The same on a connection that the caller has.
    ///
    /// # Errors
    /// As of [`Self::run`].
    pub async fn run_on<T>(
        &self,
        connection: &mut Lease,
        work: impl AsyncFnOnce(&mut PgConnection) -> Result<T, sqlx::Error>,
    ) -> Result<T, sqlx::Error> {
        let Ok(answer) = tokio::time::timeout(self.timeout, connection.work(work)).await else {
            tokio::spawn(self.clone().cancel_abandoned_commits());
            return Err(self.no_answer_within(self.timeout));
        };
        if answer.as_ref().is_err_and(is_stale_plan) {
            connection.close_on_drop();
        }
        answer.map_err(|error| self.with_address(error))
    }

    /// A commit that waits for a synchronous standby has no time limit, and continues after its connection is closed.
    /// Its retries would wait as well, until the server has no connection left. A cancelled commit stops waiting and is
    /// committed on this server alone. The server's own `statement_timeout` ends everything else.
    async fn cancel_abandoned_commits(self) {
        let Target { options, settings, .. } = &*self.target;
        let Ok(mut connection) = connect_once(options, DIAGNOSIS_TIMEOUT, settings.tls_files()).await else { return };
        // Those of this worker, and those that terminated workers have left behind.
        let end = sqlx::query(
            "SELECT pg_cancel_backend(pid) FROM pg_stat_activity
             WHERE application_name = $1 AND datname = current_database() AND usename = session_user
               AND wait_event = 'SyncRep' AND pg_catalog.clock_timestamp() - query_start > make_interval(secs => $2)",
        );
        let end = end.bind(APPLICATION_NAME).bind(self.timeout.as_secs_f64()).execute(&mut connection);
        match tokio::time::timeout(DIAGNOSIS_TIMEOUT, end).await {
            Ok(Ok(ended)) => {
                debug!(commits = ended.rows_affected(), "abandoned commits no longer wait for a standby")
            }
            Ok(Err(error)) => {
                debug!(error = one_line(&error), "abandoned commits could not be cancelled")
            }
            Err(_) => debug!("abandoned commits could not be cancelled in time"),
        }
        let _ = tokio::time::timeout(DIAGNOSIS_TIMEOUT, connection.close()).await;
    }

    /// The error of a call that timed out after this long.
    #[must_use]
    pub fn no_answer_within(&self, timeout: Duration) -> sqlx::Error {
        let why = format!("the database at {} did not answer within {timeout:?}", address(&self.target.options));
        sqlx::Error::Io(std::io::Error::new(std::io::ErrorKind::TimedOut, why))
    }

    /// The time zone in which statements run, and where it was found.
    pub(crate) fn time_zone(&self) -> &TimeZone {
        self.target.session.time_zone()
    }

    /// Whether it was made for tests: its clock can be moved.
    #[must_use]
    pub fn is_for_tests(&self) -> bool {
        self.target.session.is_for_tests()
    }

    /// Whether the time zone is a guess, because the role may not read the server's configuration.
    #[must_use]
    pub fn assumes_time_zone(&self) -> bool {
        self.time_zone().origin == ASSUMED
    }

    /// Whether connections are, or may be, encrypted.
    pub async fn is_encrypted(&self) -> bool {
        match self.pool.connect_options().get_ssl_mode() {
            // sqlx treats the second like the first.
            PgSslMode::Disable | PgSslMode::Allow => false,
            // The server is not asked: a proxy in between may use TLS to us and none to the server.
            PgSslMode::Require | PgSslMode::VerifyCa | PgSslMode::VerifyFull => true,
            PgSslMode::Prefer => {
                let ask = sqlx::query_scalar("SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()");
                self.run(async |connection| ask.fetch_one(connection).await).await.unwrap_or(true)
            }
        }
    }

    /// The pool itself, for programs beside the worker: its connections are returned whatever was done on them.
    #[must_use]
    pub fn pool(&self) -> &PgPool {
        &self.pool
    }

    /// Whether a connection could be had at once: one is idle, or the pool may open another.
    #[must_use]
    pub fn has_spare_connection(&self) -> bool {
        self.pool.num_idle() > 0 || self.pool.size() < self.pool.options().get_max_connections()
    }
}

//! Postgres: connecting, migrations, and what its errors mean.
//!
//! Shared by the steps that run SQL; knows none of their statements.

use std::borrow::Cow;
use std::fmt;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use secrecy::ExposeSecret;
use sqlx::encode::IsNull;
use sqlx::migrate::{Migrate, MigrateError, Migrator};
use sqlx::pool::PoolConnection;
use sqlx::postgres::{
    PgArgumentBuffer, PgConnectOptions, PgDatabaseError, PgPoolOptions, PgSeverity, PgSslMode, PgTypeInfo, PgValueRef,
};
use sqlx::{Connection, PgConnection, PgPool, Postgres, Row};
use time::OffsetDateTime;
use tracing::debug;

use crate::config::DatabaseSettings;
use crate::config::address::{PostgresAddress, PostgresServer};
use crate::order::Timestamp;
use crate::sanitize;
use crate::session::{Session, TimeZone, pooler_hint, refuse_shared_sessions};
use crate::tls::{self, TlsFiles};

/// Our own name, so that a shop that uses sqlx itself keeps its `_sqlx_migrations`.
const MIGRATIONS_TABLE: &str = "order_timeout_migrations";

static MIGRATOR: LazyLock<Migrator> = LazyLock::new(|| {
    let mut migrator = sqlx::migrate!();
    migrator.dangerous_set_table_name(MIGRATIONS_TABLE);
    // A newer worker may have run further migrations; expand-contract keeps them compatible with this one.
    migrator.set_ignore_missing(true);
    migrator
});

/// Why the database cannot be used, in one sentence without the password.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct DatabaseError(pub String);

/// How much longer than `database.statement_timeout` a call waits before the server counts as unreachable.
const NO_ANSWER_MARGIN: Duration = Duration::from_secs(1);

/// Identifies a worker's connections in `pg_stat_activity`.
const APPLICATION_NAME: &str = "order-timeout";

/// Identifies connections that change the schema, which has no time limit.
const SETUP_NAME: &str = "order-timeout setup";

/// How long a schema change may wait for a table lock. Closing waits behind it for as long.
const SETUP_LOCK_TIMEOUT: &str = "2s";

/// The time limit of a connection that only diagnoses a failure or cancels a hanging commit.
const DIAGNOSIS_TIMEOUT: Duration = Duration::from_millis(500);

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
    pub async fn connection(&self) -> Result<PoolConnection<Postgres>, sqlx::Error> {
        match self.pool.acquire().await {
            Err(sqlx::Error::PoolTimedOut) => Err(self.diagnose_no_connection().await),
            acquired => acquired.map_err(|error| self.with_address(error)),
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
    /// not even with an error. The connection of a call that timed out is closed.
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
        connection: &mut PoolConnection<Postgres>,
        work: impl AsyncFnOnce(&mut PgConnection) -> Result<T, sqlx::Error>,
    ) -> Result<T, sqlx::Error> {
        let Ok(answer) = tokio::time::timeout(self.timeout, work(connection)).await else {
            connection.close_on_drop();
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
               AND wait_event = 'SyncRep' AND clock_timestamp() - query_start > make_interval(secs => $2)",
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

    /// The pool itself, for callers that have their own time limit or send nothing to the server.
    #[must_use]
    pub fn pool(&self) -> &PgPool {
        &self.pool
    }
}

/// The parameters of each session of a worker.
fn parameters(settings: &DatabaseSettings) -> [(&'static str, String); 6] {
    let millis = |duration: Duration| duration.as_millis().max(1).to_string();
    [
        // sqlx sends no cancel request when a future is dropped: the server must end abandoned statements.
        ("statement_timeout", millis(settings.statement_timeout)),
        ("lock_timeout", millis(settings.lock_timeout)),
        ("idle_in_transaction_session_timeout", millis(settings.statement_timeout)),
        // A plan is cached. One made while the tables were small would scan them whole, each time, until the tables
        // that a flash sale has filled are analysed.
        ("enable_seqscan", "off".into()),
        // So the generic plan is as good as a custom one, and the first five executions need no planning.
        ("plan_cache_mode", "force_generic_plan".into()),
        // Compiling a plan takes longer than any of our statements, and without enable_seqscan some plans look costly.
        ("jit", "off".into()),
    ]
}

/// Connects and determines the parameters of sessions; refuses a pooler that shares sessions among connections.
async fn first_connection(
    options: &PgConnectOptions,
    settings: &DatabaseSettings,
    parameters: impl IntoIterator<Item = (&'static str, String)>,
) -> Result<(PgConnection, Session), DatabaseError> {
    let (timeout, files) = (settings.acquire_timeout, settings.tls_files());
    let mut connection = connect_once(options, timeout, files).await?;
    // Before any parameter is set: in a shared session it would affect other clients. A server without a second free
    // connection is not such a pooler, and reports the lack later.
    if let Ok(mut other) = connect_once(options, timeout, files).await {
        in_time(options, timeout, refuse_shared_sessions(&mut connection, &mut other)).await?;
        let _ = other.close().await;
    }
    let session = Session::find(&mut connection, options, &settings.time_zone, parameters);
    let session = in_time(options, timeout, session).await?;
    in_time(options, timeout, session.settle(&mut connection)).await?;
    Ok((connection, session))
}

/// Runs a query that checks a session before its use, with a time limit.
async fn in_time<T>(
    options: &PgConnectOptions,
    timeout: Duration,
    asked: impl Future<Output = Result<T, sqlx::Error>>,
) -> Result<T, DatabaseError> {
    let place = address(options);
    match tokio::time::timeout(timeout, asked).await {
        Ok(answer) => answer.map_err(|error| DatabaseError(why_unusable(&error, &place))),
        Err(_) => Err(DatabaseError(format!("the database at {place} did not answer within {timeout:?}"))),
    }
}

fn why_unusable(error: &sqlx::Error, place: &str) -> String {
    let hint = match sqlstate(error).as_deref() {
        // invalid_parameter_value, undefined_object (an unknown parameter), insufficient_privilege
        Some("22023" | "42704" | "42501") => "; correct options in database.url, or database.time_zone",
        _ => "",
    };
    format!("the database at {place} cannot be used: {}{hint}", one_line(error))
}

async fn connect_once(
    options: &PgConnectOptions,
    timeout: Duration,
    files: TlsFiles<'_>,
) -> Result<PgConnection, DatabaseError> {
    let place = address(options);
    match tokio::time::timeout(timeout, PgConnection::connect_with(options)).await {
        Ok(connected) => connected.map_err(|error| DatabaseError(why_not_connected(&error, &place, files))),
        Err(_) => Err(DatabaseError(format!(
            "the database at {place} did not answer within {timeout:?}; is it running there?"
        ))),
    }
}

/// The address as the client library's options, with the certificates that the settings name.
fn connect_options(settings: &DatabaseSettings) -> Result<PgConnectOptions, DatabaseError> {
    tls::choose_crypto_provider();
    let mut options = parsed(settings)?;
    // A named CA means that the server's certificate and host name must be verified.
    if settings.verifies_by_default() {
        options = options.ssl_mode(PgSslMode::VerifyFull);
    }
    let certificates = settings.tls_files().read().map_err(DatabaseError)?;
    if let Some(ca) = certificates.ca {
        options = options.ssl_root_cert_from_pem(ca);
    }
    if let Some(client) = certificates.client {
        options = options.ssl_client_cert_from_pem(client.chain).ssl_client_key_from_pem(client.key);
    }
    // The client library sets it by default and poolers refuse it; none of our statements returns a float as text.
    Ok(options.application_name(APPLICATION_NAME).extra_float_digits(None))
}

/// The server that the settings name: host, port and database, without the password.
///
/// # Errors
/// [`DatabaseError`] if the address is not valid.
pub fn place(settings: &DatabaseSettings) -> Result<String, DatabaseError> {
    parsed(settings).map(|options| address(&options))
}

fn parsed(settings: &DatabaseSettings) -> Result<PgConnectOptions, DatabaseError> {
    let url = settings.url.expose_secret();
    let refused = |why: &dyn fmt::Display| DatabaseError(format!("database.url {why}"));
    let address = PostgresAddress::parse(url).map_err(|fault| refused(&fault))?;
    let options: PgConnectOptions = url.parse().map_err(|_| refused(&"is not a Postgres address"))?;
    // The port of the address, not of the environment (PGPORT). An IPv6 address without its brackets: with them the
    // client library would resolve it as a name.
    let options = options.port(address.port);
    Ok(match address.server {
        PostgresServer::Tcp(host) => options.host(&host.for_connecting()),
        PostgresServer::Socket(directory) => options.socket(directory),
    })
}

fn address(options: &PgConnectOptions) -> String {
    let database = options.get_database().unwrap_or("(the user's)");
    let server = match options.get_socket() {
        Some(directory) => directory.display().to_string(),
        // As it is written in an address.
        None if options.get_host().contains(':') => format!("[{}]", options.get_host()),
        None => options.get_host().to_owned(),
    };
    format!("{server}:{}, database {database:?}", options.get_port())
}

fn why_not_connected(error: &sqlx::Error, place: &str, files: TlsFiles<'_>) -> String {
    if let Some(fault) = error.as_database_error() {
        if let Some(hint) = fault.code().and_then(|code| pooler_hint(&code, fault.message())) {
            return format!("the database at {place} refuses: {}; {hint}", fault.message());
        }
        let hint = match fault.code().as_deref() {
            Some("3D000") => "create it with createdb, or correct database.url",
            Some("28000") if fault.message().contains("client certificate") => {
                "name one in database.client_cert_file and its key in database.client_key_file"
            }
            Some("28000") if fault.message().contains("no encryption") => {
                "if it wants TLS, write sslmode=verify-full in database.url"
            }
            Some("28P01" | "28000") => "check the user and password in database.url",
            Some("53300") => "it has no connection left; raise max_connections or run fewer workers",
            _ => "correct database.url or fix the database",
        };
        return format!("the database at {place} refuses: {}; {hint}", fault.message());
    }
    if let Some(why) = why_not_by_tls(error) {
        return format!("no secure connection to the database at {place} is possible: {why}");
    }
    match error {
        sqlx::Error::Protocol(_) => Some("what answers there is not Postgres; correct the port in database.url".into()),
        sqlx::Error::Io(cut) if files.is_any() => tls::why_cut(cut, files),
        _ => None,
    }
    .map_or_else(
        || format!("the database at {place} cannot be reached ({error}); is it running there?"),
        |why| format!("the connection to the database at {place} failed: {why}"),
    )
}

/// The TLS error behind it, if there is one, in words.
fn why_not_by_tls(error: &sqlx::Error) -> Option<String> {
    const PLAIN: &str = "sslmode=disable for a server without TLS";
    match error {
        sqlx::Error::Io(error) => tls::why(error, "database", PLAIN),
        sqlx::Error::Tls(fault) => Some(match fault.downcast_ref() {
            Some(fault) => tls::explain(fault, "database", PLAIN),
            None => format!("{fault}; enable TLS on it (ssl = on), or write {PLAIN} in database.url"),
        }),
        _ => None,
    }
}

/// Brings the schema up to date. Idempotent; returns the names of the migrations that were applied now.
///
/// # Errors
/// [`DatabaseError`] names the migration.
pub async fn migrate(settings: &DatabaseSettings) -> Result<Vec<String>, DatabaseError> {
    // Without the worker's statement timeout, because a migration may take long. But with a lock timeout: all workers
    // wait behind a migration that waits for a table lock.
    let options = connect_options(settings)?.application_name(SETUP_NAME);
    let parameters = [("lock_timeout", SETUP_LOCK_TIMEOUT.to_owned())];
    let (mut connection, _) = first_connection(&options, settings, parameters).await?;
    let pending = pending_migrations(&mut connection).await?;
    MIGRATOR.run(&mut connection).await.map_err(|error| DatabaseError(why_not_migrated(&error)))?;
    // The migrations are committed, so an error while closing is ignored.
    let _ = connection.close().await;
    Ok(pending)
}

fn why_not_migrated(error: &MigrateError) -> String {
    let hint = match error {
        MigrateError::VersionMismatch(_) => "an applied migration was edited; restore it, migrations are never edited",
        MigrateError::Execute(inner) | MigrateError::ExecuteMigration(inner, _)
            // duplicate_table
            if sqlstate(inner).as_deref() == Some("42P07") =>
        {
            "a table of that name is there already; run CREATE SCHEMA order_timeout, add ?options=-csearch_path%3Dorder_timeout to database.url, and name statements for your own orders in orders.close_sql and orders.overdue_sql"
        }
        MigrateError::Execute(inner) | MigrateError::ExecuteMigration(inner, _) if classify(inner) == ErrorClass::Locked => {
            "another session, such as a dump or another setup, holds a lock on one of our tables (pg_stat_activity lists it); run `order-timeout setup` again when it has ended"
        }
        MigrateError::Execute(inner) | MigrateError::ExecuteMigration(inner, _) if is_forbidden(inner) => {
            OWN_SCHEMA_HINT
        }
        // invalid_schema_name
        MigrateError::Execute(inner) | MigrateError::ExecuteMigration(inner, _)
            if sqlstate(inner).as_deref() == Some("3F000") =>
        {
            "create the schema that search_path in database.url names, such as CREATE SCHEMA order_timeout, and run `order-timeout setup` again"
        }
        _ => "correct the cause and run `order-timeout setup` again",
    };
    let why = match error {
        MigrateError::Execute(inner) | MigrateError::ExecuteMigration(inner, _) => one_line(inner),
        error => error.to_string(),
    };
    format!("the database schema could not be brought up to date: {why}; {hint}")
}

/// The fix for a database user without the necessary rights. Since PostgreSQL 15 only its owner may write into
/// `public`.
const OWN_SCHEMA_HINT: &str = "give the user of database.url a schema of its own (CREATE SCHEMA order_timeout AUTHORIZATION …) and add ?options=-csearch_path%3Dorder_timeout to database.url";

/// insufficient_privilege
fn is_forbidden(error: &sqlx::Error) -> bool {
    sqlstate(error).as_deref() == Some("42501")
}

/// Refuses a schema that this version cannot work with.
///
/// # Errors
/// [`DatabaseError`] counts the migrations that are missing.
pub async fn require_migrated(database: &Database) -> Result<(), DatabaseError> {
    let read = database.run(async |connection| Ok(pending_migrations(connection).await));
    let pending = read.await.map_err(|error| unreadable_migrations(&error))??;
    let Some(first) = pending.first() else { return Ok(()) };
    let (count, Target { options, settings, .. }) = (pending.len(), &*database.target);
    let fix = if settings.is_default_address() {
        "this is the default of database.url: if your database is another, set ORDER_TIMEOUT__DATABASE__URL, and then run `order-timeout setup`"
    } else {
        "run `order-timeout setup`"
    };
    Err(DatabaseError(format!(
        "the database at {} lacks {count} migration(s), the first: {first:?}; {fix}",
        address(options)
    )))
}

async fn pending_migrations(connection: &mut PgConnection) -> Result<Vec<String>, DatabaseError> {
    let exists: bool = sqlx::query_scalar("SELECT to_regclass($1) IS NOT NULL")
        .bind(MIGRATIONS_TABLE)
        .fetch_one(&mut *connection)
        .await
        .map_err(|error| unreadable_migrations(&error))?;
    let applied = if exists {
        refuse_unfinished_migration(connection).await?;
        let listed = connection.list_applied_migrations(MIGRATIONS_TABLE).await;
        listed.map_err(|error| match &error {
            MigrateError::Execute(inner) => unreadable_migrations(inner),
            error => DatabaseError(format!("the applied migrations cannot be read: {error}")),
        })?
    } else {
        Vec::new()
    };
    let is_pending = |version: i64| !applied.iter().any(|migration| migration.version == version);
    Ok(MIGRATOR.iter().filter(|m| is_pending(m.version)).map(|m| m.description.to_string()).collect())
}

/// Refuses a migration that began and did not finish. The client library's own error names a different table.
async fn refuse_unfinished_migration(connection: &mut PgConnection) -> Result<(), DatabaseError> {
    let unfinished = connection.dirty_version(MIGRATIONS_TABLE).await.map_err(|error| match &error {
        MigrateError::Execute(inner) => unreadable_migrations(inner),
        error => DatabaseError(format!("the applied migrations cannot be read: {error}")),
    })?;
    let Some(version) = unfinished else { return Ok(()) };
    Err(DatabaseError(format!(
        "migration {version} began and did not finish, according to the table {MIGRATIONS_TABLE}; remove what it has left behind, then DELETE FROM {MIGRATIONS_TABLE} WHERE version = {version}, and run `order-timeout setup` again"
    )))
}

fn unreadable_migrations(error: &sqlx::Error) -> DatabaseError {
    let hint =
        if is_forbidden(error) { "; use the same user in database.url as for `order-timeout setup`" } else { "" };
    DatabaseError(format!("the applied migrations cannot be read: {}{hint}", one_line(error)))
}

/// The time by the database's clock, which decides when a deadline has passed.
///
/// # Errors
/// sqlx's.
pub async fn now(connection: &mut PgConnection) -> Result<Timestamp, sqlx::Error> {
    let Timestamptz(now) = sqlx::query_scalar("SELECT clock_timestamp()").fetch_one(connection).await?;
    Ok(now)
}

/// The time by the clock of a database that is used for nothing else, over one connection.
///
/// # Errors
/// [`DatabaseError`] if it does not answer within `timeout`.
pub async fn ask_time(settings: &DatabaseSettings, timeout: Duration) -> Result<Timestamp, DatabaseError> {
    let options = connect_options(settings)?;
    let mut connection = connect_once(&options, timeout, settings.tls_files()).await?;
    // Not prepared, so that it works with any pooler.
    let ask = async {
        let micros = sqlx::raw_sql("SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint::text");
        let micros: String = micros.fetch_one(&mut connection).await?.try_get(0)?;
        micros.parse().map(Timestamp::from_unix_micros).map_err(|fault| sqlx::Error::Decode(Box::new(fault)))
    };
    let now = in_time(&options, timeout, ask).await?;
    // The answer is known, so an error while closing is ignored.
    let _ = tokio::time::timeout(DIAGNOSIS_TIMEOUT, connection.close()).await;
    Ok(now)
}

/// A Postgres timestamp as a [`Timestamp`]: both count microseconds.
#[must_use]
pub fn moment(time: OffsetDateTime) -> Timestamp {
    Timestamp::from_unix_micros(i64::try_from(time.unix_timestamp_nanos() / 1_000).unwrap_or(i64::MAX))
}

/// A `timestamptz` read as its number of microseconds. `OffsetDateTime` panics on `infinity` and on years outside its
/// calendar; here they are ordinary, distant times.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timestamptz(pub Timestamp);

/// 2000-01-01T00:00:00Z, the epoch of Postgres (PostgreSQL source, `datatype/timestamp.h`).
const POSTGRES_EPOCH: Timestamp = Timestamp::from_unix_micros(946_684_800_000_000);

impl sqlx::Type<Postgres> for Timestamptz {
    fn type_info() -> PgTypeInfo {
        <OffsetDateTime as sqlx::Type<Postgres>>::type_info()
    }
}

impl<'r> sqlx::Decode<'r, Postgres> for Timestamptz {
    fn decode(value: PgValueRef<'r>) -> Result<Self, sqlx::error::BoxDynError> {
        // In the binary format of every prepared statement: microseconds since the epoch, big-endian.
        let micros = i64::from_be_bytes(value.as_bytes()?.try_into()?);
        Ok(Self(Timestamp::from_unix_micros(micros.saturating_add(POSTGRES_EPOCH.unix_micros()))))
    }
}

impl<'q> sqlx::Encode<'q, Postgres> for Timestamptz {
    fn encode_by_ref(&self, buffer: &mut PgArgumentBuffer) -> Result<IsNull, sqlx::error::BoxDynError> {
        // The minimum is Postgres' -infinity, the maximum its infinity.
        let micros = self.0.unix_micros().saturating_sub(POSTGRES_EPOCH.unix_micros());
        buffer.extend_from_slice(&micros.to_be_bytes());
        Ok(IsNull::No)
    }
}

/// A [`Timestamp`] as a Postgres timestamp; `None` beyond the calendar's years.
#[must_use]
pub fn timestamp(moment: Timestamp) -> Option<OffsetDateTime> {
    OffsetDateTime::from_unix_timestamp_nanos(i128::from(moment.unix_micros()) * 1_000).ok()
}

/// The class of an error, which decides whether a retry makes sense.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorClass {
    /// A lock could not be acquired in time.
    Locked,
    /// A deadlock, a serialization failure, a timeout, a full disk: retry.
    Transient,
    /// The data: a constraint, a trigger, a value.
    Data,
    /// A statement that was valid when it was prepared is no longer valid because a table or a right was removed; or
    /// one row's trigger is broken, or cannot reach another server. Running the statement without rows tells which.
    Broken,
    /// Nothing works at present: unreachable, read-only, or no connection left.
    Away,
}

/// Classifies an error by its SQLSTATE (PostgreSQL documentation, appendix A "Error Codes").
#[must_use]
pub fn classify(error: &sqlx::Error) -> ErrorClass {
    if matches!(error, sqlx::Error::ColumnDecode { .. } | sqlx::Error::Decode(_) | sqlx::Error::ColumnNotFound(_)) {
        // The result does not have the columns or types that the prepared statement announced.
        return ErrorClass::Broken;
    }
    let Some(fault) = error.as_database_error().and_then(|fault| fault.try_downcast_ref::<PgDatabaseError>()) else {
        // Network, pool, protocol: no answer from the database at all.
        return ErrorClass::Away;
    };
    match fault.code() {
        // lock_not_available
        "55P03" => ErrorClass::Locked,
        // query_canceled, feature_not_supported (a cached plan after an ALTER TABLE)
        "57014" | "0A000" => ErrorClass::Transient,
        // read_only_sql_transaction
        "25006" => ErrorClass::Away,
        // duplicate_prepared_statement: a pooler has changed servers
        "42P05" => ErrorClass::Transient,
        // invalid transaction state, invalid statement name (a pooler has changed servers), transaction rollback
        code if ["25", "26", "40"].contains(&&code[..2]) => ErrorClass::Transient,
        // insufficient resources, system error (a bad disk). If the connection stays open, the cause may be one order's
        // unreadable page, or another server that a trigger writes to: other orders are not affected.
        code if ["53", "58"].contains(&&code[..2]) => match fault.severity() {
            PgSeverity::Panic | PgSeverity::Fatal => ErrorClass::Away,
            _ => ErrorClass::Transient,
        },
        // connection exception, invalid authorization, operator intervention: the server's own error if it ends the
        // connection. Otherwise it may come from a trigger that failed to reach another server.
        code if ["08", "28", "57"].contains(&&code[..2]) => match fault.severity() {
            PgSeverity::Panic | PgSeverity::Fatal => ErrorClass::Away,
            _ => ErrorClass::Broken,
        },
        // data exception, integrity constraint violation, WITH CHECK OPTION violation, PL/pgSQL error (RAISE)
        code if ["22", "23", "44", "P0"].contains(&&code[..2]) => ErrorClass::Data,
        _ => ErrorClass::Broken,
    }
}

/// Whether the error says that the database accepts no writes.
#[must_use]
pub fn is_read_only(error: &sqlx::Error) -> bool {
    // read_only_sql_transaction
    sqlstate(error).as_deref() == Some("25006")
}

/// Whether a statement that this connection has prepared no longer matches its tables: sqlx would reuse the same plan
/// again and again.
fn is_stale_plan(error: &sqlx::Error) -> bool {
    // feature_not_supported ("cached plan must not change result type"), invalid_sql_statement_name,
    // duplicate_prepared_statement
    matches!(sqlstate(error).as_deref(), Some("0A000" | "26000" | "42P05"))
}

/// The SQLSTATE of an error that the server sent (PostgreSQL documentation, appendix A "Error Codes").
fn sqlstate(error: &sqlx::Error) -> Option<Cow<'_, str>> {
    error.as_database_error().and_then(sqlx::error::DatabaseError::code)
}

/// An error for the log: the server's message and SQLSTATE, without the line in the server's source. Always one line,
/// because a trigger's message must not add lines to our log.
#[must_use]
pub fn one_line(error: &sqlx::Error) -> String {
    sanitize::one_line(&words(error)).into_owned()
}

/// A sentence of [`one_line`] as a page may show it. The pages show no order, and the server's message may come from a
/// trigger and contain ids: it is replaced by the SQLSTATE and its class. A sentence without SQLSTATE is our own.
#[must_use]
pub fn without_server_message(why: &str) -> Cow<'_, str> {
    let code = why.rsplit_once("(SQLSTATE ").and_then(|(_, behind)| behind.get(..5));
    let Some(code) = code.filter(|code| code.bytes().all(|byte| byte.is_ascii_alphanumeric())) else {
        return why.into();
    };
    let class = class_of(code);
    format!("the server reports an error of class {class:?} (SQLSTATE {code}); its message is in the worker's log")
        .into()
}

/// PostgreSQL documentation, appendix A "Error Codes".
fn class_of(code: &str) -> &'static str {
    match (code, &code[..2]) {
        ("25006", _) => "read-only transaction",
        ("40P01", _) => "deadlock",
        ("42501", _) => "insufficient privilege",
        ("42P01", _) => "undefined table",
        ("53100", _) => "disk full",
        ("53300", _) => "too many connections",
        ("55P03", _) => "lock timeout",
        ("57014", _) => "statement timeout or cancellation",
        ("57P01" | "57P02", _) => "server is shutting down",
        ("57P03", _) => "server is starting up",
        (_, "08") => "connection exception",
        (_, "0A") => "feature not supported",
        (_, "22") => "data exception",
        (_, "23") => "integrity constraint violation",
        (_, "25") => "invalid transaction state",
        (_, "26") => "invalid statement name",
        (_, "28") => "invalid authorization",
        (_, "40") => "transaction rollback",
        (_, "42") => "syntax error or access rule violation",
        (_, "53") => "insufficient resources",
        (_, "54") => "program limit exceeded",
        (_, "55") => "object not in prerequisite state",
        (_, "57") => "operator intervention",
        (_, "58") => "system error",
        (_, "P0") => "PL/pgSQL error",
        (_, "XX") => "internal error",
        _ => "other",
    }
}

fn words(error: &sqlx::Error) -> String {
    match error.as_database_error() {
        Some(fault) => match fault.code() {
            Some(code) => {
                let hint = pooler_hint(&code, fault.message()).map_or_else(String::new, |hint| format!("; {hint}"));
                format!("{} (SQLSTATE {code}){hint}", fault.message())
            }
            None => fault.message().to_owned(),
        },
        None => match error {
            // One of our own sentences.
            sqlx::Error::Io(fault) if fault.get_ref().is_some() => fault.to_string(),
            error => error.to_string(),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Settings;

    #[test]
    fn client_options_name_address_server() {
        let of = |url: &str| {
            let mut settings = Settings::defaults().database;
            settings.url = url.to_owned().into();
            parsed(&settings)
        };
        for (url, host, port, shown) in [
            ("postgres://u@[2001:db8::1]/d", "2001:db8::1", 5432, "[2001:db8::1]:5432, database \"d\""),
            ("postgres:///d?host=::1&port=6432", "::1", 6432, "[::1]:6432, database \"d\""),
            ("postgres://u@db.example:6432/d", "db.example", 6432, "db.example:6432, database \"d\""),
        ] {
            let options = of(url).unwrap();
            assert_eq!((options.get_host(), options.get_port(), options.get_socket()), (host, port, None), "{url}");
            assert_eq!(address(&options), shown);
        }
        let socket = of("postgres://u@localhost/d?host=/run/pg").unwrap();
        assert_eq!(socket.get_socket().unwrap().to_str(), Some("/run/pg"));
        assert_eq!(address(&socket), "/run/pg:5432, database \"d\"");
        assert!(of("postgres:///d").unwrap_err().0.contains("names no host"));
    }

    #[test]
    fn pages_show_class_instead_of_message() {
        let of = |why: &str| without_server_message(why).into_owned();
        for (why, class) in [
            ("order 17 is guarded (SQLSTATE 25006)", "\"read-only transaction\" (SQLSTATE 25006)"),
            ("order 17 (SQLSTATE 00000) (SQLSTATE 57P05)", "\"operator intervention\" (SQLSTATE 57P05)"),
            ("order 17 (SQLSTATE ZZ999)", "\"other\" (SQLSTATE ZZ999)"),
        ] {
            let shown = of(why);
            assert!(shown.contains(class) && !shown.contains("17"), "{shown}");
        }
        let ours = "the database at h:5432 did not answer within 6s";
        assert_eq!(of(ours), ours);
    }
}

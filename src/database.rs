//! Postgres: how it is reached, brought up to date, and what its errors mean.
//!
//! Shared by the steps that speak SQL; knows none of their statements.

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

/// A name of our own, so that a shop that uses sqlx itself keeps its `_sqlx_migrations`.
const MIGRATIONS_TABLE: &str = "order_timeout_migrations";

static MIGRATOR: LazyLock<Migrator> = LazyLock::new(|| {
    let mut migrator = sqlx::migrate!();
    migrator.dangerous_set_table_name(MIGRATIONS_TABLE);
    // A newer worker may have run further migrations; expand-contract keeps them harmless to this one.
    migrator.set_ignore_missing(true);
    migrator
});

/// Why the database cannot be used, in one sentence without the password.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct DatabaseError(pub String);

/// How much longer than `database.statement_timeout` we wait for an answer before we take the server for vanished.
const NO_ANSWER_MARGIN: Duration = Duration::from_secs(1);

/// How a worker's connections are told from others in `pg_stat_activity`.
const APPLICATION_NAME: &str = "order-timeout";

/// The same of what changes the schema, which may take as long as it likes.
const SETUP_NAME: &str = "order-timeout setup";

/// How long a change of the schema may wait for a table. Whatever closes orders waits behind it for as long.
const SETUP_WAITS_FOR_LOCKS: &str = "2s";

/// How long a connection may take that is only to find out why there is none, or to end what hangs.
const ASKING_WHY: Duration = Duration::from_millis(500);

/// A pool of connections on which no call lasts for ever. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Database {
    pool: PgPool,
    timeout: Duration,
    way: Arc<Way>,
}

/// How the server is reached.
struct Way {
    options: PgConnectOptions,
    settings: DatabaseSettings,
    session: Session,
}

/// sqlx's own options would show the password.
impl fmt::Debug for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Way").field("address", &address(&self.options)).finish_non_exhaustive()
    }
}

impl Database {
    /// At most `connections`, with every timeout set that keeps one stuck statement from stopping the worker.
    ///
    /// # Errors
    /// [`DatabaseError`] if the first connection cannot be made.
    pub async fn connect(settings: &DatabaseSettings, connections: u32) -> Result<Self, DatabaseError> {
        let options = connect_options(settings)?;
        // Once by hand: a pool would go on trying for `acquire_timeout` and then hide the cause.
        let (connection, session) = first_connection(&options, settings, parameters(settings)).await?;
        // Said goodbye to properly or not, it has served its purpose.
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
        let way = Arc::new(Way { options, settings: settings.clone(), session });
        Ok(Self { pool, timeout: settings.statement_timeout + NO_ANSWER_MARGIN, way })
    }

    /// A connection out of the pool.
    ///
    /// # Errors
    /// sqlx's, with the address and the cause where the server cannot be reached.
    pub async fn connection(&self) -> Result<PoolConnection<Postgres>, sqlx::Error> {
        match self.pool.acquire().await {
            Err(sqlx::Error::PoolTimedOut) => Err(self.why_there_is_none().await),
            acquired => acquired.map_err(|error| self.with_address(error)),
        }
    }

    /// Says of a broken connection where it led to.
    fn with_address(&self, error: sqlx::Error) -> sqlx::Error {
        match error {
            sqlx::Error::Io(fault) if fault.get_ref().is_none() => {
                let why = format!("the connection to the database at {} broke ({fault})", address(&self.way.options));
                sqlx::Error::Io(std::io::Error::new(fault.kind(), why))
            }
            error => error,
        }
    }

    /// A pool that could not connect in time keeps to itself what prevented it.
    async fn why_there_is_none(&self) -> sqlx::Error {
        let Way { options, settings, session } = &*self.way;
        let connected = match connect_once(options, ASKING_WHY, settings.tls_files()).await {
            Ok(mut connection) => {
                let settled = in_time(options, ASKING_WHY, session.settle(&mut connection)).await;
                // It has served its purpose.
                let _ = connection.close().await;
                settled
            }
            Err(fault) => Err(fault),
        };
        let why = match connected {
            Ok(()) => {
                let (place, timeout) = (address(options), settings.acquire_timeout);
                format!("the database at {place} is there, but gave us no connection for {timeout:?}")
            }
            Err(DatabaseError(why)) => why,
        };
        sqlx::Error::Io(std::io::Error::new(std::io::ErrorKind::NotConnected, why))
    }

    /// Runs `work` on a connection and waits for it no longer than a statement may take: a server whose host has
    /// vanished never answers, not even with an error. The connection of such a call is thrown away.
    ///
    /// # Errors
    /// sqlx's; an I/O error of kind `TimedOut` if there was no answer. Whether the work was done is unknown then.
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
            tokio::spawn(self.clone().end_what_nobody_waits_for());
            return Err(self.no_answer_within(self.timeout));
        };
        if answer.as_ref().is_err_and(keeps_a_plan_that_no_longer_fits) {
            connection.close_on_drop();
        }
        answer.map_err(|error| self.with_address(error))
    }

    /// A commit that waits for a standby is under no time limit, and goes on when its connection is gone. Those that were
    /// begun anew in its place would wait, too, until the server has no connection left for anybody. Cancelled, it waits
    /// no longer and stands on this server alone. Everything else is ended by the server's own `statement_timeout`.
    async fn end_what_nobody_waits_for(self) {
        let Way { options, settings, .. } = &*self.way;
        let Ok(mut connection) = connect_once(options, ASKING_WHY, settings.tls_files()).await else { return };
        // Ours, and what workers that are gone have left behind.
        let end = sqlx::query(
            "SELECT pg_cancel_backend(pid) FROM pg_stat_activity
             WHERE application_name = $1 AND datname = current_database() AND usename = session_user
               AND wait_event = 'SyncRep' AND clock_timestamp() - query_start > make_interval(secs => $2)",
        );
        let end = end.bind(APPLICATION_NAME).bind(self.timeout.as_secs_f64()).execute(&mut connection);
        match tokio::time::timeout(ASKING_WHY, end).await {
            Ok(Ok(ended)) => {
                debug!(commits = ended.rows_affected(), "commits that nobody waits for no longer wait for a standby")
            }
            Ok(Err(error)) => {
                debug!(error = one_line(&error), "commits that nobody waits for could not be told to end")
            }
            Err(_) => debug!("commits that nobody waits for could not be told to end in time"),
        }
        let _ = tokio::time::timeout(ASKING_WHY, connection.close()).await;
    }

    /// The error of a call that was given up after this long.
    #[must_use]
    pub fn no_answer_within(&self, timeout: Duration) -> sqlx::Error {
        let why = format!("the database at {} did not answer within {timeout:?}", address(&self.way.options));
        sqlx::Error::Io(std::io::Error::new(std::io::ErrorKind::TimedOut, why))
    }

    /// The time zone in which statements run, and who says so.
    pub(crate) fn time_zone(&self) -> &TimeZone {
        self.way.session.time_zone()
    }

    /// The pool itself, for what bounds its own time or asks the server nothing.
    #[must_use]
    pub fn pool(&self) -> &PgPool {
        &self.pool
    }
}

/// What each session of a worker is set to.
fn parameters(settings: &DatabaseSettings) -> [(&'static str, String); 6] {
    let millis = |duration: Duration| duration.as_millis().max(1).to_string();
    [
        // sqlx sends no cancel request when a future is dropped: the server must end what nobody waits for.
        ("statement_timeout", millis(settings.statement_timeout)),
        ("lock_timeout", millis(settings.lock_timeout)),
        ("idle_in_transaction_session_timeout", millis(settings.statement_timeout)),
        // A plan is made once and kept. Made while the tables were small it would read them whole, each time, until
        // somebody analyses what a flash sale has filled them with.
        ("enable_seqscan", "off".into()),
        // So a kept plan is as good as one for the very ids, and need not be made anew for the first five.
        ("plan_cache_mode", "force_generic_plan".into()),
        // Compiling a plan takes longer than any statement of ours, and without enable_seqscan some plans look dear.
        ("jit", "off".into()),
    ]
}

/// Connects, and finds out what sessions must be set to; refuses a pooler that does not give each connection one.
async fn first_connection(
    options: &PgConnectOptions,
    settings: &DatabaseSettings,
    parameters: impl IntoIterator<Item = (&'static str, String)>,
) -> Result<(PgConnection, Session), DatabaseError> {
    let (timeout, files) = (settings.acquire_timeout, settings.tls_files());
    let mut connection = connect_once(options, timeout, files).await?;
    // Before anything is set: in a shared session it would reach other clients. A server that has no second connection
    // to give is no such pooler, and says so soon enough.
    if let Ok(mut other) = connect_once(options, timeout, files).await {
        in_time(options, timeout, refuse_shared_sessions(&mut connection, &mut other)).await?;
        let _ = other.close().await;
    }
    let session = Session::find(&mut connection, options, &settings.time_zone, parameters);
    let session = in_time(options, timeout, session).await?;
    in_time(options, timeout, session.settle(&mut connection)).await?;
    Ok((connection, session))
}

/// What a session is asked before it may be used, within this time.
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
        // invalid_parameter_value, undefined_object (a parameter that there is not), insufficient_privilege
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

/// The address as the client library has it, with the certificates that the settings name.
fn connect_options(settings: &DatabaseSettings) -> Result<PgConnectOptions, DatabaseError> {
    tls::choose_crypto_provider();
    let mut options = parsed(settings)?;
    // Whoever names a CA wants the server to be checked against it, and its name too.
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
    // The client library's own choice, which poolers refuse: no statement of ours returns a float as text.
    Ok(options.application_name(APPLICATION_NAME).extra_float_digits(None))
}

/// Where the settings lead: host, port and database, without the password.
///
/// # Errors
/// [`DatabaseError`] if the address is none.
pub fn place(settings: &DatabaseSettings) -> Result<String, DatabaseError> {
    parsed(settings).map(|options| address(&options))
}

fn parsed(settings: &DatabaseSettings) -> Result<PgConnectOptions, DatabaseError> {
    let url = settings.url.expose_secret();
    let refused = |why: &dyn fmt::Display| DatabaseError(format!("database.url {why}"));
    let address = PostgresAddress::parse(url).map_err(|fault| refused(&fault))?;
    let options: PgConnectOptions = url.parse().map_err(|_| refused(&"is not a Postgres address"))?;
    // Where the address leads, and not where the environment does (PGPORT); an IPv6 address without its brackets, which
    // the client library would look up as a name.
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
        // As it stands in an address.
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
            _ => "correct database.url or mend the database",
        };
        return format!("the database at {place} refuses: {}; {hint}", fault.message());
    }
    if let Some(why) = why_not_by_tls(error) {
        return format!("the database at {place} cannot be talked to safely: {why}");
    }
    match error {
        sqlx::Error::Protocol(_) => Some("what answers there is not Postgres; correct the port in database.url".into()),
        sqlx::Error::Io(cut) if files.is_any() => tls::why_cut(cut, files),
        _ => None,
    }
    .map_or_else(
        || format!("the database at {place} cannot be reached ({error}); is it running there?"),
        |why| format!("the database at {place} cannot be talked to: {why}"),
    )
}

/// What TLS has to do with it, if it has.
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

/// Brings the schema up to date. Idempotent; returns the names of what was applied now.
///
/// # Errors
/// [`DatabaseError`] names the migration.
pub async fn migrate(settings: &DatabaseSettings) -> Result<Vec<String>, DatabaseError> {
    // Without the worker's statement timeout, for a migration may take long. But whoever waits for a table behind somebody
    // else has all workers wait behind him.
    let options = connect_options(settings)?.application_name(SETUP_NAME);
    let parameters = [("lock_timeout", SETUP_WAITS_FOR_LOCKS.to_owned())];
    let (mut connection, _) = first_connection(&options, settings, parameters).await?;
    let pending = pending_migrations(&mut connection).await?;
    MIGRATOR.run(&mut connection).await.map_err(|error| DatabaseError(why_not_migrated(&error)))?;
    // The migrations are committed; how the goodbye goes does not matter.
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
            "somebody keeps a table of ours locked, such as a dump, or another setup runs (pg_stat_activity names them); run `order-timeout setup` again when that has ended"
        }
        MigrateError::Execute(inner) | MigrateError::ExecuteMigration(inner, _) if is_forbidden(inner) => {
            A_SCHEMA_OF_ITS_OWN
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

/// What to do for a user who may not do what it must. Since PostgreSQL 15 nobody but its owner may write into `public`.
const A_SCHEMA_OF_ITS_OWN: &str = "give the user of database.url a schema of its own (CREATE SCHEMA order_timeout AUTHORIZATION …) and add ?options=-csearch_path%3Dorder_timeout to database.url";

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
    let (count, Way { options, settings, .. }) = (pending.len(), &*database.way);
    let do_this = if settings.is_default_address() {
        "this is the default of database.url: if your database is another, set ORDER_TIMEOUT__DATABASE__URL, and then run `order-timeout setup`"
    } else {
        "run `order-timeout setup`"
    };
    Err(DatabaseError(format!(
        "the database at {} lacks {count} migration(s), the first: {first:?}; {do_this}",
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

/// A migration that began and did not end. The client library's own error names another table than ours.
async fn refuse_unfinished_migration(connection: &mut PgConnection) -> Result<(), DatabaseError> {
    let unfinished = connection.dirty_version(MIGRATIONS_TABLE).await.map_err(|error| match &error {
        MigrateError::Execute(inner) => unreadable_migrations(inner),
        error => DatabaseError(format!("the applied migrations cannot be read: {error}")),
    })?;
    let Some(version) = unfinished else { return Ok(()) };
    Err(DatabaseError(format!(
        "migration {version} began and did not finish, as the table {MIGRATIONS_TABLE} says; remove what it has left behind, then DELETE FROM {MIGRATIONS_TABLE} WHERE version = {version}, and run `order-timeout setup` again"
    )))
}

fn unreadable_migrations(error: &sqlx::Error) -> DatabaseError {
    let hint = if is_forbidden(error) {
        "; let the user of database.url be the one who ran `order-timeout setup`"
    } else {
        ""
    };
    DatabaseError(format!("the applied migrations cannot be read: {}{hint}", one_line(error)))
}

/// What time it is by the database's clock, which is the one that deadlines go by.
///
/// # Errors
/// sqlx's.
pub async fn now(connection: &mut PgConnection) -> Result<Timestamp, sqlx::Error> {
    let Timestamptz(now) = sqlx::query_scalar("SELECT clock_timestamp()").fetch_one(connection).await?;
    Ok(now)
}

/// What time it is by the clock of a database that is only asked for that, over one connection.
///
/// # Errors
/// [`DatabaseError`] if it does not answer within `timeout`.
pub async fn ask_time(settings: &DatabaseSettings, timeout: Duration) -> Result<Timestamp, DatabaseError> {
    let options = connect_options(settings)?;
    let mut connection = connect_once(&options, timeout, settings.tls_files()).await?;
    // Not prepared, so that any pooler will do.
    let ask = async {
        let micros = sqlx::raw_sql("SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint::text");
        let micros: String = micros.fetch_one(&mut connection).await?.try_get(0)?;
        micros.parse().map(Timestamp::from_unix_micros).map_err(|fault| sqlx::Error::Decode(Box::new(fault)))
    };
    let now = in_time(&options, timeout, ask).await?;
    // The answer is here; how the connection ends does not matter.
    let _ = tokio::time::timeout(ASKING_WHY, connection.close()).await;
    Ok(now)
}

/// A Postgres timestamp as a moment: both count microseconds.
#[must_use]
pub fn moment(time: OffsetDateTime) -> Timestamp {
    Timestamp::from_unix_micros(i64::try_from(time.unix_timestamp_nanos() / 1_000).unwrap_or(i64::MAX))
}

/// A `timestamptz` read as the number of microseconds that it is. `OffsetDateTime` panics on `infinity` and on years
/// its calendar does not have; here they are merely far away.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timestamptz(pub Timestamp);

/// 2000-01-01T00:00:00Z, where Postgres counts from (PostgreSQL source, `datatype/timestamp.h`).
const POSTGRES_EPOCH: Timestamp = Timestamp::from_unix_micros(946_684_800_000_000);

impl sqlx::Type<Postgres> for Timestamptz {
    fn type_info() -> PgTypeInfo {
        <OffsetDateTime as sqlx::Type<Postgres>>::type_info()
    }
}

impl<'r> sqlx::Decode<'r, Postgres> for Timestamptz {
    fn decode(value: PgValueRef<'r>) -> Result<Self, sqlx::error::BoxDynError> {
        // Binary, as every prepared statement answers: microseconds since the epoch, big-endian.
        let micros = i64::from_be_bytes(value.as_bytes()?.try_into()?);
        Ok(Self(Timestamp::from_unix_micros(micros.saturating_add(POSTGRES_EPOCH.unix_micros()))))
    }
}

impl<'q> sqlx::Encode<'q, Postgres> for Timestamptz {
    fn encode_by_ref(&self, buffer: &mut PgArgumentBuffer) -> Result<IsNull, sqlx::error::BoxDynError> {
        // The least number is Postgres' -infinity, the greatest its infinity.
        let micros = self.0.unix_micros().saturating_sub(POSTGRES_EPOCH.unix_micros());
        buffer.extend_from_slice(&micros.to_be_bytes());
        Ok(IsNull::No)
    }
}

/// A moment as a Postgres timestamp; `None` beyond the years the calendar has.
#[must_use]
pub fn timestamp(moment: Timestamp) -> Option<OffsetDateTime> {
    OffsetDateTime::from_unix_timestamp_nanos(i128::from(moment.unix_micros()) * 1_000).ok()
}

/// What kind of trouble an error is, for whoever must decide whether to try again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorClass {
    /// A lock that was not to be had in time.
    Locked,
    /// A deadlock, a serialization failure, a timeout, a full disk: try again.
    Transient,
    /// The data at hand: a constraint, a trigger, a value.
    Data,
    /// A statement that was in order when it was prepared is not any more: a table or a right was taken away, or the
    /// trigger of one row is broken, or cannot reach what it wants to. Which of the two, only trying it without rows can
    /// tell.
    Broken,
    /// Nothing will work as things stand: away, read-only, no connection left.
    Away,
}

/// Sorts an error by its SQLSTATE (PostgreSQL documentation, appendix A "Error Codes").
#[must_use]
pub fn classify(error: &sqlx::Error) -> ErrorClass {
    if matches!(error, sqlx::Error::ColumnDecode { .. } | sqlx::Error::Decode(_) | sqlx::Error::ColumnNotFound(_)) {
        // An answer that is not of the form the statement promised when it was prepared.
        return ErrorClass::Broken;
    }
    let Some(fault) = error.as_database_error().and_then(|fault| fault.try_downcast_ref::<PgDatabaseError>()) else {
        // Network, pool, protocol: no answer from the database at all.
        return ErrorClass::Away;
    };
    match fault.code() {
        // lock_not_available
        "55P03" => ErrorClass::Locked,
        // query_canceled, feature_not_supported (a cached plan after somebody's ALTER TABLE)
        "57014" | "0A000" => ErrorClass::Transient,
        // read_only_sql_transaction
        "25006" => ErrorClass::Away,
        // duplicate_prepared_statement: a pooler has changed servers
        "42P05" => ErrorClass::Transient,
        // invalid transaction state, invalid statement name (a pooler has changed servers), transaction rollback
        code if ["25", "26", "40"].contains(&&code[..2]) => ErrorClass::Transient,
        // insufficient resources, system error (a bad disk). Where the connection goes on, it may be one order's page that
        // cannot be read, or the other server that a trigger writes to: nobody's fault, but not everybody's trouble.
        code if ["53", "58"].contains(&&code[..2]) => match fault.severity() {
            PgSeverity::Panic | PgSeverity::Fatal => ErrorClass::Away,
            _ => ErrorClass::Transient,
        },
        // connection exception, invalid authorization, operator intervention: the server's own if it ends the connection.
        // What does not may be a trigger's, which failed to reach another server.
        code if ["08", "28", "57"].contains(&&code[..2]) => match fault.severity() {
            PgSeverity::Panic | PgSeverity::Fatal => ErrorClass::Away,
            _ => ErrorClass::Broken,
        },
        // data exception, integrity constraint violation, WITH CHECK OPTION violation, PL/pgSQL error (RAISE)
        code if ["22", "23", "44", "P0"].contains(&&code[..2]) => ErrorClass::Data,
        _ => ErrorClass::Broken,
    }
}

/// Whether it says that the database accepts no writes.
#[must_use]
pub fn is_read_only(error: &sqlx::Error) -> bool {
    // read_only_sql_transaction
    sqlstate(error).as_deref() == Some("25006")
}

/// Whether it says that a statement, as this connection has prepared it, does not fit what its tables are by now: sqlx
/// would try the same plan again and again.
fn keeps_a_plan_that_no_longer_fits(error: &sqlx::Error) -> bool {
    // feature_not_supported ("cached plan must not change result type"), invalid_sql_statement_name,
    // duplicate_prepared_statement
    matches!(sqlstate(error).as_deref(), Some("0A000" | "26000" | "42P05"))
}

/// The code that the server gave an error, if it is the server's (PostgreSQL documentation, appendix A "Error Codes").
fn sqlstate(error: &sqlx::Error) -> Option<Cow<'_, str>> {
    error.as_database_error().and_then(sqlx::error::DatabaseError::code)
}

/// An error in words for a person: what the server said and its SQLSTATE, without the line of the server's own source.
/// In one line, whatever a trigger says: nobody is to write lines into our log.
#[must_use]
pub fn one_line(error: &sqlx::Error) -> String {
    sanitize::one_line(&words(error)).into_owned()
}

/// What a page may say of a sentence of [`why`]'s. The pages hold no order, and the server's words may be a trigger's,
/// with ids in them: instead of words there are the SQLSTATE and its class. A sentence that has none is our own.
#[must_use]
pub fn without_the_servers_words(why: &str) -> Cow<'_, str> {
    let code = why.rsplit_once("(SQLSTATE ").and_then(|(_, behind)| behind.get(..5));
    let Some(code) = code.filter(|code| code.bytes().all(|byte| byte.is_ascii_alphanumeric())) else {
        return why.into();
    };
    let class = class_of(code);
    format!(
        "the server answers with an error of the class {class:?} (SQLSTATE {code}); its words stand in the worker's log"
    )
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
            // A sentence of our own.
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
    fn tells_the_client_the_server_of_the_address() {
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
    fn pages_hold_a_class_instead_of_words() {
        let of = |why: &str| without_the_servers_words(why).into_owned();
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

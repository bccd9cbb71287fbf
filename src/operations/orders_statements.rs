//! The statements of the orders contract that are in effect: the shop's own from files, or rendered from a mapping.
//!
//! Looks the mapped tables up in the catalog; runs none of these statements.

use order_timeout_core::kind::Kind;
use serde::Serialize;

use crate::config::Settings;
use crate::config::kinds::{self, OrdersOf};
use crate::effects::close::Closer;
use crate::effects::closing::ClaimedKind;
use crate::effects::sweep::Sweeper;
use crate::mapping::{KindFunction, MappingError, Questions, Rendered, default_tables, render};
use crate::observe::inspect::plan::Plans;
use crate::postgres::attempts;
use crate::postgres::catalog::{self, CatalogError};
use crate::postgres::contract::StatementSource;
use crate::postgres::grants;
use crate::postgres::kind_functions;
use crate::postgres::warm_connections::WarmConnections;
use crate::postgres::{Database, DatabaseError, one_line};

/// Where the statements come from.
#[derive(Debug, Clone)]
pub struct OrdersStatements {
    /// The orders table: `orders` for the default one, `statements` for statements in files, or the name of the mapped
    /// table; with the kind in front if it is not the default one, because two kinds may have one table.
    pub orders: String,
    /// What decides which of its orders are overdue; for the question whether a backlog was accepted.
    pub defined_by: DefinedBy,
    /// The statement that closes.
    pub close: StatementSource,
    /// The statement that finds overdue orders.
    pub overdue: StatementSource,
    /// Why no deadline can be moved, in one sentence; `None` if they can.
    pub why_not_moved: Option<String>,
    /// What a mapping tells operators about its table.
    pub questions: Option<Questions>,
    /// What moves deadlines, releases and pays its orders; none without a mapping of the shop's own.
    pub functions: Vec<KindFunction>,
}

/// What decides which orders are overdue. Where that is changed, other old orders may be found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DefinedBy {
    /// The default table.
    Schema,
    /// The overdue statement itself.
    Statement,
    /// The conditions and the deadline of a mapping.
    Mapping(String),
}

/// Finds the statements in effect for this kind.
///
/// # Errors
/// [`DatabaseError`] names the setting of the mapping that does not fit the table.
pub async fn statements(
    database: &Database,
    settings: &Settings,
    kind: &Kind,
) -> Result<OrdersStatements, DatabaseError> {
    let table = match settings.orders_of(kind) {
        Some(OrdersOf::Table(table)) if table.is_built_in => return Ok(of_default_tables(settings, kind)),
        Some(OrdersOf::Table(table)) => table,
        Some(OrdersOf::Statements { close_sql, overdue_sql }) => return Ok(of_files(kind, close_sql, overdue_sql)),
        Some(OrdersOf::Handler) | None => return Err(DatabaseError(why_no_orders(kind))),
    };
    let found = database.run(async |connection| Ok(catalog::facts(connection, table).await)).await;
    let found =
        found.map_err(|error| DatabaseError(format!("the mapped tables cannot be read: {}", one_line(&error))))?;
    let facts = found.map_err(|fault| match fault {
        CatalogError::Mapping(fault) => unfit(settings, kind, &fault),
        CatalogError::Database(_) => DatabaseError(fault.to_string()),
    })?;
    let rendered = render(&settings.words_of(kind), table, &facts);
    let rendered = rendered.map_err(|fault| unfit(settings, kind, &fault))?;
    let orders = remembered(kind, &format!("{}.{}", facts.orders.schema, facts.orders.name));
    let defined_by = DefinedBy::Mapping([&*table.open, &*table.paid, &*table.deadline].join("\n"));
    Ok(of_mapping(settings, kind, (orders, defined_by), rendered))
}

/// Without a look at the catalog. The schema's check names an index that is missing, and setup creates the functions.
fn of_default_tables(settings: &Settings, kind: &Kind) -> OrdersStatements {
    let rendered = default_tables::rendered().clone();
    let mut statements = of_mapping(settings, kind, ("orders".to_owned(), DefinedBy::Schema), rendered);
    if let StatementSource::Rendered { index, .. } = &mut statements.overdue {
        *index = None;
    }
    statements.functions = Vec::new();
    statements
}

fn of_mapping(
    settings: &Settings,
    kind: &Kind,
    (orders, defined_by): (String, DefinedBy),
    rendered: Rendered,
) -> OrdersStatements {
    let Rendered { close, overdue, why_not_moved, index, questions, functions } = rendered;
    let of = |what: &str, sql: String, index: Option<String>| StatementSource::Rendered {
        name: name(settings, kind, what),
        sql,
        index,
    };
    OrdersStatements {
        orders,
        defined_by,
        close: of("close", close, None),
        overdue: of("overdue", overdue, Some(index)),
        why_not_moved,
        questions: Some(questions),
        functions,
    }
}

/// Refuses a mapping whose functions are not in the database as it says. One without `pay` needs none for its worker.
///
/// # Errors
/// [`DatabaseError`] names them, and the command that creates them.
pub async fn require_functions(
    database: &Database,
    kind: &Kind,
    functions: &[KindFunction],
) -> Result<(), DatabaseError> {
    let is_there = async |what: &str| {
        let found = kind_functions::is_there(database, kind, what).await;
        found.map_err(|error| DatabaseError(one_line(&error)))
    };
    let is_mapped = |what: &str| functions.iter().any(|one| one.name == KindFunction::name_of(kind, what));
    let (pay, is_installed) = (is_mapped("pay"), is_there("close").await?);
    if pay && !is_mapped("attempts") && is_there("attempts").await? {
        return Err(DatabaseError(format!(
            "the database takes attempts to pay orders of kind {kind} over from a table of the shop's, but the settings have no {}; write it again, or DROP FUNCTION kind_{kind}_attempts",
            kinds::key_of(kind, "attempts")
        )));
    }
    if !pay && is_installed && (functions.is_empty() || is_there("pay").await?) {
        return Err(DatabaseError(format!(
            "the database has functions by which payments pay orders of kind {kind}, but the settings have no {}; write it again, or DROP FUNCTION IF EXISTS kind_{kind}_id, kind_{kind}_order, kind_{kind}_close, kind_{kind}_move, kind_{kind}_pay, kind_{kind}_attempts, kind_{kind}_consume, kind_{kind}_reopen",
            kinds::key_of(kind, "pay")
        )));
    }
    if pay || is_installed { require_installed(database, kind, functions).await } else { Ok(()) }
}

/// Refuses to move deadlines of orders whose table says no column for it, or whose functions are not in the database as the
/// mapping says.
///
/// # Errors
/// [`DatabaseError`] says what to do.
pub async fn require_movable(database: &Database, settings: &Settings, kind: &Kind) -> Result<(), DatabaseError> {
    let OrdersStatements { why_not_moved, functions, .. } = statements(database, settings, kind).await?;
    match why_not_moved {
        Some(why) => Err(DatabaseError(why)),
        None => require_installed(database, kind, &functions).await,
    }
}

/// Refuses functions that are not in the database as the mapping says.
///
/// # Errors
/// [`DatabaseError`] names them, and the command that creates them.
pub async fn require_installed(
    database: &Database,
    kind: &Kind,
    functions: &[KindFunction],
) -> Result<(), DatabaseError> {
    let missing = kind_functions::not_installed(database, functions).await;
    let missing = missing.map_err(|error| DatabaseError(one_line(&error)))?;
    if missing.is_empty() {
        return Ok(());
    }
    Err(DatabaseError(format!(
        "the functions of kind {kind} are not in the database as its mapping says ({}); run `order-timeout adopt --kind {kind} --install` as the owner of the schema",
        missing.join(", ")
    )))
}

/// The kind and the statement that closes its claimed orders, for what ends them.
///
/// # Errors
/// [`DatabaseError`] as of [`statements`], or if the kind's orders are never claimed.
pub async fn claimed_kind(database: &Database, settings: &Settings, kind: &Kind) -> Result<ClaimedKind, DatabaseError> {
    let close = match statements(database, settings, kind).await?.close {
        StatementSource::Rendered { sql, .. } if settings.claims_orders(kind) => sql,
        StatementSource::Rendered { .. } | StatementSource::File { .. } => {
            return Err(DatabaseError(format!(
                "orders of kind \"{kind}\" are never claimed, because neither the default tables nor a mapping with pay have them; end the order in your own table"
            )));
        }
    };
    Ok(ClaimedKind { kind: kind.clone(), close })
}

/// Refuses files of statements that cannot be read: a fault of the settings, which no database decides.
///
/// # Errors
/// [`DatabaseError`] names the setting and the file.
pub async fn require_readable_files(settings: &Settings, kind: &Kind) -> Result<(), DatabaseError> {
    if let Some(OrdersOf::Statements { close_sql, overdue_sql }) = settings.orders_of(kind) {
        let OrdersStatements { close, overdue, .. } = of_files(kind, close_sql, overdue_sql);
        close.text().await?;
        overdue.text().await?;
    }
    Ok(())
}

/// What a close statement reads that leaves such orders to a worker that can ask.
const GUARDS: [&str; 2] = ["orders_to_ask_about", "payment_attempts"];

/// Refuses to close orders by a statement that does not look at attempts to pay while some may bring money.
///
/// # Errors
/// [`DatabaseError`] says how many there are and what to do; or that they cannot be read.
pub async fn require_attempts_are_asked_about(
    database: &Database,
    kind: &Kind,
    close: &StatementSource,
) -> Result<(), DatabaseError> {
    let name = match close {
        StatementSource::Rendered { name, .. } => name.clone(),
        StatementSource::File { path, .. } => format!("{} ({path})", statement_setting(kind, "close_sql")),
    };
    let text = close.text().await?;
    if GUARDS.iter().any(|guard| text.contains(guard)) {
        return Ok(());
    }
    let count = attempts::count_open(database, kind).await;
    match count.map_err(|error| DatabaseError(format!("payment_attempts cannot be read: {}", one_line(&error))))? {
        0 => Ok(()),
        attempts => Err(DatabaseError(format!(
            "{name} would close orders without asking their payment providers: payment_attempts has {attempts} rows that may bring money; write the table's pay, or leave out what orders_to_ask_about returns in a statement of your own, or set their state to closed once the providers take no payment for them"
        ))),
    }
}

fn of_files(kind: &Kind, close_sql: &str, overdue_sql: &str) -> OrdersStatements {
    let of = |name: &str, path: &str| StatementSource::File {
        path: path.to_owned(),
        setting: Some(statement_setting(kind, name)),
    };
    OrdersStatements {
        orders: remembered(kind, "statements"),
        defined_by: DefinedBy::Statement,
        close: of("close_sql", close_sql),
        overdue: of("overdue_sql", overdue_sql),
        why_not_moved: Some(format!(
            "{} says that the orders table is your own: update its row yourself, and for an earlier deadline run `order-timeout schedule`",
            statement_setting(kind, "close_sql")
        )),
        questions: None,
        functions: Vec::new(),
    }
}

fn remembered(kind: &Kind, orders: &str) -> String {
    if kind.is_default() { orders.to_owned() } else { format!("{kind}: {orders}") }
}

/// The setting that names a file with a statement of this kind.
#[must_use]
pub fn statement_setting(kind: &Kind, name: &str) -> String {
    if kind.is_default() { format!("orders.{name}") } else { format!("kinds.{kind}.{name}") }
}

/// Why a kind has no statements.
#[must_use]
pub fn why_no_orders(kind: &Kind) -> String {
    format!(
        "the settings do not say where the orders of kind \"{kind}\" are; add [kinds.{kind}.table], or kinds.{kind}.close_sql and kinds.{kind}.overdue_sql, or correct the kind's name"
    )
}

/// The name of a rendered statement in errors.
fn name(settings: &Settings, kind: &Kind, what: &str) -> String {
    match settings.has_built_in_table(kind) {
        true => format!("the {what} statement of the default tables"),
        false => format!("the {what} statement of kinds.{kind}.table{}", from(settings, kind)),
    }
}

/// The names of a kind's close statement and overdue statement.
#[must_use]
pub fn names(settings: &Settings, kind: &Kind) -> (String, String) {
    match settings.orders_of(kind) {
        Some(OrdersOf::Table(_)) | None => (name(settings, kind, "close"), name(settings, kind, "overdue")),
        Some(OrdersOf::Statements { close_sql, overdue_sql }) => {
            let of = |setting: &str, file: &str| format!("{} ({file})", statement_setting(kind, setting));
            (of("close_sql", close_sql), of("overdue_sql", overdue_sql))
        }
        Some(OrdersOf::Handler) => {
            (format!("the handler of the kind {kind}"), format!("the handler of the kind {kind}"))
        }
    }
}

/// What looks at the plans of this kind's statements.
pub(crate) fn plans(settings: &Settings, kind: &Kind, closer: &Closer, sweeper: &Sweeper) -> Plans {
    let (close_name, overdue_name) = names(settings, kind);
    let own_close = (!settings.has_built_in_table(kind)).then_some((closer, close_name));
    Plans::new(sweeper, overdue_name, own_close)
}

/// ` (from shop.toml)`
#[must_use]
pub fn from(settings: &Settings, kind: &Kind) -> String {
    let origin = settings.kinds.get(kind).and_then(|kind| kind.origin.as_ref());
    origin.map_or_else(String::new, |origin| format!(" (from {origin})"))
}

/// The sentence about a mapping that does not fit, with its setting and where that came from.
pub fn unfit(settings: &Settings, kind: &Kind, MappingError { key, why }: &MappingError) -> DatabaseError {
    DatabaseError(format!("setting {}{}: {why}", kinds::key_of(kind, key), from(settings, kind)))
}

/// The sentence about the rights on a mapping's tables that the worker's role lacks, with all `GRANT` statements; `None`
/// if there are none.
///
/// # Errors
/// [`DatabaseError`] if the database does not answer.
pub async fn lacking_rights(
    database: &Database,
    settings: &Settings,
    kind: &Kind,
) -> Result<Option<String>, DatabaseError> {
    let Some(table) = settings.table_of(kind) else { return Ok(None) };
    let missing = database.run(async |connection| grants::missing(connection, table).await).await;
    let missing = missing.map_err(|error| DatabaseError(one_line(&error)))?;
    Ok((!missing.is_empty()).then(|| grants::sentence(&missing)))
}

/// The texts of the statements in effect.
#[derive(Debug, Serialize)]
pub struct StatementTexts {
    /// The statement that closes.
    pub close: String,
    /// The statement that finds overdue orders.
    pub overdue: String,
    /// The statements of `adopt --install`; for the default tables those of `setup`.
    pub functions: Vec<String>,
}

/// The statements in effect for this kind, prepared on the database.
///
/// # Errors
/// [`DatabaseError`] names what cannot be prepared, or all rights that the role lacks.
pub async fn texts(database: &Database, settings: &Settings, kind: &Kind) -> Result<StatementTexts, DatabaseError> {
    if let Some(sentence) = lacking_rights(database, settings, kind).await? {
        return Err(DatabaseError(sentence));
    }
    let found = statements(database, settings, kind).await?;
    let functions = match settings.has_built_in_table(kind) {
        true => default_tables::rendered().functions.clone(),
        false => found.functions,
    };
    let closer = Closer::prepare(WarmConnections::new(database.clone()), found.close).await?;
    let sweeper = Sweeper::prepare(database.clone(), found.overdue).await?;
    Ok(StatementTexts {
        close: closer.statement().0.as_str().to_owned(),
        overdue: sweeper.statement().as_str().to_owned(),
        functions: functions.iter().map(KindFunction::create).collect(),
    })
}

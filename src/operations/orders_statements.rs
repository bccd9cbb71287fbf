//! The statements of the orders contract that are in effect: ours, the shop's own from files, or rendered from a
//! mapping.
//!
//! Looks the mapped tables up in the catalog; runs no statement.

use serde::Serialize;

use crate::config::Settings;
use crate::config::kinds;
use crate::effects::close::Closer;
use crate::effects::sweep::Sweeper;
use crate::mapping::{MappingError, Rendered, render};
use crate::postgres::catalog::{self, CatalogError};
use crate::postgres::contract::StatementSource;
use crate::postgres::warm_connections::WarmConnections;
use crate::postgres::{Database, DatabaseError, one_line};

/// `sql/deadline.sql`.
const DEADLINE_SQL: &str = include_str!("../../sql/deadline.sql");

/// Where the statements come from.
#[derive(Debug, Clone)]
pub struct OrdersStatements {
    /// The orders table: `orders` for the default one, `statements` for statements in files, or the name of the mapped
    /// table.
    pub orders: String,
    /// What decides which of its orders are overdue; for the question whether a backlog was accepted.
    pub defined_by: DefinedBy,
    /// The statement that closes.
    pub close: StatementSource,
    /// The statement that finds overdue orders.
    pub overdue: StatementSource,
    /// The statement that moves a deadline.
    pub deadline: DeadlineStatement,
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

/// The statement that moves a deadline.
#[derive(Debug, Clone)]
pub enum DeadlineStatement {
    /// With the parameters and columns of `sql/deadline.sql`.
    Sql(String),
    /// One sentence.
    CannotBeMoved(&'static str),
}

/// Finds the statements in effect.
///
/// # Errors
/// [`DatabaseError`] names the setting of the mapping that does not fit the table.
pub async fn statements(database: &Database, settings: &Settings) -> Result<OrdersStatements, DatabaseError> {
    let Some(table) = settings.orders_table() else { return Ok(without_mapping(settings)) };
    let found = database.run(async |connection| Ok(catalog::facts(connection, table).await)).await;
    let found =
        found.map_err(|error| DatabaseError(format!("the mapped tables cannot be read: {}", one_line(&error))))?;
    let facts = found.map_err(|fault| match fault {
        CatalogError::Mapping(fault) => unfit(settings, &fault),
        CatalogError::Database(_) => DatabaseError(fault.to_string()),
    })?;
    let Rendered { close, overdue, deadline, index } =
        render(table, &facts).map_err(|fault| unfit(settings, &fault))?;
    let of = |what: &str, sql: String, index: Option<String>| StatementSource::Rendered {
        name: name(settings, what),
        sql,
        index,
    };
    Ok(OrdersStatements {
        orders: format!("{}.{}", facts.orders.schema, facts.orders.name),
        defined_by: DefinedBy::Mapping([&*table.open, &*table.paid, &*table.deadline].join("\n")),
        close: of("close", close, None),
        overdue: of("overdue", overdue, Some(index)),
        deadline: deadline.map_or(
            DeadlineStatement::CannotBeMoved(
                "kinds.order.table.deadline is an expression, so there is no column to move: update the columns that it is made of yourself, and for an earlier deadline run `order-timeout schedule`",
            ),
            DeadlineStatement::Sql,
        ),
    })
}

fn without_mapping(settings: &Settings) -> OrdersStatements {
    let orders = &settings.orders;
    let is_default = orders.close_sql.is_empty();
    OrdersStatements {
        orders: if is_default { "orders" } else { "statements" }.to_owned(),
        defined_by: if is_default { DefinedBy::Schema } else { DefinedBy::Statement },
        close: (&orders.close_sql).into(),
        overdue: (&orders.overdue_sql).into(),
        deadline: if is_default {
            DeadlineStatement::Sql(DEADLINE_SQL.to_owned())
        } else {
            DeadlineStatement::CannotBeMoved(
                "orders.close_sql says that the orders table is your own: update its row yourself, and for an earlier deadline run `order-timeout schedule`",
            )
        },
    }
}

/// The name of a rendered statement in errors.
fn name(settings: &Settings, what: &str) -> String {
    format!("the {what} statement of kinds.order.table{}", from(settings))
}

/// The names of the close statement and the overdue statement.
#[must_use]
pub fn names(settings: &Settings) -> (String, String) {
    if settings.orders_table().is_some() {
        return (name(settings, "close"), name(settings, "overdue"));
    }
    let of = |setting: &str, file: &str, own: &str| {
        if file.is_empty() { own.to_owned() } else { format!("{setting} ({file})") }
    };
    let orders = &settings.orders;
    (
        of("orders.close_sql", &orders.close_sql, "sql/close.sql"),
        of("orders.overdue_sql", &orders.overdue_sql, "sql/overdue.sql"),
    )
}

/// ` (from shop.toml)`
#[must_use]
pub fn from(settings: &Settings) -> String {
    let origin = settings.kinds.get(kinds::ORDER).and_then(|kind| kind.origin.as_ref());
    origin.map_or_else(String::new, |origin| format!(" (from {origin})"))
}

fn unfit(settings: &Settings, MappingError { key, why }: &MappingError) -> DatabaseError {
    DatabaseError(format!("setting {}{}: {why}", kinds::key_of(key), from(settings)))
}

/// The texts of the statements in effect.
#[derive(Debug, Serialize)]
pub struct StatementTexts {
    /// The statement that closes.
    pub close: String,
    /// The statement that finds overdue orders.
    pub overdue: String,
    /// `None` if the deadline cannot be moved by a statement.
    pub deadline: Option<String>,
}

/// The statements in effect, prepared on the database.
///
/// # Errors
/// [`DatabaseError`] names what cannot be prepared.
pub async fn texts(database: &Database, settings: &Settings) -> Result<StatementTexts, DatabaseError> {
    let found = statements(database, settings).await?;
    let closer = Closer::prepare(WarmConnections::new(database.clone()), found.close).await?;
    let sweeper = Sweeper::prepare(database.clone(), found.overdue).await?;
    Ok(StatementTexts {
        close: closer.statement().0.as_str().to_owned(),
        overdue: sweeper.statement().as_str().to_owned(),
        deadline: match found.deadline {
            DeadlineStatement::Sql(sql) => Some(sql),
            DeadlineStatement::CannotBeMoved(_) => None,
        },
    })
}

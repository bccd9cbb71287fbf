//! What the catalog says about the tables of a mapping: their columns and types, and the types of the operator's
//! expressions.
//!
//! Reads the catalog and prepares statements; reads no row and changes nothing.

use sqlx::{AssertSqlSafe, Column, Executor, PgConnection, Row, SqlSafeStr, Statement as _, TypeInfo};

use super::one_line;
use crate::config::kinds::{AttemptsSettings, StockSettings, TableSettings};
use crate::mapping::{ColumnType, Facts, MappingError, Relation, RelationKind, ids, predicate, quote};

/// Why the facts of a mapping are not known.
#[derive(Debug, thiserror::Error)]
pub enum CatalogError {
    /// The mapping does not fit.
    #[error(transparent)]
    Mapping(#[from] MappingError),
    /// The database did not answer.
    #[error("the tables of the mapping cannot be read: {}", one_line(.0))]
    Database(#[from] sqlx::Error),
}

const COLUMNS: &str = "
SELECT n.nspname::text, c.relname::text, c.relkind::text, a.attname::text,
       b.typname::text, format_type(a.atttypid, a.atttypmod)
FROM pg_class c
JOIN pg_namespace n ON n.oid = c.relnamespace
JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
-- A domain may be of a domain.
CROSS JOIN LATERAL (
    WITH RECURSIVE below (typname, typbasetype) AS (
        SELECT t.typname, t.typbasetype FROM pg_type t WHERE t.oid = a.atttypid
        UNION ALL SELECT t.typname, t.typbasetype FROM below JOIN pg_type t ON t.oid = below.typbasetype
    )
    SELECT typname FROM below WHERE typbasetype = 0
) b
WHERE c.oid = to_regclass($1)
ORDER BY a.attnum";

/// The facts that a mapping is rendered with.
///
/// # Errors
/// [`CatalogError`] names the setting that does not fit.
pub async fn facts(connection: &mut PgConnection, table: &TableSettings) -> Result<Facts, CatalogError> {
    let orders = relation(connection, "table", &table.table).await?;
    for (key, condition) in [("open", &table.open), ("paid", &table.paid)] {
        let found = type_of(connection, key, condition, &orders).await?;
        if let Some(why) = why_no_condition(&found) {
            return Err(MappingError::new(key, why).into());
        }
    }
    require_volatile(connection, table).await?;
    require_values(connection, table, &orders).await?;
    let deadline_type = type_of(connection, "deadline", &table.deadline, &orders).await?;
    if let Some(zone) = &table.time_zone {
        require_zone(connection, zone).await?;
    }
    let money_fault = match require_money(connection, table, &orders).await {
        Err(CatalogError::Mapping(fault)) => Some(fault),
        found => {
            found?;
            None
        }
    };
    let attempts = match &table.attempts {
        Some(attempts) => Some(attempts_relation(connection, table, attempts).await?),
        None => None,
    };
    let mut stock = Vec::new();
    for (index, settings) in table.stock.iter().enumerate() {
        let setting = format!("stock[{index}]");
        let found = stock_relations(connection, &setting, settings).await?;
        require_own_stock(&format!("{setting}.table"), &orders, &found.1, &stock)?;
        stock.push(found);
    }
    let search_path: Vec<String> =
        sqlx::query_scalar("SELECT current_schemas(false)::text[]").fetch_one(&mut *connection).await?;
    let changed: Vec<&Relation> = std::iter::once(&orders).chain(stock.iter().map(|(_, stock)| stock)).collect();
    for (index, also) in table.also.iter().enumerate() {
        require_other_table(&format!("also[{index}].sql"), &also.sql, &changed, &search_path)?;
    }
    Ok(Facts { orders, deadline_type, attempts, stock, status: None, money_fault })
}

/// The items and the stock of an entry of `stock`.
async fn stock_relations(
    connection: &mut PgConnection,
    setting: &str,
    settings: &StockSettings,
) -> Result<(Relation, Relation), CatalogError> {
    let key = |name: &str| format!("{setting}.{name}");
    let items = relation(connection, &key("items"), &settings.items).await?;
    let stock = relation(connection, &key("table"), &settings.table).await?;
    type_of(connection, &key("quantity"), &settings.quantity, &items).await?;
    if let Some(left) = &settings.left {
        let found = type_as(connection, &key("left"), left, &stock, "stock").await?;
        if !["INT2", "INT4", "INT8", "NUMERIC", "FLOAT4", "FLOAT8"].contains(&found.as_str()) {
            let why = format!("is {}; write an expression of a number, such as \"available\"", found.to_lowercase());
            return Err(MappingError::new(key("left"), why).into());
        }
    }
    Ok((items, stock))
}

/// The shop's own table of attempts to pay, whose expressions have the types that ours has.
async fn attempts_relation(
    connection: &mut PgConnection,
    table: &TableSettings,
    settings: &AttemptsSettings,
) -> Result<Relation, CatalogError> {
    let attempts = relation(connection, "attempts.table", &settings.table).await?;
    for column in &settings.order.0 {
        // One that is equal to an id and printed otherwise, as 1.00 is to 1, would not be found again.
        let printed_otherwise = |kind: &&ColumnType| kind.base == "citext" || !ids::TYPES.contains(&kind.base.as_str());
        if let Some(kind) = attempts.columns.get(column).filter(printed_otherwise) {
            let why = format!(
                "names {column}, which is {}, and is printed otherwise than an id; name a column of the id's type",
                kind.sql
            );
            return Err(MappingError::new("attempts.order", why).into());
        }
    }
    for (name, expression) in settings.expressions() {
        let key = format!("attempts.{name}");
        let found = type_of(connection, &key, expression, &attempts).await?;
        let why = match (name, found.as_str()) {
            ("open", found) => why_no_condition(found),
            ("created_at" | "payable_until", "TIMESTAMPTZ") => None,
            ("created_at" | "payable_until", other) => Some(format!(
                "is {}, which names no moment; write an expression of type timestamptz, such as \"expires AT TIME ZONE 'UTC'\"",
                other.to_lowercase()
            )),
            ("amount", found) => why_no_amount(table, found),
            ("currency", found) => why_no_currency(found),
            _ => None,
        };
        if let Some(why) = why {
            return Err(MappingError::new(key, why).into());
        }
    }
    Ok(attempts)
}

/// An amount is a number, of which is known how many there are of the smallest unit; a currency is a text.
async fn require_money(
    connection: &mut PgConnection,
    table: &TableSettings,
    orders: &Relation,
) -> Result<(), CatalogError> {
    if let Some(amount) = &table.amount {
        let found = type_of(connection, "amount", amount, orders).await?;
        if let Some(why) = why_no_amount(table, &found) {
            return Err(MappingError::new("amount", why).into());
        }
    }
    if let Some(currency) = &table.currency {
        let found = type_of(connection, "currency", currency, orders).await?;
        if let Some(why) = why_no_currency(&found) {
            return Err(MappingError::new("currency", why).into());
        }
    }
    Ok(())
}

fn why_no_condition(found: &str) -> Option<String> {
    (found != "BOOL").then(|| format!("is {}, not a condition; compare it with something", found.to_lowercase()))
}

fn why_no_amount(table: &TableSettings, found: &str) -> Option<String> {
    match found {
        "INT2" | "INT4" | "INT8" => None,
        "NUMERIC" if table.minor_units.is_some() => None,
        "NUMERIC" => Some("is numeric, of which minor_units is not given; write minor_units = 2 for an amount such as 49.99, or 0 if it counts cents".to_owned()),
        other => Some(format!("is {}; write an expression of type bigint or numeric", other.to_lowercase())),
    }
}

/// An enum is a currency too: what matters is the word that Postgres prints.
fn why_no_currency(found: &str) -> Option<String> {
    ["BOOL", "INT2", "INT4", "INT8", "NUMERIC", "FLOAT4", "FLOAT8"].contains(&found).then(|| {
        format!(
            "is {}, not three letters; write such as \"'EUR'\", or name a column that has them",
            found.to_lowercase()
        )
    })
}

/// A STABLE function reads what was committed when the statement began, possibly before the order's row was locked.
async fn require_volatile(connection: &mut PgConnection, table: &TableSettings) -> Result<(), CatalogError> {
    for (key, condition) in [("open", &table.open), ("paid", &table.paid)] {
        let called = predicate::called_functions(condition);
        // By name, because an expression has no dependencies before it is stored. Those of Postgres itself read no table.
        let stable: Option<String> = sqlx::query_scalar(
            "SELECT p.oid::regprocedure::text FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace
             WHERE (n.nspname || '.' || p.proname = ANY ($1) OR p.proname = ANY ($1) AND pg_function_is_visible(p.oid))
               AND p.provolatile = 's' AND n.nspname <> 'pg_catalog'
             ORDER BY 1 LIMIT 1",
        )
        .bind(called)
        .fetch_optional(&mut *connection)
        .await?;
        if let Some(function) = stable {
            let why = format!(
                "calls {function}, which is STABLE and reads what was committed before the order's row was locked, so that a payment in the same instant would be missed; ALTER FUNCTION {function} VOLATILE"
            );
            return Err(MappingError::new(key, why).into());
        }
    }
    Ok(())
}

/// A value of `close`, `closing`, `pay` or `reopen` that its column's type does not have, such as an expression.
async fn require_values(
    connection: &mut PgConnection,
    table: &TableSettings,
    orders: &Relation,
) -> Result<(), CatalogError> {
    let settings = [
        ("close", table.close.columns()),
        ("closing", table.closing.as_ref()),
        ("pay", table.pay.as_ref()),
        ("reopen", table.reopen.as_ref()),
    ];
    let mut written = Vec::new();
    for (setting, columns) in settings {
        written.extend(columns.into_iter().flatten().map(|(column, value)| (setting, column, value)));
    }
    for (setting, column, value) in
        written.into_iter().filter(|(_, _, value)| !["now", "null"].contains(&value.as_str()))
    {
        let Some(kind) = orders.columns.get(column) else { continue };
        let select = format!("SELECT {}::{}", quote::literal(value), kind.sql);
        match connection.prepare(AssertSqlSafe(select).into_sql_str()).await {
            Err(error) if error.as_database_error().is_some() => {
                let why = format!(
                    "is {value:?}, which the column cannot be: {}; write one value, \"now\" or \"null\". An expression is not possible: a trigger of the table can raise a counter such as lock_version",
                    one_line(&error)
                );
                return Err(MappingError::new(format!("{setting}.{column}"), why).into());
            }
            prepared => drop(prepared?),
        }
    }
    Ok(())
}

/// What a statement of the shop's own must not change, because the close statement changes it already.
fn require_other_table(
    key: &str,
    statement: &str,
    changed: &[&Relation],
    search_path: &[String],
) -> Result<(), MappingError> {
    let Some((schema, table)) = predicate::changed_table(statement).and_then(|name| quote::parts(&name)) else {
        return Ok(());
    };
    let is_same = |relation: &&&Relation| {
        relation.name == table
            && match &schema {
                Some(schema) => *schema == relation.schema,
                None => search_path.contains(&relation.schema),
            }
    };
    let Some(same) = changed.iter().find(is_same) else { return Ok(()) };
    let why = format!(
        "changes {}, which the close changes already, so one of two changes of a row would be lost; write it in close or in the give_back of its stock",
        same.qualified()
    );
    Err(MappingError::new(key, why))
}

/// One statement changes each row once: a second change of the same row would be lost.
fn require_own_stock(
    key: &str,
    orders: &Relation,
    stock: &Relation,
    before: &[(Relation, Relation)],
) -> Result<(), MappingError> {
    let is_same = |other: &Relation| (&other.schema, &other.name) == (&stock.schema, &stock.name);
    if !is_same(orders) && !before.iter().any(|(_, other)| is_same(other)) {
        return Ok(());
    }
    let why = format!(
        "is {}, which the same statement changes already, so one of the changes would be lost; combine them into one entry",
        stock.qualified()
    );
    Err(MappingError::new(key, why))
}

/// The relation of this name as it is written in a setting; `key` is the setting.
///
/// # Errors
/// [`CatalogError`] if there is no such relation.
pub async fn relation(connection: &mut PgConnection, key: &str, written: &str) -> Result<Relation, CatalogError> {
    let Some((schema, table)) = quote::parts(written) else {
        let why = format!("{written:?} is no name of a table; write it as public.orders, or as \"My.Schema\".orders");
        return Err(MappingError::new(key, why).into());
    };
    let quoted = match &schema {
        Some(schema) => format!("{}.{}", quote::name(schema), quote::name(&table)),
        None => quote::name(&table),
    };
    let rows = sqlx::query(COLUMNS).bind(&quoted).fetch_all(connection).await?;
    let Some(first) = rows.first() else {
        let why = format!(
            "there is no table {quoted} that the worker's role can see; correct the name, write it with its schema, or GRANT USAGE on the schema"
        );
        return Err(MappingError::new(key, why).into());
    };
    let kind = match first.try_get::<String, _>(2)?.as_str() {
        "r" => RelationKind::Table,
        "p" => RelationKind::PartitionedTable,
        "v" => RelationKind::View,
        "m" => RelationKind::MaterializedView,
        "f" => RelationKind::ForeignTable,
        _ => RelationKind::Other,
    };
    let columns =
        rows.iter().map(|row| Ok((row.try_get(3)?, ColumnType { base: row.try_get(4)?, sql: row.try_get(5)? })));
    Ok(Relation {
        schema: first.try_get(0)?,
        name: first.try_get(1)?,
        kind,
        columns: columns.collect::<Result<_, sqlx::Error>>()?,
    })
}

/// The type of an expression on a row of this relation, by the client's name for it.
async fn type_of(
    connection: &mut PgConnection,
    key: &str,
    expression: &str,
    relation: &Relation,
) -> Result<String, CatalogError> {
    type_as(connection, key, expression, relation, &relation.name).await
}

/// The same, where the statement calls the relation `alias`.
async fn type_as(
    connection: &mut PgConnection,
    key: &str,
    expression: &str,
    relation: &Relation,
    alias: &str,
) -> Result<String, CatalogError> {
    let select = format!("SELECT ({expression}\n) AS value FROM {} AS {}", relation.qualified(), quote::name(alias));
    // The expression is configuration: the operator who sets it may run any SQL anyway. It is prepared, not run.
    let prepared = connection.prepare(AssertSqlSafe(select).into_sql_str()).await;
    match prepared {
        Ok(statement) => Ok(statement.columns()[0].type_info().name().to_owned()),
        Err(error) if error.as_database_error().is_some() => {
            let why = format!("cannot be used with {}: {}; correct it", relation.qualified(), one_line(&error));
            Err(MappingError::new(key, why).into())
        }
        Err(error) => Err(error.into()),
    }
}

/// Why a rendered statement cannot be prepared; `None` if it can.
///
/// # Errors
/// sqlx's, if the database does not answer.
pub async fn why_not_prepared(connection: &mut PgConnection, sql: &str) -> Result<Option<String>, sqlx::Error> {
    match connection.prepare(AssertSqlSafe(sql.to_owned()).into_sql_str()).await {
        Err(error) if error.as_database_error().is_some() => Ok(Some(one_line(&error))),
        prepared => prepared.map(|_| None),
    }
}

async fn require_zone(connection: &mut PgConnection, zone: &str) -> Result<(), CatalogError> {
    // By name: Postgres takes a text such as UTC+8 for a zone of its own, eight hours west of Greenwich.
    let is_known = sqlx::query_scalar("SELECT EXISTS (SELECT FROM pg_timezone_names WHERE lower(name) = lower($1))");
    if is_known.bind(zone).fetch_one(connection).await? {
        return Ok(());
    }
    let why = format!(
        "{zone:?} is no zone that the database knows; take a name from pg_timezone_names, such as \"Asia/Shanghai\""
    );
    Err(MappingError::new("time_zone", why).into())
}

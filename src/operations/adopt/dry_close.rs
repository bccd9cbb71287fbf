//! Closes up to ten overdue orders in a transaction that is rolled back, and reports what it would have changed.
//!
//! Uses the statements in effect. Holds its locks for the time of one batch.

use std::time::Duration;

use order_timeout_client::postgres::Timestamptz;
use order_timeout_core::order::Timestamp;
use sqlx::{AssertSqlSafe, Connection, PgConnection, Row, SqlStr};

use crate::config::kinds::{AlsoSettings, StockSettings, TableSettings};
use crate::effects::close::with_arguments;
use crate::effects::sweep::read_row;
use crate::mapping::{Facts, Relation, ids, predicate, quote};
use crate::postgres::one_line;

/// Orders that are tried.
pub(super) const TRIED: i64 = 10;
/// Every deadline that a shop has.
pub(super) const FAR: Duration = Duration::from_secs(100 * 365 * 86_400);
/// Stock rows that are shown.
const EXAMPLES: usize = 3;

/// What a rolled-back close has shown.
#[derive(Debug, Default)]
pub struct DryClose {
    /// How many orders were tried.
    pub tried: usize,
    /// Those that no other session has ended meanwhile, with their outcomes; an error's sentence where the close failed.
    pub outcomes: Vec<(String, Result<String, String>)>,
    /// Those that the overdue statement found again after they were closed.
    pub found_again: Vec<String>,
    /// For each `give_back`, by the place of its stock: rows that the closed orders need, and how many of them changed.
    pub stock: Vec<(usize, StockChange)>,
    /// For each `also`: the rows that it changed in the table that it names; `None` for a SELECT.
    pub also: Vec<Option<i64>>,
}

/// What a close would have changed in one stock table.
#[derive(Debug)]
pub struct StockChange {
    pub stock: String,
    pub needed: usize,
    pub changed: usize,
    /// Whether two of the orders have an item for the same row.
    pub is_shared: bool,
    /// Some of the rows: before, and after.
    pub examples: Vec<(String, String)>,
}

/// Runs it.
///
/// # Errors
/// sqlx's, if the overdue statement fails or the database does not answer.
pub async fn run(
    connection: &mut PgConnection,
    close: (&SqlStr, usize),
    overdue: &SqlStr,
    mapping: Option<(&TableSettings, &Facts)>,
) -> Result<DryClose, sqlx::Error> {
    let mut transaction = connection.begin().await?;
    let tried = overdue_ids(&mut transaction, overdue, TRIED).await?;
    let mut dry = DryClose { tried: tried.len(), ..DryClose::default() };
    if tried.is_empty() {
        return Ok(dry);
    }
    let mut before = Vec::new();
    if let Some((table, facts)) = mapping {
        before = needed_stock(&mut transaction, table, facts, |stock| !stock.give_back.is_empty(), &tried).await?;
    }
    let alsos = mapping.map_or(&[][..], |(table, _)| table.also.as_slice());
    let changed_before = changed_rows(&mut transaction, alsos).await?;
    let outcomes = close_tried(&mut transaction, close, &tried).await;
    dry.outcomes = outcomes.into_iter().map(|(id, outcome)| (id, outcome.map_err(|error| one_line(&error)))).collect();
    let is_closed = |outcome: &Result<String, String>| outcome.as_deref() == Ok("closed");
    let closed = |id: &String| dry.outcomes.iter().any(|(one, outcome)| one == id && is_closed(outcome));
    dry.found_again = overdue_ids(&mut transaction, overdue, TRIED * 2).await?.into_iter().filter(closed).collect();
    dry.stock = compare(&mut transaction, before).await?;
    let changed = changed_rows(&mut transaction, alsos).await?;
    dry.also = changed.into_iter().zip(changed_before).map(|(now, before)| Some(now? - before?)).collect();
    transaction.rollback().await?;
    // Behind the rollback, so that only what other sessions have done counts: an order that they have closed or paid since it
    // was found is not to blame.
    let overdue_now = overdue_ids(connection, overdue, TRIED * 2).await?;
    dry.outcomes.retain(|(id, outcome)| is_closed(outcome) || overdue_now.contains(id));
    Ok(dry)
}

/// How many rows of the table that each statement changes this transaction has changed.
async fn changed_rows(connection: &mut PgConnection, alsos: &[AlsoSettings]) -> Result<Vec<Option<i64>>, sqlx::Error> {
    let mut changed = Vec::new();
    for also in alsos {
        // A partitioned table's rows are counted at its partitions.
        let count = sqlx::query_scalar(
            "SELECT sum(n_tup_ins + n_tup_upd + n_tup_del)::bigint FROM pg_stat_xact_all_tables
             WHERE relid = to_regclass($1)
                OR relid IN (SELECT t.relid FROM pg_partition_tree(to_regclass($1)) t)",
        );
        let table = predicate::changed_table(&also.sql);
        changed.push(count.bind(table).fetch_one(&mut *connection).await?);
    }
    Ok(changed)
}

/// The first overdue orders.
pub(super) async fn overdue_ids(
    connection: &mut PgConnection,
    overdue: &SqlStr,
    limit: i64,
) -> Result<Vec<String>, sqlx::Error> {
    ids_due_by(connection, overdue, limit, Duration::ZERO).await
}

/// The same of orders that are due within `ahead`.
pub(super) async fn ids_due_by(
    connection: &mut PgConnection,
    overdue: &SqlStr,
    limit: i64,
    ahead: Duration,
) -> Result<Vec<String>, sqlx::Error> {
    let rows = sqlx::query(overdue.clone())
        .bind(-ahead.as_secs_f64())
        .bind(Timestamptz(Timestamp::from_unix_micros(i64::MIN)))
        .bind("")
        .bind(limit)
        .fetch_all(connection)
        .await?;
    let found = rows.iter().map(read_row).collect::<Result<Vec<_>, _>>()?;
    Ok(found.into_iter().filter_map(|(_, order)| Some(order?.order_id.to_string())).collect())
}

/// What the close says of each order; after an error the transaction is as before.
pub(super) async fn close_tried(
    connection: &mut PgConnection,
    close: (&SqlStr, usize),
    tried: &[String],
) -> Vec<(String, Result<String, sqlx::Error>)> {
    if let Ok(outcomes) = close_all(connection, close, tried).await {
        return outcomes.into_iter().map(|(id, outcome)| (id, Ok(outcome))).collect();
    }
    // One by one, to name the order that the error is about.
    let mut outcomes = Vec::new();
    for id in tried {
        let outcome = close_all(connection, close, std::slice::from_ref(id)).await;
        let outcome = outcome.map(|found| found.into_iter().next().map_or("unknown".to_owned(), |(_, word)| word));
        outcomes.push((id.clone(), outcome));
    }
    outcomes
}

async fn close_all(
    connection: &mut PgConnection,
    (sql, parameters): (&SqlStr, usize),
    ids: &[String],
) -> Result<Vec<(String, String)>, sqlx::Error> {
    let ids: Vec<&str> = ids.iter().map(String::as_str).collect();
    let mut savepoint = connection.begin().await?;
    let query = with_arguments((sql.clone(), parameters), &ids, "manual", true);
    let rows = match query.fetch_all(&mut *savepoint).await {
        Ok(rows) => rows,
        Err(error) => {
            savepoint.rollback().await?;
            return Err(error);
        }
    };
    savepoint.commit().await?;
    rows.iter().map(|row| Ok((row.try_get("order_id")?, row.try_get("outcome")?))).collect()
}

/// An entry of `stock`, and its rows that the tried orders need.
pub(super) struct NeededStock<'a> {
    /// Its place in the list.
    index: usize,
    settings: &'a StockSettings,
    stock: &'a Relation,
    rows: Vec<StockRow>,
}

impl NeededStock<'_> {
    /// How many rows.
    pub(super) fn len(&self) -> usize {
        self.rows.len()
    }
}

/// A stock row that the tried orders need.
struct StockRow {
    /// The values of its key, as text.
    key: Vec<String>,
    row: String,
    /// How many of the orders need it.
    orders: i64,
}

/// The stock that these orders need, of the entries that are wanted.
pub(super) async fn needed_stock<'a>(
    connection: &mut PgConnection,
    table: &'a TableSettings,
    facts: &'a Facts,
    is_wanted: impl Fn(&StockSettings) -> bool,
    ids: &[String],
) -> Result<Vec<NeededStock<'a>>, sqlx::Error> {
    let mut needed = Vec::new();
    let entries = table.stock.iter().zip(&facts.stock).enumerate().filter(|(_, (settings, _))| is_wanted(settings));
    for (index, (settings, relations)) in entries {
        let rows = needed_rows(connection, settings, relations, ids).await?;
        needed.push(NeededStock { index, settings, stock: &relations.1, rows });
    }
    Ok(needed)
}

async fn needed_rows(
    connection: &mut PgConnection,
    settings: &StockSettings,
    (items, stock): &(Relation, Relation),
    ids: &[String],
) -> Result<Vec<StockRow>, sqlx::Error> {
    let columns = |alias: &str, names: &[String]| {
        names.iter().map(|name| format!("{alias}.{}", quote::name(name))).collect::<Vec<_>>()
    };
    let (order, key) = (columns("i", &settings.order.0), columns("i", &settings.key.0));
    let stock_key = columns("s", &settings.stock_key.0);
    let of = order.len();
    // Each id once, as its columns' types, so that the items are found through their index.
    let asked: Vec<String> = (1..)
        .zip(&settings.order.0)
        .map(|(number, column)| {
            let part = ids::part("t.text_id", number, of);
            let parsed = items.columns.get(column).map_or(part.clone(), |kind| ids::parse(kind, &part));
            format!("{parsed} AS k{number}")
        })
        .collect();
    let wanted: Vec<String> =
        (1..).zip(&order).map(|(number, column): (usize, _)| format!("{column} = a.k{number}")).collect();
    let matches: Vec<String> = stock_key.iter().zip(&key).map(|(s, i)| format!("{s} = {i}")).collect();
    let texts: Vec<String> = stock_key.iter().map(|column| format!("{column}::text")).collect();
    let select = format!(
        "WITH asked AS MATERIALIZED (SELECT t.text_id, {} FROM unnest($1::text[]) AS t (text_id))
         SELECT ARRAY[{}], to_jsonb(s)::text, count(DISTINCT a.text_id)
         FROM asked a JOIN {} i ON {} JOIN {} s ON {} GROUP BY 1, 2",
        asked.join(", "),
        texts.join(", "),
        items.qualified(),
        wanted.join(" AND "),
        stock.qualified(),
        matches.join(" AND "),
    );
    // Names of the operator's configuration that are in the catalog, quoted.
    let rows: Vec<(Vec<String>, String, i64)> =
        sqlx::query_as(AssertSqlSafe(select)).bind(ids).fetch_all(connection).await?;
    Ok(rows.into_iter().map(|(key, row, orders)| StockRow { key, row, orders }).collect())
}

/// Which of these stock rows have changed, by the places of their entries.
pub(super) async fn compare(
    connection: &mut PgConnection,
    before: Vec<NeededStock<'_>>,
) -> Result<Vec<(usize, StockChange)>, sqlx::Error> {
    let mut compared = Vec::new();
    for NeededStock { index, settings, stock, rows } in before {
        let after = rows_now(connection, settings, stock, &rows).await?;
        let changed: Vec<(String, String)> = rows
            .iter()
            .filter_map(|row| {
                let (_, now) = after.iter().find(|(key, _)| *key == row.key)?;
                (*now != row.row).then(|| (row.row.clone(), now.clone()))
            })
            .collect();
        let change = StockChange {
            stock: settings.table.clone(),
            needed: rows.len(),
            changed: changed.len(),
            is_shared: rows.iter().any(|row| row.orders > 1),
            examples: changed.into_iter().take(EXAMPLES).collect(),
        };
        compared.push((index, change));
    }
    Ok(compared)
}

/// The keys and values of these rows as they are now.
async fn rows_now(
    connection: &mut PgConnection,
    settings: &StockSettings,
    stock: &Relation,
    before: &[StockRow],
) -> Result<Vec<(Vec<String>, String)>, sqlx::Error> {
    let columns: Vec<&String> = settings.stock_key.0.iter().collect();
    let keys: Vec<String> = columns.iter().map(|name| format!("s.{}", quote::name(name))).collect();
    let casts: Vec<String> = (1..)
        .zip(&columns)
        .map(|(number, name)| format!("u.k{number}::{}", stock.columns.get(*name).map_or("text", |kind| &kind.sql)))
        .collect();
    let (arrays, names): (Vec<String>, Vec<String>) =
        (1..=columns.len()).map(|number| (format!("${number}::text[]"), format!("k{number}"))).unzip();
    let texts: Vec<String> = keys.iter().map(|column| format!("{column}::text")).collect();
    let select = format!(
        "SELECT ARRAY[{}], to_jsonb(s)::text FROM {} s WHERE ({}) IN (SELECT {} FROM unnest({}) AS u ({}))",
        texts.join(", "),
        stock.qualified(),
        keys.join(", "),
        casts.join(", "),
        arrays.join(", "),
        names.join(", ")
    );
    let mut query = sqlx::query_as(AssertSqlSafe(select));
    for place in 0..columns.len() {
        query = query.bind(before.iter().map(|row| row.key[place].clone()).collect::<Vec<_>>());
    }
    query.fetch_all(connection).await
}

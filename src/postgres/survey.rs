//! What the catalog says about a table beside its columns: keys, indexes, foreign keys, triggers, functions.
//!
//! Reads the catalog, and counts the values of a column; changes nothing.

use serde::{Deserialize, Serialize};
use sqlx::types::Json;
use sqlx::{AssertSqlSafe, PgConnection};

use super::catalog::{self, CatalogError};
use crate::config::kinds::TableSettings;
use crate::mapping::{Facts, Relation, quote};

/// A table as the catalog has it.
#[derive(Debug, Clone)]
pub struct Survey {
    /// The table.
    pub relation: Relation,
    /// Its columns, in order.
    pub primary_key: Vec<String>,
    /// All of them.
    pub indexes: Vec<Index>,
    /// Foreign keys of other tables on this one.
    pub referenced_by: Vec<ForeignKey>,
    /// Row triggers that run when a row is updated, and constraint triggers.
    pub triggers: Vec<String>,
    /// The number of rows, as the planner estimates it.
    pub rows: i64,
}

/// A valid index.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Index {
    /// Its name.
    pub name: String,
    /// Whether it allows each key once.
    pub is_unique: bool,
    /// Whether it has a condition.
    pub is_partial: bool,
    /// Whether it is that of the primary key.
    pub is_primary: bool,
    /// Its columns; an empty text is an expression.
    pub columns: Vec<String>,
}

/// A foreign key between two tables.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ForeignKey {
    /// The table that has it, with its schema.
    pub table: String,
    /// The referencing columns.
    pub columns: Vec<String>,
    /// The table that it refers to, with its schema.
    pub target: String,
    /// The referenced columns, in the same order.
    pub target_columns: Vec<String>,
}

const INDEXES: &str = "
SELECT jsonb_build_object(
       'name', i.indexrelid::regclass::text, 'is_unique', i.indisunique, 'is_partial', i.indpred IS NOT NULL,
       'is_primary', i.indisprimary, 'columns', ARRAY(SELECT coalesce(a.attname::text, '')
             FROM unnest(i.indkey::smallint[]) WITH ORDINALITY AS k(number, place)
             LEFT JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.number
             WHERE k.place <= i.indnkeyatts ORDER BY k.place))
FROM pg_index i WHERE i.indrelid = to_regclass($1) AND i.indisvalid ORDER BY i.indexrelid::regclass::text";

const FOREIGN_KEYS: &str = "
SELECT jsonb_build_object(
       'table', quote_ident(n.nspname) || '.' || quote_ident(c.relname),
       'columns', ARRAY(SELECT a.attname::text FROM unnest(k.conkey) WITH ORDINALITY AS u(number, place)
             JOIN pg_attribute a ON a.attrelid = k.conrelid AND a.attnum = u.number ORDER BY u.place),
       'target', quote_ident(tn.nspname) || '.' || quote_ident(t.relname),
       'target_columns', ARRAY(SELECT a.attname::text FROM unnest(k.confkey) WITH ORDINALITY AS u(number, place)
             JOIN pg_attribute a ON a.attrelid = k.confrelid AND a.attnum = u.number ORDER BY u.place))
FROM pg_constraint k
JOIN pg_class c ON c.oid = k.conrelid JOIN pg_namespace n ON n.oid = c.relnamespace
JOIN pg_class t ON t.oid = k.confrelid JOIN pg_namespace tn ON tn.oid = t.relnamespace
WHERE k.contype = 'f' AND k.conparentid = 0 AND CASE WHEN $2 THEN k.confrelid ELSE k.conrelid END = to_regclass($1)
ORDER BY quote_ident(n.nspname) || '.' || quote_ident(c.relname), quote_ident(tn.nspname) || '.' || quote_ident(t.relname)";

const TRIGGERS: &str = "
SELECT t.tgname || ' (function ' || p.oid::regproc || ')'
FROM pg_trigger t JOIN pg_proc p ON p.oid = t.tgfoid
WHERE t.tgrelid = to_regclass($1) AND NOT t.tgisinternal AND t.tgenabled <> 'D' AND t.tgtype & 16 = 16
ORDER BY 1";

/// Surveys a table. `key` is the setting that names it.
///
/// # Errors
/// [`CatalogError`] if there is no such table.
pub async fn survey(connection: &mut PgConnection, key: &str, written: &str) -> Result<Survey, CatalogError> {
    let relation = catalog::relation(connection, key, written).await?;
    let name = relation.qualified();
    let indexes = sqlx::query_scalar(INDEXES).bind(&name).fetch_all(&mut *connection).await?;
    let indexes: Vec<Index> = indexes.into_iter().map(|Json(index)| index).collect();
    let primary_key = indexes.iter().find(|index| index.is_primary).map(|index| index.columns.clone());
    let referenced_by = foreign_keys(connection, &name, true).await?;
    let triggers = sqlx::query_scalar(TRIGGERS).bind(&name).fetch_all(&mut *connection).await?;
    let rows: f32 = sqlx::query_scalar(
        "SELECT coalesce(sum(greatest(c.reltuples, 0)), 0)::real FROM pg_class c
         WHERE c.oid = to_regclass($1) OR c.oid IN (SELECT i.inhrelid FROM pg_inherits i WHERE i.inhparent = to_regclass($1))",
    )
    .bind(&name)
    .fetch_one(connection)
    .await?;
    #[allow(clippy::cast_possible_truncation)] // an estimate
    let rows = rows as i64;
    Ok(Survey { relation, primary_key: primary_key.unwrap_or_default(), indexes, referenced_by, triggers, rows })
}

/// The foreign keys of a table, or of others on it.
///
/// # Errors
/// sqlx's.
pub async fn foreign_keys(
    connection: &mut PgConnection,
    qualified: &str,
    from_others: bool,
) -> Result<Vec<ForeignKey>, sqlx::Error> {
    let keys = sqlx::query_scalar(FOREIGN_KEYS).bind(qualified).bind(from_others).fetch_all(connection).await?;
    Ok(keys.into_iter().map(|Json(key)| key).collect())
}

/// Rows that are read to see how often conditions hold.
const ROWS_READ: i64 = 100_000;

/// How often the conditions of a mapping hold.
#[derive(Debug, Clone, Copy)]
pub struct Counted {
    /// The rows that were read.
    pub rows: i64,
    /// Whether they are all.
    pub is_all: bool,
    /// Those for which `open` holds.
    pub open: i64,
    /// Those for which `open` is NULL.
    pub open_is_null: i64,
    /// Those for which `paid` holds.
    pub paid: i64,
}

/// Counts among the first rows of the table, whichever they are.
///
/// # Errors
/// sqlx's.
pub async fn count_conditions(
    connection: &mut PgConnection,
    table: &TableSettings,
    facts: &Facts,
) -> Result<Counted, sqlx::Error> {
    let count = format!(
        "SELECT count(*), count(*) FILTER (WHERE ({open}\n)), count(*) FILTER (WHERE ({open}\n) IS NULL), count(*) FILTER (WHERE ({paid}\n))
         FROM (SELECT * FROM {orders} LIMIT $1) AS {alias}",
        open = table.open,
        paid = table.paid,
        orders = facts.orders.qualified(),
        alias = quote::name(&facts.orders.name),
    );
    // The conditions are configuration: the operator who sets them may run any SQL anyway.
    let counted: (i64, i64, i64, i64) =
        sqlx::query_as(AssertSqlSafe(count)).bind(ROWS_READ).fetch_one(connection).await?;
    let (rows, open, open_is_null, paid) = counted;
    Ok(Counted { rows, is_all: rows < ROWS_READ, open, open_is_null, paid })
}

/// The answer to [`crate::mapping::Questions::unusable`].
///
/// # Errors
/// sqlx's.
pub async fn count_unusable(
    connection: &mut PgConnection,
    question: String,
) -> Result<(i64, Option<String>, i64), sqlx::Error> {
    // Rendered from the operator's configuration.
    sqlx::query_as(AssertSqlSafe(question)).fetch_one(connection).await
}

/// Tables that look like orders, by what they are connected with more than by their names; the most likely first.
///
/// # Errors
/// sqlx's.
pub async fn likely_orders(connection: &mut PgConnection) -> Result<Vec<String>, sqlx::Error> {
    sqlx::query_scalar(
        "SELECT quote_ident(n.nspname) || '.' || quote_ident(c.relname)
         FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
         CROSS JOIN LATERAL (
             SELECT bool_or(t.typcategory = 'D' OR t.typname IN ('tstzrange', 'tsrange')) AS has_times,
                    bool_or(t.typtype = 'e' OR a.attname ~* '(stat[ue]|state|zustand|estado|stage|settled|paid)') AS has_status,
                    bool_or(t.typcategory = 'D' AND EXISTS (
                        SELECT FROM pg_index i WHERE i.indrelid = c.oid AND i.indpred IS NOT NULL AND i.indkey[0] = a.attnum
                    )) AS has_queue
             FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid
             WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
         ) found
         CROSS JOIN LATERAL (
             SELECT 4 * (c.relname ~* '(order|purchase|booking|cart|checkout|reserv|hold|bestell|auftr|pedido|commande|ordine)')::integer
                  - 4 * (c.relname ~* '(item|line|position|event|history|log|outbox)')::integer
                  + 5 * has_queue::integer
                  + 2 * EXISTS (SELECT FROM pg_constraint k WHERE k.confrelid = c.oid AND k.contype = 'f')::integer AS points
         ) judged
         WHERE c.relkind IN ('r', 'p') AND NOT c.relispartition AND n.nspname NOT IN ('pg_catalog', 'information_schema')
           AND found.has_times AND (found.has_status OR found.has_queue) AND judged.points > 1
           -- Our own tables.
           AND NOT (to_regclass(quote_ident(n.nspname) || '.order_timeout_adoption') IS NOT NULL
                    AND c.relname ~ '^(order(s|_items|_events|_resources|_timeout_.*)|.*_outbox|.*_attempts|.*_payments|closing_.*|parked_alarms)$')
         ORDER BY judged.points DESC, c.reltuples DESC, length(c.relname), 1 LIMIT 20",
    )
    .fetch_all(connection)
    .await
}

/// The tables that a view reads itself.
///
/// # Errors
/// sqlx's.
pub async fn behind(connection: &mut PgConnection, view: &Relation) -> Result<Vec<String>, sqlx::Error> {
    sqlx::query_scalar(
        "SELECT DISTINCT d.refobjid::regclass::text FROM pg_rewrite r JOIN pg_depend d
             ON d.classid = 'pg_rewrite'::regclass AND d.objid = r.oid AND d.refclassid = 'pg_class'::regclass
         WHERE r.ev_class = to_regclass($1) AND d.refobjid <> r.ev_class ORDER BY 1",
    )
    .bind(view.qualified())
    .fetch_all(connection)
    .await
}

/// What says the meaning of a column besides its name.
#[derive(Debug, Clone, Deserialize)]
pub struct Clues {
    /// Its name.
    pub name: String,
    /// Whether its type is an enum.
    pub is_enum: bool,
    /// Whether it is of a primary or foreign key.
    pub is_key: bool,
    /// Whether its default is the present.
    pub is_now: bool,
    /// Its default, as Postgres prints the expression.
    pub default: Option<String>,
    /// Whether an index, other than that of the primary key, begins with it.
    pub leads_index: bool,
    /// Whether an index has a condition on it.
    pub is_condition: bool,
}

/// The clues about all columns, in the order of the table.
///
/// # Errors
/// sqlx's.
pub async fn clues(connection: &mut PgConnection, relation: &Relation) -> Result<Vec<Clues>, sqlx::Error> {
    let clues = sqlx::query_scalar(
        "SELECT jsonb_build_object(
                'name', a.attname, 'is_enum', t.typtype = 'e',
                'is_key', EXISTS (SELECT FROM pg_constraint k WHERE k.conrelid = a.attrelid AND k.contype IN ('p', 'f')
                        AND a.attnum = ANY (k.conkey)),
                'default', pg_get_expr(d.adbin, d.adrelid),
                'is_now', coalesce(pg_get_expr(d.adbin, d.adrelid) ~* '(now\\(|current_|clock_timestamp|statement_timestamp)', false),
                'leads_index', EXISTS (SELECT FROM pg_index i WHERE i.indrelid = a.attrelid AND i.indkey[0] = a.attnum
                        AND NOT i.indisprimary),
                'is_condition', EXISTS (SELECT FROM pg_index i WHERE i.indrelid = a.attrelid
                        AND pg_get_expr(i.indpred, i.indrelid) ~ ('\\m' || a.attname || '\\M')))
         FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
         WHERE a.attrelid = to_regclass($1) AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attnum",
    )
    .bind(relation.qualified())
    .fetch_all(connection)
    .await?;
    Ok(clues.into_iter().map(|Json(clues)| clues).collect())
}

/// The values of a column with their number of rows, the most frequent first, and the labels of its enum; at most
/// [`MOST_VALUES`]. Counts among the first `rows` of the table, whichever they are.
///
/// # Errors
/// sqlx's.
pub async fn values(
    connection: &mut PgConnection,
    relation: &Relation,
    column: &str,
    rows: i64,
) -> Result<Vec<(String, i64)>, sqlx::Error> {
    let count = format!(
        "SELECT v.value, sum(v.rows)::bigint FROM (
             SELECT {column}::text AS value, count(*) AS rows FROM (SELECT {column} FROM {} LIMIT $4) read GROUP BY 1
             UNION ALL
             SELECT e.enumlabel, 0 FROM pg_enum e JOIN pg_attribute a ON a.atttypid = e.enumtypid
             WHERE a.attrelid = to_regclass($1) AND a.attname = $2
         ) v WHERE v.value IS NOT NULL GROUP BY 1 ORDER BY 2 DESC, 1 LIMIT $3",
        relation.qualified(),
        column = quote::name(column)
    );
    // Names from the catalog, quoted.
    let count = sqlx::query_as(AssertSqlSafe(count)).bind(relation.qualified()).bind(column);
    count.bind(MOST_VALUES).bind(rows).fetch_all(connection).await
}

/// A column with more has no statuses.
pub const MOST_VALUES: i64 = 16;

/// Whether a column has times in the future.
///
/// # Errors
/// sqlx's.
pub async fn has_future(connection: &mut PgConnection, relation: &Relation, column: &str) -> Result<bool, sqlx::Error> {
    let ask = format!("SELECT coalesce(max({}) > now(), false) FROM {}", quote::name(column), relation.qualified());
    sqlx::query_scalar(AssertSqlSafe(ask)).fetch_one(connection).await
}

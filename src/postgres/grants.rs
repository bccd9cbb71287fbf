//! The rights that the statements of a mapping need on the shop's tables, and that the worker's role lacks.
//!
//! Reads the catalog only, which every role may; grants nothing. What a function or a subquery of the shop's reads is
//! not known here: the database says so when the statements are explained.

use sqlx::{PgConnection, Row};

use crate::config::kinds::TableSettings;
use crate::mapping::{predicate, quote};

/// `$1` schema, or null for the search path; `$2` table; `$3` rights. Looked up without the schema's name being resolved,
/// which needs `USAGE`. A right on one column is enough: which columns are meant, the statement knows.
const LACKING: &str = "
SELECT n.nspname::text, current_user::text, has_schema_privilege(n.oid, 'USAGE'), ARRAY(
    SELECT wanted FROM unnest($3::text[]) WITH ORDINALITY AS rights (wanted, place)
    WHERE NOT CASE wanted WHEN 'DELETE' THEN has_table_privilege(c.oid, wanted)
                          ELSE has_any_column_privilege(c.oid, wanted) END
    ORDER BY place)
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE c.relkind IN ('r', 'p', 'v', 'm', 'f') AND c.relname = $2
    AND (n.nspname = $1 OR ($1 IS NULL AND n.nspname = ANY (current_schemas(false))))
LIMIT 1";

/// The `GRANT` statements that the role of this connection lacks for a mapping, in the order of its tables. A table that
/// does not exist has none.
///
/// # Errors
/// sqlx's.
pub async fn missing(connection: &mut PgConnection, table: &TableSettings) -> Result<Vec<String>, sqlx::Error> {
    lacking(connection, needed(table)).await
}

/// The same for an audit, which only reads the orders and their stock.
///
/// # Errors
/// sqlx's.
pub async fn missing_to_read(connection: &mut PgConnection, table: &TableSettings) -> Result<Vec<String>, sqlx::Error> {
    let of_stock = table.stock.iter().flat_map(|stock| [&stock.items, &stock.table]);
    let tables = std::iter::once(&table.table).chain(of_stock);
    lacking(connection, tables.map(|name| (name.clone(), vec!["SELECT"])).collect()).await
}

/// Why this table, as it is written in a setting, cannot be read, with the `GRANT` statements that an orders table needs.
///
/// # Errors
/// sqlx's.
pub async fn why_unreadable(connection: &mut PgConnection, orders: &str) -> Result<Option<String>, sqlx::Error> {
    if lacking(connection, vec![(orders.to_owned(), vec!["SELECT"])]).await?.is_empty() {
        return Ok(None);
    }
    let statements = lacking(connection, vec![(orders.to_owned(), vec!["SELECT", "UPDATE"])]).await?;
    Ok(Some(sentence(&statements)))
}

/// What is wrong if these statements are needed.
#[must_use]
pub fn sentence(statements: &[String]) -> String {
    format!("the worker's role lacks rights on the shop's tables; run as their owner: {};", statements.join("; "))
}

async fn lacking(
    connection: &mut PgConnection,
    needed: Vec<(String, Vec<&'static str>)>,
) -> Result<Vec<String>, sqlx::Error> {
    let mut statements = Vec::new();
    let mut add = |statement: String| {
        if !statements.contains(&statement) {
            statements.push(statement);
        }
    };
    for (written, rights) in needed {
        let Some((schema, name)) = quote::parts(&written) else { continue };
        let found = sqlx::query(LACKING).bind(schema).bind(&name).bind(rights).fetch_optional(&mut *connection).await?;
        let Some(row) = found else { continue };
        let (schema, role): (String, String) = (row.try_get(0)?, row.try_get(1)?);
        let (schema, role) = (quote::name(&schema), quote::name(&role));
        if !row.try_get::<bool, _>(2)? {
            add(format!("GRANT USAGE ON SCHEMA {schema} TO {role}"));
        }
        let lacking: Vec<String> = row.try_get(3)?;
        if !lacking.is_empty() {
            add(format!("GRANT {} ON {schema}.{} TO {role}", lacking.join(", "), quote::name(&name)));
        }
    }
    Ok(statements)
}

/// The tables of a mapping as they are written there, and the rights that its statements need on them.
fn needed(table: &TableSettings) -> Vec<(String, Vec<&'static str>)> {
    let mut needed = vec![(table.table.clone(), vec!["SELECT", "UPDATE"])];
    if table.close.columns().is_none() {
        needed[0].1.push("DELETE");
    }
    for stock in &table.stock {
        needed.push((stock.items.clone(), vec!["SELECT"]));
        needed.push((stock.table.clone(), vec!["SELECT", "UPDATE"]));
    }
    needed.extend(table.attempts.iter().map(|attempts| (attempts.table.clone(), vec!["SELECT"])));
    for also in &table.also {
        let Some(changed) = predicate::changed_table(&also.sql) else { continue };
        let verb = also.sql.trim_start().get(..6).unwrap_or_default().to_uppercase();
        let rights = match verb.as_str() {
            "INSERT" => vec!["INSERT"],
            "DELETE" => vec!["SELECT", "DELETE"],
            _ => vec!["SELECT", "UPDATE"],
        };
        needed.push((changed, rights));
    }
    needed
}

//! Checks on the query plan whether the overdue statement uses an index; and, if the statements are the shop's own,
//! whether the worker's role may run them and sees all rows.
//!
//! Explains the statements, never runs them.

use std::collections::HashMap;

use order_timeout_client::postgres::Timestamptz;
use order_timeout_core::order::Timestamp;
use order_timeout_core::problem::{Cause, Problem};
use serde_json::Value;
use sqlx::postgres::PgConnection;
use sqlx::{AssertSqlSafe, Connection, SqlSafeStr, SqlStr};

use super::schema::row_security;
use super::{Found, hides_rows};
use crate::effects::close::{Closer, with_arguments};
use crate::effects::sweep::Sweeper;
use crate::postgres::{Database, ErrorClass, classify, one_line};

/// A relation up to this size may be read completely, four times a second.
const SMALL_BYTES: i64 = 2 * 1024 * 1024;

/// Tables that the transaction's statements use, directly or through views, and that have row security for this role.
/// They are found by their locks: planning a statement locks its tables until the transaction ends.
fn hidden_by_policies() -> String {
    format!(
        "SELECT c.oid::regclass::text, current_user::text FROM pg_locks l JOIN pg_class c ON c.oid = l.relation
         WHERE l.pid = pg_backend_pid() AND l.locktype = 'relation' AND c.relkind IN ('r', 'p') AND {}
         GROUP BY 1, 2 ORDER BY 1",
        hides_rows("c.oid", "'SELECT'")
    )
}

const SIZES: &str = "
SELECT n.nspname::text, c.relname::text, pg_relation_size(c.oid)
FROM unnest($1::text[], $2::text[]) AS wanted(s, t)
JOIN pg_namespace n ON n.nspname = wanted.s JOIN pg_class c ON c.relnamespace = n.oid AND c.relname = wanted.t";

/// The two statements of the orders contract, for the check of their plans.
#[derive(Debug)]
pub struct Plans {
    /// The overdue statement and its name.
    overdue: (SqlStr, String),
    /// The close statement, its number of parameters and its name, if it is the shop's own.
    own_close: Option<(SqlStr, usize, String)>,
    /// The statement that creates the index for the overdue one, if it is known.
    index: Option<String>,
    /// A relation up to this size may be read completely.
    small_bytes: i64,
}

impl Plans {
    /// Of these statements with their names; of the close statement only if it is the shop's own.
    pub(crate) fn new(sweeper: &Sweeper, overdue_name: String, own_close: Option<(&Closer, String)>) -> Self {
        let own_close = own_close.map(|(closer, name)| {
            let (sql, parameters) = closer.statement();
            (sql, parameters, name)
        });
        let overdue = (sweeper.statement(), overdue_name);
        Self { overdue, own_close, index: sweeper.index(), small_bytes: SMALL_BYTES }
    }

    /// Reports a missing index even of a small or empty table.
    #[must_use]
    pub fn of_any_size(self) -> Self {
        Self { small_bytes: -1, ..self }
    }

    /// Explains the statements once.
    ///
    /// # Errors
    /// sqlx's, if the query fails.
    pub async fn look(&self, database: &Database) -> Result<Found, sqlx::Error> {
        database.run(async |connection| self.look_on(connection).await).await
    }

    async fn look_on(&self, connection: &mut PgConnection) -> Result<Found, sqlx::Error> {
        let mut transaction = connection.begin().await?;
        let plan = match self.explain_overdue(&mut transaction).await {
            Ok(plan) => plan,
            Err(error) => return forbidden(&self.overdue.1, error),
        };
        let slow = self.why_slow(&mut transaction, &plan).await?;
        let mut found = vec![(Cause::SlowOverdueQuery, slow.into_iter().collect())];
        if let Some((sql, parameters, name)) = &self.own_close {
            if let Err(error) = explain_close(&mut transaction, sql, *parameters).await {
                return forbidden(name, error);
            }
            let hidden: Vec<(String, String)> =
                sqlx::query_as(AssertSqlSafe(hidden_by_policies())).fetch_all(&mut *transaction).await?;
            let role = hidden.first().map(|(_, role)| role.clone());
            let tables: Vec<String> = hidden.into_iter().map(|(table, _)| table).collect();
            let hidden = role.map(|role| row_security(&role, &tables));
            found.push((Cause::DatabaseRights, hidden.into_iter().collect()));
        } else {
            // The statement can be run. `schema.rs` reports row security on our own tables.
            found.push((Cause::DatabaseRights, Vec::new()));
        }
        transaction.rollback().await?;
        Ok(found)
    }

    async fn explain_overdue(&self, connection: &mut PgConnection) -> Result<Value, sqlx::Error> {
        let explain = sqlx::query_scalar(explain(&self.overdue.0))
            .bind(0.5_f64)
            .bind(Timestamptz(Timestamp::from_unix_micros(i64::MIN)))
            .bind("")
            .bind(1_000_i64);
        explain.persistent(false).fetch_one(connection).await
    }

    async fn why_slow(&self, connection: &mut PgConnection, plan: &Value) -> Result<Option<Problem>, sqlx::Error> {
        let scans = unbounded_scans(plan);
        if scans.is_empty() {
            return Ok(None);
        }
        let (schemas, tables): (Vec<&str>, Vec<&str>) =
            scans.iter().map(|scan| (scan.schema.as_str(), scan.table.as_str())).unzip();
        let sizes: Vec<(String, String, i64)> =
            sqlx::query_as(SIZES).bind(schemas).bind(tables).fetch_all(connection).await?;
        let sizes: HashMap<(String, String), i64> =
            sizes.into_iter().map(|(schema, table, bytes)| ((schema, table), bytes)).collect();
        let large = scans.into_iter().find_map(|scan| {
            let bytes = *sizes.get(&(scan.schema.clone(), scan.table.clone()))?;
            (bytes > self.small_bytes).then(|| scan.problem(&self.overdue.1, bytes, self.index.as_deref()))
        });
        Ok(large)
    }
}

/// A statement that the role may not run is a cause of degradation; any other error is returned to the caller.
fn forbidden(name: &str, error: sqlx::Error) -> Result<Found, sqlx::Error> {
    if classify(&error) != ErrorClass::Broken {
        return Err(error);
    }
    let is_right = error.as_database_error().is_some_and(|fault| fault.code().as_deref() == Some("42501"));
    let advice = if is_right { "GRANT the worker's role what it uses" } else { "correct the statement or its tables" };
    let problem = Problem::new(Cause::DatabaseRights, format!("{name} cannot be run: {}", one_line(&error)), advice);
    Ok(vec![(Cause::DatabaseRights, vec![problem])])
}

fn explain(sql: &SqlStr) -> SqlStr {
    // The statement is configuration: the operator who sets it may run any SQL.
    AssertSqlSafe(format!("EXPLAIN (VERBOSE, FORMAT JSON) {}", sql.as_str())).into_sql_str()
}

async fn explain_close(connection: &mut PgConnection, sql: &SqlStr, parameters: usize) -> Result<(), sqlx::Error> {
    let explain = with_arguments((explain(sql), parameters), &[], "sweep", false);
    explain.persistent(false).fetch_one(connection).await.map(drop)
}

/// A plan node that reads a whole relation.
#[derive(Debug, PartialEq, Eq)]
struct Scan {
    schema: String,
    table: String,
    /// The index that it reads; `None` if it reads the table itself.
    index: Option<String>,
    /// Whether it reads a part of the index, which is not bounded by the deadline.
    is_part: bool,
    /// The columns of the missing index, as far as the plan shows them.
    columns: Vec<String>,
    /// The condition of the missing index, likewise.
    condition: Option<String>,
}

impl Scan {
    /// `known`: the statement that creates the index, where that is not a guess.
    fn problem(&self, statement: &str, bytes: i64, known: Option<&str>) -> Problem {
        let Self { schema, table, index, is_part, columns, condition } = self;
        let megabytes = bytes / 1024 / 1024;
        let what = match index {
            Some(index) if *is_part => {
                format!("{schema}.{table} ({megabytes} MB) through the index {index}, without a bound on the deadline,")
            }
            Some(index) => {
                format!("{schema}.{table} ({megabytes} MB) through the whole index {index}")
            }
            None => format!("all of {schema}.{table} ({megabytes} MB)"),
        };
        let what = format!("{statement} reads {what} in every sweep");
        let condition = condition.as_ref().map_or_else(String::new, |condition| format!(" WHERE {condition}"));
        let fix = match (known, columns.join(", ").as_str()) {
            (Some(create), _) => format!("{create}; ANALYZE {schema}.{table}, which is enough if that index exists"),
            (None, "") => format!(
                "it needs an index on (deadline, id){condition}, and must compare the deadline with statement_timestamp(), because clock_timestamp() cannot bound an index scan"
            ),
            (None, columns) => format!("CREATE INDEX CONCURRENTLY ON {schema}.{table} ({columns}){condition}"),
        };
        Problem::new(Cause::SlowOverdueQuery, what, fix)
    }
}

/// The scans of a plan without an upper bound. An index scan within a nested loop looks up single rows.
fn unbounded_scans(explained: &Value) -> Vec<Scan> {
    let plan = &explained[0]["Plan"];
    let columns = sort_columns(plan).unwrap_or_default();
    let mut scans = Vec::new();
    collect(plan, false, &columns, &mut scans);
    scans
}

fn collect(node: &Value, is_lookup: bool, columns: &[String], into: &mut Vec<Scan>) {
    let kind = text(node, "Node Type");
    let is_unbounded = match kind {
        "Seq Scan" => true,
        "Index Scan" | "Index Only Scan" => !is_lookup && !is_bounded(node),
        "Bitmap Heap Scan" => !is_lookup && !children(node).iter().any(has_a_bound),
        _ => false,
    };
    if is_unbounded {
        let alias = format!("{}.", text(node, "Alias"));
        let conditions = ["Filter", "Index Cond", "Recheck Cond"].map(|key| text(node, key));
        into.push(Scan {
            schema: text(node, "Schema").to_owned(),
            table: text(node, "Relation Name").to_owned(),
            index: node["Index Name"].as_str().map(str::to_owned),
            is_part: !text(node, "Index Cond").is_empty(),
            columns: columns.iter().map(|column| column.replace(&alias, "")).collect(),
            condition: conditions.iter().find_map(|condition| constant_condition(condition, &alias)),
        });
    }
    for child in children(node) {
        let relation = text(child, "Parent Relationship");
        let is_lookup = is_lookup || relation == "SubPlan" || (kind == "Nested Loop" && relation == "Inner");
        collect(child, is_lookup, columns, into);
    }
}

fn has_a_bound(node: &Value) -> bool {
    is_bounded(node) || children(node).iter().any(has_a_bound)
}

/// Whether the index scan has an upper bound.
fn is_bounded(node: &Value) -> bool {
    text(node, "Index Cond").contains(" <")
}

fn children(node: &Value) -> &[Value] {
    node["Plans"].as_array().map_or(&[], Vec::as_slice)
}

fn text<'a>(node: &'a Value, key: &str) -> &'a str {
    node[key].as_str().unwrap_or_default()
}

/// The sort key, if the plan sorts the rows: the columns that the missing index would have.
fn sort_columns(node: &Value) -> Option<Vec<String>> {
    let keys = node["Sort Key"].as_array();
    let own = keys.map(|keys| keys.iter().filter_map(Value::as_str).map(as_index_column).collect());
    own.or_else(|| children(node).iter().find_map(sort_columns))
}

/// The key as a column of an index, where an expression must be in parentheses.
fn as_index_column(key: &str) -> String {
    let is_plain = key.chars().all(|c| c.is_alphanumeric() || "_.\"".contains(c));
    if is_plain || key.starts_with('(') { key.to_owned() } else { format!("({key})") }
}

/// The first comparison of a column with a constant word, such as a status: `state = 'open'`.
fn constant_condition(condition: &str, alias: &str) -> Option<String> {
    condition.split(" AND ").find_map(|part| {
        let (column, value) = part.trim_start_matches('(').split_once(" = '")?;
        let column = column.strip_prefix(alias).unwrap_or(column).trim_start_matches('(');
        let column = column.split(')').next().unwrap_or(column);
        let column = column.strip_prefix(alias).unwrap_or(column);
        let (value, _) = value.split_once('\'')?;
        let is_plain = !column.is_empty() && column.chars().all(|c| c.is_alphanumeric() || "_\"".contains(c));
        is_plain.then(|| format!("{column} = '{value}'"))
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn scans(plan: &Value) -> Vec<Scan> {
        unbounded_scans(&json!([{ "Plan": plan }]))
    }

    fn index_scan(condition: &str) -> Value {
        json!({ "Node Type": "Index Scan", "Schema": "public", "Relation Name": "purchases", "Alias": "p",
                "Index Name": "purchases_pkey", "Index Cond": condition, "Filter": "(p.state = 'open'::text)" })
    }

    #[test]
    fn bounded_index_scan_is_fine() {
        let bounded = "((p.pay_until <= (statement_timestamp() - '00:00:00.5'::interval)) AND (ROW(p.pay_until, p.id) > ROW('-infinity', 0)))";
        assert_eq!(scans(&json!({ "Node Type": "Limit", "Plans": [index_scan(bounded)] })), []);
    }

    #[test]
    fn table_scan_suggests_index() {
        let seq_scan = json!({ "Node Type": "Seq Scan", "Schema": "public", "Relation Name": "purchases", "Alias": "p",
            "Filter": "((p.state = 'open'::text) AND (p.pay_until <= (statement_timestamp() - '00:00:00.5'::interval)))" });
        let sort = json!({ "Node Type": "Sort", "Sort Key": ["p.pay_until", "p.id"], "Plans": [seq_scan] });
        let found = scans(&json!({ "Node Type": "Limit", "Plans": [sort] }));
        let said = found[0].problem("own.sql", 62 * 1024 * 1024, None).sentence();
        assert_eq!(
            said,
            "own.sql reads all of public.purchases (62 MB) in every sweep: CREATE INDEX CONCURRENTLY ON public.purchases (pay_until, id) WHERE state = 'open'"
        );
    }

    #[test]
    fn index_scan_without_upper_bound_is_reported() {
        let found = scans(&index_scan("(ROW(p.pay_until, p.id) > ROW('-infinity', 0))"));
        assert_eq!(found[0].index.as_deref(), Some("purchases_pkey"));
        let said = found[0].problem("own.sql", 0, None).sentence();
        assert!(said.contains("statement_timestamp()") && said.contains("without a bound"), "{said}");
        let said = found[0].problem("own.sql", 0, Some("CREATE INDEX ON purchases (pay_until, id)")).sentence();
        assert!(said.ends_with("CREATE INDEX ON purchases (pay_until, id); ANALYZE public.purchases, which is enough if that index exists"), "{said}");
    }

    #[test]
    fn lookups_of_single_rows_are_fine() {
        let mut lookup = index_scan("(p.id = o.id)");
        lookup["Parent Relationship"] = json!("Inner");
        assert_eq!(scans(&json!({ "Node Type": "Nested Loop", "Plans": [lookup.clone()] })), []);
        assert_eq!(scans(&json!({ "Node Type": "Hash Join", "Plans": [lookup] })).len(), 1);
    }

    #[test]
    fn bitmap_scan_depends_on_its_indexes() {
        let bitmap = |condition: &str| {
            json!({ "Node Type": "Bitmap Heap Scan", "Schema": "public", "Relation Name": "purchases", "Plans": [
                { "Node Type": "Bitmap Index Scan", "Index Name": "i", "Index Cond": condition }] })
        };
        assert_eq!(scans(&bitmap("(pay_until <= now())")), []);
        assert_eq!(scans(&bitmap("(state = 'open'::text)")).len(), 1);
    }

    #[test]
    fn expressions_are_indexed_in_parentheses() {
        assert_eq!(as_index_column("p.pay_until"), "p.pay_until");
        assert_eq!(as_index_column("timezone('x'::text, p.at)"), "(timezone('x'::text, p.at))");
    }
}

//! Checks that the database has the tables, columns, indexes, constraints and rights that a worker needs, accepts
//! writes, and hides no rows from the worker.
//!
//! One query on the catalog; reads no row of our own or the shop's tables.

use order_timeout_core::problem::{Cause, Problem};
use serde::Deserialize;
use sqlx::AssertSqlSafe;
use sqlx::types::Json;

use super::{Found, hides_rows, listed};
use crate::config::Settings;
use crate::postgres::Database;
use crate::postgres::migrations::{self, NewIndex};

/// A table, and the rights that the worker's statements use. Its columns are those of its migration.
type Table = (&'static str, &'static [&'static str]);

/// Needed by every worker.
const ALWAYS: &[Table] = &[
    ("event_outbox", &["SELECT", "UPDATE", "DELETE"]),
    ("alarm_outbox", &["SELECT", "UPDATE", "DELETE"]),
    ("parked_alarms", &["SELECT", "INSERT", "UPDATE", "DELETE"]),
    ("order_timeout_workers", &["SELECT", "INSERT", "UPDATE", "DELETE"]),
    ("order_timeout_adoption", &["SELECT", "INSERT"]),
    ("order_timeout_settings", &["SELECT", "INSERT", "UPDATE"]),
    ("closing_pauses", &["SELECT", "INSERT"]),
    ("closing_minutes", &["SELECT", "INSERT", "UPDATE", "DELETE"]),
];

/// Needed if a kind has reminders.
const REMINDER_PROGRESS: Table = ("reminder_progress", &["SELECT", "INSERT", "UPDATE"]);

/// Needed if the close statement is ours, or rendered from a mapping, or a kind has reminders.
const WRITTEN_EVENTS: Table = ("event_outbox", &["INSERT"]);

/// Needed if the statements are our own.
const DEFAULT_ORDERS_TABLES: &[Table] = &[
    ("orders", &["SELECT", "UPDATE"]),
    ("order_items", &["SELECT"]),
    ("stock", &["SELECT", "UPDATE"]),
    ("order_resources", &["SELECT"]),
    ("reserved_resources", &["SELECT", "UPDATE"]),
    ("order_events", &["INSERT"]),
];

/// Needed if orders may be claimed.
const CLAIM_TABLES: &[Table] =
    &[("payment_attempts", &["SELECT"]), ("close_attempts", &["SELECT", "INSERT", "UPDATE"])];

/// Needed as well if a payment provider is asked before an order is closed, with our own statements.
const PROVIDER_TABLES: &[Table] = &[("payment_attempts", &["UPDATE"]), ("close_attempts", &["DELETE"])];

/// The name of an index that a guarantee depends on, and what to say if there is none like it, whatever its name. How it is
/// created is in its migration.
type Index = (&'static str, &'static str);

const INDEXES_ALWAYS: [Index; 2] = [
    ("event_outbox_due", "the index of unsent events is missing"),
    ("alarm_outbox_due", "the index of unsent alarms is missing"),
];
const INDEXES_OF_DEFAULT_ORDERS_TABLES: [Index; 2] = [
    ("orders_unpaid_by_deadline", "the deadline index is missing, so the sweep reads the whole table"),
    ("an_order_is_closed_once", "the unique index that refuses a second close is missing"),
];
const INDEX_OF_ATTEMPTS: Index = ("payment_attempts_by_order", "the index of an order's attempts to pay is missing");
const INDEX_OF_CLAIMS: Index = ("close_attempts_due", "the index of claimed orders is missing");

/// What a close statement calls that claims orders.
const CLAIM_FUNCTIONS: &[&str] = &["orders_to_ask_about(text[], text)"];

/// What that calls where a mapping names the shop's own table of attempts to pay.
const TAKE_OVER_ATTEMPTS: &str = "take_over_attempts(text[], text)";

/// What the statements call that settle orders as paid. No role may call them unless it is granted.
const PROVIDER_FUNCTIONS: &[&str] = &[
    "settle_asked_order(text, text, text[], text[], bigint[], text[], boolean[], text)",
    "lock_free_order(text, text)",
    "consume_for_orders(text, text[])",
    "end_claims(text, text[], text[], jsonb)",
];

const NO_EARLY_CLOSE_CHECK: &str = "the constraint that refuses an early close is missing";
const ADD_EARLY_CLOSE_CHECK: &str = "ALTER TABLE orders ADD CONSTRAINT no_order_is_closed_early CHECK (closed_at >= expires_at OR closed_by = 'released') NOT VALID";

/// All checks in one query. `$1`, `$2` tables and columns; `$3`, `$4` tables and rights; `$5` to `$8` indexes: table,
/// first column, whether unique, a part of the condition; `$9` whether the early-close check is needed; `$10`
/// functions. Columns, rights and indexes of a missing table are not checked.
fn catalog_query() -> String {
    let hides_rows = hides_rows("to_regclass(n.t)", "n.r");
    format!(
        "
SELECT to_jsonb(found) FROM (SELECT
       pg_is_in_recovery() AS is_standby,
       current_setting('transaction_read_only') = 'on' AS is_read_only,
       quote_ident(current_user) AS role,
       current_setting('search_path') AS search_path,
       ARRAY(
           SELECT DISTINCT n.t FROM unnest($1::text[]) AS n(t) WHERE to_regclass(n.t) IS NULL ORDER BY 1
       ) AS tables,
       ARRAY(
           SELECT n.t || '.' || n.c FROM unnest($1::text[], $2::text[]) AS n(t, c)
           WHERE to_regclass(n.t) IS NOT NULL AND NOT EXISTS (
               SELECT FROM pg_attribute a
               WHERE a.attrelid = to_regclass(n.t) AND a.attname = n.c AND a.attnum > 0 AND NOT a.attisdropped)
       ) AS columns,
       ARRAY(
           SELECT DISTINCT n.t FROM unnest($1::text[]) AS n(t) JOIN pg_class c ON c.oid = to_regclass(n.t)
           WHERE c.relpersistence = 'u' ORDER BY 1
       ) AS unlogged,
       ARRAY(
           SELECT n.r || ' ON ' || n.t FROM unnest($3::text[], $4::text[]) AS n(t, r)
           WHERE to_regclass(n.t) IS NOT NULL
             AND NOT CASE n.r WHEN 'DELETE' THEN has_table_privilege(to_regclass(n.t), n.r)
                              ELSE has_any_column_privilege(to_regclass(n.t), n.r) END
       ) AS rights,
       ARRAY(
           SELECT DISTINCT n.t FROM unnest($3::text[], $4::text[]) AS n(t, r) WHERE {hides_rows} ORDER BY 1
       ) AS row_security,
       ARRAY(
           SELECT n.place::integer FROM unnest($5::text[], $6::text[], $7::boolean[], $8::text[]) WITH ORDINALITY AS n(t, c, u, says, place)
           WHERE to_regclass(n.t) IS NOT NULL AND NOT EXISTS (
               SELECT FROM pg_index i JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = i.indkey[0]
               WHERE i.indrelid = to_regclass(n.t) AND i.indisvalid AND a.attname = n.c
                 AND (NOT n.u OR (i.indisunique AND i.indnkeyatts = 1))
                 AND (i.indpred IS NULL OR strpos(pg_get_expr(i.indpred, i.indrelid), n.says) > 0))
       ) AS indexes,
       $9::boolean AND to_regclass('orders') IS NOT NULL AND NOT EXISTS (
           SELECT FROM pg_constraint k
           WHERE k.conrelid = to_regclass('orders') AND k.contype = 'c' AND k.conkey @> ARRAY(
               SELECT a.attnum FROM pg_attribute a
               WHERE a.attrelid = k.conrelid AND a.attname IN ('closed_at', 'expires_at'))
       ) AS no_early_close_check,
       ARRAY(
           SELECT n.f FROM unnest($10::text[]) WITH ORDINALITY AS n(f, place) WHERE to_regprocedure(n.f) IS NULL ORDER BY n.place
       ) AS missing_functions,
       ARRAY(
           SELECT n.f FROM unnest($10::text[]) WITH ORDINALITY AS n(f, place)
           WHERE NOT has_function_privilege(to_regprocedure(n.f)::oid, 'EXECUTE') ORDER BY n.place
       ) AS forbidden_functions) AS found"
    )
}

/// What a worker needs in its schema, and the query that looks for it.
#[derive(Debug)]
pub struct Schema {
    query: String,
    /// Tables and columns.
    columns: (Vec<&'static str>, Vec<&'static str>),
    /// Tables and rights.
    rights: (Vec<&'static str>, Vec<&'static str>),
    /// Each with what to say if there is none like it.
    indexes: Vec<(NewIndex, &'static str)>,
    functions: Vec<&'static str>,
    /// Whether the statements are our own, for the default orders tables.
    is_ours: bool,
}

/// The result of the catalog query.
#[derive(Debug, Default, Deserialize)]
struct Catalog {
    is_standby: bool,
    is_read_only: bool,
    role: String,
    search_path: String,
    tables: Vec<String>,
    columns: Vec<String>,
    unlogged: Vec<String>,
    rights: Vec<String>,
    row_security: Vec<String>,
    /// Positions of missing indexes in the list of indexes, from 1.
    indexes: Vec<usize>,
    no_early_close_check: bool,
    missing_functions: Vec<String>,
    forbidden_functions: Vec<String>,
}

impl Schema {
    /// If the statements are the shop's own, the default orders tables may be missing.
    #[must_use]
    pub fn new(settings: &Settings) -> Self {
        let kinds = settings.served_kinds();
        let is_ours = kinds.iter().any(|kind| settings.has_built_in_table(kind));
        let (mut tables, mut indexes, mut functions) = (ALWAYS.to_vec(), INDEXES_ALWAYS.to_vec(), Vec::new());
        let has_reminders = |kind| !settings.reminders_of(kind).is_empty();
        if kinds.iter().any(has_reminders) {
            tables.push(REMINDER_PROGRESS);
        }
        if is_ours || kinds.iter().any(|kind| settings.table_of(kind).is_some() || has_reminders(kind)) {
            tables.push(WRITTEN_EVENTS);
        }
        if is_ours {
            tables.extend(DEFAULT_ORDERS_TABLES);
            indexes.extend(INDEXES_OF_DEFAULT_ORDERS_TABLES);
        }
        if kinds.iter().any(|kind| settings.claims_orders(kind)) {
            tables.extend(CLAIM_TABLES);
            indexes.push(INDEX_OF_ATTEMPTS);
            functions.extend(CLAIM_FUNCTIONS);
            let takes_over = |kind| settings.table_of(kind).is_some_and(|table| table.attempts.is_some());
            functions.extend(kinds.iter().any(takes_over).then_some(TAKE_OVER_ATTEMPTS));
        }
        if settings.asks_providers() {
            tables.extend(PROVIDER_TABLES);
            indexes.push(INDEX_OF_CLAIMS);
            functions.extend(PROVIDER_FUNCTIONS);
        }
        let columns = |table| migrations::columns_of(table).into_iter().map(move |column| (table, column));
        Self {
            query: catalog_query(),
            columns: tables.iter().flat_map(|(table, _)| columns(*table)).unzip(),
            rights: tables.iter().flat_map(|(table, rights)| rights.iter().map(move |right| (*table, *right))).unzip(),
            indexes: indexes.into_iter().map(|(name, missing)| (migrations::index(name), missing)).collect(),
            functions,
            is_ours,
        }
    }

    /// Checks once. The result has an entry for every cause that this can find.
    ///
    /// # Errors
    /// sqlx's, if the query fails.
    pub async fn look(&self, database: &Database) -> Result<Found, sqlx::Error> {
        let of_indexes = |part: fn(&NewIndex) -> &'static str| -> Vec<&str> {
            self.indexes.iter().map(|(index, _)| part(index)).collect()
        };
        // Made of constants.
        let query = sqlx::query_scalar(AssertSqlSafe(self.query.clone()))
            .bind(&self.columns.0)
            .bind(&self.columns.1)
            .bind(&self.rights.0)
            .bind(&self.rights.1)
            .bind(of_indexes(|index| index.table))
            .bind(of_indexes(|index| index.first_column))
            .bind(self.indexes.iter().map(|(index, _)| index.is_unique).collect::<Vec<_>>())
            .bind(of_indexes(|index| index.condition))
            .bind(self.is_ours)
            .bind(&self.functions);
        let Json(catalog) = database.run(async |connection| query.fetch_one(connection).await).await?;
        Ok(self.judge(&catalog))
    }

    fn judge(&self, catalog: &Catalog) -> Found {
        vec![
            (Cause::Schema, self.what_is_missing(catalog)),
            (Cause::DatabaseRights, what_is_forbidden(catalog)),
            (Cause::ReadOnly, why_read_only(catalog).into_iter().collect()),
        ]
    }

    fn what_is_missing(&self, catalog: &Catalog) -> Vec<Problem> {
        let mut problems = Vec::new();
        if !catalog.tables.is_empty() {
            let with_migration =
                |name: &String| format!("{name} (created by migrations/{}.sql)", migrations::creates(name));
            let tables: Vec<String> = catalog.tables.iter().map(with_migration).collect();
            problems.push(Problem::new(
                Cause::Schema,
                format!("the table {} is missing in the schemas {}", listed(&tables), catalog.search_path),
                "restore it from a backup, or create it as the migration does",
            ));
        }
        if !catalog.columns.is_empty() {
            let columns = listed(&catalog.columns);
            let what = format!("the column {columns} is missing");
            problems.push(Problem::new(Cause::Schema, what, "add it as the migration of its table does"));
        }
        for table in &catalog.unlogged {
            let what = format!("the table {table} is unlogged, so a crash of the server empties it");
            problems.push(Problem::new(Cause::Schema, what, format!("ALTER TABLE {table} SET LOGGED")));
        }
        for (index, missing) in catalog.indexes.iter().filter_map(|place| self.indexes.get(place.checked_sub(1)?)) {
            problems.push(Problem::new(Cause::Schema, *missing, index.create_concurrently()));
        }
        if catalog.no_early_close_check {
            problems.push(Problem::new(Cause::Schema, NO_EARLY_CLOSE_CHECK, ADD_EARLY_CLOSE_CHECK));
        }
        if !catalog.missing_functions.is_empty() {
            let what = format!("the function {} is missing", catalog.missing_functions.join(", "));
            problems.push(Problem::new(Cause::Schema, what, "run `order-timeout setup`"));
        }
        problems
    }
}

fn what_is_forbidden(catalog: &Catalog) -> Vec<Problem> {
    let role = &catalog.role;
    let mut problems = Vec::new();
    if !catalog.rights.is_empty() {
        let grants: Vec<String> = catalog.rights.iter().map(|right| format!("GRANT {right} TO {role}")).collect();
        problems.push(Problem::new(
            Cause::DatabaseRights,
            format!("the role {role} lacks {}", listed(&catalog.rights)),
            grants.join("; "),
        ));
    }
    if !catalog.forbidden_functions.is_empty() {
        let functions = catalog.forbidden_functions.join(", ");
        problems.push(Problem::new(
            Cause::DatabaseRights,
            format!("the role {role} lacks EXECUTE ON FUNCTION {functions}, without which no order is settled as paid"),
            format!("GRANT EXECUTE ON FUNCTION {functions} TO {role}"),
        ));
    }
    if !catalog.row_security.is_empty() {
        problems.push(row_security(role, &catalog.row_security));
    }
    problems
}

/// The problem of policies that may hide rows of these tables from this role.
pub(super) fn row_security(role: &str, tables: &[String]) -> Problem {
    let tables = listed(tables);
    Problem::new(
        Cause::DatabaseRights,
        format!("row security may hide rows of {tables} from the role {role}, and hidden orders are never closed"),
        format!("ALTER ROLE {role} BYPASSRLS, or give it a policy FOR ALL USING (true)"),
    )
}

fn why_read_only(catalog: &Catalog) -> Option<Problem> {
    if catalog.is_standby {
        Some(Problem::new(
            Cause::ReadOnly,
            "the database is a standby and accepts no writes, so nothing can be closed",
            "let database.url name the primary, or promote the standby",
        ))
    } else if catalog.is_read_only {
        Some(Problem::new(
            Cause::ReadOnly,
            "the database accepts no writes (default_transaction_read_only is on), so nothing can be closed",
            "switch it off for this database and role",
        ))
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::super::sentence;
    use super::*;

    fn why(found: Found, cause: Cause) -> Option<String> {
        sentence(&found.into_iter().find(|(found, _)| *found == cause).expect("every cause has an entry").1)
    }

    #[test]
    fn migrations_create_what_is_needed() {
        for (table, _) in ALWAYS.iter().chain(DEFAULT_ORDERS_TABLES).chain(PROVIDER_TABLES).chain([&REMINDER_PROGRESS])
        {
            assert!(!migrations::creates(table).is_empty() && migrations::columns_of(table).len() > 1, "{table}");
        }
        for (index, _) in INDEXES_ALWAYS.iter().chain(&INDEXES_OF_DEFAULT_ORDERS_TABLES).chain([&INDEX_OF_CLAIMS]) {
            assert!(migrations::index(index).create_concurrently().contains(" CONCURRENTLY "), "{index}");
        }
    }

    #[test]
    fn complete_schema_has_no_cause() {
        let schema = Schema::new(&Settings::defaults());
        assert!(schema.judge(&Catalog::default()).iter().all(|(_, problems)| problems.is_empty()));
    }

    #[test]
    fn missing_rights_are_granted() {
        let schema = Schema::new(&Settings::defaults());
        let rights = ["SELECT ON alarm_outbox", "UPDATE ON stock"].map(str::to_owned).to_vec();
        let catalog = Catalog { rights, role: "worker".into(), ..Catalog::default() };
        let said = why(schema.judge(&catalog), Cause::DatabaseRights).unwrap();
        assert!(said.contains("lacks SELECT ON alarm_outbox, UPDATE ON stock"), "{said}");
        assert!(said.ends_with("GRANT SELECT ON alarm_outbox TO worker; GRANT UPDATE ON stock TO worker"), "{said}");
    }
}

//! Checks that the database has the tables, columns, indexes, constraints and rights that a worker needs, accepts
//! writes, and hides no rows from the worker.
//!
//! One query on the catalog; reads no row of our own or the shop's tables.

use order_timeout_core::problem::{Cause, Problem};
use sqlx::Row;
use sqlx::postgres::PgRow;

use super::{Found, listed};
use crate::config::Settings;
use crate::postgres::Database;

/// A table, and the columns and rights that the worker's statements use.
#[derive(Debug, Clone, Copy)]
struct Table {
    name: &'static str,
    /// The file that creates it.
    migration: &'static str,
    columns: &'static [&'static str],
    rights: &'static [&'static str],
}

/// Needed by every worker.
const ALWAYS: &[Table] = &[
    Table {
        name: "event_outbox",
        migration: "20261129100100_outboxes_and_parked_alarms.sql",
        columns: &[
            "id",
            "routing_key",
            "type",
            "payload",
            "kind",
            "traceparent",
            "created_at",
            "sent_at",
            "refusals",
            "next_attempt_at",
        ],
        rights: &["SELECT", "UPDATE", "DELETE"],
    },
    Table {
        name: "alarm_outbox",
        migration: "20261129100100_outboxes_and_parked_alarms.sql",
        columns: &[
            "id",
            "kind",
            "order_id",
            "deadline",
            "traceparent",
            "created_at",
            "sent_at",
            "refusals",
            "next_attempt_at",
        ],
        rights: &["SELECT", "UPDATE", "DELETE"],
    },
    Table {
        name: "parked_alarms",
        migration: "20261129100100_outboxes_and_parked_alarms.sql",
        columns: &["id", "reason", "detail", "kind", "order_id", "deadline", "attempts", "body", "parked_at"],
        rights: &["SELECT", "INSERT", "UPDATE", "DELETE"],
    },
    Table {
        name: "order_timeout_workers",
        migration: "20261129100300_workers_pauses_and_counts.sql",
        columns: &["id", "host", "pid", "namespace", "kinds", "delays", "problems", "started_at", "last_seen"],
        rights: &["SELECT", "INSERT", "UPDATE", "DELETE"],
    },
    Table {
        name: "order_timeout_adoption",
        migration: "20261129100300_workers_pauses_and_counts.sql",
        columns: &["orders", "adopted_at", "by", "overdue"],
        rights: &["SELECT", "INSERT"],
    },
    Table {
        name: "order_timeout_settings",
        migration: "20261129100300_workers_pauses_and_counts.sql",
        columns: &["is_the_only_row", "pay_after_deadline"],
        rights: &["SELECT", "INSERT", "UPDATE"],
    },
    Table {
        name: "closing_pauses",
        migration: "20261129100300_workers_pauses_and_counts.sql",
        columns: &["kind", "cause", "reason", "paused_by", "paused_at", "resumed_at"],
        rights: &["SELECT", "INSERT"],
    },
    Table {
        name: "closing_minutes",
        migration: "20261129100300_workers_pauses_and_counts.sql",
        columns: &[
            "kind",
            "minute",
            "closed",
            "unforeseen",
            "woken_closed",
            "woken_paid",
            "foreseen",
            "closed_of_due",
            "asked",
            "asked_paid",
            "asked_unknown",
        ],
        rights: &["SELECT", "INSERT", "UPDATE", "DELETE"],
    },
];

/// Needed if a kind has reminders.
const REMINDER_TABLES: &[Table] = &[Table {
    name: "reminder_progress",
    migration: "20261129100100_outboxes_and_parked_alarms.sql",
    columns: &["kind", "before_ms", "reached", "reached_id"],
    rights: &["SELECT", "INSERT", "UPDATE"],
}];

/// Needed if the statements are our own.
const DEFAULT_ORDERS_TABLES: &[Table] = &[
    Table {
        name: "orders",
        migration: "20261129100000_orders_stock_and_history.sql",
        columns: &["id", "status", "expires_at", "closed_at", "closed_by", "close_reason", "received_minor"],
        rights: &["SELECT", "UPDATE"],
    },
    Table {
        name: "order_items",
        migration: "20261129100000_orders_stock_and_history.sql",
        columns: &["order_id", "article_id", "quantity"],
        rights: &["SELECT"],
    },
    Table {
        name: "stock",
        migration: "20261129100000_orders_stock_and_history.sql",
        columns: &["article_id", "available", "reserved"],
        rights: &["SELECT", "UPDATE"],
    },
    Table {
        name: "order_resources",
        migration: "20261129100000_orders_stock_and_history.sql",
        columns: &["order_id", "kind", "resource_id", "quantity"],
        rights: &["SELECT"],
    },
    Table {
        name: "reserved_resources",
        migration: "20261129100000_orders_stock_and_history.sql",
        columns: &["kind", "id", "available", "reserved"],
        rights: &["SELECT", "UPDATE"],
    },
    Table {
        name: "order_events",
        migration: "20261129100000_orders_stock_and_history.sql",
        columns: &["order_id", "event", "at", "by", "reason", "who", "why"],
        rights: &["INSERT"],
    },
    Table {
        name: "payment_attempts",
        migration: "20261129100200_payments_and_late_money.sql",
        columns: &["provider", "reference", "order_id", "state", "created_at"],
        rights: &["SELECT"],
    },
    Table {
        name: "close_attempts",
        migration: "20261129100200_payments_and_late_money.sql",
        columns: &[
            "kind",
            "order_id",
            "claimed_by",
            "claimed_at",
            "queue",
            "step",
            "rounds",
            "has_waited",
            "next_attempt_at",
            "lease",
            "last_answers",
            "unresolved_reason",
            "unresolved_at",
            "who",
            "why",
        ],
        rights: &["SELECT", "INSERT", "UPDATE"],
    },
    WRITTEN_EVENTS,
];

/// Needed as well if a payment provider is asked before an order is closed, with our own statements.
const PROVIDER_TABLES: &[Table] = &[
    Table {
        name: "orders",
        migration: "20261129100000_orders_stock_and_history.sql",
        columns: &["paid_at", "amount_minor", "currency"],
        rights: &[],
    },
    Table {
        name: "order_events",
        migration: "20261129100000_orders_stock_and_history.sql",
        columns: &["answers"],
        rights: &[],
    },
    Table {
        name: "payment_attempts",
        migration: "20261129100200_payments_and_late_money.sql",
        columns: &["amount_minor", "currency", "payable_until"],
        rights: &["UPDATE"],
    },
    Table {
        name: "close_attempts",
        migration: "20261129100200_payments_and_late_money.sql",
        columns: &[],
        rights: &["DELETE"],
    },
];

/// Needed if the close statement is ours, or rendered from a mapping.
const WRITTEN_EVENTS: Table = Table {
    name: "event_outbox",
    migration: "20261129100100_outboxes_and_parked_alarms.sql",
    columns: &[],
    rights: &["INSERT"],
};

/// An index that a guarantee depends on. Identified by its definition, not by its name.
#[derive(Debug, Clone, Copy)]
struct Index {
    table: &'static str,
    first_column: &'static str,
    unique: bool,
    /// A part of its condition, if it has one.
    condition: &'static str,
    /// That it is missing, and what for.
    missing: &'static str,
    /// The statement that creates it.
    create: &'static str,
}

const INDEXES_ALWAYS: &[Index] = &[
    Index {
        table: "event_outbox",
        first_column: "next_attempt_at",
        unique: false,
        condition: "sent_at IS NULL",
        missing: "the index of unsent events is missing",
        create: "CREATE INDEX CONCURRENTLY event_outbox_due ON event_outbox (next_attempt_at, created_at, id) WHERE sent_at IS NULL",
    },
    Index {
        table: "alarm_outbox",
        first_column: "next_attempt_at",
        unique: false,
        condition: "sent_at IS NULL",
        missing: "the index of unsent alarms is missing",
        create: "CREATE INDEX CONCURRENTLY alarm_outbox_due ON alarm_outbox (next_attempt_at, created_at, id) WHERE sent_at IS NULL",
    },
];

const INDEXES_OF_DEFAULT_ORDERS_TABLES: &[Index] = &[
    Index {
        table: "orders",
        first_column: "expires_at",
        unique: false,
        condition: "unpaid",
        missing: "the deadline index is missing, so the sweep reads the whole table",
        create: "CREATE INDEX CONCURRENTLY orders_unpaid_by_deadline ON orders (expires_at, id) WHERE status = 'unpaid'",
    },
    Index {
        table: "order_events",
        first_column: "order_id",
        unique: true,
        condition: "closed",
        missing: "the unique index that refuses a second close is missing",
        create: "CREATE UNIQUE INDEX CONCURRENTLY an_order_is_closed_once ON order_events (order_id) WHERE event = 'closed'",
    },
    Index {
        table: "payment_attempts",
        first_column: "order_id",
        unique: false,
        condition: "",
        missing: "the index of an order's attempts to pay is missing",
        create: "CREATE INDEX CONCURRENTLY payment_attempts_by_order ON payment_attempts (order_id)",
    },
];

const INDEXES_OF_PROVIDER_TABLES: &[Index] = &[Index {
    table: "close_attempts",
    first_column: "kind",
    unique: false,
    condition: "unresolved_at IS NULL",
    missing: "the index of claimed orders is missing",
    create: "CREATE INDEX CONCURRENTLY close_attempts_due ON close_attempts (kind, queue, next_attempt_at, order_id) WHERE unresolved_at IS NULL",
}];

/// What the close statement calls.
const DEFAULT_FUNCTIONS: &[&str] = &["orders_to_ask_about(uuid[])"];

/// What the statements call that settle orders as paid. No role may call them unless it is granted.
const PROVIDER_FUNCTIONS: &[&str] = &[
    "settle_asked_order(text, text[], text[], bigint[], text[], boolean[], text)",
    "paid_attempts(text)",
    "consume_reserved(uuid[])",
];

const NO_EARLY_CLOSE_CHECK: &str = "the constraint that refuses an early close is missing";
const ADD_EARLY_CLOSE_CHECK: &str =
    "ALTER TABLE orders ADD CONSTRAINT no_order_is_closed_early CHECK (closed_at >= expires_at) NOT VALID";

/// All checks in one query. `$1`, `$2` tables and columns; `$3`, `$4` tables and rights; `$5` to `$8` indexes: table,
/// first column, whether unique, a part of the condition; `$9` whether the early-close check is needed; `$10`
/// functions. Columns, rights and indexes of a missing table are not checked.
const CATALOG_QUERY: &str = "
SELECT pg_is_in_recovery() AS is_standby,
       current_setting('transaction_read_only') = 'on' AS is_read_only,
       quote_ident(current_user) AS role,
       current_setting('search_path') AS search_path,
       ARRAY(
           SELECT DISTINCT n.t FROM unnest($1::text[]) AS n(t) WHERE to_regclass(n.t) IS NULL ORDER BY 1
       ) AS tables,
       ARRAY(
           SELECT n.t || '.' || n.c FROM unnest($1::text[], $2::text[]) AS n(t, c)
           WHERE n.c <> '' AND to_regclass(n.t) IS NOT NULL AND NOT EXISTS (
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
           SELECT DISTINCT n.t FROM unnest($3::text[], $4::text[]) AS n(t, r)
           WHERE row_security_active(to_regclass(n.t)) AND (
               EXISTS (SELECT FROM pg_policy p WHERE p.polrelid = to_regclass(n.t) AND NOT p.polpermissive)
               OR NOT EXISTS (
                   SELECT FROM pg_policy p
                   WHERE p.polrelid = to_regclass(n.t) AND p.polpermissive
                     AND p.polcmd IN ('*', CASE n.r WHEN 'SELECT' THEN 'r' WHEN 'INSERT' THEN 'a' WHEN 'UPDATE' THEN 'w' ELSE 'd' END)
                     AND (0 = ANY (p.polroles) OR EXISTS (SELECT FROM unnest(p.polroles) AS r WHERE pg_has_role(r, 'USAGE')))
                     AND coalesce(pg_get_expr(CASE n.r WHEN 'INSERT' THEN coalesce(p.polwithcheck, p.polqual) ELSE p.polqual END, p.polrelid), 'true') = 'true'))
           ORDER BY 1
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
       ) AS forbidden_functions";

/// What a worker needs in its schema.
#[derive(Debug)]
pub struct Schema {
    tables: Vec<Table>,
    indexes: Vec<Index>,
    functions: Vec<&'static str>,
    /// Whether the statements are our own, for the default orders tables.
    is_ours: bool,
}

/// The result of the catalog query.
#[derive(Debug, Default)]
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
    indexes: Vec<i32>,
    no_early_close_check: bool,
    missing_functions: Vec<String>,
    forbidden_functions: Vec<String>,
}

impl Schema {
    /// If the statements are the shop's own, the default orders tables may be missing.
    #[must_use]
    pub fn new(settings: &Settings) -> Self {
        let kinds = settings.served_kinds();
        let is_ours = kinds.iter().any(|kind| settings.has_default_orders(kind));
        let (mut tables, mut indexes) = (ALWAYS.to_vec(), INDEXES_ALWAYS.to_vec());
        let has_reminders = |kind| !settings.reminders_of(kind).is_empty();
        if kinds.iter().any(has_reminders) {
            tables.extend(REMINDER_TABLES);
        }
        // Those of the default orders tables are among theirs.
        if !is_ours && kinds.iter().any(|kind| settings.table_of(kind).is_some() || has_reminders(kind)) {
            tables.push(WRITTEN_EVENTS);
        }
        if is_ours {
            tables.extend(DEFAULT_ORDERS_TABLES);
            indexes.extend(INDEXES_OF_DEFAULT_ORDERS_TABLES);
        }
        let functions = if is_ours { DEFAULT_FUNCTIONS.to_vec() } else { Vec::new() };
        Self { tables, indexes, functions, is_ours }
    }

    /// Of a worker that asks a payment provider before it closes an order.
    #[must_use]
    pub fn with_provider(mut self) -> Self {
        self.tables.extend(PROVIDER_TABLES);
        self.indexes.extend(INDEXES_OF_PROVIDER_TABLES);
        self.functions.extend(PROVIDER_FUNCTIONS);
        self
    }

    /// Checks once. The result has an entry for every cause that this can find.
    ///
    /// # Errors
    /// sqlx's, if the query fails.
    pub async fn look(&self, database: &Database) -> Result<Found, sqlx::Error> {
        let (of_columns, columns): (Vec<_>, Vec<_>) = self
            .tables
            .iter()
            // A table without listed columns is checked as well.
            .flat_map(|table| [""].iter().chain(table.columns).map(|column| (table.name, *column)))
            .unzip();
        let (of_rights, rights): (Vec<_>, Vec<_>) =
            self.tables.iter().flat_map(|table| table.rights.iter().map(|right| (table.name, *right))).unzip();
        let query = sqlx::query(CATALOG_QUERY)
            .bind(of_columns)
            .bind(columns)
            .bind(of_rights)
            .bind(rights)
            .bind(self.indexes.iter().map(|index| index.table).collect::<Vec<_>>())
            .bind(self.indexes.iter().map(|index| index.first_column).collect::<Vec<_>>())
            .bind(self.indexes.iter().map(|index| index.unique).collect::<Vec<_>>())
            .bind(self.indexes.iter().map(|index| index.condition).collect::<Vec<_>>())
            .bind(self.is_ours)
            .bind(&self.functions);
        let row = database.run(async |connection| query.fetch_one(connection).await).await?;
        Ok(self.judge(&read(&row)?))
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
            let with_migration = |name: &String| {
                let table = self.tables.iter().find(|table| table.name == name.as_str());
                format!("{name} (created by migrations/{})", table.map_or("", |table| table.migration))
            };
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
        let index = |place: &i32| self.indexes.get(usize::try_from(*place).ok()?.checked_sub(1)?);
        let missing = catalog.indexes.iter().filter_map(index);
        problems.extend(missing.map(|index| Problem::new(Cause::Schema, index.missing, index.create)));
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

fn read(row: &PgRow) -> Result<Catalog, sqlx::Error> {
    Ok(Catalog {
        is_standby: row.try_get("is_standby")?,
        is_read_only: row.try_get("is_read_only")?,
        role: row.try_get("role")?,
        search_path: row.try_get("search_path")?,
        tables: row.try_get("tables")?,
        columns: row.try_get("columns")?,
        unlogged: row.try_get("unlogged")?,
        rights: row.try_get("rights")?,
        row_security: row.try_get("row_security")?,
        indexes: row.try_get("indexes")?,
        no_early_close_check: row.try_get("no_early_close_check")?,
        missing_functions: row.try_get("missing_functions")?,
        forbidden_functions: row.try_get("forbidden_functions")?,
    })
}

#[cfg(test)]
mod tests {
    use super::super::sentence;
    use super::*;

    fn why(found: Found, cause: Cause) -> Option<String> {
        sentence(&found.into_iter().find(|(found, _)| *found == cause).expect("every cause has an entry").1)
    }

    #[test]
    fn every_migration_named_exists() {
        for table in ALWAYS.iter().chain(DEFAULT_ORDERS_TABLES).chain(REMINDER_TABLES).chain(PROVIDER_TABLES) {
            let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("migrations").join(table.migration);
            assert!(path.is_file(), "{}", path.display());
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

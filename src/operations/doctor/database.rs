//! The database: reached, supported, writable, complete, with the rights that a worker needs and no more, vacuumed, and
//! with connections left.
//!
//! Runs no statement itself (`server.rs`, `src/observe/inspect/`).

use std::time::Duration;

use super::check::{CheckName, Checks, Finding};
use super::server::{self, Facts, OpenTransaction, Table};
use super::{Options, clocks, orders};
use crate::config::Settings;
use crate::observe::degraded::Cause;
use crate::observe::inspect::Fault;
use crate::observe::inspect::schema::Schema;
use crate::postgres::{self, Database, DatabaseError, one_line};

/// README, "It needs": PostgreSQL 13.
const OLDEST_VERSION: i32 = 130_000;
/// Fewer dead rows cost nothing, whatever their share.
const MANY_DEAD_ROWS: i64 = 10_000;
/// Autovacuum keeps them below a fifth, by default.
const LIVE_TO_DEAD: i64 = 2;
/// PostgreSQL begins to vacuum against the wraparound at 200 million, and stops writing at 2 100 million.
const OLD_TRANSACTION_IDS: i64 = 1_000_000_000;
/// PostgreSQL itself warns 40 million before it stops.
const TOO_OLD_TRANSACTION_IDS: i64 = 1_800_000_000;

/// Checks that need a connection.
const CONNECTED: [CheckName; 25] = {
    use CheckName as C;
    [
        C::DatabaseVersion,
        C::DatabaseWritable,
        C::DatabaseDurability,
        C::SchemaMigrated,
        C::SchemaComplete,
        C::SchemaLogged,
        C::RoleRights,
        C::RoleLeastPrivilege,
        C::DatabaseConnections,
        C::Vacuum,
        C::TransactionIds,
        C::LongTransactions,
        C::TimeZone,
        C::DatabaseClock,
        C::OrdersStatements,
        C::OverduePlan,
        C::FirstBacklog,
        C::WorkersAlive,
        C::OrdersOverdue,
        C::KindsServed,
        C::WorkersAgree,
        C::AlarmOutbox,
        C::EventOutbox,
        C::ParkedAlarms,
        C::ClosesBySweep,
    ]
};
/// Those among them that need our tables.
const MIGRATED: [CheckName; 17] = {
    use CheckName as C;
    [
        C::SchemaComplete,
        C::SchemaLogged,
        C::RoleRights,
        C::DatabaseWritable,
        C::Vacuum,
        C::TimeZone,
        C::OrdersStatements,
        C::OverduePlan,
        C::FirstBacklog,
        C::WorkersAlive,
        C::OrdersOverdue,
        C::KindsServed,
        C::WorkersAgree,
        C::AlarmOutbox,
        C::EventOutbox,
        C::ParkedAlarms,
        C::ClosesBySweep,
    ]
};

/// Returns the database if it has our tables.
pub(super) async fn examine(settings: &Settings, options: &Options, checks: &mut Checks) -> Option<Database> {
    let database = match Database::connect(&settings.database, 2).await {
        Ok(database) => database,
        Err(fault) => {
            unreachable(&fault, checks);
            checks.skip(&CONNECTED, "there is no connection to the database");
            return None;
        }
    };
    match server::facts(&database).await {
        Ok(facts) => {
            judge_server(&facts, settings, checks);
            sessions(&database, options, &facts, checks).await;
            match postgres::require_migrated(&database).await {
                Err(fault) => {
                    checks.error(
                        CheckName::SchemaMigrated,
                        Finding::new(
                            fault.to_string(),
                            "a worker does not start on it",
                            "run `order-timeout setup` as the owner of the schema",
                        ),
                    );
                    checks.skip(&MIGRATED, "the schema lacks migrations");
                    return None;
                }
                Ok(()) => schema(&database, settings, &facts, checks).await,
            }
        }
        Err(why) => {
            checks.skip(&CONNECTED, &why);
            return None;
        }
    }
    match clocks::difference(server::now(&database)).await {
        Ok(ahead_us) => clocks::judge_database(ahead_us, checks),
        Err(why) => checks.not_known(CheckName::DatabaseClock, why),
    }
    for kind in settings.served_kinds() {
        orders::examine(&database, settings, &kind, checks).await;
    }
    Some(database)
}

fn unreachable(fault: &DatabaseError, checks: &mut Checks) {
    let (name, why, fix) = if postgres::is_about_pooler(fault) {
        (
            CheckName::DatabasePooler,
            "the worker's locks, timeouts and prepared statements belong to a session, so it does not start",
            "let the pooler use pool_mode = session for this user and database, or give database.url the address of Postgres itself",
        )
    } else {
        (CheckName::DatabaseReachable, "without the database nothing is closed", "start it, or correct database.url")
    };
    checks.error(name, Finding::new(fault.to_string(), why, fix));
}

fn judge_server(facts: &Facts, settings: &Settings, checks: &mut Checks) {
    if facts.version_number < OLDEST_VERSION {
        checks.error(
            CheckName::DatabaseVersion,
            Finding::new(
                format!("PostgreSQL {} is older than 13", facts.version),
                "our statements use what later versions have",
                "upgrade to PostgreSQL 13 or newer",
            ),
        );
    } else {
        checks.fact(CheckName::DatabaseVersion, format!("PostgreSQL {}", facts.version));
    }
    if !facts.unsafe_settings.is_empty() {
        let off = facts.unsafe_settings.join(" and ");
        checks.warning(
            CheckName::DatabaseDurability,
            Finding::new(
                format!("{off} is off"),
                "a crash of the server takes back closes whose events were sent, and payments",
                format!("ALTER SYSTEM SET {} = on (or RESET it for the role or the database that sets it); SELECT pg_reload_conf()", facts.unsafe_settings[0]),
            ),
        );
    }
    if !facts.server_rights.is_empty() {
        let (role, rights) = (&facts.role, facts.server_rights.join(", "));
        let without = facts.server_rights.iter().map(|right| format!("NO{right}")).collect::<Vec<_>>().join(" ");
        const OWN_ROLE: &str = "give database.url a role of its own (docs/operating/deploy.md, \"Rights\")";
        // The server's first superuser may be its only one.
        let fix = match role.as_str() {
            "postgres" => OWN_ROLE.to_owned(),
            role => format!("ALTER ROLE {role} {without}, or {OWN_ROLE}"),
        };
        checks.warning(
            CheckName::RoleLeastPrivilege,
            Finding::new(
                format!("the role {role} has rights on the whole server that no worker needs: {rights}"),
                "a program that gets hold of the worker's address could change every database of the server",
                fix,
            ),
        );
    }
    // The closers' own, and one on which the clock is read while all of them are busy.
    let of_closers = i64::try_from(settings.worker.closers).unwrap_or(i64::MAX).saturating_add(1);
    let needed = of_closers.saturating_add(settings.connections_besides_closers().into());
    if facts.connections_left < needed {
        checks.warning(
            CheckName::DatabaseConnections,
            Finding::new(
                format!("{} connections are left by {}, and one more worker needs {needed}", facts.connections_left.max(0), facts.connections_limited_by),
                "a worker that is replaced by a new one, or that reconnects after an outage, finds none and closes nothing",
                "raise that limit (max_connections needs a restart; ALTER ROLE or ALTER DATABASE … CONNECTION LIMIT does not), or run fewer clients",
            ),
        );
    }
    if facts.transaction_age > OLD_TRANSACTION_IDS {
        let finding = Finding::new(
            format!(
                "the oldest transaction id of this database is {} million transactions old",
                facts.transaction_age / 1_000_000
            ),
            "at 2 100 million PostgreSQL stops accepting writes",
            "end what holds it back (transactions, prepared transactions, replication slots), then run vacuumdb --freeze on this database",
        );
        match facts.transaction_age > TOO_OLD_TRANSACTION_IDS {
            true => checks.error(CheckName::TransactionIds, finding),
            false => checks.warning(CheckName::TransactionIds, finding),
        }
    }
}

async fn sessions(database: &Database, options: &Options, facts: &Facts, checks: &mut Checks) {
    match server::open_transactions(database, options.long_transaction).await {
        Ok(open) if open.is_empty() => {
            if facts.has_other_sessions && !facts.sees_sessions {
                let role = &facts.role;
                checks.not_known(
                    CheckName::LongTransactions,
                    format!(
                        "the role {role} does not see the sessions of other roles; GRANT pg_read_all_stats TO {role}"
                    ),
                );
            }
        }
        Ok(open) => checks.warning(CheckName::LongTransactions, long_transactions(&open)),
        Err(why) => checks.not_known(CheckName::LongTransactions, why),
    }
}

fn long_transactions(open: &[OpenTransaction]) -> Finding {
    let one = |open: &OpenTransaction| {
        let OpenTransaction { pid, of, state, age_s } = open;
        let age = Duration::try_from_secs_f64(age_s.trunc()).unwrap_or_default();
        let age = humantime::format_duration(age);
        match pid {
            Some(pid) => format!("pid {pid} ({of}), {state}, for {age}"),
            None => format!("prepared transaction {of:?}, for {age}"),
        }
    };
    let end = |open: &OpenTransaction| match open.pid {
        Some(pid) => format!("SELECT pg_terminate_backend({pid})"),
        None => format!("ROLLBACK PREPARED '{}'", open.of.replace('\'', "''")),
    };
    Finding::new(
        format!("transactions are open: {}", open.iter().map(one).collect::<Vec<_>>().join("; ")),
        "they keep dead rows from being removed, so every query slows down, and orders that they have locked are not closed",
        format!("end them if their program does not: {}", open.iter().map(end).collect::<Vec<_>>().join("; ")),
    )
}

async fn schema(database: &Database, settings: &Settings, facts: &Facts, checks: &mut Checks) {
    let mut schema = Schema::new(settings);
    if settings.asks_providers() {
        schema = schema.with_provider();
    }
    match schema.look(database).await {
        Ok(found) => {
            found.into_iter().for_each(|(cause, faults)| faults.iter().for_each(|fault| of_cause(cause, fault, checks)))
        }
        Err(error) => {
            let names = [CheckName::SchemaComplete, CheckName::RoleRights, CheckName::DatabaseWritable];
            checks.skip(&names, &one_line(&error));
        }
    }
    match server::tables(database, &schema.table_names()).await {
        Ok(tables) => {
            judge_unlogged(&tables, checks);
            judge_vacuum(&tables, facts.is_autovacuum_on, checks);
        }
        Err(why) => checks.skip(&[CheckName::SchemaLogged, CheckName::Vacuum], &why),
    }
}

/// A fault that a worker would report as a cause of its degradation.
pub(super) fn of_cause(cause: Cause, Fault { what, fix }: &Fault, checks: &mut Checks) {
    let (name, why) = match cause {
        Cause::ReadOnly => (CheckName::DatabaseWritable, "orders stay open until it accepts writes"),
        Cause::DatabaseRights => {
            (CheckName::RoleRights, "what a statement may not read or write is not closed, not sent or not parked")
        }
        Cause::SlowOverdueQuery => {
            let why = "four times a second it costs the database as much as the table is large, and ends at database.statement_timeout; then there is no safety net";
            return checks.warning(CheckName::OverduePlan, Finding::new(what, why, fix));
        }
        _ => (
            CheckName::SchemaComplete,
            "a guarantee depends on it: a statement fails, orders are closed twice or early, or overdue ones are found slowly",
        ),
    };
    checks.error(name, Finding::new(what, why, fix));
}

fn judge_unlogged(tables: &[Table], checks: &mut Checks) {
    for table in tables.iter().filter(|table| table.is_unlogged) {
        let name = &table.name;
        checks.error(
            CheckName::SchemaLogged,
            Finding::new(
                format!("the table {name} is unlogged"),
                "a crash of the server empties it, and a standby never has it",
                format!("ALTER TABLE {name} SET LOGGED"),
            ),
        );
    }
}

fn judge_vacuum(tables: &[Table], is_autovacuum_on: bool, checks: &mut Checks) {
    const WHY: &str = "queries read dead rows as well, so closing slows down day by day";
    if !is_autovacuum_on {
        checks.warning(
            CheckName::Vacuum,
            Finding::new("autovacuum is off", WHY, "ALTER SYSTEM RESET autovacuum; SELECT pg_reload_conf()"),
        );
    }
    for table in tables {
        let Table { name, dead_rows, live_rows, .. } = table;
        if table.is_left_out {
            checks.warning(
                CheckName::Vacuum,
                Finding::new(
                    format!("autovacuum is off for the table {name}"),
                    WHY,
                    format!("ALTER TABLE {name} RESET (autovacuum_enabled)"),
                ),
            );
        }
        if *dead_rows >= MANY_DEAD_ROWS && dead_rows.saturating_mul(LIVE_TO_DEAD) >= *live_rows {
            let vacuumed = match table.vacuumed_s {
                Some(seconds) => {
                    let ago = Duration::try_from_secs_f64(seconds.trunc()).unwrap_or_default();
                    format!("vacuumed {} ago", humantime::format_duration(ago))
                }
                None => "never vacuumed".to_owned(),
            };
            checks.warning(
                CheckName::Vacuum,
                Finding::new(
                    format!("the table {name} has {dead_rows} dead rows besides {live_rows} live ones, and was {vacuumed}"),
                    WHY,
                    format!("VACUUM (ANALYZE) {name}; if they come back, lower autovacuum_vacuum_scale_factor for it, and end long transactions"),
                ),
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(facts: &Facts) -> Vec<CheckName> {
        let mut checks = Checks::default();
        judge_server(facts, &Settings::defaults(), &mut checks);
        checks.report(&[]).findings().map(|(name, _)| name).collect()
    }

    #[test]
    fn server_facts_are_judged() {
        let facts = Facts { version_number: 150_000, connections_left: 12, ..Facts::default() };
        assert_eq!(found(&facts), []);
        assert_eq!(found(&Facts { version_number: 120_010, ..facts.clone() }), [CheckName::DatabaseVersion]);
        assert_eq!(found(&Facts { connections_left: 11, ..facts.clone() }), [CheckName::DatabaseConnections]);
        assert_eq!(found(&Facts { transaction_age: 1_100_000_000, ..facts.clone() }), [CheckName::TransactionIds]);
        assert_eq!(found(&Facts { unsafe_settings: vec!["fsync".into()], ..facts }), [CheckName::DatabaseDurability]);
    }

    #[test]
    fn prepared_transaction_is_rolled_back() {
        let open = OpenTransaction { pid: None, of: "it's".into(), state: "prepared".into(), age_s: 61.7 };
        let finding = long_transactions(&[open]);
        assert!(finding.what.contains("for 1m 1s"), "{finding:?}");
        assert!(finding.fix.ends_with("ROLLBACK PREPARED 'it''s'"), "{finding:?}");
    }
}

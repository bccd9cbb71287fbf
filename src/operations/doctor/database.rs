//! The database: reached, supported, writable, complete, with the rights that a worker needs and with connections left.
//!
//! Runs no statement itself (`server.rs`, `src/observe/inspect/`).

use order_timeout_core::problem::{Cause, Problem};

use super::check::Checks;
use super::orders;
use super::server::{self, Facts};
use crate::config::Settings;
use crate::observe::inspect::schema::Schema;
use crate::postgres::{self, Database, DatabaseError, one_line};

/// README, "It needs": PostgreSQL 13.
const OLDEST_VERSION: i32 = 130_000;

/// Returns the database if it has our tables.
pub(super) async fn examine(settings: &Settings, checks: &mut Checks) -> Option<Database> {
    let database = match Database::connect(&settings.database, 2).await {
        Ok(database) => database,
        Err(fault) => {
            unreachable(&fault, checks);
            skip_from(Cause::DatabaseVersion, "there is no connection to the database", checks);
            return None;
        }
    };
    match server::facts(&database).await {
        Ok(facts) => {
            judge_server(&facts, settings, checks);
            if !is_migrated(&database, &facts, checks).await {
                return None;
            }
            schema(&database, settings, checks).await;
        }
        Err(why) => {
            skip_from(Cause::DatabaseVersion, &why, checks);
            return None;
        }
    }
    for kind in settings.served_kinds() {
        orders::examine(&database, settings, &kind, checks).await;
    }
    Some(database)
}

/// Checks that need the database, from this one on; and what only its workers can find.
fn skip_from(first: Cause, why: &str, checks: &mut Checks) {
    checks.skip(first..=Cause::ProviderAway, why);
    checks.skip(Cause::AlarmsCirculate.., why);
}

/// Whether our tables are there. If not, no other check of them is made.
async fn is_migrated(database: &Database, Facts { role, forbidden, .. }: &Facts, checks: &mut Checks) -> bool {
    if !forbidden.is_empty() {
        let grants: Vec<String> = forbidden.iter().map(|right| format!("GRANT {right} TO {role}")).collect();
        let what = format!("the role {role} lacks {}", forbidden.join(", "));
        skip_from(Cause::Schema, "the migrations cannot be read", checks);
        checks.error(
            Problem::new(Cause::DatabaseRights, what, grants.join("; ")).because("a worker does not start without it"),
        );
        return false;
    }
    let Err(fault) = postgres::require_migrated(database).await else { return true };
    checks.error(
        Problem::new(Cause::Schema, fault.to_string(), "run `order-timeout setup` as the owner of the schema")
            .because("a worker does not start on it"),
    );
    skip_from(Cause::ReadOnly, "the schema lacks migrations", checks);
    false
}

fn unreachable(fault: &DatabaseError, checks: &mut Checks) {
    let (cause, fix) = if postgres::is_about_pooler(fault) {
        (
            Cause::DatabasePooler,
            "let the pooler use pool_mode = session for this user and database, or give database.url the address of Postgres itself",
        )
    } else {
        (Cause::Database, "start it, or correct database.url")
    };
    checks.error(Problem::new(cause, fault.to_string(), fix));
}

fn judge_server(facts: &Facts, settings: &Settings, checks: &mut Checks) {
    if facts.version_number < OLDEST_VERSION {
        checks.error(Problem::new(
            Cause::DatabaseVersion,
            format!("PostgreSQL {} is older than 13", facts.version),
            "upgrade to PostgreSQL 13 or newer",
        ));
    } else {
        checks.fact(Cause::DatabaseVersion, format!("PostgreSQL {}", facts.version));
    }
    // The closers' own, and one on which the clock is read while all of them are busy.
    let of_closers = i64::try_from(settings.worker.closers).unwrap_or(i64::MAX).saturating_add(1);
    let besides = settings.connections_besides_closers().saturating_add(settings.connections_of_closing());
    let needed = of_closers.saturating_add(besides.into());
    if facts.connections_left < needed {
        checks.warning(
            Problem::new(
                Cause::DatabaseConnections,
                format!("{} connections are left by {}, and one more worker needs {needed}", facts.connections_left.max(0), facts.connections_limited_by),
                "raise that limit (max_connections needs a restart; ALTER ROLE or ALTER DATABASE … CONNECTION LIMIT does not), or run fewer clients",
            ),
        );
    }
}

async fn schema(database: &Database, settings: &Settings, checks: &mut Checks) {
    match Schema::new(settings).look(database).await {
        Ok(found) => {
            found.into_iter().flat_map(|(_, problems)| problems).for_each(|problem| of_worker(problem, checks));
        }
        Err(error) => {
            checks.skip(Cause::Schema..=Cause::DatabaseRights, &one_line(&error));
        }
    }
}

/// What a worker would report as a cause of its degradation.
pub(super) fn of_worker(problem: Problem, checks: &mut Checks) {
    match problem.cause {
        Cause::SlowOverdueQuery => checks.warning(problem),
        _ => checks.error(problem),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(facts: &Facts) -> Vec<Cause> {
        let mut checks = Checks::default();
        judge_server(facts, &Settings::defaults(), &mut checks);
        checks.report(&[]).problems().map(|problem| problem.cause).collect()
    }

    #[test]
    fn server_facts_are_judged() {
        let facts = Facts { version_number: 150_000, connections_left: 12, ..Facts::default() };
        assert_eq!(found(&facts), []);
        assert_eq!(found(&Facts { version_number: 120_010, ..facts.clone() }), [Cause::DatabaseVersion]);
        assert_eq!(found(&Facts { connections_left: 11, ..facts }), [Cause::DatabaseConnections]);
    }
}

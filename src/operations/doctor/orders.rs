//! The statements on one kind's orders: whether they fit their table, use an index, and may close what is overdue already.
//!
//! Runs them as `adopt --check` does: up to ten closes of a shop's own table are rolled back.

use order_timeout_core::kind::Kind;
use order_timeout_core::problem::{Cause, Problem};

use super::check::Checks;
use super::database::of_worker;
use crate::config::Settings;
use crate::effects::close::Closer;
use crate::effects::sweep::Sweeper;
use crate::operations::adopt::{Level, check};
use crate::operations::first_backlog::{self, Verdict};
use crate::operations::orders_statements;
use crate::postgres::warm_connections::WarmConnections;
use crate::postgres::{Database, DatabaseError, adoption, one_line};

pub(super) async fn examine(database: &Database, settings: &Settings, kind: &Kind, checks: &mut Checks) {
    let is_own = !settings.has_built_in_table(kind);
    let names_zone = settings.table_of(kind).is_some_and(|table| table.time_zone.is_some());
    if is_own && !names_zone && database.assumes_time_zone() {
        checks.warning(
            Problem::new(
                Cause::TimeZone,
                "the worker's role may not read the server's time zone, so log_timezone is assumed",
                "name the zone of psql (SHOW timezone) in database.time_zone",
            )
            .because("deadlines in a column of type timestamp are hours off if the two differ"),
        );
    }
    let prepared = async {
        let statements = orders_statements::statements(database, settings, kind).await?;
        orders_statements::require_attempts_are_asked_about(database, kind, &statements.close).await?;
        let closer = Closer::prepare(WarmConnections::new(database.clone()), statements.close.clone()).await?;
        let sweeper = Sweeper::prepare(database.clone(), statements.overdue.clone()).await?;
        Ok::<_, DatabaseError>((statements, closer, sweeper))
    };
    let (statements, closer, sweeper) = match prepared.await {
        Ok(prepared) => prepared,
        Err(fault) => return checks.error(statement(fault.to_string())),
    };
    let mut is_planned = true;
    match orders_statements::plans(settings, kind, &closer, &sweeper).look(database).await {
        Ok(found) => {
            for (cause, faults) in found {
                is_planned &= faults.is_empty();
                // The schema's own check names a default index that is missing.
                if is_own || cause != Cause::SlowOverdueQuery || !checks.has_found(Cause::Schema) {
                    faults.into_iter().for_each(|problem| of_worker(problem, checks));
                }
            }
        }
        Err(error) => {
            is_planned = false;
            checks.not_known(Cause::SlowOverdueQuery, one_line(&error));
        }
    }
    let adoptable = first_backlog::adoptable(&statements.orders, &statements.defined_by, &sweeper);
    let may_close = backlog(database, settings, kind, (&sweeper, &adoptable), checks).await;
    if is_own && is_planned && may_close {
        match check::check(database, settings, kind).await {
            Ok(report) => {
                let wrong = report.findings.into_iter().filter(|finding| finding.level == Level::Wrong);
                wrong.for_each(|finding| {
                    checks.error(statement(format!("{}: {}", finding.key, finding.sentence)));
                });
            }
            Err(fault) => checks.not_known(Cause::OrdersContract, fault.to_string()),
        }
    }
}

fn statement(what: String) -> Problem {
    Problem::new(
        Cause::OrdersContract,
        what,
        "correct the setting that is named, and prove it with `order-timeout adopt --check`",
    )
}

/// Whether workers may close what is overdue.
async fn backlog(
    database: &Database,
    settings: &Settings,
    kind: &Kind,
    (sweeper, adoptable): (&Sweeper, &adoption::Adoptable),
    checks: &mut Checks,
) -> bool {
    match first_backlog::judge(database, sweeper, adoptable, settings, kind).await {
        Ok(Verdict::Adopted | Verdict::Small(_)) => true,
        Ok(Verdict::Refused(refusal)) => {
            let of_kind = if kind.is_default() { String::new() } else { format!(" --kind {kind}") };
            checks.error(Problem::new(
                Cause::FirstBacklog,
                refusal,
                format!(
                    "run `order-timeout adopt --accept-backlog{of_kind}`, or leave old orders out as the sentence says"
                ),
            ));
            false
        }
        Err(fault) => {
            checks.not_known(Cause::FirstBacklog, fault.to_string());
            false
        }
    }
}

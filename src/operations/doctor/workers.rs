//! The workers as they have registered themselves, and what they leave behind when they do not do their work: overdue
//! orders, full outboxes, parked alarms, closes by the sweep.
//!
//! Asks no worker; reads the database alone.

use std::collections::BTreeSet;
use std::time::Duration;

use order_timeout_core::kind::Kind;

use super::check::{CheckName, Checks, Finding};
use super::server;
use crate::config::Settings;
use crate::observe::inspect::Fault;
use crate::observe::inspect::registration::Registration;
use crate::operations::orders_table::OrdersTable;
use crate::operations::pause_closing::HOW_TO_RESUME;
use crate::operations::status::{self, Outbox, RegisteredWorker};
use crate::postgres::closing_pauses::{self, Pause};
use crate::postgres::{self, Database, one_line, parked_alarms};

/// How long an order may be overdue beyond `sweep.grace`. The sweep takes it within seconds.
const OVERDUE_FOR: Duration = Duration::from_secs(30);
/// How long a row may wait in an outbox, which is polled ten times a second. Longer than a transaction that commits old
/// rows.
const UNSENT_FOR: Duration = Duration::from_secs(60);
/// Closes of this time are looked at.
const LATELY: Duration = Duration::from_secs(600);
/// Fewer show nothing.
const FEW_SWEPT: i64 = 10;
/// One close in so many may be the sweep's: an order whose alarm was parked, or for which none was scheduled.
const SWEPT_OF: i64 = 20;

/// Returns the live workers of this namespace, if they are known.
pub(super) async fn examine(
    settings: &Settings,
    database: &Database,
    checks: &mut Checks,
) -> Option<Vec<RegisteredWorker>> {
    let live = live_workers(settings, database, checks).await;
    if let Some(live) = &live {
        kinds_served(settings, live, checks);
    }
    overdue(settings, database, live.as_deref(), checks).await;
    match Registration::new(database.clone(), settings).disagreement().await {
        Ok(None) => {}
        Ok(Some(Fault { what, fix })) => checks.error(
            CheckName::WorkersAgree,
            Finding::new(
                format!("workers differ from this configuration: {what}"),
                "a publisher or worker writes alarms where another does not look for them, or takes them for another deadline",
                fix,
            ),
        ),
        Err(error) => checks.not_known(CheckName::WorkersAgree, one_line(&error)),
    }
    outboxes(database, checks).await;
    match parked_alarms::count_by_reason(database).await {
        Ok(parked) => {
            judge_parked(&parked.into_iter().map(|(reason, alarms, _)| (reason, alarms)).collect::<Vec<_>>(), checks)
        }
        Err(error) => checks.not_known(CheckName::ParkedAlarms, one_line(&error)),
    }
    let has_default = settings.served_kinds().iter().any(|kind| settings.has_default_orders(kind));
    if has_default && settings.delay.strategy.needs_broker() {
        match server::closes(database, LATELY).await {
            Ok((swept, closed)) => judge_closes(swept, closed, checks),
            Err(why) => checks.not_known(CheckName::ClosesBySweep, why),
        }
    }
    live
}

/// The live workers of this namespace.
pub(super) async fn live(settings: &Settings, database: &Database) -> Result<Vec<RegisteredWorker>, String> {
    let mut workers = status::workers(database).await?;
    workers.retain(|worker| worker.is_live && worker.namespace == settings.namespace);
    Ok(workers)
}

async fn live_workers(settings: &Settings, database: &Database, checks: &mut Checks) -> Option<Vec<RegisteredWorker>> {
    match live(settings, database).await {
        Ok(workers) => Some(workers),
        Err(why) => {
            checks.skip(&[CheckName::WorkersAlive, CheckName::KindsServed, CheckName::OrdersOverdue], &why);
            None
        }
    }
}

fn kinds_served(settings: &Settings, live: &[RegisteredWorker], checks: &mut Checks) {
    if live.is_empty() {
        return checks.not_known(CheckName::KindsServed, "no worker runs");
    }
    let unserved = unserved(settings, live);
    if !unserved.is_empty() {
        let kinds = unserved.iter().map(Kind::to_string).collect::<Vec<_>>().join(", ");
        checks.error(
            CheckName::KindsServed,
            Finding::new(
                format!("no worker serves the kind {kinds}"),
                "its alarms wait in their queue and its deadlines pass",
                format!("start a worker with the settings of kinds.{kinds}, and with it in worker.kinds if that is not empty"),
            ),
        );
    }
}

/// The kinds of the configuration that no live worker serves.
pub(super) fn unserved(settings: &Settings, live: &[RegisteredWorker]) -> BTreeSet<Kind> {
    let is_served = |kind: &Kind| live.iter().any(|worker| worker.kinds.iter().any(|served| served == kind.as_str()));
    settings.all_kinds().into_iter().filter(|kind| !is_served(kind)).collect()
}

async fn overdue(settings: &Settings, database: &Database, live: Option<&[RegisteredWorker]>, checks: &mut Checks) {
    let Some(live) = live else { return };
    let mut late = None;
    for kind in settings.served_kinds() {
        // What is overdue then waits for the end of the pause, whatever else is wrong.
        if let Some(pause) = paused(database, &kind).await {
            checks.warning(CheckName::OrdersOverdue, waits_for_resume(&pause));
            continue;
        }
        let found = async {
            let orders =
                OrdersTable::open(database.clone(), settings, &kind).await.map_err(|fault| fault.to_string())?;
            let overdue = orders.overdue().await?;
            let now = database.run(postgres::now).await.map_err(|error| one_line(&error))?;
            Ok::<_, String>((overdue.orders, overdue.oldest.map(|oldest| now.since(oldest)).unwrap_or_default()))
        };
        match found.await {
            Ok((orders, age)) if age > settings.sweep.grace + OVERDUE_FOR => {
                late.get_or_insert((kind, orders, age));
            }
            Ok(_) => {}
            Err(why) => checks.not_known(CheckName::OrdersOverdue, why),
        }
    }
    match (late, live.is_empty()) {
        (Some((kind, orders, age)), true) => checks.error(
            CheckName::WorkersAlive,
            Finding::new(
                format!("no worker runs, and {orders} orders of kind {kind} are overdue, the oldest for {}", seconds(age)),
                "without a worker no order is closed",
                "start one: order-timeout worker",
            ),
        ),
        (Some((kind, orders, age)), false) => checks.error(
            CheckName::OrdersOverdue,
            Finding::new(
                format!("{orders} orders of kind {kind} are overdue although workers run, the oldest for {}", seconds(age)),
                "they are not closed, and their stock is not given back",
                "ask for the cause with `order-timeout show ID`; a trigger, a constraint or a lock of another session is usual. The worker's log names the error",
            ),
        ),
        (None, true) => checks.not_known(CheckName::WorkersAlive, "no worker runs, and no order is overdue"),
        (None, false) => checks.fact(CheckName::WorkersAlive, format!("{} workers run", live.len())),
    }
}

/// The oldest pause of the kind; `None` also if that cannot be read, which other checks say.
pub(super) async fn paused(database: &Database, kind: &Kind) -> Option<Pause> {
    let read = database.run(async |connection| closing_pauses::current(connection, Some(kind)).await);
    read.await.ok()?.into_iter().next()
}

fn waits_for_resume(pause: &Pause) -> Finding {
    Finding::new(
        pause.sentence(),
        "no order of it is closed until closing is resumed; alarms wait in the broker, and workers read no queue",
        HOW_TO_RESUME,
    )
}

fn seconds(age: Duration) -> humantime::FormattedDuration {
    humantime::format_duration(Duration::from_secs(age.as_secs()))
}

async fn outboxes(database: &Database, checks: &mut Checks) {
    let now = match database.run(postgres::now).await {
        Ok(now) => now,
        Err(error) => return checks.skip(&[CheckName::AlarmOutbox, CheckName::EventOutbox], &one_line(&error)),
    };
    for (name, table) in [(CheckName::AlarmOutbox, "alarm_outbox"), (CheckName::EventOutbox, "event_outbox")] {
        match status::outbox(database, table, now).await {
            Ok(outbox) => judge_outbox(name, table, &outbox, checks),
            Err(why) => checks.not_known(name, why),
        }
    }
}

fn judge_outbox(name: CheckName, table: &str, outbox: &Outbox, checks: &mut Checks) {
    let Outbox { unsent, oldest_s, refused, .. } = *outbox;
    let age = Duration::try_from_secs_f64(oldest_s.unwrap_or(0.0)).unwrap_or_default();
    let why = match name {
        CheckName::AlarmOutbox => "the orders' alarms are not armed, so the sweep closes them late",
        _ => "the shop does not learn that orders were closed",
    };
    if refused > 0 {
        checks.warning(
            name,
            Finding::new(
                format!("{refused} rows of {table} were refused by the broker, the oldest row is {} old", seconds(age)),
                why,
                "order_timeout's log names the queue that refuses: raise its max-length, read it, or give its user the rights; the rows are then sent by themselves",
            ),
        );
    } else if unsent > 0 && age > UNSENT_FOR {
        checks.error(
            name,
            Finding::new(
                format!("{unsent} rows of {table} are not sent, the oldest for {}", seconds(age)),
                why,
                "start a worker; if one runs, read /readyz of the worker whose order_timeout_relaying is 1",
            ),
        );
    }
}

fn judge_parked(parked: &[(String, u64)], checks: &mut Checks) {
    if parked.is_empty() {
        return;
    }
    let of_reason = parked.iter().map(|(reason, alarms)| format!("{alarms} {reason}")).collect::<Vec<_>>().join(", ");
    checks.warning(
        CheckName::ParkedAlarms,
        Finding::new(
            format!("alarms are parked: {of_reason}"),
            "each could not be handled; its order is closed by the sweep, or there is no such order",
            "look at them with `order-timeout parked list`, correct the cause, then `order-timeout parked retry` or `drop`",
        ),
    );
}

fn judge_closes(swept: i64, closed: i64, checks: &mut Checks) {
    if swept < FEW_SWEPT || swept * SWEPT_OF <= closed {
        return;
    }
    checks.warning(
        CheckName::ClosesBySweep,
        Finding::new(
            format!("the sweep closed {swept} of {closed} orders in the last {}", seconds(LATELY)),
            "their alarms did not arrive in time, so they were closed late, by sweep.grace and more",
            "schedule an alarm in each order's transaction; if that is done, see \"Alarms that do not arrive\" in docs/operating/troubleshoot.md. It is clear again when no such close is left in that time",
        ),
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(judge: impl FnOnce(&mut Checks)) -> Vec<CheckName> {
        let mut checks = Checks::default();
        judge(&mut checks);
        checks.report(&[]).findings().map(|(name, _)| name).collect()
    }

    #[test]
    fn few_swept_orders_are_usual() {
        assert_eq!(names(|checks| judge_closes(10, 200, checks)), []);
        assert_eq!(names(|checks| judge_closes(11, 200, checks)), [CheckName::ClosesBySweep]);
        assert_eq!(names(|checks| judge_closes(9, 9, checks)), []);
    }

    #[test]
    fn young_outbox_rows_are_usual() {
        let of = |unsent, oldest_s, refused| {
            let outbox = Outbox { unsent, oldest_s: Some(oldest_s), refused, oldest_refused_s: None };
            names(|checks| judge_outbox(CheckName::EventOutbox, "event_outbox", &outbox, checks))
        };
        assert_eq!(of(10, 5.0, 0), []);
        assert_eq!(of(10, 61.0, 0), [CheckName::EventOutbox]);
        assert_eq!(of(10, 5.0, 1), [CheckName::EventOutbox]);
    }
}

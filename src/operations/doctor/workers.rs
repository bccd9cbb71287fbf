//! The workers as they have registered themselves, what they have found, and what they leave behind when they do not do their
//! work: overdue orders, full outboxes, parked alarms.
//!
//! Asks no worker; reads the database alone.

use std::time::Duration;

use order_timeout_core::kind::Kind;
use order_timeout_core::order::Timestamp;
use order_timeout_core::problem::{Cause, Problem};

use super::check::Checks;
use crate::config::Settings;
use crate::observe::inspect::registration::{Registered, Registration, not_served};
use crate::operations::open_cause::{how_to_end, named};
use crate::operations::orders_table::{OrdersTable, OverdueOrders};
use crate::operations::pause_closing::{HOW_TO_RESUME, lasting};
use crate::operations::status::{self, Outbox};
use crate::postgres::closing_pauses::Pause;
use crate::postgres::lock_holders::LockHolder;
use crate::postgres::{self, Database, one_line, parked_alarms};

/// How long an order may be overdue beyond `sweep.grace`. The sweep takes it within seconds.
const OVERDUE_FOR: Duration = Duration::from_secs(30);
/// How long a row may wait in an outbox, which is polled ten times a second. Longer than a transaction that commits old
/// rows.
const UNSENT_FOR: Duration = Duration::from_secs(60);

/// Returns the live workers, if they are known.
pub(super) async fn examine(
    settings: &Settings,
    database: &Database,
    registration: &Registration,
    checks: &mut Checks,
) -> Option<Registered> {
    let live = match registration.look().await {
        Ok(live) => Some(live),
        Err(error) => {
            let why = one_line(&error);
            checks.skip(Cause::NoWorker..=Cause::Reminders, &why);
            checks.skip(Cause::AlarmsCirculate.., &why);
            None
        }
    };
    if let Some(live) = &live {
        overdue(settings, database, live.count(), checks).await;
        found_by_workers(live, checks);
        if let Some(problem) = live.disagreement() {
            let what = format!("workers differ from this configuration: {}", problem.what);
            checks.error(Problem { what, ..problem });
        }
    }
    outboxes(settings, database, checks).await;
    match parked_alarms::count_by_reason(database).await {
        Ok(parked) => judge_parked(&parked, checks),
        Err(error) => checks.not_known(Cause::ParkedAlarms, one_line(&error)),
    }
    live
}

/// What ends with its cause, because each worker says what it finds every few seconds.
fn found_by_workers(live: &Registered, checks: &mut Checks) {
    if live.count() == 0 {
        checks.not_known(Cause::KindNotServed, "no worker runs");
        checks.skip(Cause::KindNotStarted..=Cause::Reminders, "no worker runs");
        return checks.skip(Cause::AlarmsCirculate.., "no worker runs");
    }
    live.unserved().iter().for_each(|kind| checks.error(not_served(kind)));
    live.found().into_iter().for_each(|problem| match problem.cause {
        Cause::KindNotStarted | Cause::TimeZone => checks.error(problem),
        _ => checks.warning(problem),
    });
}

async fn overdue(settings: &Settings, database: &Database, workers: usize, checks: &mut Checks) {
    let mut late = None;
    for kind in settings.served_kinds() {
        // What is overdue then waits for the end of the pause, whatever else is wrong.
        if let Some(pause) = paused(database, &kind).await {
            checks.warning(Problem::new(Cause::ClosingPaused, pause.sentence(), HOW_TO_RESUME).of_kind(Some(&kind)));
            continue;
        }
        match late_orders(settings, database, &kind).await {
            Ok(found) => late = late.or(found.map(|found| (kind, found))),
            Err(why) => checks.not_known(Cause::OrdersOverdue, why),
        }
    }
    match (late, workers == 0) {
        (Some((kind, late)), true) => checks.error(Problem::new(
            Cause::NoWorker,
            format!("no worker runs, and {} of kind {kind} are overdue, {}", late.orders, late.oldest),
            "start one: order-timeout worker",
        )),
        (Some((kind, late)), false) => checks.error(overdue_despite_workers(&kind, &late)),
        (None, true) => checks.not_known(Cause::NoWorker, "no worker runs, and no order is overdue"),
        (None, false) => checks.fact(Cause::NoWorker, format!("{workers} workers run")),
    }
}

/// Orders of a kind that should be closed by now.
struct LateOrders {
    orders: String,
    oldest: String,
    holders: Vec<LockHolder>,
}

async fn late_orders(settings: &Settings, database: &Database, kind: &Kind) -> Result<Option<LateOrders>, String> {
    let table = OrdersTable::open(database.clone(), settings, kind).await.map_err(|fault| fault.to_string())?;
    let OverdueOrders { orders, is_at_least, oldest, example } = table.overdue().await?;
    let now = database.run(postgres::now).await.map_err(|error| one_line(&error))?;
    let age = oldest.map(|oldest| now.since(oldest)).unwrap_or_default();
    let Some(example) = example.filter(|_| age > settings.sweep.grace + OVERDUE_FOR) else { return Ok(None) };
    let orders = format!("{}{orders} orders", if is_at_least { "at least " } else { "" });
    let oldest = format!("the oldest ({example}) for {}", seconds(age));
    // What holds the locks is a help, not the finding.
    Ok(Some(LateOrders { orders, oldest, holders: table.lock_holders(&example).await.unwrap_or_default() }))
}

fn overdue_despite_workers(kind: &Kind, LateOrders { orders, oldest, holders }: &LateOrders) -> Problem {
    let mut what = format!("{orders} of kind {kind} are overdue although workers run, {oldest}");
    if !holders.is_empty() {
        what = format!("{what}: {} holds a lock on what its close changes", named(holders));
    }
    let ask = "ask for the cause with `order-timeout explain ID`; a trigger, a constraint or a lock of another session is usual. The worker's log names the error";
    Problem::new(Cause::OrdersOverdue, what, how_to_end(holders).unwrap_or_else(|| ask.to_owned()))
}

/// The oldest pause of the kind; `None` also if that cannot be read, which other checks say.
pub(super) async fn paused(database: &Database, kind: &Kind) -> Option<Pause> {
    lasting(database, Some(kind)).await.ok()?.into_iter().next()
}

fn seconds(age: Duration) -> humantime::FormattedDuration {
    humantime::format_duration(Duration::from_secs(age.as_secs()))
}

async fn outboxes(settings: &Settings, database: &Database, checks: &mut Checks) {
    let now = match database.run(postgres::now).await {
        Ok(now) => now,
        Err(error) => return checks.not_known(Cause::RelayStalled, one_line(&error)),
    };
    // Without a broker, alarms are kept for one that may come, and events for a shop that reads the table itself.
    let needs_broker = settings.delay.strategy.needs_broker();
    let announces = !(settings.announce.webhook.is_empty() && settings.announce.notify.is_empty());
    for (table, is_emptied) in [("alarm_outbox", needs_broker), ("event_outbox", needs_broker || announces)] {
        if !is_emptied {
            continue;
        }
        match status::outbox(database, table, now).await {
            Ok(outbox) => judge_outbox(table, &outbox, checks),
            // Rights that are missing are named already.
            Err(why) if checks.has_found(Cause::DatabaseRights) => checks.not_known(Cause::OutboxUnreadable, why),
            Err(why) => checks.error(Problem::new(
                Cause::OutboxUnreadable,
                format!("{table} cannot be read: {why}"),
                format!("end the session that keeps it locked: SELECT pid, mode FROM pg_locks WHERE relation = '{table}'::regclass"),
            )),
        }
    }
}

fn judge_outbox(table: &str, outbox: &Outbox, checks: &mut Checks) {
    let Outbox { unsent, oldest_s, refused, .. } = *outbox;
    let age = Duration::try_from_secs_f64(oldest_s.unwrap_or(0.0)).unwrap_or_default();
    if refused > 0 {
        let cause = if table == "event_outbox" { Cause::EventsRefused } else { Cause::RelayStalled };
        checks.warning(Problem::new(
            cause,
            format!("{refused} rows of {table} were refused by the broker, the oldest row is {} old", seconds(age)),
            "order_timeout's log names the queue that refuses: raise its max-length, read it, or give its user the rights; the rows are then sent by themselves",
        ));
    } else if unsent > 0 && age > UNSENT_FOR {
        checks.error(Problem::new(
            Cause::RelayStalled,
            format!("{unsent} rows of {table} are not sent, the oldest for {}", seconds(age)),
            "start a worker; if one runs, read /readyz of the worker whose order_timeout_relaying is 1",
        ));
    }
}

fn judge_parked(parked: &[(String, u64, Timestamp)], checks: &mut Checks) {
    if parked.is_empty() {
        return;
    }
    let of_reason =
        parked.iter().map(|(reason, alarms, _)| format!("{alarms} {reason}")).collect::<Vec<_>>().join(", ");
    checks.warning(Problem::new(
        Cause::ParkedAlarms,
        format!("alarms are parked: {of_reason}"),
        "look at them with `order-timeout parked list`, correct the cause, then `order-timeout parked retry` or `drop`",
    ));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(judge: impl FnOnce(&mut Checks)) -> Vec<Cause> {
        let mut checks = Checks::default();
        judge(&mut checks);
        checks.report(&[]).problems().map(|problem| problem.cause).collect()
    }

    #[test]
    fn young_outbox_rows_are_usual() {
        let of = |unsent, oldest_s, refused| {
            let outbox = Outbox { unsent, oldest_s: Some(oldest_s), refused, oldest_refused_s: None };
            names(|checks| judge_outbox("event_outbox", &outbox, checks))
        };
        assert_eq!(of(10, 5.0, 0), []);
        assert_eq!(of(10, 61.0, 0), [Cause::RelayStalled]);
        assert_eq!(of(10, 5.0, 1), [Cause::EventsRefused]);
    }
}

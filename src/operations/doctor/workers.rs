//! The workers as they have registered themselves, what they have found, and what they leave behind when they do not do their
//! work: overdue orders, full outboxes, parked alarms, closes by the sweep.
//!
//! Asks no worker; reads the database alone.

use std::collections::BTreeSet;
use std::time::Duration;

use order_timeout_core::kind::Kind;
use order_timeout_core::message::write_rfc3339;
use order_timeout_core::problem::{Cause, Problem};

use super::check::Checks;
use super::server::{self, Closes};
use crate::config::Settings;
use crate::observe::inspect::registration::Registration;
use crate::operations::open_cause::{how_to_end, named};
use crate::operations::orders_table::{OrdersTable, OverdueOrders};
use crate::operations::pause_closing::HOW_TO_RESUME;
use crate::operations::status::{self, Outbox, RegisteredWorker};
use crate::postgres::closing_pauses::{self, Pause};
use crate::postgres::lock_holders::LockHolder;
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
/// In fewer minutes the sweep has closed what was overdue after a start, a pause or an outage. Where more orders than these
/// fall due, workers find by themselves that alarms are missing.
const FEW_MINUTES: i64 = 3;
/// The sweep has stopped closing orders when its last close is older than this, and than so many of its usual gaps.
const OVER_AFTER: Duration = Duration::from_secs(15);
const GAPS_UNTIL_OVER: u32 = 3;
/// What only a worker can find and nothing else here looks at.
const NEEDS_WORKER: [Cause; 5] = {
    use Cause as C;
    [C::KindNotStarted, C::Reminders, C::SlotNotConfirming, C::AlarmsCirculate, C::UnreadableMessage]
};
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
    let registration = Registration::new(database.clone(), settings);
    found_by_workers(&registration, live.as_deref(), checks).await;
    match registration.disagreement().await {
        Ok(None) => {}
        Ok(Some(problem)) => checks
            .error(Problem { what: format!("workers differ from this configuration: {}", problem.what), ..problem }),
        Err(error) => checks.not_known(Cause::WorkersDisagree, one_line(&error)),
    }
    outboxes(settings, database, checks).await;
    match parked_alarms::count_by_reason(database).await {
        Ok(parked) => {
            judge_parked(&parked.into_iter().map(|(reason, alarms, _)| (reason, alarms)).collect::<Vec<_>>(), checks)
        }
        Err(error) => checks.not_known(Cause::ParkedAlarms, one_line(&error)),
    }
    let has_default = settings.served_kinds().iter().any(|kind| settings.has_default_orders(kind));
    if has_default && settings.delay.strategy.needs_broker() {
        match server::closes(database, LATELY).await {
            Ok(closes) => judge_closes(&closes, checks),
            Err(why) => checks.not_known(Cause::AlarmsNotArriving, why),
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
            checks.skip(&[Cause::NoWorker, Cause::KindNotServed, Cause::OrdersOverdue], &why);
            None
        }
    }
}

/// What ends with its cause, because each worker says what it finds every few seconds.
async fn found_by_workers(registration: &Registration, live: Option<&[RegisteredWorker]>, checks: &mut Checks) {
    if live.is_some_and(<[_]>::is_empty) {
        return checks.skip(&NEEDS_WORKER, "no worker runs");
    }
    match registration.found_by_workers().await {
        Ok(found) => found.into_iter().for_each(|problem| match problem.cause {
            Cause::KindNotStarted | Cause::TimeZone => checks.error(problem),
            _ => checks.warning(problem),
        }),
        Err(error) => checks.skip(&NEEDS_WORKER, &one_line(&error)),
    }
}

fn kinds_served(settings: &Settings, live: &[RegisteredWorker], checks: &mut Checks) {
    if live.is_empty() {
        return checks.not_known(Cause::KindNotServed, "no worker runs");
    }
    let unserved = unserved(settings, live);
    if !unserved.is_empty() {
        let kinds = unserved.iter().map(Kind::to_string).collect::<Vec<_>>().join(", ");
        checks.error(Problem::new(
            Cause::KindNotServed,
            format!("no worker serves the kind {kinds}"),
            format!(
                "start a worker with the settings of kinds.{kinds}, and with it in worker.kinds if that is not empty"
            ),
        ));
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
            checks.warning(Problem::new(Cause::ClosingPaused, pause.sentence(), HOW_TO_RESUME).of_kind(Some(&kind)));
            continue;
        }
        match late_orders(settings, database, &kind).await {
            Ok(found) => late = late.or(found.map(|found| (kind, found))),
            Err(why) => checks.not_known(Cause::OrdersOverdue, why),
        }
    }
    match (late, live.is_empty()) {
        (Some((kind, late)), true) => checks.error(Problem::new(
            Cause::NoWorker,
            format!("no worker runs, and {} of kind {kind} are overdue, {}", late.orders, late.oldest),
            "start one: order-timeout worker",
        )),
        (Some((kind, late)), false) => checks.error(overdue_despite_workers(&kind, &late)),
        (None, true) => checks.not_known(Cause::NoWorker, "no worker runs, and no order is overdue"),
        (None, false) => checks.fact(Cause::NoWorker, format!("{} workers run", live.len())),
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
    let read = database.run(async |connection| closing_pauses::current(connection, Some(kind)).await);
    read.await.ok()?.into_iter().next()
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

fn judge_parked(parked: &[(String, u64)], checks: &mut Checks) {
    if parked.is_empty() {
        return;
    }
    let of_reason = parked.iter().map(|(reason, alarms)| format!("{alarms} {reason}")).collect::<Vec<_>>().join(", ");
    checks.warning(Problem::new(
        Cause::ParkedAlarms,
        format!("alarms are parked: {of_reason}"),
        "look at them with `order-timeout parked list`, correct the cause, then `order-timeout parked retry` or `drop`",
    ));
}

fn judge_closes(closes: &Closes, checks: &mut Checks) {
    let Closes { closed, swept, closed_since, .. } = *closes;
    let is_unusual = swept >= FEW_SWEPT && swept * SWEPT_OF > closed && closes.swept_minutes >= FEW_MINUTES;
    let Some(last) = closes.last_swept.filter(|_| is_unusual) else { return };
    let what = format!("the sweep closed {swept} of {closed} orders in the last {}", seconds(LATELY));
    if closed_since >= SWEPT_OF || closes.last_swept_ago > OVER_AFTER.max(closes.mean_gap * GAPS_UNTIL_OVER) {
        let last = write_rfc3339(last);
        return checks.fact(
            Cause::AlarmsNotArriving,
            format!("{what}, which is over: the last at {last}, {closed_since} since by others"),
        );
    }
    checks.warning(
        Problem::new(
            Cause::AlarmsNotArriving,
            what,
            "schedule an alarm in each order's transaction; if that is done, see \"Alarms that do not arrive\" in docs/operating/troubleshoot.md",
        )
        .because("their alarms did not arrive in time, so they were closed late, by sweep.grace and more"),
    );
}

#[cfg(test)]
mod tests {
    use order_timeout_core::order::Timestamp;

    use super::*;

    fn names(judge: impl FnOnce(&mut Checks)) -> Vec<Cause> {
        let mut checks = Checks::default();
        judge(&mut checks);
        checks.report(&[]).problems().map(|problem| problem.cause).collect()
    }

    #[test]
    fn few_swept_orders_are_usual() {
        let of = |swept, closed, swept_minutes| {
            let last_swept = Some(Timestamp::from_unix_micros(0));
            let closes = Closes { swept, closed, swept_minutes, last_swept, ..Closes::default() };
            names(|checks| judge_closes(&closes, checks))
        };
        assert_eq!(of(10, 200, 9), []);
        assert_eq!(of(11, 200, 9), [Cause::AlarmsNotArriving]);
        assert_eq!(of(9, 9, 9), []);
        assert_eq!(of(500, 500, 2), [], "what was overdue after an outage");
    }

    #[test]
    fn sweep_that_has_stopped_is_over() {
        let last_swept = Some(Timestamp::from_unix_micros(1_000_000));
        let (swept, closed) = (12, 12);
        let of = |ago_s, gap_s, closed_since| {
            let (last_swept_ago, mean_gap) = (Duration::from_secs(ago_s), Duration::from_secs(gap_s));
            let swept_minutes = 9;
            let closes = Closes { swept, closed, swept_minutes, last_swept, last_swept_ago, mean_gap, closed_since };
            let mut checks = Checks::default();
            judge_closes(&closes, &mut checks);
            let report = checks.report(&[]);
            (report.exit_code(), format!("{:?}", report.checks))
        };
        assert_eq!(of(14, 0, 0).0, 1);
        let (code, said) = of(16, 0, 0);
        assert!(code == 0 && said.contains("is over: the last at 1970-01-01T00:00:01"), "{said}");
        assert_eq!(of(60, 50, 0).0, 1, "one a minute is usual there");
        assert_eq!(of(0, 0, 20).0, 0, "twenty were closed in time since");
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

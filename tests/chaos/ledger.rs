//! Compares the tables and the received events with the shop's own records, and counts.
//!
//! The invariants, without exception: an order that was never paid is closed exactly once (one line of history, its
//! stock returned once, its event received under one id); a paid order is not closed; none is closed before the
//! deadline in force, by the database's clock; no order's alarm is parked.
//!
//! The time of a close is the server's record of the commit (`track_commit_timestamp`), not the worker's.
//!
//! A close may be one second late. That second counts from the order's deadline, or from when the shop learned that the
//! deadline is committed, if that was later. A fault extends it to the fault's end if the fault began before the second
//! was over and excuses this order; `plan.rs` says which orders a fault excuses. Consecutive faults extend it further,
//! each beginning within a second of the end of the last. A fault of the broker, of messages, or of one worker extends
//! nothing. The aftermath of a fault is no excuse: the database's recovery is part of its restart, a worker's backoff
//! is not. Everything runs on one machine, so the runner's clock is the database's.
//!
//! Where a payment provider is asked, how an order with an attempt there may end is in `provider_ledger.rs`. A fault of the
//! provider extends the second of such an order alone, and for as long after its end as the pauses of the settings last.
//! An order that a worker or a statement has taken with it waits until the lease is over: it is counted, and only few may
//! be excused by that. Closing must never have been paused, because nothing in a run is unusual for the brake.
//!
//! A machine stall is a fault outside the plan (`machine_stall_probe.rs`). It excuses a close for no longer than it
//! lasted, and the report also gives the lateness that includes it. If the machine stalls for much of a run, the run
//! proves nothing.
//!
//! A payment that is declined in the end excuses the orders of its article while it holds the stock row, because none
//! of them can be closed then. It is ordinary operation, not a fault.
//!
//! The sweep closes orders without an alarm too, so closed orders prove nothing about alarms. Therefore an order that
//! falls due in a quiet period requires its alarm, provided that the alarm was safe and not discarded; what happened
//! before does not matter. If something else closed such an order and no alarm arrived afterwards, the alarm is lost. An
//! alarm that arrives afterwards is late if the sweep closed the order, or if it arrived when the sweep would have taken
//! it: a broker counts a message's delay from its arrival, so a stalled broker delays messages on their way to it, and
//! those behind them in the same slot. If look-ahead closed the order, the alarm may have arrived on time: a worker
//! without a session, or whose session is new, reads its share of the orders ahead, and the other worker gets some of
//! their alarms. If alarms were discarded soon after the
//! order's deadline, its alarm may have been among them, late, or lost before: it is undecided. Only few may be late or
//! undecided. An order that was extended requires no alarm if the alarm could be handed over only after the deadline it
//! names, because the relay leaves such an alarm to the sweep. Neither does an order for which additional alarms were
//! sent, because they cannot be told apart.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::Duration;

use order_timeout_core::order::Timestamp;
use order_timeout_testkit::ledger::Ledger;
use order_timeout_testkit::machine_stall_probe::{MachineStall, stalled_time, total_duration};
use order_timeout_testkit::payment_service::Truth;
use serde::Serialize;
use sqlx::postgres::PgRow;
use sqlx::{FromRow, PgPool, Row as _};
use time::OffsetDateTime;
use uuid::Uuid;

use crate::event_listener::{Announced, ReceivedEvent};
use crate::faults::{Affected, CompletedFault};
use crate::provider_ledger::{Broken, End, Found, ProviderReport, Waits, judge};
use crate::run::QuietPeriod;
use crate::shop::{Declined, IN_STOCK, OrderRecord};

/// How late a close may be without an excuse.
pub const PROMISED: Duration = Duration::from_secs(1);
/// In a quiet period, an alarm that is safe this long before its deadline has time for every route: out of the outbox,
/// through a lane, into the hold.
const LONGEST_ROUTE: Duration = Duration::from_millis(1_500);
/// How long after its deadline a late alarm may still arrive: no fault stops a broker for longer.
const LATEST_ALARM: Duration = Duration::from_secs(30);

/// The outcome of a run, as printed in its last line.
#[derive(Debug, Serialize)]
pub struct Report {
    pub seed: u64,
    pub orders: usize,
    pub paid: usize,
    pub faults: usize,
    pub fault_kinds: BTreeMap<String, usize>,
    /// Neither closed nor paid, or closed without an event, or missing though the shop had its commit confirmed.
    pub lost: usize,
    pub closed_twice: usize,
    pub paid_closed: usize,
    pub early: usize,
    pub stock_balanced: bool,
    /// Payments that held an article for a while and were declined.
    pub declined: usize,
    /// Events sent more than once, each under its own id, which is allowed.
    pub duplicate_event_ids: usize,
    pub closed_by: ClosedBy,
    /// Orders that required their alarm, because nothing was broken when they fell due.
    pub alarms_owed: usize,
    /// Those of them whose alarm arrived on time and found the order closed by look-ahead.
    pub alarms_after_look_ahead: usize,
    /// Those of them whose alarm arrived too late.
    pub alarms_late: usize,
    /// Those of them that something else closed shortly before alarms were discarded: late, or lost.
    pub alarms_undecided: usize,
    /// Those of them that never got their alarm.
    pub alarms_lost: usize,
    pub max_lateness_beyond_fault_ms: f64,
    /// The same if stalls of the machine excused nothing.
    pub max_lateness_with_standstills_ms: f64,
    /// How long the machine stalled outside faults that affect all orders.
    pub stood_still_ms: f64,
    /// How often closing was paused.
    pub pauses_of_closing: usize,
    /// Of a run with a payment provider.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub provider: Option<ProviderReport>,
}

#[derive(Debug, Default, Serialize)]
pub struct ClosedBy {
    pub alarm: usize,
    pub look_ahead: usize,
    pub sweep: usize,
    pub manual: usize,
}

/// Everything that the checks are based on.
pub struct Observations<'a> {
    pub seed: u64,
    pub records: &'a [OrderRecord],
    pub completed: &'a [CompletedFault],
    pub declined: &'a [Declined],
    pub quiet_periods: &'a [QuietPeriod],
    pub standstills: &'a [MachineStall],
    pub received: &'a HashMap<Uuid, ReceivedEvent>,
    /// Orders that got their alarm after they had been closed or claimed, and when the first such alarm was answered.
    pub alarmed_after_close: &'a HashMap<Uuid, Timestamp>,
    /// How long after a deadline the sweep takes an order.
    pub sweep_grace: Duration,
    /// Of a run with a payment provider.
    pub provider: Option<AskedProvider<'a>>,
}

/// What is known of the payment provider.
#[derive(Clone, Copy)]
pub struct AskedProvider<'a> {
    pub waits: Waits,
    /// What it knows of an order's attempt.
    pub truth: &'a (dyn Fn(Uuid) -> Truth + Sync),
}

/// The report, and a description of every broken promise.
pub struct CheckResult {
    pub report: Report,
    pub violations: Vec<String>,
    /// The latest closes, for analysis.
    pub latest: Vec<String>,
    pub alarms_lost: Vec<String>,
}

/// An order's row at the end.
#[derive(Debug)]
struct Row {
    id: Uuid,
    status: String,
    expires_at: OffsetDateTime,
    closed_at: Option<OffsetDateTime>,
    /// When its last change was committed, by the server's own record: `closed_at` is set by our statement.
    committed_at: OffsetDateTime,
    closed_by: Option<String>,
    closes: i64,
    /// How often a worker settled it, because the payment provider had its money.
    settlements: i64,
    unresolved_reason: Option<String>,
    unresolved_at: Option<OffsetDateTime>,
}

impl FromRow<'_, PgRow> for Row {
    fn from_row(row: &PgRow) -> Result<Self, sqlx::Error> {
        Ok(Self {
            id: row.try_get("id")?,
            status: row.try_get("status")?,
            expires_at: row.try_get("expires_at")?,
            closed_at: row.try_get("closed_at")?,
            committed_at: row.try_get("committed_at")?,
            closed_by: row.try_get("closed_by")?,
            closes: row.try_get("closes")?,
            settlements: row.try_get("settlements")?,
            unresolved_reason: row.try_get("unresolved_reason")?,
            unresolved_at: row.try_get("unresolved_at")?,
        })
    }
}

/// The orders with a last alarm that was sent only after the deadline it names, and that deadline.
type Expired = HashMap<Uuid, Timestamp>;

#[derive(Default)]
struct Tally {
    violations: Vec<String>,
    lost: usize,
    closed_twice: usize,
    paid_closed: usize,
    early: usize,
    closed_by: ClosedBy,
    alarms_owed: usize,
    alarms_after_look_ahead: usize,
    alarms_late: usize,
    alarms_undecided: usize,
    /// Descriptions.
    alarms_lost: Vec<String>,
    lateness: Vec<(Duration, String)>,
    max_lateness_with_standstills: Duration,
    provider: ProviderReport,
}

impl Tally {
    fn violation(&mut self, record: &OrderRecord, row: Option<&Row>, what: &str) {
        self.violations.push(format!("{what}: {record:?} {row:?}"));
    }
}

/// What excuses an order that falls due while it lasts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Excuse {
    from: Timestamp,
    until: Timestamp,
    /// Until when such an order may wait.
    lasts: Timestamp,
}

/// The time up to which a close at `closed_at` is excused. `waits`: how long orders may wait behind faults; `None` if no
/// payment provider is asked.
fn excused_until(
    record: &OrderRecord,
    deadline: Timestamp,
    closed_at: Timestamp,
    (completed, declined): (&[CompletedFault], &[Declined]),
    waits: Option<Waits>,
) -> Timestamp {
    let faults = completed.iter().filter(|fault| excuses(&fault.affected, record)).map(|fault| {
        let is_behind = fault.affected == Affected::AtProvider;
        let until = fault.until + waits.filter(|_| is_behind).map_or(Duration::ZERO, |waits| waits.for_provider);
        Excuse { from: fault.from, until, lasts: until }
    });
    let lease = waits.map(|waits| waits.for_lease).filter(|lease| !lease.is_zero());
    let leases = completed.iter().filter(|fault| fault.kind.loses_leases()).filter_map(|fault| {
        // The statement that takes orders over may arrive at the database as the fault ends.
        Some(Excuse { from: fault.from, until: fault.until + PROMISED, lasts: fault.until + lease? })
    });
    let kept = declined.iter().filter(|one| one.article == record.article);
    let kept = kept.map(|one| Excuse { from: one.from, until: one.until, lasts: one.until });
    let mut excuses: Vec<Excuse> = faults.chain(leases).chain(kept).collect();
    excuses.sort();
    let mut owed = deadline.max(record.confirmed_at.min(closed_at));
    for Excuse { from, until, lasts } in excuses {
        if from < owed + PROMISED && until > owed {
            owed = owed.max(lasts);
        }
    }
    owed
}

/// The machine stalls outside faults that affect all orders.
pub fn outside_faults(standstills: &[MachineStall], completed: &[CompletedFault]) -> Vec<MachineStall> {
    let within_fault = |one: &MachineStall| {
        let meets = |fault: &&CompletedFault| fault.from <= one.until && fault.until >= one.from;
        completed.iter().filter(meets).any(|fault| fault.affected == Affected::All)
    };
    standstills.iter().filter(|one| !within_fault(one)).copied().collect()
}

/// Whether its alarm must close it.
fn requires_alarm(
    record: &OrderRecord,
    expired: &Expired,
    completed: &[CompletedFault],
    quiet_periods: &[QuietPeriod],
) -> bool {
    let Some(alarmed_at) = record.alarmed_at else { return false };
    let was_left_to_sweep = expired.get(&record.id).is_some_and(|deadline| *deadline < record.deadline);
    // Both ends of a quiet period need a margin: for what fell due shortly before it, and for the next fault.
    let in_quiet_period = |quiet_period: &QuietPeriod| {
        quiet_period.from + LONGEST_ROUTE <= record.deadline && record.deadline + PROMISED <= quiet_period.until
    };
    !record.contested
        && !was_left_to_sweep
        && alarmed_at + LONGEST_ROUTE <= record.deadline
        && quiet_periods.iter().any(in_quiet_period)
        && !alarms_were_discarded(completed, record.created_at, record.deadline)
        // An additional alarm may have closed it.
        && !completed.iter().any(|fault| fault.forged.contains(&record.id))
}

/// Whether alarms were discarded at any time in this span.
fn alarms_were_discarded(completed: &[CompletedFault], from: Timestamp, until: Timestamp) -> bool {
    completed.iter().any(|fault| fault.kind.discards_alarms() && fault.from <= until && fault.until >= from)
}

fn excuses(affected: &Affected, record: &OrderRecord) -> bool {
    match affected {
        Affected::None => false,
        Affected::All => true,
        Affected::Orders(orders) => orders.contains(&record.id),
        Affected::Article(article) => *article == record.article,
        Affected::AtProvider => record.at_provider.is_some(),
    }
}

pub async fn check_run(pool: &PgPool, observations: Observations<'_>) -> CheckResult {
    let rows = rows(pool).await;
    let expired = expired(pool).await;
    let events = EventCounts::of(observations.received);
    let mut tally = Tally::default();
    for record in observations.records {
        check_order(&mut tally, record, rows.get(&record.id), &events, &observations);
        check_alarm(&mut tally, record, rows.get(&record.id), &expired, &observations);
    }
    if rows.len() != observations.records.len() {
        tally.violations.push(format!(
            "{} orders in the table, {} in the shop's records",
            rows.len(),
            observations.records.len()
        ));
    }
    let is_sold = |record: &&OrderRecord| record.paid && rows.get(&record.id).is_some_and(|row| row.status == "paid");
    let sold: Vec<&OrderRecord> = observations.records.iter().filter(is_sold).collect();
    let stock_balanced = stock_is_balanced(pool, &sold).await;
    if !stock_balanced {
        tally.violations.push("the stock does not add up".to_owned());
    }
    for (order, reason) in parked(pool).await {
        if observations.records.iter().any(|record| record.id.to_string() == order) {
            tally.violations.push(format!("an alarm of order {order} was parked: {reason}"));
        }
    }
    let pauses = pauses_of_closing(pool).await.unwrap();
    tally.violations.extend(pause_violations(&pauses));
    tally.lateness.sort_by_key(|(lateness, _)| std::cmp::Reverse(*lateness));
    let report = report(&observations, &tally, stock_balanced, pauses.len());
    let latest = tally.lateness.into_iter().take(20).map(|(_, what)| what).collect();
    CheckResult { report, violations: tally.violations, latest, alarms_lost: tally.alarms_lost }
}

fn check_order(
    tally: &mut Tally,
    record: &OrderRecord,
    row: Option<&Row>,
    events: &EventCounts<'_>,
    observations: &Observations<'_>,
) {
    let Some(row) = row else {
        tally.lost += 1;
        return tally.violation(record, row, "a committed order is gone");
    };
    let closes_announced = events.count(record, Announced::Closed);
    if let (Some(_), Some(provider)) = (record.at_provider, observations.provider) {
        return check_at_provider(tally, record, row, events, (observations, provider));
    }
    match (row.status.as_str(), row.closed_at) {
        ("paid", _) if !record.paid => tally.violation(record, Some(row), "paid without a payment"),
        ("paid", _) => check_paid(tally, record, row, closes_announced),
        ("closed", _) if record.paid => {
            tally.paid_closed += 1;
            tally.violation(record, Some(row), "closed, though the shop was told that it is paid");
        }
        ("closed", Some(_)) => check_close(tally, record, row, closes_announced, observations),
        _ => {
            tally.lost += 1;
            tally.violation(record, Some(row), "never closed");
        }
    }
}

fn check_paid(tally: &mut Tally, record: &OrderRecord, row: &Row, closes_announced: usize) {
    if row.closes > 0 || closes_announced > 0 {
        tally.paid_closed += 1;
        tally.violation(record, Some(row), "paid, and closed as well");
    }
}

fn check_at_provider(
    tally: &mut Tally,
    record: &OrderRecord,
    row: &Row,
    events: &EventCounts<'_>,
    (observations, provider): (&Observations<'_>, AskedProvider<'_>),
) {
    let unresolved = row.unresolved_reason.as_deref().zip(row.unresolved_at.map(Timestamp::from));
    let (status, truth) = (row.status.as_str(), (provider.truth)(record.id));
    let found = Found { status, truth, settlements: row.settlements, unresolved };
    let end = judge(record, found, observations.completed, provider.waits);
    tally.provider.count(end);
    let closes_announced = events.count(record, Announced::Closed);
    let announced = match end {
        Ok(End::Closed) => return check_close(tally, record, row, closes_announced, observations),
        Ok(End::PaidByCallback) => return check_paid(tally, record, row, closes_announced),
        Ok(End::Settled) => {
            check_paid(tally, record, row, closes_announced);
            note_lateness(tally, record, row, observations);
            events.count(record, Announced::Settled)
        }
        Ok(End::Unresolved(_)) => {
            check_paid(tally, record, row, closes_announced);
            events.count(record, Announced::Unresolved)
        }
        Err(broken) => {
            tally.lost += usize::from(broken == Broken::NotEnded);
            return tally.violation(record, Some(row), broken.words());
        }
    };
    if announced != 1 {
        tally.violation(record, Some(row), &format!("{end:?}, and announced by {announced} events"));
    }
}

fn check_close(tally: &mut Tally, record: &OrderRecord, row: &Row, events: usize, observations: &Observations<'_>) {
    match row.closed_by.as_deref() {
        Some("alarm") => tally.closed_by.alarm += 1,
        Some("look_ahead") => tally.closed_by.look_ahead += 1,
        Some("sweep") => tally.closed_by.sweep += 1,
        _ => tally.closed_by.manual += 1,
    }
    if row.closes != 1 || events > 1 {
        tally.closed_twice += 1;
        tally.violation(record, Some(row), &format!("{} closes in its history, {events} events", row.closes));
    }
    if events == 0 {
        tally.lost += 1;
        tally.violation(record, Some(row), "closed, but no event was received");
    }
    let (deadline, closed_at) = (Timestamp::from(row.expires_at), Timestamp::from(row.committed_at));
    if closed_at < deadline.max(record.deadline) || deadline != record.deadline {
        tally.early += 1;
        tally.violation(record, Some(row), "closed early, or for a deadline that the shop does not know");
    }
    note_lateness(tally, record, row, observations);
}

/// How late an order was closed, or settled as paid.
fn note_lateness(tally: &mut Tally, record: &OrderRecord, row: &Row, observations: &Observations<'_>) {
    let (deadline, closed_at) = (Timestamp::from(row.expires_at), Timestamp::from(row.committed_at));
    let waits = observations.provider.map(|provider| provider.waits);
    let excused = |waits| {
        let faults = (observations.completed, observations.declined);
        let excused_until = excused_until(record, deadline, closed_at, faults, waits);
        let late = closed_at.since(excused_until);
        (late, late.saturating_sub(stalled_time(observations.standstills, excused_until, closed_at)))
    };
    let without_lease = waits.map(|waits| Waits { for_lease: Duration::ZERO, ..waits });
    let (mut late, mut beyond) = excused(without_lease);
    if beyond >= PROMISED && excused(waits).1 < PROMISED {
        tally.provider.waited_for_lease += 1;
        (late, beyond) = excused(waits);
    }
    tally.max_lateness_with_standstills = late.max(tally.max_lateness_with_standstills);
    let plainly = closed_at.since(deadline).as_secs_f64() * 1e3;
    let beyond_ms = beyond.as_secs_f64() * 1e3;
    let what = format!("{beyond_ms:.0} ms beyond any excuse, {plainly:.0} ms after its deadline: {record:?} {row:?}");
    tally.lateness.push((beyond, what));
}

fn check_alarm(
    tally: &mut Tally,
    record: &OrderRecord,
    row: Option<&Row>,
    expired: &Expired,
    observations: &Observations<'_>,
) {
    let Some(row) = row.filter(|row| row.status == "closed") else { return };
    if !requires_alarm(record, expired, observations.completed, observations.quiet_periods) {
        return;
    }
    tally.alarms_owed += 1;
    let alarmed_at = observations.alarmed_after_close.get(&record.id).copied();
    let on_time = |at: Timestamp| at < record.deadline + observations.sweep_grace;
    match row.closed_by.as_deref() {
        Some("alarm") => {}
        Some("look_ahead") if alarmed_at.is_some_and(on_time) => tally.alarms_after_look_ahead += 1,
        _ if alarmed_at.is_some() => tally.alarms_late += 1,
        _ if alarms_were_discarded(observations.completed, record.deadline, record.deadline + LATEST_ALARM) => {
            tally.alarms_undecided += 1;
        }
        _ => tally.alarms_lost.push(format!("{record:?} {row:?}")),
    }
}

fn report(observations: &Observations<'_>, tally: &Tally, stock_balanced: bool, pauses_of_closing: usize) -> Report {
    let mut fault_kinds = BTreeMap::new();
    for fault in observations.completed {
        *fault_kinds.entry(fault.kind.name()).or_default() += 1;
    }
    let latest = tally.lateness.first().map_or(Duration::ZERO, |(lateness, _)| *lateness);
    let ClosedBy { alarm, look_ahead, sweep, manual } = tally.closed_by;
    Report {
        seed: observations.seed,
        orders: observations.records.len(),
        paid: observations.records.iter().filter(|record| record.paid).count(),
        faults: observations.completed.len(),
        fault_kinds,
        lost: tally.lost,
        closed_twice: tally.closed_twice,
        paid_closed: tally.paid_closed,
        early: tally.early,
        stock_balanced,
        declined: observations.declined.len(),
        duplicate_event_ids: observations.received.values().filter(|received| received.times > 1).count(),
        closed_by: ClosedBy { alarm, look_ahead, sweep, manual },
        alarms_owed: tally.alarms_owed,
        alarms_after_look_ahead: tally.alarms_after_look_ahead,
        alarms_late: tally.alarms_late,
        alarms_undecided: tally.alarms_undecided,
        alarms_lost: tally.alarms_lost.len(),
        max_lateness_beyond_fault_ms: ms(latest),
        max_lateness_with_standstills_ms: ms(tally.max_lateness_with_standstills),
        stood_still_ms: ms(total_duration(observations.standstills)),
        pauses_of_closing,
        provider: observations.provider.map(|_| tally.provider.clone()),
    }
}

/// To a tenth of a millisecond.
pub fn ms(time: Duration) -> f64 {
    (time.as_secs_f64() * 1e4).round() / 10.0
}

async fn rows(pool: &PgPool) -> HashMap<Uuid, Row> {
    let rows: Vec<Row> = sqlx::query_as(
        "SELECT o.id, o.status::text, o.expires_at, o.closed_at, pg_xact_commit_timestamp(o.xmin) AS committed_at,
                o.closed_by,
                (SELECT count(*) FROM order_events e WHERE e.order_id = o.id AND e.event = 'closed') AS closes,
                (SELECT count(*) FROM order_events e
                 WHERE e.order_id = o.id AND e.event = 'paid' AND e.by = 'provider') AS settlements,
                c.unresolved_reason, c.unresolved_at
         FROM orders o
         LEFT JOIN close_attempts c ON c.kind = 'order' AND c.order_id = o.id::text AND c.unresolved_at IS NOT NULL",
    )
    .fetch_all(pool)
    .await
    .unwrap();
    rows.into_iter().map(|row| (row.id, row)).collect()
}

async fn expired(pool: &PgPool) -> Expired {
    let rows: Vec<(String, OffsetDateTime)> = sqlx::query_as(
        "SELECT order_id, deadline
         FROM (SELECT DISTINCT ON (order_id) * FROM alarm_outbox ORDER BY order_id, created_at DESC) AS last
         WHERE sent_at >= deadline",
    )
    .fetch_all(pool)
    .await
    .unwrap();
    let of_order = |(order, deadline): (String, OffsetDateTime)| Some((order.parse().ok()?, Timestamp::from(deadline)));
    rows.into_iter().filter_map(of_order).collect()
}

/// The event ids under which something was announced of each order.
struct EventCounts<'a>(HashMap<(&'a str, Announced), HashSet<Uuid>>);

impl<'a> EventCounts<'a> {
    fn of(received: &'a HashMap<Uuid, ReceivedEvent>) -> Self {
        let mut of = HashMap::<_, HashSet<Uuid>>::new();
        for (id, event) in received {
            of.entry((event.order_id.as_str(), event.what)).or_default().insert(*id);
        }
        Self(of)
    }

    fn count(&self, record: &OrderRecord, what: Announced) -> usize {
        self.0.get(&(record.id.to_string().as_str(), what)).map_or(0, HashSet::len)
    }
}

/// Every pause of closing: who paused it, and why.
pub async fn pauses_of_closing(pool: &PgPool) -> Result<Vec<String>, sqlx::Error> {
    let pauses = "SELECT paused_by || ' (' || cause || '): ' || reason FROM closing_pauses ORDER BY id";
    sqlx::query_scalar(pauses).fetch_all(pool).await
}

/// Nothing in a run is unusual for the brake, and no person is there to pause closing.
fn pause_violations(pauses: &[String]) -> impl Iterator<Item = String> {
    pauses.iter().map(|pause| format!("closing was paused: {pause}"))
}

/// The reserved stock equals what open orders hold, and exactly the paid quantity of each article is gone.
async fn stock_is_balanced(pool: &PgPool, sold: &[&OrderRecord]) -> bool {
    let tables = Ledger::read(pool).await.unwrap();
    let stock: Vec<(String, i64, i64)> =
        sqlx::query_as("SELECT article_id, available, reserved FROM stock WHERE article_id LIKE 'article-%'")
            .fetch_all(pool)
            .await
            .unwrap();
    let sold = |article: &str| sold.iter().filter(|record| record.article == article).count();
    let is_right = |(article, available, reserved): &(String, i64, i64)| {
        let sold = i64::try_from(sold(article)).unwrap();
        available + reserved + sold == IN_STOCK
    };
    tables.reserved == tables.promised && stock.iter().all(is_right)
}

async fn parked(pool: &PgPool) -> Vec<(String, String)> {
    let parked = "SELECT order_id, reason || ', ' || detail FROM parked_alarms WHERE order_id IS NOT NULL";
    sqlx::query_as(parked).fetch_all(pool).await.unwrap()
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use crate::history::AtProvider;
    use crate::plan::Kind;

    const DEADLINE_MS: u64 = 10_000;
    const WAITS: Waits = Waits { for_provider: Duration::from_secs(3), for_lease: Duration::from_secs(30) };

    pub fn at(ms: u64) -> Timestamp {
        Timestamp::from_unix_micros(0) + Duration::from_millis(ms)
    }

    pub fn fault(from: u64, until: u64, affected: Affected) -> CompletedFault {
        let (kind, from, until) = (Kind::DatabaseKilled, at(from), at(until));
        CompletedFault { kind, from, until, affected, hits: None, forged: Vec::new() }
    }

    pub fn order() -> OrderRecord {
        let (id, article) = (Uuid::from_u128(7), "article-3".to_owned());
        let (created_at, confirmed_at) = (at(1_000), at(1_000));
        let deadline = at(DEADLINE_MS);
        OrderRecord {
            id,
            article,
            deadline,
            created_at,
            confirmed_at,
            alarmed_at: Some(at(1_100)),
            contested: false,
            paid: false,
            at_provider: None,
        }
    }

    fn row(status: &str) -> Row {
        let moment = |ms: u64| OffsetDateTime::UNIX_EPOCH + Duration::from_millis(ms);
        Row {
            id: order().id,
            status: status.to_owned(),
            expires_at: moment(DEADLINE_MS),
            closed_at: (status == "closed").then(|| moment(10_100)),
            committed_at: moment(10_100),
            closed_by: Some("alarm".to_owned()),
            closes: i64::from(status == "closed"),
            settlements: 0,
            unresolved_reason: None,
            unresolved_at: None,
        }
    }

    fn late_ms(closed: u64, faults: &[CompletedFault]) -> u128 {
        at(closed).since(excused_until(&order(), at(DEADLINE_MS), at(closed), (faults, &[]), None)).as_millis()
    }

    #[test]
    fn without_faults_lateness_counts_from_deadline() {
        assert_eq!(late_ms(10_400, &[]), 400);
        assert_eq!(late_ms(14_000, &[fault(9_000, 13_000, Affected::None)]), 4_000);
        assert_eq!(late_ms(14_000, &[fault(9_000, 13_000, Affected::Article("article-4".into()))]), 4_000);
        assert_eq!(late_ms(14_000, &[fault(9_000, 13_000, Affected::Orders(vec![Uuid::from_u128(8)]))]), 4_000);
    }

    #[test]
    fn fault_extends_deadlines_within_it() {
        for affected in
            [Affected::All, Affected::Article("article-3".into()), Affected::Orders(vec![Uuid::from_u128(7)])]
        {
            assert_eq!(late_ms(14_000, &[fault(9_000, 13_000, affected.clone())]), 1_000);
            // Begun when the order should have been closed already.
            assert_eq!(late_ms(14_000, &[fault(11_001, 13_000, affected.clone())]), 4_000);
            // Over before the deadline.
            assert_eq!(late_ms(10_300, &[fault(8_000, 9_900, affected)]), 300);
        }
    }

    #[test]
    fn consecutive_faults_extend_deadlines_further() {
        let faults = [fault(15_500, 16_000, Affected::All), fault(10_500, 12_000, Affected::All)];
        assert_eq!(late_ms(16_500, &faults), 4_500, "between them it had its second");
        let faults = [fault(12_500, 16_000, Affected::All), fault(10_500, 12_000, Affected::All)];
        assert_eq!(late_ms(16_500, &faults), 500);
    }

    #[test]
    fn declined_payment_extends_deadlines_of_its_article() {
        let kept =
            |article: &str, from, until| Declined { article: article.to_owned(), from: at(from), until: at(until) };
        let late_ms = |declined: &[Declined], faults: &[CompletedFault]| {
            let excused_until = excused_until(&order(), at(DEADLINE_MS), at(11_050), (faults, declined), None);
            at(11_050).since(excused_until).as_millis()
        };
        assert_eq!(late_ms(&[kept("article-3", 10_600, 10_800)], &[]), 250);
        assert_eq!(late_ms(&[kept("article-4", 10_600, 10_800)], &[]), 1_050, "another's");
        assert_eq!(late_ms(&[kept("article-3", 9_600, 9_900)], &[]), 1_050, "over before the deadline");
        let after_fault = fault(9_000, 10_200, Affected::All);
        assert_eq!(late_ms(&[kept("article-3", 11_010, 11_030)], &[]), 1_050, "its second was over");
        assert_eq!(late_ms(&[kept("article-3", 11_010, 11_030)], &[after_fault]), 20);
    }

    #[test]
    fn alarm_is_required_only_during_quiet_periods() {
        let quiet_period = |from, until| QuietPeriod { from: at(from), until: at(until) };
        let owed = |record: &OrderRecord, quiet_period: QuietPeriod, faults: &[CompletedFault]| {
            requires_alarm(record, &Expired::new(), faults, &[quiet_period])
        };
        let (of_it, before) = (quiet_period(8_000, 12_000), fault(2_000, 7_000, Affected::All));
        assert!(owed(&order(), of_it, std::slice::from_ref(&before)), "earlier faults do not matter");
        assert!(!owed(&order(), quiet_period(9_000, 12_000), &[]), "the quiet period has just begun");
        assert!(!owed(&order(), quiet_period(8_000, 10_900), &[]), "the next fault may be there first");
        assert!(!owed(&OrderRecord { alarmed_at: None, ..order() }, of_it, &[]));
        assert!(!owed(&OrderRecord { alarmed_at: Some(at(9_000)), ..order() }, of_it, &[]));
        assert!(!owed(&OrderRecord { contested: true, ..order() }, of_it, &[]));
        for kind in [Kind::QueuePurged, Kind::QueueDeleted, Kind::DelayQueueDeleted] {
            assert!(!owed(&order(), of_it, &[CompletedFault { kind, ..before.clone() }]), "{kind:?} took it");
        }
        let doubled = CompletedFault { kind: Kind::AlarmsDoubled, forged: vec![order().id], ..before.clone() };
        assert!(!owed(&order(), of_it, &[doubled]), "an additional alarm may have closed it");
        let handed_over_after = |deadline| requires_alarm(&order(), &[(order().id, deadline)].into(), &[], &[of_it]);
        assert!(!handed_over_after(at(3_000)), "the order was extended meanwhile");
        assert!(handed_over_after(at(DEADLINE_MS)), "it was not extended");
    }

    #[test]
    fn purges_discard_only_alarms_in_flight() {
        let deleted = CompletedFault { kind: Kind::QueueDeleted, ..fault(20_000, 21_000, Affected::None) };
        let thrown = |fault: &CompletedFault, from, until| {
            alarms_were_discarded(std::slice::from_ref(fault), at(from), at(until))
        };
        assert!(thrown(&deleted, 10_000, 20_000) && thrown(&deleted, 21_000, 30_000));
        assert!(!thrown(&deleted, 10_000, 19_999), "before");
        assert!(!thrown(&deleted, 21_001, 30_000), "after");
        assert!(
            !thrown(&CompletedFault { kind: Kind::DatabaseKilled, ..deleted }, 10_000, 30_000),
            "it discards no alarms"
        );
    }

    #[test]
    fn lateness_never_counts_from_uncommitted_deadline() {
        let mut record = order();
        record.confirmed_at = at(12_000);
        assert_eq!(excused_until(&record, at(DEADLINE_MS), at(12_300), (&[], &[]), None), at(12_000));
        // Closed before the shop learned of its commit.
        assert_eq!(excused_until(&record, at(DEADLINE_MS), at(11_000), (&[], &[]), None), at(11_000));
    }

    #[test]
    fn machine_stalls_during_database_faults_are_ignored() {
        let standstill = |from, until| MachineStall { from: at(from), until: at(until) };
        let (within, after) = (standstill(12_900, 13_100), standstill(13_101, 14_000));
        let broken = |affected| outside_faults(&[within, after], &[fault(9_000, 13_000, affected)]);
        assert_eq!(broken(Affected::All), [after]);
        assert_eq!(broken(Affected::None), [within, after], "a fault of the broker");
    }
    #[test]
    fn provider_faults_excuse_their_orders_alone() {
        let faults = [fault(9_000, 13_000, Affected::AtProvider)];
        let at_provider = OrderRecord { at_provider: Some(AtProvider::NeverPaid), ..order() };
        let late_ms = |record: &OrderRecord, deadline, closed| {
            let excused = excused_until(record, at(deadline), at(closed), (&faults, &[]), Some(WAITS));
            at(closed).since(excused).as_millis()
        };
        let without_lease = |record: &OrderRecord, deadline, closed| {
            let waits = Waits { for_lease: Duration::ZERO, ..WAITS };
            let excused = excused_until(record, at(deadline), at(closed), (&faults, &[]), Some(waits));
            at(closed).since(excused).as_millis()
        };
        assert_eq!(without_lease(&order(), 10_000, 14_000), 4_000, "it has no attempt there");
        assert_eq!(without_lease(&at_provider, 10_000, 14_000), 0);
        assert_eq!(without_lease(&at_provider, 10_000, 17_500), 1_500, "the pauses were over");
        assert_eq!(without_lease(&at_provider, 14_000, 16_500), 500, "the circuit breaker was open");
        assert_eq!(without_lease(&at_provider, 16_100, 17_500), 1_400, "due behind it");
        // The kind of the fault is one of the database, which loses leases.
        assert_eq!(late_ms(&order(), 10_000, 42_000), 0);
        assert_eq!(late_ms(&order(), 10_000, 44_000), 1_000);
        assert_eq!(late_ms(&order(), 14_100, 16_000), 1_900, "due when it was over");
    }

    fn checked(record: &OrderRecord, row: &Row, truth: Truth, received: &HashMap<Uuid, ReceivedEvent>) -> Tally {
        let (truth, alarmed) = (|_| truth, HashMap::new());
        let observations = Observations {
            seed: 1,
            records: &[],
            completed: &[],
            declined: &[],
            quiet_periods: &[],
            standstills: &[],
            received,
            alarmed_after_close: &alarmed,
            sweep_grace: Duration::from_millis(500),
            provider: Some(AskedProvider { waits: WAITS, truth: &truth }),
        };
        let mut tally = Tally::default();
        check_order(&mut tally, record, Some(row), &EventCounts::of(received), &observations);
        tally
    }

    fn received(what: Announced) -> HashMap<Uuid, ReceivedEvent> {
        let event = ReceivedEvent { order_id: order().id.to_string(), what, times: 1 };
        [(Uuid::from_u128(70), event)].into()
    }

    fn at_provider(paid: bool) -> OrderRecord {
        OrderRecord { at_provider: Some(AtProvider::NeverPaid), paid, ..order() }
    }

    #[test]
    fn close_without_proof_is_violation() {
        let check = |truth| checked(&at_provider(false), &row("closed"), truth, &received(Announced::Closed));
        assert_eq!(check(Truth::Closed).violations, Vec::<String>::new());
        let despite_money = check(Truth::Paid);
        assert_eq!((despite_money.violations.len(), despite_money.provider.closed_despite_money), (1, 1));
        let on_unknown = check(Truth::Open);
        assert_eq!((on_unknown.violations.len(), on_unknown.provider.stock_released_on_unknown), (1, 1));
    }

    #[test]
    fn settlement_is_announced_once_and_timely() {
        let settled = Row { settlements: 1, ..row("paid") };
        let check = |row: &Row, what| checked(&at_provider(true), row, Truth::Paid, &received(what));
        let as_it_must_be = check(&settled, Announced::Settled);
        assert_eq!((as_it_must_be.violations.len(), as_it_must_be.provider.settled_as_paid), (0, 1));
        assert_eq!(as_it_must_be.lateness[0].0, Duration::from_millis(100));
        assert_eq!(check(&settled, Announced::Unresolved).violations.len(), 1, "no event of it");
        assert_eq!(check(&settled, Announced::Closed).paid_closed, 1);
        let twice = check(&Row { settlements: 2, ..row("paid") }, Announced::Settled);
        assert_eq!(twice.violations.len(), 1);
    }

    #[test]
    fn every_pause_is_violation() {
        let pauses = ["the worker on host (brake): the provider gave no usable answer".to_owned()];
        assert_eq!(pause_violations(&pauses).count(), 1);
        assert_eq!(pause_violations(&[]).count(), 0);
    }

    #[test]
    fn order_left_open_is_lost() {
        let open = checked(&at_provider(false), &row("closing"), Truth::Open, &HashMap::new());
        assert_eq!((open.violations.len(), open.lost), (1, 1));
        let plain = checked(&order(), &row("closing"), Truth::Open, &HashMap::new());
        assert_eq!((plain.violations.len(), plain.lost), (1, 1), "without an attempt");
    }

    #[test]
    fn listed_order_without_cause_is_violation() {
        let unresolved_at = Some(OffsetDateTime::UNIX_EPOCH + Duration::from_secs(20));
        let listed = Row { unresolved_reason: Some("no_answer".to_owned()), unresolved_at, ..row("closing") };
        let check = |planned, what| {
            let record = OrderRecord { at_provider: Some(planned), ..order() };
            checked(&record, &listed, Truth::Open, &received(what))
        };
        assert_eq!(check(AtProvider::NeverAnswered, Announced::Unresolved).violations, Vec::<String>::new());
        assert_eq!(check(AtProvider::NeverAnswered, Announced::Settled).violations.len(), 1, "not announced");
        let without_cause = check(AtProvider::NeverPaid, Announced::Unresolved);
        assert_eq!((without_cause.violations.len(), without_cause.provider.unresolved_without_cause), (1, 1));
    }

    #[test]
    fn lease_excuse_is_counted() {
        let late = OffsetDateTime::UNIX_EPOCH + Duration::from_secs(30);
        let (row, received) = (Row { committed_at: late, ..row("closed") }, received(Announced::Closed));
        let completed = [fault(10_500, 12_000, Affected::All)];
        let lateness = |completed: &[CompletedFault]| {
            let (truth, alarmed) = (|_| Truth::Closed, HashMap::new());
            let observations = Observations {
                seed: 1,
                records: &[],
                completed,
                declined: &[],
                quiet_periods: &[],
                standstills: &[],
                received: &received,
                alarmed_after_close: &alarmed,
                sweep_grace: Duration::from_millis(500),
                provider: Some(AskedProvider { waits: WAITS, truth: &truth }),
            };
            let mut tally = Tally::default();
            check_order(&mut tally, &order(), Some(&row), &EventCounts::of(&received), &observations);
            (tally.lateness[0].0, tally.provider.waited_for_lease)
        };
        assert_eq!(lateness(&completed), (Duration::ZERO, 1));
        assert_eq!(lateness(&[]), (Duration::from_secs(20), 0));
    }

    #[test]
    fn only_late_alarm_counts_as_late() {
        let deadline = order().deadline;
        let quiet_periods = [QuietPeriod { from: at(0), until: deadline + Duration::from_secs(60) }];
        let tallied = |closed_by: &str, alarmed_after: Option<Duration>| {
            let row = Row { closed_by: Some(closed_by.to_owned()), ..row("closed") };
            let alarmed = alarmed_after.map(|after| (order().id, deadline + after)).into_iter().collect();
            let observations = Observations {
                seed: 1,
                records: &[],
                completed: &[],
                declined: &[],
                quiet_periods: &quiet_periods,
                standstills: &[],
                received: &HashMap::new(),
                alarmed_after_close: &alarmed,
                sweep_grace: Duration::from_millis(500),
                provider: None,
            };
            let mut tally = Tally::default();
            check_alarm(&mut tally, &order(), Some(&row), &Expired::new(), &observations);
            assert_eq!(tally.alarms_owed, 1);
            (tally.alarms_after_look_ahead, tally.alarms_late, tally.alarms_lost.len())
        };
        let (soon, late) = (Some(Duration::from_millis(499)), Some(Duration::from_millis(500)));
        assert_eq!(tallied("alarm", None), (0, 0, 0));
        assert_eq!(tallied("look_ahead", soon), (1, 0, 0));
        assert_eq!(tallied("look_ahead", late), (0, 1, 0));
        assert_eq!(tallied("sweep", soon), (0, 1, 0));
        assert_eq!(tallied("sweep", late), (0, 1, 0));
        assert_eq!(tallied("look_ahead", None), (0, 0, 1));
        assert_eq!(tallied("sweep", None), (0, 0, 1));
    }
}

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
//! A disk stall is a fault outside the plan (`disk_stall_probe.rs`). It excuses a close for no longer than it lasted, and the
//! report also gives the lateness that includes it. If the disk stalls for much of a run, the run proves nothing.
//!
//! A payment that is declined in the end excuses the orders of its article while it holds the stock row, because none
//! of them can be closed then. It is ordinary operation, not a fault.
//!
//! The sweep closes orders without an alarm too, so closed orders prove nothing about alarms. Therefore an order that
//! falls due in a quiet period requires its alarm, provided that the alarm was safe and not discarded; what happened
//! before does not matter. If the sweep closed such an order and no alarm arrived afterwards, the alarm is lost. An
//! alarm that arrives afterwards is late: a broker counts a message's delay from its arrival, so a stalled broker
//! delays messages on their way to it, and those behind them in the same slot. If alarms were discarded soon after the
//! order's deadline, its alarm may have been among them, late, or lost before: it is undecided. Only few may be late or
//! undecided. An order that was extended requires no alarm if the alarm could be handed over only after the deadline it
//! names, because the relay leaves such an alarm to the sweep. Neither does an order for which additional alarms were
//! sent, because they cannot be told apart.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::Duration;

use order_timeout::postgres;
use order_timeout_core::order::Timestamp;
use order_timeout_testkit::disk_stall_probe::{DiskStall, stalled_time, total_duration};
use order_timeout_testkit::ledger::Ledger;
use serde::Serialize;
use sqlx::PgPool;
use time::OffsetDateTime;
use uuid::Uuid;

use crate::event_listener::ReceivedEvent;
use crate::faults::{Affected, CompletedFault};
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
    /// Those of them that the sweep closed because the alarm arrived too late.
    pub alarms_late: usize,
    /// Those of them that the sweep closed shortly before alarms were discarded: late, or lost.
    pub alarms_undecided: usize,
    /// Those of them that never got their alarm.
    pub alarms_lost: usize,
    pub max_lateness_beyond_fault_ms: f64,
    /// The same if the disk's stalls excused nothing.
    pub max_lateness_with_standstills_ms: f64,
    /// How long the disk stalled outside faults that affect all orders.
    pub stood_still_ms: f64,
}

#[derive(Debug, Default, Serialize)]
pub struct ClosedBy {
    pub alarm: usize,
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
    pub standstills: &'a [DiskStall],
    pub received: &'a HashMap<Uuid, ReceivedEvent>,
    /// Orders that got their alarm after they had been closed.
    pub late: &'a HashSet<Uuid>,
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
#[derive(Debug, sqlx::FromRow)]
struct Row {
    id: Uuid,
    status: String,
    expires_at: OffsetDateTime,
    closed_at: Option<OffsetDateTime>,
    /// When its last change was committed, by the server's own record: `closed_at` is set by our statement.
    committed_at: OffsetDateTime,
    closed_by: Option<String>,
    closes: i64,
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
    alarms_late: usize,
    alarms_undecided: usize,
    /// Descriptions.
    alarms_lost: Vec<String>,
    lateness: Vec<(Duration, String)>,
    max_lateness_with_standstills: Duration,
}

impl Tally {
    fn violation(&mut self, record: &OrderRecord, row: Option<&Row>, what: &str) {
        self.violations.push(format!("{what}: {record:?} {row:?}"));
    }
}

/// The time up to which a close at `closed_at` is excused.
fn excused_until(
    record: &OrderRecord,
    deadline: Timestamp,
    closed_at: Timestamp,
    completed: &[CompletedFault],
    declined: &[Declined],
) -> Timestamp {
    let faults =
        completed.iter().filter(|fault| excuses(&fault.affected, record)).map(|fault| (fault.from, fault.until));
    let kept = declined.iter().filter(|one| one.article == record.article).map(|one| (one.from, one.until));
    let mut intervals: Vec<(Timestamp, Timestamp)> = faults.chain(kept).collect();
    intervals.sort();
    let mut owed = deadline.max(record.confirmed_at.min(closed_at));
    for (from, until) in intervals {
        if from < owed + PROMISED && until > owed {
            owed = until;
        }
    }
    owed
}

/// The disk stalls outside faults that affect all orders.
pub fn outside_faults(standstills: &[DiskStall], completed: &[CompletedFault]) -> Vec<DiskStall> {
    let within_fault = |one: &DiskStall| {
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
    }
}

pub async fn check_run(pool: &PgPool, observations: Observations<'_>) -> CheckResult {
    let rows = rows(pool).await;
    let expired = expired(pool).await;
    let event_ids_by_order = event_ids_by_order(observations.received);
    let mut tally = Tally::default();
    for record in observations.records {
        let events = event_ids_by_order.get(record.id.to_string().as_str()).map_or(0, HashSet::len);
        check_order(&mut tally, record, rows.get(&record.id), events, &observations);
        check_alarm(&mut tally, record, rows.get(&record.id), &expired, &observations);
    }
    if rows.len() != observations.records.len() {
        tally.violations.push(format!(
            "{} orders in the table, {} in the shop's records",
            rows.len(),
            observations.records.len()
        ));
    }
    let stock_balanced = stock_is_balanced(pool, observations.records).await;
    if !stock_balanced {
        tally.violations.push("the stock does not add up".to_owned());
    }
    for (order, reason) in parked(pool).await {
        if observations.records.iter().any(|record| record.id.to_string() == order) {
            tally.violations.push(format!("an alarm of order {order} was parked: {reason}"));
        }
    }
    tally.lateness.sort_by_key(|(lateness, _)| std::cmp::Reverse(*lateness));
    let report = report(&observations, &tally, stock_balanced);
    let latest = tally.lateness.into_iter().take(20).map(|(_, what)| what).collect();
    CheckResult { report, violations: tally.violations, latest, alarms_lost: tally.alarms_lost }
}

fn check_order(
    tally: &mut Tally,
    record: &OrderRecord,
    row: Option<&Row>,
    events: usize,
    observations: &Observations<'_>,
) {
    let Some(row) = row else {
        tally.lost += 1;
        return tally.violation(record, row, "a committed order is gone");
    };
    match (row.status.as_str(), row.closed_at) {
        ("paid", _) if !record.paid => tally.violation(record, Some(row), "paid without a payment"),
        ("paid", _) if row.closes > 0 || events > 0 => {
            tally.paid_closed += 1;
            tally.violation(record, Some(row), "paid, and closed as well");
        }
        ("paid", _) => {}
        ("closed", _) if record.paid => {
            tally.paid_closed += 1;
            tally.violation(record, Some(row), "closed, though the shop was told that it is paid");
        }
        ("closed", Some(_)) => check_close(tally, record, row, events, observations),
        _ => {
            tally.lost += 1;
            tally.violation(record, Some(row), "never closed");
        }
    }
}

fn check_close(tally: &mut Tally, record: &OrderRecord, row: &Row, events: usize, observations: &Observations<'_>) {
    match row.closed_by.as_deref() {
        Some("alarm") => tally.closed_by.alarm += 1,
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
    let (deadline, closed_at) = (postgres::moment(row.expires_at), postgres::moment(row.committed_at));
    if closed_at < deadline.max(record.deadline) || deadline != record.deadline {
        tally.early += 1;
        tally.violation(record, Some(row), "closed early, or for a deadline that the shop does not know");
    }
    let excused_until = excused_until(record, deadline, closed_at, observations.completed, observations.declined);
    let late = closed_at.since(excused_until);
    let beyond = late.saturating_sub(stalled_time(observations.standstills, excused_until, closed_at));
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
    match row.closed_by.as_deref() {
        Some("alarm") => {}
        _ if observations.late.contains(&record.id) => tally.alarms_late += 1,
        _ if alarms_were_discarded(observations.completed, record.deadline, record.deadline + LATEST_ALARM) => {
            tally.alarms_undecided += 1;
        }
        _ => tally.alarms_lost.push(format!("{record:?} {row:?}")),
    }
}

fn report(observations: &Observations<'_>, tally: &Tally, stock_balanced: bool) -> Report {
    let mut fault_kinds = BTreeMap::new();
    for fault in observations.completed {
        *fault_kinds.entry(fault.kind.name()).or_default() += 1;
    }
    let latest = tally.lateness.first().map_or(Duration::ZERO, |(lateness, _)| *lateness);
    let ClosedBy { alarm, sweep, manual } = tally.closed_by;
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
        closed_by: ClosedBy { alarm, sweep, manual },
        alarms_owed: tally.alarms_owed,
        alarms_late: tally.alarms_late,
        alarms_undecided: tally.alarms_undecided,
        alarms_lost: tally.alarms_lost.len(),
        max_lateness_beyond_fault_ms: ms(latest),
        max_lateness_with_standstills_ms: ms(tally.max_lateness_with_standstills),
        stood_still_ms: ms(total_duration(observations.standstills)),
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
                (SELECT count(*) FROM order_events e WHERE e.order_id = o.id AND e.event = 'closed') AS closes
         FROM orders o",
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
    let of_order =
        |(order, deadline): (String, OffsetDateTime)| Some((order.parse().ok()?, postgres::moment(deadline)));
    rows.into_iter().filter_map(of_order).collect()
}

/// The event ids under which each order's close was announced.
fn event_ids_by_order(received: &HashMap<Uuid, ReceivedEvent>) -> HashMap<&str, HashSet<Uuid>> {
    let mut of = HashMap::<&str, HashSet<Uuid>>::new();
    for (id, event) in received {
        of.entry(&event.order_id).or_default().insert(*id);
    }
    of
}

/// The reserved stock equals what open orders hold, and exactly the paid quantity of each article is gone.
async fn stock_is_balanced(pool: &PgPool, records: &[OrderRecord]) -> bool {
    let tables = Ledger::read(pool).await.unwrap();
    let stock: Vec<(String, i64, i64)> =
        sqlx::query_as("SELECT article_id, available, reserved FROM stock WHERE article_id LIKE 'article-%'")
            .fetch_all(pool)
            .await
            .unwrap();
    let sold = |article: &str| records.iter().filter(|record| record.paid && record.article == article).count();
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
mod tests {
    use super::*;
    use crate::plan::Kind;

    const DEADLINE_MS: u64 = 10_000;

    fn at(ms: u64) -> Timestamp {
        Timestamp::from_unix_micros(0) + Duration::from_millis(ms)
    }

    fn fault(from: u64, until: u64, affected: Affected) -> CompletedFault {
        let (kind, from, until) = (Kind::DatabaseKilled, at(from), at(until));
        CompletedFault { kind, from, until, affected, hits: None, forged: Vec::new() }
    }

    fn order() -> OrderRecord {
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
        }
    }

    fn late_ms(closed: u64, faults: &[CompletedFault]) -> u128 {
        at(closed).since(excused_until(&order(), at(DEADLINE_MS), at(closed), faults, &[])).as_millis()
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
            let excused_until = excused_until(&order(), at(DEADLINE_MS), at(11_050), faults, declined);
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
        assert_eq!(excused_until(&record, at(DEADLINE_MS), at(12_300), &[], &[]), at(12_000));
        // Closed before the shop learned of its commit.
        assert_eq!(excused_until(&record, at(DEADLINE_MS), at(11_000), &[], &[]), at(11_000));
    }

    #[test]
    fn disk_stalls_during_database_faults_are_ignored() {
        let standstill = |from, until| DiskStall { from: at(from), until: at(until) };
        let (within, after) = (standstill(12_900, 13_100), standstill(13_101, 14_000));
        let broken = |affected| outside_faults(&[within, after], &[fault(9_000, 13_000, affected)]);
        assert_eq!(broken(Affected::All), [after]);
        assert_eq!(broken(Affected::None), [within, after], "a fault of the broker");
    }
}

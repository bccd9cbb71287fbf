//! Holds the tables, and what the shop's consumers heard, against the shop's own books; and counts.
//!
//! What must hold, without exception: an order that was never paid is closed exactly once (one line of history, its
//! stock returned once, its event heard under one id); a paid order is not closed; none is closed before the deadline
//! in force, by the database's clock; no order's alarm is parked.
//!
//! When an order was closed, the server's record of the commit says (`track_commit_timestamp`), not the worker.
//!
//! How late a close may be: one second after the order's time. That is its deadline, or the moment at which the shop
//! heard that the deadline is committed, if that was later. A fault puts it off to the fault's end if it began while
//! the order had the right to be open, before that second was over, and excuses this order: `plan.rs` says which fault
//! excuses whom. So faults may follow one another, each beginning within a second of the end of the last. A fault of
//! the broker, of messages, or of one worker puts off nothing. What follows a fault is no excuse either: the database's
//! recovery is part of its restart, a worker's pause before its next try is not. All of it runs on one machine, so the
//! runner's clock and the database's are one.
//!
//! A disk that stands still is a fault that nobody drew (`disk_stall_probe.rs`). It excuses nobody for longer than it lasted, and
//! the report says how late they were with it, too. Where a machine stands still for much of a run, the run says nothing.
//!
//! So it is while a payment that is declined in the end keeps its article: no order of that article can be closed then,
//! by anybody. That is part of every day, and no fault.
//!
//! The sweep closes whatever alarm is lost, so that says nothing of alarms yet. An order that falls due in a rest, with
//! an alarm that was safe and that nobody threw away, is owed it, whatever it went through before. If the sweep had to
//! close it and no alarm came afterwards either, its alarm is lost. One that comes afterwards is late: a broker counts a
//! message's delay from when it has it, so one that stood still makes late what was on its way to it, and whatever waits
//! in the same slot behind that. If alarms were thrown away soon after such an order's deadline, nobody can say whether
//! its own was among them, late, or had been lost before: it is undecided. Late and undecided ones may be few. And nothing
//! is owed to an order that was extended if its alarm could be handed over only after the deadline it names: the relay
//! leaves such an alarm to the sweep. Nor to one for whom somebody else sent alarms: which of them came is not to be told.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::Duration;

use order_timeout::database;
use order_timeout::order::Timestamp;
use serde::Serialize;
use sqlx::PgPool;
use time::OffsetDateTime;
use uuid::Uuid;

use crate::ear::Heard;
use crate::faults::{Carried, Whom};
use crate::run::Rest;
use crate::shop::{Declined, IN_STOCK, Life};
use crate::support::disk_stall_probe::{DiskStall, stalled_time, total_duration};
use crate::support::ledger::Ledger;

/// How late a close may be that nothing excuses.
pub const PROMISED: Duration = Duration::from_secs(1);
/// An alarm that is safe so long before its deadline, in a rest, has the time for every way there is: out of the outbox,
/// through a lane, into the hold.
const TIME_FOR_EVERY_WAY: Duration = Duration::from_millis(1_500);
/// How long after its deadline a late alarm may still be on its way: no fault stops a broker for longer.
const MAY_STILL_COME: Duration = Duration::from_secs(30);

/// How a run ended, as its last line says it.
#[derive(Debug, Serialize)]
pub struct Report {
    pub seed: u64,
    pub orders: usize,
    pub paid: usize,
    pub faults: usize,
    pub fault_kinds: BTreeMap<String, usize>,
    /// Never closed nor paid, or closed and never heard of, or not there though the shop was told so.
    pub lost: usize,
    pub closed_twice: usize,
    pub paid_closed: usize,
    pub early: usize,
    pub stock_balanced: bool,
    /// Payments that kept an article for a while and were declined.
    pub declined: usize,
    /// Events sent more than once, each under its own id, as is allowed.
    pub duplicate_event_ids: usize,
    pub closed_by: ClosedBy,
    /// Orders whose alarm had to come, for nothing was broken when they fell due.
    pub alarms_owed: usize,
    /// Those of them that the sweep had to close, because the alarm came later than that.
    pub alarms_late: usize,
    /// Those of them that the sweep had to close shortly before alarms were thrown away: late, or lost.
    pub alarms_undecided: usize,
    /// Those of them whose alarm never came.
    pub alarms_lost: usize,
    pub max_lateness_beyond_fault_ms: f64,
    /// The same if the disk's standstills excused nobody.
    pub max_lateness_with_standstills_ms: f64,
    /// How long the disk stood still while no fault of everybody's was carried out.
    pub stood_still_ms: f64,
}

#[derive(Debug, Default, Serialize)]
pub struct ClosedBy {
    pub alarm: usize,
    pub sweep: usize,
    pub manual: usize,
}

/// Everything the judge hears.
pub struct Evidence<'a> {
    pub seed: u64,
    pub lives: &'a [Life],
    pub carried: &'a [Carried],
    pub declined: &'a [Declined],
    pub rests: &'a [Rest],
    pub standstills: &'a [DiskStall],
    pub heard: &'a HashMap<Uuid, Heard>,
    /// Whose alarm came when they had been closed already.
    pub late: &'a HashSet<Uuid>,
}

/// The report, and every broken promise in words.
pub struct Verdict {
    pub report: Report,
    pub violations: Vec<String>,
    /// The latest closes, for whoever looks into them.
    pub latest: Vec<String>,
    pub alarms_lost: Vec<String>,
}

/// An order as the tables have it in the end.
#[derive(Debug, sqlx::FromRow)]
struct Row {
    id: Uuid,
    status: String,
    expires_at: OffsetDateTime,
    closed_at: Option<OffsetDateTime>,
    /// When its last change was committed, by the server's own record: `closed_at` is what our statement says.
    committed_at: OffsetDateTime,
    closed_by: Option<String>,
    closes: i64,
}

/// Which orders' last alarm stood in the outbox until the deadline that it names had passed, and that deadline.
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
    /// In words.
    alarms_lost: Vec<String>,
    lateness: Vec<(Duration, String)>,
    max_lateness_with_standstills: Duration,
}

impl Tally {
    fn violation(&mut self, life: &Life, row: Option<&Row>, what: &str) {
        self.violations.push(format!("{what}: {life:?} {row:?}"));
    }
}

/// What an order that was closed then may have been put off to.
fn put_off_to(
    life: &Life,
    deadline: Timestamp,
    closed_at: Timestamp,
    carried: &[Carried],
    declined: &[Declined],
) -> Timestamp {
    let faults = carried.iter().filter(|fault| excuses(&fault.whom, life)).map(|fault| (fault.from, fault.until));
    let kept = declined.iter().filter(|one| one.article == life.article).map(|one| (one.from, one.until));
    let mut in_the_way: Vec<(Timestamp, Timestamp)> = faults.chain(kept).collect();
    in_the_way.sort();
    let mut owed = deadline.max(life.known_at.min(closed_at));
    for (from, until) in in_the_way {
        if from < owed + PROMISED && until > owed {
            owed = until;
        }
    }
    owed
}

/// The standstills that are not a fault's own.
pub fn but_for_faults(standstills: &[DiskStall], carried: &[Carried]) -> Vec<DiskStall> {
    let is_a_faults = |one: &DiskStall| {
        let meets = |fault: &&Carried| fault.from <= one.until && fault.until >= one.from;
        carried.iter().filter(meets).any(|fault| fault.whom == Whom::Everybody)
    };
    standstills.iter().filter(|one| !is_a_faults(one)).copied().collect()
}

/// Whether its alarm must close it.
fn is_owed_its_alarm(life: &Life, expired: &Expired, carried: &[Carried], rests: &[Rest]) -> bool {
    let Some(alarmed_at) = life.alarmed_at else { return false };
    let was_left_to_the_sweep = expired.get(&life.id).is_some_and(|deadline| *deadline < life.deadline);
    // Both ends of a rest are somebody's beginning: what fell due a moment before it, and the next fault.
    let in_a_rest =
        |rest: &Rest| rest.from + TIME_FOR_EVERY_WAY <= life.deadline && life.deadline + PROMISED <= rest.until;
    !life.contested
        && !was_left_to_the_sweep
        && alarmed_at + TIME_FOR_EVERY_WAY <= life.deadline
        && rests.iter().any(in_a_rest)
        && !were_thrown_away(carried, life.created_at, life.deadline)
        // Whether its own came then, nobody can say.
        && !carried.iter().any(|fault| fault.forged.contains(&life.id))
}

/// Whether alarms were thrown away at any time between these moments.
fn were_thrown_away(carried: &[Carried], from: Timestamp, until: Timestamp) -> bool {
    carried.iter().any(|fault| fault.kind.throws_alarms_away() && fault.from <= until && fault.until >= from)
}

fn excuses(whom: &Whom, life: &Life) -> bool {
    match whom {
        Whom::Nobody => false,
        Whom::Everybody => true,
        Whom::Orders(orders) => orders.contains(&life.id),
        Whom::Article(article) => *article == life.article,
    }
}

pub async fn judge(pool: &PgPool, evidence: Evidence<'_>) -> Verdict {
    let rows = rows(pool).await;
    let expired = expired(pool).await;
    let heard_of = heard_of(evidence.heard);
    let mut tally = Tally::default();
    for life in evidence.lives {
        let events = heard_of.get(life.id.to_string().as_str()).map_or(0, HashSet::len);
        judge_one(&mut tally, life, rows.get(&life.id), events, &evidence);
        judge_alarm(&mut tally, life, rows.get(&life.id), &expired, &evidence);
    }
    if rows.len() != evidence.lives.len() {
        tally.violations.push(format!("{} orders in the table, {} in the books", rows.len(), evidence.lives.len()));
    }
    let stock_balanced = stock_balances(pool, evidence.lives).await;
    if !stock_balanced {
        tally.violations.push("the stock does not add up".to_owned());
    }
    for (order, reason) in parked(pool).await {
        if evidence.lives.iter().any(|life| life.id.to_string() == order) {
            tally.violations.push(format!("an alarm of order {order} was parked: {reason}"));
        }
    }
    tally.lateness.sort_by_key(|(lateness, _)| std::cmp::Reverse(*lateness));
    let report = report(&evidence, &tally, stock_balanced);
    let latest = tally.lateness.into_iter().take(20).map(|(_, what)| what).collect();
    Verdict { report, violations: tally.violations, latest, alarms_lost: tally.alarms_lost }
}

fn judge_one(tally: &mut Tally, life: &Life, row: Option<&Row>, events: usize, evidence: &Evidence<'_>) {
    let Some(row) = row else {
        tally.lost += 1;
        return tally.violation(life, row, "a committed order is gone");
    };
    match (row.status.as_str(), row.closed_at) {
        ("paid", _) if !life.paid => tally.violation(life, Some(row), "paid by nobody"),
        ("paid", _) if row.closes > 0 || events > 0 => {
            tally.paid_closed += 1;
            tally.violation(life, Some(row), "paid, and closed as well");
        }
        ("paid", _) => {}
        ("closed", _) if life.paid => {
            tally.paid_closed += 1;
            tally.violation(life, Some(row), "closed, though the shop was told that it is paid");
        }
        ("closed", Some(_)) => judge_close(tally, life, row, events, evidence),
        _ => {
            tally.lost += 1;
            tally.violation(life, Some(row), "never closed");
        }
    }
}

fn judge_close(tally: &mut Tally, life: &Life, row: &Row, events: usize, evidence: &Evidence<'_>) {
    match row.closed_by.as_deref() {
        Some("alarm") => tally.closed_by.alarm += 1,
        Some("sweep") => tally.closed_by.sweep += 1,
        _ => tally.closed_by.manual += 1,
    }
    if row.closes != 1 || events > 1 {
        tally.closed_twice += 1;
        tally.violation(life, Some(row), &format!("{} closes in its history, {events} events", row.closes));
    }
    if events == 0 {
        tally.lost += 1;
        tally.violation(life, Some(row), "closed, and nobody heard of it");
    }
    let (deadline, closed_at) = (database::moment(row.expires_at), database::moment(row.committed_at));
    if closed_at < deadline.max(life.deadline) || deadline != life.deadline {
        tally.early += 1;
        tally.violation(life, Some(row), "closed early, or for a deadline that the shop does not know");
    }
    let put_off_to = put_off_to(life, deadline, closed_at, evidence.carried, evidence.declined);
    let late = closed_at.since(put_off_to);
    let beyond = late.saturating_sub(stalled_time(evidence.standstills, put_off_to, closed_at));
    tally.max_lateness_with_standstills = late.max(tally.max_lateness_with_standstills);
    let plainly = closed_at.since(deadline).as_secs_f64() * 1e3;
    let beyond_ms = beyond.as_secs_f64() * 1e3;
    let what = format!("{beyond_ms:.0} ms beyond any excuse, {plainly:.0} ms after its deadline: {life:?} {row:?}");
    tally.lateness.push((beyond, what));
}

fn judge_alarm(tally: &mut Tally, life: &Life, row: Option<&Row>, expired: &Expired, evidence: &Evidence<'_>) {
    let Some(row) = row.filter(|row| row.status == "closed") else { return };
    if !is_owed_its_alarm(life, expired, evidence.carried, evidence.rests) {
        return;
    }
    tally.alarms_owed += 1;
    match row.closed_by.as_deref() {
        Some("alarm") => {}
        _ if evidence.late.contains(&life.id) => tally.alarms_late += 1,
        _ if were_thrown_away(evidence.carried, life.deadline, life.deadline + MAY_STILL_COME) => {
            tally.alarms_undecided += 1;
        }
        _ => tally.alarms_lost.push(format!("{life:?} {row:?}")),
    }
}

fn report(evidence: &Evidence<'_>, tally: &Tally, stock_balanced: bool) -> Report {
    let mut fault_kinds = BTreeMap::new();
    for fault in evidence.carried {
        *fault_kinds.entry(fault.kind.name()).or_default() += 1;
    }
    let latest = tally.lateness.first().map_or(Duration::ZERO, |(lateness, _)| *lateness);
    let ClosedBy { alarm, sweep, manual } = tally.closed_by;
    Report {
        seed: evidence.seed,
        orders: evidence.lives.len(),
        paid: evidence.lives.iter().filter(|life| life.paid).count(),
        faults: evidence.carried.len(),
        fault_kinds,
        lost: tally.lost,
        closed_twice: tally.closed_twice,
        paid_closed: tally.paid_closed,
        early: tally.early,
        stock_balanced,
        declined: evidence.declined.len(),
        duplicate_event_ids: evidence.heard.values().filter(|heard| heard.times > 1).count(),
        closed_by: ClosedBy { alarm, sweep, manual },
        alarms_owed: tally.alarms_owed,
        alarms_late: tally.alarms_late,
        alarms_undecided: tally.alarms_undecided,
        alarms_lost: tally.alarms_lost.len(),
        max_lateness_beyond_fault_ms: ms(latest),
        max_lateness_with_standstills_ms: ms(tally.max_lateness_with_standstills),
        stood_still_ms: ms(total_duration(evidence.standstills)),
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
        |(order, deadline): (String, OffsetDateTime)| Some((order.parse().ok()?, database::moment(deadline)));
    rows.into_iter().filter_map(of_order).collect()
}

/// Under which ids each order's close was announced.
fn heard_of(heard: &HashMap<Uuid, Heard>) -> HashMap<&str, HashSet<Uuid>> {
    let mut of = HashMap::<&str, HashSet<Uuid>>::new();
    for (id, event) in heard {
        of.entry(&event.order_id).or_default().insert(*id);
    }
    of
}

/// Nothing is reserved beyond what is promised, and of each article exactly what was paid for is gone.
async fn stock_balances(pool: &PgPool, lives: &[Life]) -> bool {
    let tables = Ledger::read(pool).await.unwrap();
    let stock: Vec<(String, i64, i64)> =
        sqlx::query_as("SELECT article_id, available, reserved FROM stock WHERE article_id LIKE 'article-%'")
            .fetch_all(pool)
            .await
            .unwrap();
    let sold = |article: &str| lives.iter().filter(|life| life.paid && life.article == article).count();
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

    fn fault(from: u64, until: u64, whom: Whom) -> Carried {
        let (kind, from, until) = (Kind::DatabaseKilled, at(from), at(until));
        Carried { kind, from, until, whom, hits: None, forged: Vec::new() }
    }

    fn order() -> Life {
        let (id, article) = (Uuid::from_u128(7), "article-3".to_owned());
        let (created_at, known_at) = (at(1_000), at(1_000));
        let deadline = at(DEADLINE_MS);
        Life { id, article, deadline, created_at, known_at, alarmed_at: Some(at(1_100)), contested: false, paid: false }
    }

    fn late_ms(closed: u64, faults: &[Carried]) -> u128 {
        at(closed).since(put_off_to(&order(), at(DEADLINE_MS), at(closed), faults, &[])).as_millis()
    }

    #[test]
    fn without_an_excuse_lateness_counts_from_the_deadline() {
        assert_eq!(late_ms(10_400, &[]), 400);
        assert_eq!(late_ms(14_000, &[fault(9_000, 13_000, Whom::Nobody)]), 4_000);
        assert_eq!(late_ms(14_000, &[fault(9_000, 13_000, Whom::Article("article-4".into()))]), 4_000);
        assert_eq!(late_ms(14_000, &[fault(9_000, 13_000, Whom::Orders(vec![Uuid::from_u128(8)]))]), 4_000);
    }

    #[test]
    fn a_fault_puts_off_what_was_due_in_it_to_its_end() {
        for whom in [Whom::Everybody, Whom::Article("article-3".into()), Whom::Orders(vec![Uuid::from_u128(7)])] {
            assert_eq!(late_ms(14_000, &[fault(9_000, 13_000, whom.clone())]), 1_000);
            // Begun when the order ought to have been closed already.
            assert_eq!(late_ms(14_000, &[fault(11_001, 13_000, whom.clone())]), 4_000);
            // Over before the deadline.
            assert_eq!(late_ms(10_300, &[fault(8_000, 9_900, whom)]), 300);
        }
    }

    #[test]
    fn faults_that_follow_at_once_put_off_further() {
        let faults = [fault(15_500, 16_000, Whom::Everybody), fault(10_500, 12_000, Whom::Everybody)];
        assert_eq!(late_ms(16_500, &faults), 4_500, "between them it had its second");
        let faults = [fault(12_500, 16_000, Whom::Everybody), fault(10_500, 12_000, Whom::Everybody)];
        assert_eq!(late_ms(16_500, &faults), 500);
    }

    #[test]
    fn a_declined_payment_puts_off_the_orders_of_its_article_while_it_lasts() {
        let kept =
            |article: &str, from, until| Declined { article: article.to_owned(), from: at(from), until: at(until) };
        let late_ms = |declined: &[Declined], faults: &[Carried]| {
            let put_off_to = put_off_to(&order(), at(DEADLINE_MS), at(11_050), faults, declined);
            at(11_050).since(put_off_to).as_millis()
        };
        assert_eq!(late_ms(&[kept("article-3", 10_600, 10_800)], &[]), 250);
        assert_eq!(late_ms(&[kept("article-4", 10_600, 10_800)], &[]), 1_050, "another's");
        assert_eq!(late_ms(&[kept("article-3", 9_600, 9_900)], &[]), 1_050, "over before the deadline");
        let behind_a_fault = fault(9_000, 10_200, Whom::Everybody);
        assert_eq!(late_ms(&[kept("article-3", 11_010, 11_030)], &[]), 1_050, "its second was over");
        assert_eq!(late_ms(&[kept("article-3", 11_010, 11_030)], &[behind_a_fault]), 20);
    }

    #[test]
    fn an_alarm_is_owed_to_who_falls_due_in_a_rest_and_to_nobody_else() {
        let rest = |from, until| Rest { from: at(from), until: at(until) };
        let owed =
            |life: &Life, rest: Rest, faults: &[Carried]| is_owed_its_alarm(life, &Expired::new(), faults, &[rest]);
        let (of_it, before) = (rest(8_000, 12_000), fault(2_000, 7_000, Whom::Everybody));
        assert!(owed(&order(), of_it, std::slice::from_ref(&before)), "whatever was broken before");
        assert!(!owed(&order(), rest(9_000, 12_000), &[]), "the rest has hardly begun");
        assert!(!owed(&order(), rest(8_000, 10_900), &[]), "the next fault may be there first");
        assert!(!owed(&Life { alarmed_at: None, ..order() }, of_it, &[]));
        assert!(!owed(&Life { alarmed_at: Some(at(9_000)), ..order() }, of_it, &[]));
        assert!(!owed(&Life { contested: true, ..order() }, of_it, &[]));
        for kind in [Kind::QueuePurged, Kind::QueueDeleted, Kind::DelayQueueDeleted] {
            assert!(!owed(&order(), of_it, &[Carried { kind, ..before.clone() }]), "{kind:?} took it");
        }
        let doubled = Carried { kind: Kind::AlarmsDoubled, forged: vec![order().id], ..before.clone() };
        assert!(!owed(&order(), of_it, &[doubled]), "somebody else's may have closed it");
        let handed_over_after = |deadline| is_owed_its_alarm(&order(), &[(order().id, deadline)].into(), &[], &[of_it]);
        assert!(!handed_over_after(at(3_000)), "the order was extended meanwhile");
        assert!(handed_over_after(at(DEADLINE_MS)), "nobody had extended it");
    }

    #[test]
    fn what_is_thrown_away_is_what_was_under_way_at_that_time() {
        let deleted = Carried { kind: Kind::QueueDeleted, ..fault(20_000, 21_000, Whom::Nobody) };
        let thrown = |fault: &Carried, from, until| were_thrown_away(std::slice::from_ref(fault), at(from), at(until));
        assert!(thrown(&deleted, 10_000, 20_000) && thrown(&deleted, 21_000, 30_000));
        assert!(!thrown(&deleted, 10_000, 19_999), "before");
        assert!(!thrown(&deleted, 21_001, 30_000), "after");
        assert!(!thrown(&Carried { kind: Kind::DatabaseKilled, ..deleted }, 10_000, 30_000), "no alarm's business");
    }

    #[test]
    fn nobody_is_late_for_a_deadline_that_was_not_committed_yet() {
        let mut life = order();
        life.known_at = at(12_000);
        assert_eq!(put_off_to(&life, at(DEADLINE_MS), at(12_300), &[], &[]), at(12_000));
        // Closed before the shop heard that it was committed.
        assert_eq!(put_off_to(&life, at(DEADLINE_MS), at(11_000), &[], &[]), at(11_000));
    }

    #[test]
    fn a_disk_that_stands_still_is_no_news_while_the_database_is_broken() {
        let standstill = |from, until| DiskStall { from: at(from), until: at(until) };
        let (within, after) = (standstill(12_900, 13_100), standstill(13_101, 14_000));
        let broken = |whom| but_for_faults(&[within, after], &[fault(9_000, 13_000, whom)]);
        assert_eq!(broken(Whom::Everybody), [after]);
        assert_eq!(broken(Whom::Nobody), [within, after], "a fault of the broker's");
    }
}

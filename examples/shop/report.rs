//! The run's output: a sentence before, and afterwards a line of JSON or a table, a histogram and the verdict.

use std::collections::HashSet;
use std::fmt::Write;

use hdrhistogram::Histogram;
use order_timeout_core::delay::Strategy;
use serde::Serialize;

use crate::args::Args;
use crate::audit::Findings;
use crate::checkout::{PaymentOutcome, Served};
use crate::environment::Environment;
use crate::listener::ReceivedEvents;
use crate::plan::Plan;

/// Upper bounds of the histogram's rows, in milliseconds: each about twice the one before.
const ROW_ENDS_MS: [u64; 13] = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, u64::MAX];
const LONGEST_BAR: usize = 48;

/// The result of a run.
#[derive(Debug)]
pub struct Report {
    summary: Summary,
    lost_payments: usize,
    lateness_us: Vec<u64>,
    lateness_until: &'static str,
    pub commit_p99_ms: f64,
    /// One sentence for each promise that was broken.
    pub violations: Vec<String>,
}

/// The line of JSON; its keys are stable.
#[derive(Debug, Serialize)]
struct Summary {
    strategy: &'static str,
    orders: usize,
    paid: usize,
    closed: usize,
    left_unpaid: usize,
    paid_closed: usize,
    closed_twice: usize,
    early: usize,
    stock_balanced: bool,
    events_announced: usize,
    closed_by: ClosedBy,
    lateness_ms: Lateness,
}

#[derive(Debug, Serialize)]
struct ClosedBy {
    alarm: usize,
    look_ahead: usize,
    sweep: usize,
    manual: usize,
}

#[derive(Debug, Serialize)]
struct Lateness {
    p50: f64,
    p99: f64,
    max: f64,
}

/// What is about to happen.
pub fn introduction(args: &Args, environment: &Environment, plan: &Plan) -> String {
    let settings = &environment.settings;
    let seconds = args.duration().as_secs();
    let terms = environment.terms();
    let others = format!("{}s to {}s", terms.other_ms.start() / 1_000, terms.other_ms.end() / 1_000);
    let time_to_pay = match terms.lane {
        Some(lane) => format!("{} to pay, every tenth {others}", humantime::format_duration(lane)),
        None => format!("{others} to pay"),
    };
    let woken_by = match settings.delay.strategy.needs_broker() {
        true => format!(
            "an alarm that waits in\nRabbitMQ ({}, namespace {})",
            settings.delay.strategy.as_str(),
            settings.namespace
        ),
        false => "its row in Postgres, without a broker,".to_owned(),
    };
    let worker = if args.no_worker { "a worker that runs elsewhere" } else { "a worker in this program" };
    format!(
        "A shop takes {} orders in {seconds}s. Its customers have {time_to_pay}; {} of them will try to pay,\n\
         some in the last milliseconds. Every other order must be closed at its deadline, by {woken_by}\n\
         and {worker}.\n",
        plan.customers.len(),
        plan.payers(),
    )
}

impl Report {
    pub fn new(
        strategy: Strategy,
        findings: Findings,
        served: &[Served],
        received: &ReceivedEvents,
        commit_p99_ms: f64,
        hint_if_left_unpaid: &str,
    ) -> Self {
        let violations = violations(strategy, &findings, served, received, hint_if_left_unpaid);
        let summary = Summary {
            strategy: Strategy::as_str(strategy),
            orders: findings.orders,
            paid: findings.paid,
            closed: findings.closed,
            left_unpaid: findings.left_unpaid,
            paid_closed: findings.paid_closed,
            closed_twice: findings.closed_twice,
            early: findings.early,
            stock_balanced: findings.stock_faults.is_empty(),
            events_announced: received.events.len(),
            closed_by: ClosedBy {
                alarm: findings.closed_by_alarm,
                look_ahead: findings.closed_by_look_ahead,
                sweep: findings.closed_by_sweep,
                manual: findings.closed_by_manual,
            },
            lateness_ms: Lateness::of(&findings.lateness_us),
        };
        Self {
            summary,
            lost_payments: count(served, PaymentOutcome::TooLate),
            lateness_us: findings.lateness_us,
            lateness_until: findings.lateness_until,
            commit_p99_ms,
            violations,
        }
    }

    pub fn json_line(&self) -> anyhow::Result<String> {
        Ok(serde_json::to_string(&self.summary)?)
    }

    pub fn for_people(&self) -> String {
        let verdict = match self.violations.len() {
            0 => "All promises held.".to_owned(),
            1 => "1 promise was broken, see above.".to_owned(),
            more => format!("{more} promises were broken, see above."),
        };
        format!("{}\n{}\n{verdict}", self.table(), self.histogram())
    }

    fn table(&self) -> String {
        let s = &self.summary;
        let by = &s.closed_by;
        let stock = if s.stock_balanced { "balanced" } else { "NOT balanced" };
        let too_late = match self.lost_payments {
            0 => String::new(),
            1 => "1 payment came too late: its order had been closed".to_owned(),
            more => format!("{more} payments came too late: their orders had been closed"),
        };
        let rows = [
            ("orders", s.orders.to_string(), String::new()),
            ("paid", s.paid.to_string(), too_late),
            (
                "closed",
                s.closed.to_string(),
                format!("alarm {}, look-ahead {}, sweep {}, manual {}", by.alarm, by.look_ahead, by.sweep, by.manual),
            ),
            ("announced", s.events_announced.to_string(), "distinct events at a consumer".to_owned()),
            ("left unpaid", s.left_unpaid.to_string(), String::new()),
            ("paid and closed", s.paid_closed.to_string(), String::new()),
            ("closed twice", s.closed_twice.to_string(), String::new()),
            ("closed early", s.early.to_string(), String::new()),
            ("stock", stock.to_owned(), String::new()),
        ];
        let mut table = String::new();
        for (name, value, remark) in rows {
            let line = format!("  {name:<16}{value:>8}   {remark}");
            table.push_str(line.trim_end());
            table.push('\n');
        }
        table
    }

    fn histogram(&self) -> String {
        let Lateness { p50, p99, max } = self.summary.lateness_ms;
        let counts = count_rows(&self.lateness_us);
        let most = counts.iter().copied().max().unwrap_or(0).max(1);
        let mut drawn = format!("  How late the closes were ({} after the deadline):\n\n", self.lateness_until);
        let first = counts.iter().position(|count| *count > 0).unwrap_or(0);
        let last = counts.iter().rposition(|count| *count > 0).unwrap_or(0);
        for (row, count) in counts.iter().enumerate().take(last + 1).skip(first) {
            let name = row_name(row);
            // Every nonzero count is visible.
            let bar = "█".repeat((count * LONGEST_BAR).div_ceil(most));
            // Writing to a String cannot fail.
            let _ = writeln!(drawn, "  {name:>9} ms {count:>6}  {bar}");
        }
        let _ = write!(
            drawn,
            "\n  p50 {p50} ms, p99 {p99} ms, max {max} ms; in the same run a single-row commit's p99 was {} ms\n",
            self.commit_p99_ms
        );
        drawn
    }
}

impl Lateness {
    fn of(lateness_us: &[u64]) -> Self {
        // Three significant digits of microseconds; grows as needed, so recording cannot fail.
        let mut histogram = Histogram::<u64>::new(3).expect("3 is a number of digits that hdrhistogram has");
        lateness_us.iter().for_each(|us| histogram += *us);
        let at = |quantile| rounded_ms(histogram.value_at_quantile(quantile));
        Self { p50: at(0.5), p99: at(0.99), max: rounded_ms(histogram.max()) }
    }
}

fn violations(
    strategy: Strategy,
    findings: &Findings,
    served: &[Served],
    received: &ReceivedEvents,
    hint_if_left_unpaid: &str,
) -> Vec<String> {
    let f = findings;
    let (on_time, woken) = match strategy.needs_broker() {
        true => (f.closed_by_alarm, "woken by an alarm"),
        false => (f.closed_by_look_ahead, "read ahead"),
    };
    let told_paid = count(served, PaymentOutcome::Paid);
    let announced = received.events.len();
    let announced_orders: HashSet<&String> = received.events.values().collect();
    let unannounced = f.closed_orders.iter().filter(|order_id| !announced_orders.contains(order_id)).count();
    let rules = [
        (f.orders != f.planned, format!("of {} orders created, {} are there", f.planned, f.orders)),
        (
            f.left_unpaid > 0,
            format!("{} orders were left unpaid after their deadline{hint_if_left_unpaid}", f.left_unpaid),
        ),
        (f.paid_closed > 0, format!("{} orders were paid and closed", f.paid_closed)),
        (f.closed_twice > 0, format!("{} orders were closed twice", f.closed_twice)),
        (f.early > 0, format!("{} orders were closed early", f.early)),
        (
            f.paid != told_paid,
            format!("{told_paid} customers were told that they had paid, but {} orders are paid", f.paid),
        ),
        (announced != f.closed, format!("{announced} events were announced for {} closed orders", f.closed)),
        (unannounced > 0, format!("{unannounced} closed orders were never announced")),
        (on_time != f.closed, format!("{} of {} closes were not {woken}", f.closed - on_time, f.closed)),
    ];
    let broken = rules.into_iter().filter_map(|(is_broken, sentence)| is_broken.then_some(sentence));
    let stock = f.stock_faults.iter().cloned();
    let unreadable = received
        .unreadable
        .iter()
        .take(1)
        .map(|first| format!("{} events could not be read, the first because {first}", received.unreadable.len()));
    broken.chain(stock).chain(unreadable).collect()
}

fn count(served: &[Served], outcome: PaymentOutcome) -> usize {
    served.iter().filter(|served| served.payment == outcome).count()
}

fn count_rows(lateness_us: &[u64]) -> [usize; ROW_ENDS_MS.len()] {
    let mut counts = [0; ROW_ENDS_MS.len()];
    for us in lateness_us {
        let row = ROW_ENDS_MS.iter().position(|end_ms| *us < end_ms.saturating_mul(1_000));
        counts[row.unwrap_or(ROW_ENDS_MS.len() - 1)] += 1;
    }
    counts
}

fn row_name(row: usize) -> String {
    let begin_ms = if row == 0 { 0 } else { ROW_ENDS_MS[row - 1] };
    match ROW_ENDS_MS[row] {
        u64::MAX => format!("from {begin_ms}"),
        end_ms => format!("{begin_ms}–{end_ms}"),
    }
}

/// Microseconds as milliseconds with one decimal.
pub fn rounded_ms(us: u64) -> f64 {
    (us as f64 / 100.0).round() / 10.0
}

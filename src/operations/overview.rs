//! Whether orders are closed on time right now: what is overdue, what waits in the outboxes, what is parked, and which
//! workers run. For a page that is refreshed every few seconds, so it counts nothing that grows with the table.
//!
//! Reads only. What cannot be known is left out, and listed with the reason.

use order_timeout_core::message::write_rfc3339;
use serde::Serialize;

use super::orders_table::OrdersTable;
use super::status::{
    Outbox, Overdue, ParkedForReason, RegisteredWorker, outbox, overdue_at, parked_by_reason, workers,
};
use super::{NotKnown, known};
use crate::postgres::{self, Database};

/// Orders that have been overdue for no longer are about to be closed: the sweep's usual grace, a pass and a batch.
pub const USUALLY_CLOSED_WITHIN_S: f64 = 2.0;

/// The state of the moment. `None` is unknown, and `not_known` says why.
#[derive(Debug, Clone, PartialEq, Serialize, utoipa::ToSchema)]
pub struct Overview {
    /// The database's time, RFC 3339.
    pub at: String,
    /// Unpaid orders whose deadline has passed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub overdue: Option<Overdue>,
    /// Alarms on their way to the broker.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub alarm_outbox: Option<Outbox>,
    /// Events on their way to the broker.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub event_outbox: Option<Outbox>,
    /// Parked alarms.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub parked: Option<Vec<ParkedForReason>>,
    /// Registered workers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub workers: Option<Vec<RegisteredWorker>>,
    /// What could not be found out, and why.
    pub not_known: Vec<NotKnown>,
}

/// Reads the state of the moment.
///
/// # Errors
/// sqlx's, if the database's time cannot be read. Anything else that cannot be read is listed in `not_known`.
pub async fn overview(database: &Database, orders: &OrdersTable) -> Result<Overview, sqlx::Error> {
    let now = database.run(postgres::now).await?;
    let mut not_known = Vec::new();
    let overdue = known("overdue", orders.overdue().await, &mut not_known).map(|found| overdue_at(now, &found));
    let alarm_outbox = known("alarm outbox", outbox(database, "alarm_outbox", now).await, &mut not_known);
    let event_outbox = known("event outbox", outbox(database, "event_outbox", now).await, &mut not_known);
    let parked = known("parked", parked_by_reason(database, now).await, &mut not_known);
    let workers = known("workers", workers(database).await, &mut not_known);
    Ok(Overview { at: write_rfc3339(now), overdue, alarm_outbox, event_outbox, parked, workers, not_known })
}

/// Whether orders are closed on time.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// They are.
    OnTime,
    /// They are, and something is wrong: one line for each.
    Degraded(Vec<String>),
    /// They are not: one line for each reason that is known.
    Late(Vec<String>),
    /// That cannot be known: why.
    Unknown(String),
}

/// Judges the state of the moment. `problems` are the lines of a worker's `/readyz` that is not ready or degraded.
#[must_use]
pub fn verdict(overview: Result<&Overview, &str>, problems: &[String]) -> Verdict {
    let overview = match overview {
        Ok(overview) => overview,
        Err(why) => return Verdict::Unknown(why.to_owned()),
    };
    let Some(overdue) = &overview.overdue else {
        let why = overview.not_known.iter().find(|entry| entry.what == "overdue").map(|entry| entry.why.clone());
        return Verdict::Unknown(why.unwrap_or_else(|| "overdue orders could not be counted".into()));
    };
    let is_late = overdue.oldest_s.is_some_and(|oldest_s| oldest_s > USUALLY_CLOSED_WITHIN_S);
    if is_late {
        let mut reasons = problems.to_vec();
        if overview.workers.as_ref().is_some_and(|workers| !workers.iter().any(|worker| worker.is_live)) {
            reasons.push("no worker is registered as running".into());
        }
        return Verdict::Late(reasons);
    }
    if problems.is_empty() { Verdict::OnTime } else { Verdict::Degraded(problems.to_vec()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn overview(oldest_s: Option<f64>) -> Overview {
        let overdue = Overdue { orders: 3, is_at_least: false, oldest: None, oldest_s };
        Overview {
            at: String::new(),
            overdue: Some(overdue),
            alarm_outbox: None,
            event_outbox: None,
            parked: None,
            workers: Some(Vec::new()),
            not_known: Vec::new(),
        }
    }

    #[test]
    fn verdict_follows_oldest_overdue_order() {
        let problem = || vec!["broker: no consumer session is open".to_owned()];
        assert_eq!(verdict(Ok(&overview(None)), &[]), Verdict::OnTime);
        assert_eq!(verdict(Ok(&overview(Some(0.4))), &[]), Verdict::OnTime);
        assert_eq!(verdict(Ok(&overview(Some(0.4))), &problem()), Verdict::Degraded(problem()));
        let Verdict::Late(reasons) = verdict(Ok(&overview(Some(60.0))), &problem()) else { panic!() };
        assert_eq!(reasons.len(), 2, "{reasons:?}");
        assert_eq!(verdict(Err("no answer"), &problem()), Verdict::Unknown("no answer".into()));
        let unknown = Overview { overdue: None, ..overview(None) };
        assert!(matches!(verdict(Ok(&unknown), &[]), Verdict::Unknown(_)));
    }
}

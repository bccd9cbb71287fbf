//! The action SETTLE PAID: marks orders as paid because a provider has their money. One batch, one statement, one
//! transaction.
//!
//! Whether the money covers what the order costs is decided by the statement, on the locked row.

use order_timeout_client::postgres::Timestamptz;
use order_timeout_core::engine::{AttemptKey, EndOutcome, Ending, PaidEnding};
use order_timeout_core::payment::Money;
use sqlx::Row;
use sqlx::postgres::{PgConnection, PgRow};
use sqlx::types::Json;

use super::ended_orders::{EndedOrder, EndedOrders};
use super::outcomes::{EndStatement, Outcomes};
use super::statements::settle_paid_sql;
use super::{AttemptColumns, answers_by_order};
use crate::postgres::{Database, ErrorClass, classify};

/// Runs it on this database.
pub(super) struct SettlePaid<'a>(pub &'a Database, pub &'a EndedOrders);

impl EndStatement for SettlePaid<'_> {
    type Item = PaidEnding;

    fn ending(item: &PaidEnding) -> &Ending {
        &item.ending
    }

    async fn run(&self, endings: &[PaidEnding]) -> Result<Outcomes, sqlx::Error> {
        let settle = async |waits| self.0.run(async |connection| settle(connection, endings, waits).await).await;
        let rows = match settle(true).await {
            // As in `close_claimed.rs`.
            Err(error) if classify(&error) == ErrorClass::Locked => settle(false).await?,
            answer => answer?,
        };
        self.1.add(rows.iter().filter_map(read_settled));
        rows.iter().map(|row| Ok((row.try_get("order_id")?, read_outcome(row)?))).collect()
    }
}

/// Attempts as the statement takes them, with what the provider said of each.
#[derive(Default)]
struct Said<'a> {
    attempts: AttemptColumns<'a>,
    states: Vec<&'static str>,
    amounts: Vec<Option<i64>>,
    currencies: Vec<Option<&'a str>>,
}

impl<'a> Said<'a> {
    fn of(endings: &'a [PaidEnding]) -> Self {
        let mut said = Self::default();
        for PaidEnding { ending, paid, differing, refunded } in endings {
            said.add(ending, paid, "paid");
            said.add(ending, &ending.closed, "closed");
            said.add(ending, refunded, "refunded");
            for (attempt, money) in differing {
                said.add(ending, std::slice::from_ref(attempt), "differs");
                said.set_money(money);
            }
        }
        said
    }

    fn add(&mut self, ending: &'a Ending, attempts: &'a [AttemptKey], state: &'static str) {
        self.attempts.add(&ending.order_id, attempts);
        let count = self.attempts.orders.len();
        self.states.resize(count, state);
        self.amounts.resize(count, None);
        self.currencies.resize(count, None);
    }

    /// Of the attempt that was added last.
    fn set_money(&mut self, money: &'a Money) {
        if let (Some(amount), Some(currency)) = (self.amounts.last_mut(), self.currencies.last_mut()) {
            (*amount, *currency) = (Some(money.amount_minor), Some(money.currency.as_str()));
        }
    }
}

pub(super) async fn settle(
    connection: &mut PgConnection,
    endings: &[PaidEnding],
    waits: bool,
) -> Result<Vec<PgRow>, sqlx::Error> {
    let all = || endings.iter().map(|paid| &paid.ending);
    let said = Said::of(endings);
    let query = sqlx::query(settle_paid_sql())
        .bind(all().map(|ending| ending.order_id.as_str()).collect::<Vec<_>>())
        .bind(all().map(|ending| ending.lease.0).collect::<Vec<_>>())
        .bind(waits)
        .bind(Json(answers_by_order(all())))
        .bind(said.attempts.orders)
        .bind(said.attempts.providers)
        .bind(said.attempts.references)
        .bind(said.states)
        .bind(said.amounts)
        .bind(said.currencies);
    query.fetch_all(connection).await
}

/// `None` if the order was not settled now. What cannot be read is not counted.
fn read_settled(row: &PgRow) -> Option<EndedOrder> {
    (row.try_get::<&str, _>("outcome").ok()? == EndOutcome::Settled.as_str()).then_some(())?;
    let deadline: Option<Timestamptz> = row.try_get("deadline").ok()?;
    Some(EndedOrder { closed_by: None, deadline: deadline.map(|Timestamptz(moment)| moment) })
}

pub(super) fn read_outcome(row: &PgRow) -> Result<EndOutcome, sqlx::Error> {
    let word: &str = row.try_get("outcome")?;
    Ok(match word {
        "settled" => EndOutcome::Settled,
        "already_paid" => EndOutcome::AlreadyPaid,
        "paid_late" => EndOutcome::PaidLate,
        // It is unpaid again: the sweep finds it, and it is claimed anew.
        "not_claimed" => EndOutcome::AlreadyClosed,
        "busy" => EndOutcome::Busy,
        "amount_differs" => EndOutcome::AmountDiffers,
        "kept" => EndOutcome::Kept,
        "lease_lost" => EndOutcome::LeaseLost,
        _ => return Err(sqlx::Error::Decode(format!("sql/settle_paid.sql returns the outcome {word:?}").into())),
    })
}

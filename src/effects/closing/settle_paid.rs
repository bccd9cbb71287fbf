//! The action SETTLE PAID: marks orders as paid because a provider has their money. One batch, one statement, one
//! transaction.
//!
//! Whether the money covers what the order costs is decided by the statement, on the locked row.

use order_timeout_client::postgres::Timestamptz;
use order_timeout_core::engine::{AttemptKey, EndOutcome, Ending, PaidEnding};
use order_timeout_core::payment::Money;
use sqlx::postgres::{PgConnection, PgRow};
use sqlx::types::Json;
use sqlx::{Connection, Row};

use super::ended_orders::{EndedOrder, EndedOrders};
use super::outcomes::{EndStatement, Outcomes};
use super::{AttemptColumns, ClaimedKind, answers_by_order};
use crate::postgres::{self, Database, ErrorClass, classify};

/// The statement.
pub const SETTLE_PAID_SQL: &str = include_str!("../../../sql/settle_paid.sql");

/// Runs it on this database.
pub(super) struct SettlePaid<'a>(pub &'a Database, pub &'a ClaimedKind, pub &'a EndedOrders);

impl EndStatement for SettlePaid<'_> {
    type Item = PaidEnding;

    fn ending(item: &PaidEnding) -> &Ending {
        &item.ending
    }

    async fn run(&self, endings: &[PaidEnding]) -> Result<Outcomes, sqlx::Error> {
        let all = self.0.run(async |connection| settle(connection, self.1, endings).await).await;
        let rows = match all {
            // One of them needs stock that another session holds: the others must not wait for it again.
            Err(error) if classify(&error) == ErrorClass::Locked => return self.settle_each(endings).await,
            rows => rows?,
        };
        self.2.add(rows.iter().filter_map(read_settled));
        rows.iter().map(|row| Ok((row.try_get("order_id")?, read_outcome(row)?))).collect()
    }
}

impl SettlePaid<'_> {
    /// Order by order, without waiting long: those whose stock is locked are reported as busy.
    async fn settle_each(&self, endings: &[PaidEnding]) -> Result<Outcomes, sqlx::Error> {
        let mut outcomes = Outcomes::new();
        for ending in endings {
            let one = async |connection: &mut PgConnection| {
                let mut transaction = connection.begin().await?;
                postgres::shorten_lock_timeout(&mut transaction).await?;
                let rows = settle(&mut transaction, self.1, std::slice::from_ref(ending)).await?;
                transaction.commit().await?;
                Ok(rows)
            };
            let order_id = ending.ending.order_id.as_str().to_owned();
            match self.0.run(one).await {
                Err(error) if classify(&error) == ErrorClass::Locked => {
                    outcomes.insert(order_id, EndOutcome::Busy);
                }
                Err(error) => return Err(error),
                Ok(rows) => {
                    self.2.add(rows.iter().filter_map(read_settled));
                    for row in &rows {
                        outcomes.insert(order_id.clone(), read_outcome(row)?);
                    }
                }
            }
        }
        Ok(outcomes)
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
    of: &ClaimedKind,
    endings: &[PaidEnding],
) -> Result<Vec<PgRow>, sqlx::Error> {
    let all = || endings.iter().map(|paid| &paid.ending);
    let said = Said::of(endings);
    let query = sqlx::query(SETTLE_PAID_SQL)
        .bind(of.kind.as_str())
        .bind(all().map(|ending| ending.order_id.as_str()).collect::<Vec<_>>())
        .bind(all().map(|ending| ending.lease.0).collect::<Vec<_>>())
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
        "busy" => EndOutcome::Busy,
        "amount_differs" => EndOutcome::AmountDiffers,
        "kept" => EndOutcome::Kept,
        "lease_lost" => EndOutcome::LeaseLost,
        _ => return Err(sqlx::Error::Decode(format!("sql/settle_paid.sql returns the outcome {word:?}").into())),
    })
}

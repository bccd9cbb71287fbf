//! The closing protocol with a payment provider: takes claimed orders over, calls providers, and writes how orders end.
//! One file for each action; claims are written by the closers (`effects/close.rs`).
//!
//! One try each: the engine decides what an answer means, and whether and when to retry. Every statement compares the
//! lease, so that each may be run again, and late.

mod by_hand;
mod call;
mod close_claimed;
mod configured;
mod ended_orders;
mod outcomes;
mod postpone;
mod resume;
mod settle_paid;

use std::collections::BTreeMap;
use std::sync::Arc;

use order_timeout_core::engine::{AttemptKey, ClosingAction, ClosingInput, Ending, EndingKind};
use order_timeout_core::order::OrderId;
use order_timeout_providers::Load;
use tracing::debug;

pub(crate) use by_hand::{EndByHand, end_by_hand};
pub use call::{AnswerFuture, Providers};
use close_claimed::CloseClaimed;
pub use close_claimed::{ClaimedKind, HOLD_CLAIMED_SQL};
pub use configured::ConfiguredProviders;
pub(crate) use ended_orders::EndedOrder;
use ended_orders::EndedOrders;
use outcomes::end_each;
pub use postpone::POSTPONE_SQL;
use postpone::Postpone;
pub use resume::RESUME_SQL;
pub use settle_paid::SETTLE_PAID_SQL;
use settle_paid::SettlePaid;

use crate::postgres::{Database, one_line};

/// Runs the actions of the closing protocol. Cheap to clone.
#[derive(Clone)]
pub struct ClosingEffects {
    database: Database,
    of: ClaimedKind,
    providers: Arc<dyn Providers>,
    ended: EndedOrders,
}

impl ClosingEffects {
    /// On a pool that the closers do not use: they must not wait for this.
    #[must_use]
    pub fn new(database: Database, of: ClaimedKind, providers: Arc<dyn Providers>) -> Self {
        Self { database, of, providers, ended: EndedOrders::default() }
    }

    /// Why a provider is not asked at the moment.
    #[must_use]
    pub fn sick_provider(&self) -> Option<String> {
        self.providers.sick()
    }

    /// What the limits of each provider do, by name.
    #[must_use]
    pub fn provider_loads(&self) -> Vec<(String, Load)> {
        self.providers.loads()
    }

    /// The orders that were closed or settled since the last call, by any clone of this.
    pub(crate) fn take_ended(&self) -> Vec<EndedOrder> {
        self.ended.take()
    }

    /// Runs an action, and returns what the engine is to be told.
    pub async fn run(&self, action: ClosingAction) -> ClosingInput {
        match action {
            ClosingAction::Resume(page) => match resume::resume(&self.database, &self.of.kind, &page).await {
                Ok(claims) => {
                    debug!(orders = claims.len(), "claimed orders taken over");
                    ClosingInput::Resumed(claims)
                }
                Err(error) => ClosingInput::NotResumed(one_line(&error)),
            },
            ClosingAction::Call(call) => {
                let answer = call::call(&*self.providers, &call).await;
                ClosingInput::Answered(call, answer)
            }
            ClosingAction::CloseClaimed(endings) => ClosingInput::Ended(
                EndingKind::Close,
                end_each(&CloseClaimed(&self.database, &self.of, &self.ended), endings).await,
            ),
            ClosingAction::SettlePaid(endings) => ClosingInput::Ended(
                EndingKind::SettlePaid,
                end_each(&SettlePaid(&self.database, &self.of, &self.ended), endings).await,
            ),
            ClosingAction::Postpone(ends) => ClosingInput::Ended(
                EndingKind::Postpone,
                end_each(&Postpone(&self.database, &self.of.kind), ends).await,
            ),
        }
    }
}

/// Attempts as the statements take them: one array for each column.
#[derive(Debug, Default)]
struct AttemptColumns<'a> {
    orders: Vec<&'a str>,
    providers: Vec<&'a str>,
    references: Vec<&'a str>,
}

impl<'a> AttemptColumns<'a> {
    fn add(&mut self, order_id: &'a OrderId, attempts: &'a [AttemptKey]) {
        for attempt in attempts {
            self.orders.push(order_id.as_str());
            self.providers.push(&attempt.provider);
            self.references.push(&attempt.reference);
        }
    }

    /// The attempts of these orders that are proved to be closed.
    fn closed(endings: impl IntoIterator<Item = &'a Ending>) -> Self {
        let mut columns = Self::default();
        endings.into_iter().for_each(|ending| columns.add(&ending.order_id, &ending.closed));
        columns
    }
}

/// The answers about each order, by its id.
fn answers_by_order<'a>(endings: impl IntoIterator<Item = &'a Ending>) -> BTreeMap<&'a str, String> {
    endings.into_iter().map(|ending| (ending.order_id.as_str(), without_nul(&ending.answers))).collect()
}

/// A text for Postgres, which cannot hold a NUL: providers may answer anything.
fn without_nul(text: &str) -> String {
    text.replace('\0', "\u{fffd}")
}

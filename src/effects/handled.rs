//! Step 5 and the sweep for a kind that the embedding program handles itself (`handler.rs`).
//!
//! Bounds each call, and checks the answers. No SQL.

use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::FutureExt;
use order_timeout_core::engine::BatchResult;
use order_timeout_core::order::{
    CloseError, ClosedBy, OddAnswer, OrderId, SweepPage, SweepPlace, SweepReach, SweptPage, Timestamp,
};

use crate::handler::{Answers, Due, ErasedHandler, OverduePage};

/// Calls one handler. Cheap to clone.
#[derive(Clone)]
pub struct HandledOrders {
    handler: Arc<dyn ErasedHandler>,
    /// Of one call.
    timeout: Duration,
    /// Answers outside the contract that were not taken yet.
    odd: Arc<Mutex<Vec<OddAnswer>>>,
}

impl std::fmt::Debug for HandledOrders {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HandledOrders").field("timeout", &self.timeout).finish_non_exhaustive()
    }
}

impl HandledOrders {
    pub(crate) fn new(handler: Arc<dyn ErasedHandler>, timeout: Duration) -> Self {
        Self { handler, timeout, odd: Arc::default() }
    }

    /// Whether overdue orders are found at all.
    #[must_use]
    pub fn finds_overdue(&self) -> bool {
        self.handler.finds_overdue()
    }

    /// Hands these orders over, each once.
    ///
    /// # Errors
    /// The handler's, or what its panic or its silence means.
    pub async fn time_out(&self, mut due: Vec<Due>, by: ClosedBy) -> BatchResult {
        due.sort_by(|one, other| (&one.order_id, one.deadline).cmp(&(&other.order_id, other.deadline)));
        due.dedup_by(|one, other| one.order_id == other.order_id);
        let answers = self.within_time(async { self.handler.time_out(&due, by).await }).await;
        Ok(self.checked(&due, answers.map_err(Unanswered::into_close_error)??))
    }

    /// Answers about other orders are dropped.
    fn checked(&self, due: &[Due], mut answers: Answers) -> Answers {
        let was_asked = |id: &OrderId| due.binary_search_by(|one| one.order_id.cmp(id)).is_ok();
        let other = answers.keys().find(|id| !was_asked(id)).map(ToString::to_string);
        if let Some(order_id) = other {
            self.odd.lock().expect("no holder panics").push(OddAnswer::NotAsked { order_id });
            answers.retain(|id, _| was_asked(id));
        }
        answers
    }

    /// Answers outside the contract since the previous call.
    #[must_use]
    pub fn take_odd_answers(&self) -> Vec<OddAnswer> {
        std::mem::take(&mut *self.odd.lock().expect("no holder panics"))
    }

    /// One page. `now`: the database's time.
    ///
    /// # Errors
    /// One sentence.
    pub async fn overdue(&self, page: &SweepPage, now: Timestamp) -> Result<SweptPage, String> {
        let horizon = match page.reach {
            SweepReach::Overdue(grace) => now - grace,
            SweepReach::Ahead(ahead) => now + ahead,
        };
        let asked = OverduePage { horizon, after: page.after.clone(), limit: page.limit };
        let found = self.within_time(async { self.handler.overdue(&asked).await }).await;
        let orders = found.map_err(Unanswered::into_sentence)??;
        let last = orders.last().map(|last| SweepPlace { deadline: last.deadline, id: last.order_id.to_string() });
        let next = last.filter(|_| orders.len() >= page.limit);
        Ok(SweptPage { orders, next })
    }

    async fn within_time<T>(&self, call: impl Future<Output = T>) -> Result<T, Unanswered> {
        match tokio::time::timeout(self.timeout, AssertUnwindSafe(call).catch_unwind()).await {
            Ok(Ok(answer)) => Ok(answer),
            Ok(Err(_)) => Err(Unanswered::Panicked),
            Err(_) => Err(Unanswered::TooLate(self.timeout)),
        }
    }
}

/// Why a call has no answer.
enum Unanswered {
    Panicked,
    TooLate(Duration),
}

impl Unanswered {
    fn into_sentence(self) -> String {
        match self {
            Self::Panicked => "the kind's handler panicked".to_owned(),
            Self::TooLate(timeout) => format!("the kind's handler did not answer within {timeout:?}"),
        }
    }

    /// One of the batch's orders may be why it panics.
    fn into_close_error(self) -> CloseError {
        match self {
            Self::Panicked => CloseError::Rejected(self.into_sentence()),
            Self::TooLate(_) => CloseError::Transient(self.into_sentence()),
        }
    }
}

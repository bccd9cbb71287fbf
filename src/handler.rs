//! What a program that embeds the worker does itself when orders of a kind are due, instead of statements.
//!
//! Only the interface: `effects/handled.rs` calls it, `runtime/` starts a worker with it. No SQL.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::Arc;

use futures_util::future::BoxFuture;
use order_timeout_core::kind::Kind;
pub use order_timeout_core::order::{
    CloseError, CloseOutcome, CloseResult, ClosedBy, Deadline, OrderId, Outcome, Overdue, SweepPlace, Timestamp,
};

/// An order whose deadline has passed, by the database's clock.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Due {
    /// As it was scheduled.
    pub order_id: OrderId,
    /// As it was scheduled, or as [`OverdueSource::overdue`] returned it. The order's own may be another one by now.
    pub deadline: Deadline,
}

/// An answer for each order; an order without one is [`Outcome::Unknown`], and tried again for `retry.missing_for`.
pub type Answers = HashMap<OrderId, CloseResult>;

/// Times orders of a kind out.
///
/// The worker does for these orders what it does for its own: their alarms come through the broker and are held until the
/// deadline, each is acknowledged only after an answer, what fails is tried again with growing pauses and parked in the
/// end, and at most `worker.closers` batches run at a time. It writes nothing: no event, no history, no change of an order.
///
/// # What must hold
/// - An order may be handed over **more than once**, also after it was closed, and by two workers at a time. So test under a
///   lock whether it is still open, and answer [`Outcome::AlreadyClosed`] or [`Outcome::Paid`] if not.
/// - **Test the order's own deadline.** If that is later, answer [`Outcome::NotDue`] with the deadline, and the alarm waits
///   for it.
/// - [`Outcome::Closed`] means that it is committed.
/// - An `Err` for a whole batch closes none of its orders. [`CloseError::Rejected`] makes the worker try smaller batches, to
///   find the order that cannot be closed; a panic counts as that. [`CloseError::Unavailable`] makes it stop taking alarms
///   until a try succeeds.
/// - A call that takes longer than `database.acquire_timeout` and `database.statement_timeout` together is dropped, and
///   tried again.
pub trait TimeoutHandler: Send + Sync + 'static {
    /// Times these orders out, of which each is named once. `by`: what found them.
    fn time_out(&self, due: &[Due], by: ClosedBy) -> impl Future<Output = Result<Answers, CloseError>> + Send;
}

/// Where a page of overdue orders begins and ends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OverduePage {
    /// Only orders with a deadline up to this moment. While no alarm can come from the broker it is in the future, so that
    /// orders are known before they fall due.
    pub horizon: Timestamp,
    /// Only orders behind this one, in the order of deadline and id. `None` begins a pass.
    pub after: Option<SweepPlace>,
    /// The most orders that the page may have. Fewer mean that it is the last one.
    pub limit: usize,
}

/// Finds open orders that no alarm has woken: the safety net, and what closes orders while the broker is away.
pub trait OverdueSource: TimeoutHandler {
    /// One page of open orders, sorted by deadline and then by id.
    ///
    /// # Errors
    /// One sentence. The page is asked for again.
    fn overdue(&self, page: &OverduePage) -> impl Future<Output = Result<Vec<Overdue>, String>> + Send;
}

/// The handlers of a worker's kinds.
#[derive(Clone, Default)]
pub struct Handlers(BTreeMap<Kind, Arc<dyn ErasedHandler>>);

impl Handlers {
    /// None: every kind has tables or statements.
    #[must_use]
    pub fn none() -> Self {
        Self::default()
    }

    /// Hands the due orders of this kind to this handler, which also finds those that no alarm has woken. The kind must be in
    /// the settings, without a table and statements.
    #[must_use]
    pub fn with(mut self, kind: Kind, handler: impl OverdueSource) -> Self {
        self.0.insert(kind, Arc::new(Sweeping(handler)));
        self
    }

    /// The same without the safety net. An order is then timed out only if its alarm arrives: one that was never scheduled,
    /// or whose alarm was parked or lost, stays open forever, and while the broker is away nothing is timed out.
    /// Not possible with `delay.strategy = "database"`, which has no alarms.
    #[must_use]
    pub fn with_alarms_only(mut self, kind: Kind, handler: impl TimeoutHandler) -> Self {
        self.0.insert(kind, Arc::new(AlarmsOnly(handler)));
        self
    }

    pub(crate) fn get(&self, kind: &Kind) -> Option<Arc<dyn ErasedHandler>> {
        self.0.get(kind).cloned()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (&Kind, &dyn ErasedHandler)> {
        self.0.iter().map(|(kind, handler)| (kind, &**handler))
    }
}

impl fmt::Debug for Handlers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.0.keys()).finish()
    }
}

/// A handler of any type.
pub(crate) trait ErasedHandler: Send + Sync {
    fn time_out<'a>(&'a self, due: &'a [Due], by: ClosedBy) -> BoxFuture<'a, Result<Answers, CloseError>>;
    fn finds_overdue(&self) -> bool;
    /// Nothing if it finds none.
    fn overdue<'a>(&'a self, page: &'a OverduePage) -> BoxFuture<'a, Result<Vec<Overdue>, String>>;
}

struct Sweeping<H>(H);

impl<H: OverdueSource> ErasedHandler for Sweeping<H> {
    fn time_out<'a>(&'a self, due: &'a [Due], by: ClosedBy) -> BoxFuture<'a, Result<Answers, CloseError>> {
        Box::pin(self.0.time_out(due, by))
    }

    fn finds_overdue(&self) -> bool {
        true
    }

    fn overdue<'a>(&'a self, page: &'a OverduePage) -> BoxFuture<'a, Result<Vec<Overdue>, String>> {
        Box::pin(self.0.overdue(page))
    }
}

struct AlarmsOnly<H>(H);

impl<H: TimeoutHandler> ErasedHandler for AlarmsOnly<H> {
    fn time_out<'a>(&'a self, due: &'a [Due], by: ClosedBy) -> BoxFuture<'a, Result<Answers, CloseError>> {
        Box::pin(self.0.time_out(due, by))
    }

    fn finds_overdue(&self) -> bool {
        false
    }

    fn overdue<'a>(&'a self, _page: &'a OverduePage) -> BoxFuture<'a, Result<Vec<Overdue>, String>> {
        Box::pin(async { Ok(Vec::new()) })
    }
}

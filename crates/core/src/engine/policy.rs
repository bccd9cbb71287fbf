//! The limits within which the engine decides.
//!
//! Pure. Only holds the limits and the pauses that follow from them; the engine's other modules decide.

use std::collections::BTreeSet;
use std::time::Duration;

use crate::kind::Kind;

/// The worker fills in its settings; `config/default.toml` in the repository has each with its default and its reason.
#[derive(Debug, Clone)]
pub struct Policy {
    /// The kind that the engine works on.
    pub kind: Kind,
    /// The other kinds that are configured: their alarms are sent on to their own queues. Those of any further kind are
    /// parked.
    pub other_kinds: BTreeSet<Kind>,
    /// `worker.hold_max`: an alarm whose deadline is further ahead is rearmed instead of held.
    pub hold_max: Duration,
    /// `delay.max_delay`: an alarm whose deadline is further ahead is parked.
    pub max_delay: Duration,
    /// `worker.batch_size`: the most orders in one [`Batch`](super::Batch).
    pub batch_size: usize,
    /// `worker.linger`: how long a batch that is not full waits for more orders.
    pub linger: Duration,
    /// `worker.closers`: how many batches are closed at the same time; at least 1.
    pub closers: usize,
    /// `retry.first`: the pause after the first failure. It doubles with each further one.
    pub retry_first: Duration,
    /// `retry.longest`: the longest pause in memory. Longer ones are spent at the broker, up to
    /// [`LONGEST_RETRY_FACTOR`](super::LONGEST_RETRY_FACTOR) times this.
    pub retry_longest: Duration,
    /// `retry.missing_for`: how long after its publication an alarm is retried while its order is unknown.
    pub missing_for: Duration,
    /// `retry.max_attempts`: how often a failing alarm goes back through the broker before it is parked.
    pub max_attempts: u32,
    /// `worker.requeue_after`: how long a delivery that cannot be settled stays unacknowledged before it is requeued.
    pub requeue_after: Duration,
    /// About how long a batch may take to fail: the wait for a connection, and the statement.
    pub longest_try: Duration,
    /// `sweep.every`: from the beginning of one pass to that of the next, if the pass is shorter.
    pub sweep_every: Duration,
    /// `sweep.grace`: how long after its deadline an order is left to its alarm. While no session is open, it is how long
    /// an order is left to the worker that has read it ahead.
    pub sweep_grace: Duration,
    /// `sweep.look_ahead`: while no session is open or alarms do not arrive in time, the sweep also reads the orders that fall due within this time.
    pub look_ahead: Duration,
    /// `delay.lead`: how long before its deadline an alarm leaves the broker.
    pub lead: Duration,
    /// Whether no alarm ever comes, because `delay.strategy` is `database`.
    pub has_no_alarms: bool,
    /// The most overdue orders in one page. No further page is asked for while so many wait for a closer.
    pub sweep_page: usize,
    /// Which share of a pause after a failure this worker takes, at most 1. Each worker has its own share, so that
    /// workers that lost the same server do not come back in step.
    pub pause_share: f64,
}

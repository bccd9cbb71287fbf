//! Changes many orders in batches, at a rate, until told to stop. What is done is done, and is counted.
//!
//! Knows no statement: the caller changes a batch. A batch that fails is changed one order at a time.

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::time::Duration;

use order_timeout_core::order::OrderId;
use serde::Serialize;
use tokio::time::{MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;

/// Batches per second: a batch is short for the sessions that wait for its locks, and an interruption takes effect soon.
const BATCHES_PER_SECOND: u32 = 5;
/// The most orders in a batch, whatever the rate.
const MOST_AT_ONCE: u32 = 400;
/// The most failed orders that are named.
const MOST_NAMED: usize = 10;

/// The outcome of an order that another session holds.
pub const BUSY: &str = "busy";
/// The outcome of an order that cannot be changed.
pub const FAILED: &str = "failed";

/// Why a batch has no outcomes, in one sentence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BatchError {
    /// Another session holds what it needs.
    Busy(String),
    /// At least one of its orders cannot be changed.
    Failed(String),
    /// No order can be changed.
    Unavailable(String),
}

/// The outcome of each order of a batch; an order may be left out.
pub type BatchOutcomes = Result<Vec<&'static str>, BatchError>;

/// What became of many orders.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Progress {
    /// How many orders have each outcome.
    pub outcomes: BTreeMap<&'static str, usize>,
    /// Some of the orders that failed.
    pub failed: Vec<FailedOrder>,
    /// How many were not tried.
    pub left: usize,
    /// Why it ended before all were tried, in one sentence.
    pub stopped: Option<String>,
}

/// An order that cannot be changed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct FailedOrder {
    /// The order that failed.
    pub order_id: OrderId,
    /// One sentence.
    pub why: String,
}

impl Progress {
    /// How many orders have an outcome.
    #[must_use]
    pub fn done(&self) -> usize {
        self.outcomes.values().sum()
    }

    /// How many orders have this outcome.
    #[must_use]
    pub fn count(&self, outcome: &str) -> usize {
        self.outcomes.get(outcome).copied().unwrap_or_default()
    }

    /// Whether every order was tried, and none failed or was busy.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.stopped.is_none() && self.left == 0 && self.count(BUSY) + self.count(FAILED) == 0
    }

    fn note(&mut self, outcome: &'static str) {
        *self.outcomes.entry(outcome).or_default() += 1;
    }

    fn fail(&mut self, order_id: &OrderId, why: String) {
        self.note(FAILED);
        if self.failed.len() < MOST_NAMED {
            self.failed.push(FailedOrder { order_id: order_id.clone(), why });
        }
    }
}

/// Changes the orders, at most `rate` a second; those that are busy once more at the end. `each` is told the progress
/// after each batch. `stop` takes effect between two batches.
pub async fn in_batches(
    ids: &[OrderId],
    rate: NonZeroU32,
    stop: &CancellationToken,
    mut change: impl AsyncFnMut(&[OrderId]) -> BatchOutcomes,
    mut each: impl FnMut(&Progress),
) -> Progress {
    let (size, every) = pace(rate);
    let mut ticks = interval(every);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let (mut progress, mut busy) = (Progress { left: ids.len(), ..Progress::default() }, Vec::new());
    for is_last in [false, true] {
        let round = if is_last { std::mem::take(&mut busy) } else { ids.to_vec() };
        for batch in round.chunks(size) {
            tokio::select! {
                biased;
                () = stop.cancelled() => progress.stopped = Some("interrupted".to_owned()),
                _ = ticks.tick() => change_batch(batch, is_last, &mut change, &mut progress, &mut busy).await,
            }
            if progress.stopped.is_some() {
                return progress;
            }
            each(&progress);
        }
    }
    progress
}

/// How many orders are in a batch, and the time between two batches.
fn pace(rate: NonZeroU32) -> (usize, Duration) {
    let size = rate.get().div_ceil(BATCHES_PER_SECOND).min(MOST_AT_ONCE);
    (usize::try_from(size).unwrap_or(1), Duration::from_secs(1) * size / rate.get())
}

async fn change_batch(
    batch: &[OrderId],
    is_last: bool,
    change: &mut impl AsyncFnMut(&[OrderId]) -> BatchOutcomes,
    progress: &mut Progress,
    busy: &mut Vec<OrderId>,
) {
    let outcomes = change(batch).await;
    if batch.len() > 1 && matches!(outcomes, Err(BatchError::Busy(_) | BatchError::Failed(_))) {
        for order in batch {
            let outcome = change(std::slice::from_ref(order)).await;
            take(std::slice::from_ref(order), is_last, outcome, progress, busy);
            if progress.stopped.is_some() {
                return;
            }
        }
        return;
    }
    take(batch, is_last, outcomes, progress, busy);
}

/// Counts the outcomes of a batch, or of its only order. A busy one is left for the last round; after that it is busy.
fn take(batch: &[OrderId], is_last: bool, outcomes: BatchOutcomes, progress: &mut Progress, busy: &mut Vec<OrderId>) {
    match outcomes {
        Err(BatchError::Unavailable(why)) => progress.stopped = Some(why),
        Err(BatchError::Busy(_)) if !is_last => busy.extend_from_slice(batch),
        Err(BatchError::Busy(_)) => {
            progress.left = progress.left.saturating_sub(batch.len());
            batch.iter().for_each(|_| progress.note(BUSY));
        }
        Err(BatchError::Failed(why)) => {
            progress.left = progress.left.saturating_sub(batch.len());
            batch.iter().for_each(|order| progress.fail(order, why.clone()));
        }
        Ok(outcomes) => {
            progress.left = progress.left.saturating_sub(outcomes.len());
            outcomes.into_iter().for_each(|outcome| progress.note(outcome));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(count: usize) -> Vec<OrderId> {
        (0..count).map(|number| OrderId::new(number.to_string()).unwrap()).collect()
    }

    fn all(batch: &[OrderId], outcome: &'static str) -> Vec<&'static str> {
        vec![outcome; batch.len()]
    }

    async fn run(count: usize, change: impl AsyncFnMut(&[OrderId]) -> BatchOutcomes) -> Progress {
        let rate = NonZeroU32::new(200).unwrap();
        in_batches(&ids(count), rate, &CancellationToken::new(), change, |_| {}).await
    }

    #[tokio::test(start_paused = true)]
    async fn batches_keep_the_rate() {
        let began = tokio::time::Instant::now();
        let progress = run(400, async |batch| Ok(all(batch, "done"))).await;
        assert_eq!((progress.count("done"), progress.left), (400, 0));
        assert!(progress.is_complete());
        let took = began.elapsed();
        assert!(took >= Duration::from_millis(1_700) && took <= Duration::from_secs(2), "{took:?}");
        for rate in [1, 7, 200, 100_000] {
            let (size, every) = pace(NonZeroU32::new(rate).unwrap());
            let per_second = size as f64 / every.as_secs_f64();
            assert!(size >= 1 && per_second <= f64::from(rate) * 1.001, "{rate}: {size} every {every:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn failing_order_fails_alone() {
        let bad = OrderId::new("7").unwrap();
        let progress =
            run(
                50,
                async |batch| {
                    if batch.contains(&bad) { Err(BatchError::Failed("no".into())) } else { Ok(all(batch, "done")) }
                },
            )
            .await;
        assert_eq!((progress.count("done"), progress.count(FAILED), progress.left), (49, 1, 0));
        assert_eq!(progress.failed, [FailedOrder { order_id: bad, why: "no".into() }]);
        assert!(!progress.is_complete());
    }

    #[tokio::test(start_paused = true)]
    async fn busy_orders_are_tried_again() {
        let (held, mut calls) = (OrderId::new("3").unwrap(), 0);
        let progress = run(50, async |batch| {
            calls += 1;
            // The first round finds every order held, in two batches and one by one.
            let is_busy = calls <= 52 || batch.contains(&held);
            if is_busy { Err(BatchError::Busy("locked".into())) } else { Ok(all(batch, "done")) }
        })
        .await;
        assert_eq!((progress.count("done"), progress.count(BUSY), progress.left), (49, 1, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn stop_leaves_the_rest_untried() {
        let stop = CancellationToken::new();
        let rate = NonZeroU32::new(10).unwrap();
        let change = async |batch: &[OrderId]| Ok(all(batch, "done"));
        let progress = in_batches(&ids(100), rate, &stop, change, |progress| {
            if progress.done() >= 20 {
                stop.cancel();
            }
        })
        .await;
        assert_eq!((progress.done(), progress.left), (20, 80));
        assert_eq!(progress.stopped.as_deref(), Some("interrupted"));
        let progress = run(50, async |_| Err(BatchError::Unavailable("away".into()))).await;
        assert_eq!((progress.done(), progress.left, progress.stopped.as_deref()), (0, 50, Some("away")));
    }
}

//! What a worker says of a cause that degrades it, on `/readyz` and in its metric.
//!
//! Reads the worker's pages alone.

use std::time::Duration;

use order_timeout::http::READYZ;

use crate::figures::{Figures, get};
use crate::{RunningWorker, wait_promised};

/// How soon a worker must name a cause, and stop naming it after the cure.
pub const NAMED_WITHIN: Duration = Duration::from_secs(15);

/// Whether the worker is ready, and the sentence of this cause if `/readyz` names it.
pub async fn why_degraded(worker: &RunningWorker, cause: &str) -> (bool, Option<String>) {
    let (status, text) = get(worker, READYZ).await;
    let beginning = format!("degraded: {cause}: ");
    (status == 200, text.lines().find_map(|line| line.strip_prefix(&beginning)).map(str::to_owned))
}

/// Waits until a worker that is ready names the cause in these words, and its metric counts it. It may be not ready for a
/// moment: RabbitMQ may end a session with an internal error when a policy is set, and the machine may stall.
pub async fn wait_until_named(worker: &RunningWorker, cause: &str, part: &str) {
    wait_promised(NAMED_WITHIN, &format!("{cause} with {part:?}"), async || {
        let is_named = matches!(why_degraded(worker, cause).await, (true, Some(why)) if why.contains(part));
        is_named && metric(worker, cause).await == 1.0
    })
    .await;
}

/// Waits until a worker that is ready names the cause no more.
pub async fn wait_until_cured(worker: &RunningWorker, cause: &str) {
    wait_promised(NAMED_WITHIN, &format!("no {cause}"), async || {
        why_degraded(worker, cause).await == (true, None) && metric(worker, cause).await == 0.0
    })
    .await;
}

async fn metric(worker: &RunningWorker, cause: &str) -> f64 {
    Figures::of(worker).await.get(&format!("degraded{{cause=\"{cause}\"}}"))
}

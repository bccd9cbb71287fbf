//! Reads the database's clock every second, and keeps the closers' connections warm. On these connections it is also read
//! whether closing is paused, and the brake keeps its counts: one after the other, because one connection is left when all
//! closers are busy, and all of them short, so that each is read in time.
//!
//! Carries nothing forward: the event loop learns from the readings.

use std::time::{Duration, Instant};

use order_timeout_core::clock::ClockSample;
use tokio::sync::mpsc;
use tracing::debug;

use super::closing_watch::ClosingWatch;
use super::orders::Orders;
use crate::postgres::one_line;

/// How often the database's clock is read.
const CLOCK_SAMPLE_EVERY: Duration = Duration::from_secs(1);
/// The same on a database for tests, which wait for what follows when they have moved its clock.
const TEST_CLOCK_SAMPLE_EVERY: Duration = Duration::from_millis(50);
/// How often it is read whether closing is paused. Twice a second: until a worker reads that another has tripped the brake,
/// it closes on.
const LOOK_EVERY: Duration = Duration::from_millis(500);
/// The pause after a closer's connection could not be opened. If the server has no free connection, each try takes
/// `database.acquire_timeout`, and the clock is not read meanwhile.
const WARM_UP_PAUSE: Duration = Duration::from_secs(10);

/// Keeps the connections of closers open and warm. A failure is only logged: a closer without a connection opens its own.
#[derive(Default)]
struct WarmUp {
    paused_until: Option<Instant>,
}

impl WarmUp {
    async fn warm_up(&mut self, orders: &Orders) {
        if self.paused_until.is_some_and(|until| Instant::now() < until) {
            return;
        }
        self.paused_until = None;
        if let Err(error) = orders.warm_up().await {
            debug!(error, "connections for closers could not be warmed up");
            self.paused_until = Some(Instant::now() + WARM_UP_PAUSE);
        }
    }
}

/// A reading of the database's clock, or why there is none.
pub(crate) type ClockReading = Result<ClockSample, String>;

/// Reads the database's clock until the worker ends, and keeps the connections of closers warm.
pub(crate) async fn sample_clock(
    orders: Orders,
    mut watch: ClosingWatch,
    readings: mpsc::UnboundedSender<ClockReading>,
) {
    let is_for_tests = orders.connections().database().is_for_tests();
    let mut ticks = tokio::time::interval(if is_for_tests { TEST_CLOCK_SAMPLE_EVERY } else { CLOCK_SAMPLE_EVERY });
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut looks = tokio::time::interval(LOOK_EVERY);
    looks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let (mut warm_up, mut answers) = (WarmUp::default(), false);
    loop {
        tokio::select! {
            _ = ticks.tick() => {}
            // Not while the database is unavailable: the clock is what finds it again.
            _ = looks.tick(), if answers => {
                watch.look_again().await;
                continue;
            }
            Some(report) = watch.next_report() => {
                watch.take(report).await;
                continue;
            }
        }
        match orders.connections().sample_clock().await {
            Ok(sample) if readings.send(Ok(sample)).is_err() => return,
            Ok(_) => {
                answers = true;
                warm_up.warm_up(&orders).await;
            }
            Err(error) => {
                answers = false;
                let why = one_line(&error);
                debug!(error = why, "the database's clock could not be read; the last reading is carried forward");
                // Without the event loop the result is not needed; the next reading ends this task.
                let _ = readings.send(Err(format!("its clock cannot be read: {why}")));
            }
        }
    }
}

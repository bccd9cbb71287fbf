//! The limits around every provider: how many calls at a time, how long they wait for their turn, and the circuit breaker.
//! Each provider has its own, so that one that hangs or fails delays no call of another.
//!
//! Knows no protocol. The rate limit is in the [`client`](crate::client), because one call may need several requests.

use std::pin::pin;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use order_timeout_core::payment::{Answer, Attempt, Money};
use tokio::sync::{Notify, Semaphore, SemaphorePermit};
use tokio::time::timeout;

use crate::breaker::{Admission, Breaker, BreakerLimits, CallResult, Refusal};
use crate::call_error::CallError;
use crate::protocol::{self, Protocol};
use crate::settings::LimitsSettings;
use crate::table::Call;
use crate::{Load, Pending, Provider, Trial, settings};

/// A provider behind its limits.
pub(crate) struct LimitedProvider<P> {
    name: String,
    protocol: P,
    /// tokio's semaphore is fair: this is the provider's queue.
    permits: Semaphore,
    queue_timeout: Duration,
    longest_call: Duration,
    health: Mutex<Health>,
    /// Wakes calls that wait for what the call finds out that tests the provider.
    tested: Notify,
    waiting: AtomicUsize,
    refused_by_breaker: AtomicU64,
    refused_by_queue: AtomicU64,
}

/// A call that waits for its turn. Dropping it ends that.
struct Waiting<'a>(&'a AtomicUsize);

impl<'a> Waiting<'a> {
    fn new(waiting: &'a AtomicUsize) -> Self {
        waiting.fetch_add(1, Ordering::Relaxed);
        Self(waiting)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

struct Health {
    breaker: Breaker,
    /// What the breaker was last told of, so that a refused call says why.
    last_fault: String,
}

impl Health {
    fn circuit_open(&self, pause: Duration) -> CallError {
        CallError::CircuitOpen { pause, last: self.last_fault.clone() }
    }
}

impl<P: Protocol> LimitedProvider<P> {
    pub(crate) fn new(name: &str, protocol: P, limits: &LimitsSettings) -> Self {
        let breaker = BreakerLimits { failures_to_open: limits.failures_to_open, open_for: limits.open_for };
        Self {
            name: name.to_owned(),
            protocol,
            permits: Semaphore::new(limits.concurrency as usize),
            queue_timeout: limits.queue_timeout,
            longest_call: limits.longest_call(),
            health: Mutex::new(Health { breaker: Breaker::new(breaker), last_fault: String::new() }),
            tested: Notify::new(),
            waiting: AtomicUsize::new(0),
            refused_by_breaker: AtomicU64::new(0),
            refused_by_queue: AtomicU64::new(0),
        }
    }

    async fn call(&self, call: Call, attempt: &Attempt) -> Answer {
        let answer = self.within_limits(call, attempt).await;
        match &answer {
            Err(CallError::CircuitOpen { .. }) => self.refused_by_breaker.fetch_add(1, Ordering::Relaxed),
            Err(CallError::QueueFull(_)) => self.refused_by_queue.fetch_add(1, Ordering::Relaxed),
            _ => 0,
        };
        answer.unwrap_or_else(|error| Answer::Unknown(error.into_unknown(&self.name)))
    }

    /// "It knows no such payment" is what a provider says if address and keys are right.
    async fn try_keys(&self) -> Result<(), String> {
        let (provider, reference) = (self.name.clone(), P::NO_PAYMENT.to_owned());
        let attempt = Attempt { provider, reference, money: Money::NOTHING };
        match self.within_limits(Call::Ask, &attempt).await {
            Ok(_) | Err(CallError::NotKnown(_)) => Ok(()),
            Err(error) => Err(error.to_string()),
        }
    }

    async fn within_limits(&self, call: Call, attempt: &Attempt) -> Result<Answer, CallError> {
        if attempt.provider != self.name {
            return Err(CallError::InvalidAttempt("it was asked about an attempt of another provider"));
        }
        let waiting = Waiting::new(&self.waiting);
        let turn = timeout(self.queue_timeout, self.turn(&attempt.reference)).await;
        drop(waiting);
        let Ok(turn) = turn else { return Err(CallError::QueueFull(settings::section(&self.name))) };
        let (_permit, admitted) = turn?;
        // Each step of a call is bounded; this is the bound of them all.
        let answer = timeout(self.longest_call, protocol::answer(&self.protocol, call, attempt)).await;
        let answer = answer.unwrap_or(Err(CallError::TimedOut(self.longest_call)));
        admitted.settle(answer.as_ref().err());
        answer
    }

    /// Waits until this call may be made. While another tests the provider, for what that finds out.
    async fn turn(&self, reference: &str) -> Result<(Option<SemaphorePermit<'_>>, Admitted<'_, P>), CallError> {
        loop {
            let mut tested = pin!(self.tested.notified());
            tested.as_mut().enable();
            // Before the queue: while the breaker is open, no call is to wait for its turn only to be refused.
            let refusal = self.health().breaker.refuses(reference, now());
            if let Some(Refusal::Open(pause)) = refusal {
                return Err(self.health().circuit_open(pause));
            }
            if refusal.is_none() {
                // An error would be that the semaphore is closed, which nothing does.
                let permit = self.permits.acquire().await.ok();
                let admission = self.health().breaker.admit(reference, now());
                match admission {
                    Ok(admission) => return Ok((permit, Admitted { provider: self, admission: Some(admission) })),
                    Err(Refusal::Open(pause)) => return Err(self.health().circuit_open(pause)),
                    Err(Refusal::Testing) => {}
                }
            }
            tested.await;
        }
    }

    fn health(&self) -> MutexGuard<'_, Health> {
        // No code panics while it holds the lock; and if it did, the breaker would be whole.
        self.health.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<P: Protocol> Provider for LimitedProvider<P> {
    fn ask<'a>(&'a self, attempt: &'a Attempt) -> Pending<'a> {
        Box::pin(self.call(Call::Ask, attempt))
    }

    fn cancel<'a>(&'a self, attempt: &'a Attempt) -> Pending<'a> {
        Box::pin(self.call(Call::Cancel, attempt))
    }

    fn try_keys(&self) -> Trial<'_> {
        Box::pin(self.try_keys())
    }

    fn load(&self) -> Load {
        Load {
            breaker_is_open: self.health().breaker.is_open(),
            waiting: self.waiting.load(Ordering::Relaxed),
            refused_by_breaker: self.refused_by_breaker.load(Ordering::Relaxed),
            refused_by_queue: self.refused_by_queue.load(Ordering::Relaxed),
        }
    }
}

/// A call that the breaker admitted. Dropping it tells the breaker that the call ended without a result.
struct Admitted<'a, P: Protocol> {
    provider: &'a LimitedProvider<P>,
    admission: Option<Admission>,
}

impl<P: Protocol> Admitted<'_, P> {
    fn settle(mut self, error: Option<&CallError>) {
        let result = error.map_or(CallResult::Answered, CallError::as_result);
        if let (CallResult::Failed(_), Some(error)) = (result, error) {
            self.provider.health().last_fault = error.to_string();
        }
        self.report(result);
    }

    fn report(&mut self, result: CallResult) {
        if let Some(admission) = self.admission.take() {
            self.provider.health().breaker.settle(admission, result, now());
            self.provider.tested.notify_waiters();
        }
    }
}

impl<P: Protocol> Drop for Admitted<'_, P> {
    fn drop(&mut self) {
        self.report(CallResult::NothingLearnt);
    }
}

/// tokio's clock, which tests can pause.
fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}

//! The actions ASK and CANCEL: one call to a payment provider.
//!
//! Names no provider and sends no request: that is in what implements [`Providers`]. Retries nothing.

use std::future::Future;
use std::pin::Pin;

use order_timeout_core::engine::{Call, CallKind};
use order_timeout_core::payment::{Answer, Attempt};
use order_timeout_providers::Load;
use tracing::debug;

/// An answer that has not come yet.
pub type AnswerFuture<'a> = Pin<Box<dyn Future<Output = Answer> + Send + 'a>>;

/// The payment providers of the settings. The attempt names the one that is asked; for a name that is in no settings the
/// answer is [`Answer::Unknown`]. Every call ends within a time limit of its provider's, may be repeated at any time, and
/// never waits for a call to another provider.
pub trait Providers: Send + Sync {
    /// Asks whether the attempt is paid.
    fn ask<'a>(&'a self, attempt: &'a Attempt) -> AnswerFuture<'a>;

    /// Makes sure that it cannot be paid any more; the answer says whether that is so.
    fn cancel<'a>(&'a self, attempt: &'a Attempt) -> AnswerFuture<'a>;

    /// Why one of them is not asked at the moment; `None` if all are.
    fn sick(&self) -> Option<String> {
        None
    }

    /// What the limits of each do, by name; for metrics.
    fn loads(&self) -> Vec<(String, Load)> {
        Vec::new()
    }
}

pub(super) async fn call(providers: &dyn Providers, call: &Call) -> Answer {
    let answer = match call.kind {
        CallKind::Ask => providers.ask(&call.attempt).await,
        CallKind::Cancel => providers.cancel(&call.attempt).await,
    };
    let (order_id, provider, call) = (&call.order_id, &call.attempt.provider, call.kind.as_str());
    debug!(%order_id, provider, call, ?answer, "provider answered");
    answer
}

//! How an order with an attempt at the payment provider has ended, compared with what the provider knows of the attempt.
//!
//! Pure. An order may be closed only if the provider has promised to take no money for it. Money that the provider has
//! pays the order, whether it reports it or not. An order may be left to a person only if the provider never answered
//! about it, or did not during a fault; `Waits` bounds for how long after a fault that is an excuse.

use std::collections::BTreeMap;
use std::time::Duration;

use order_timeout::Settings;
use order_timeout_core::kind::Kind;
use order_timeout_core::order::Timestamp;
use order_timeout_providers::settings::LimitsSettings;
use order_timeout_testkit::payment_service::Truth;
use serde::Serialize;

use crate::environment::PROVIDER;
use crate::faults::{Affected, CompletedFault};
use crate::history::AtProvider;
use crate::shop::OrderRecord;

/// How long after a fault an order may wait that the fault has met.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Waits {
    /// After a fault of the payment provider: a call that hangs at its end times out, the circuit breaker stays open, and
    /// the order's pause is over.
    pub for_provider: Duration,
    /// After the loss of a lease: until it is over and another worker looks.
    pub for_lease: Duration,
}

impl Waits {
    /// `None` if no provider is asked.
    pub fn of(settings: &Settings) -> Option<Self> {
        let policy = settings.closing_policy(&Kind::ORDER)?;
        let LimitsSettings { timeout, open_for, .. } = settings.providers.0.get(PROVIDER)?.limits();
        Some(Self {
            // Two pauses: the first may end while the circuit breaker is still open.
            for_provider: *timeout + *open_for + 2 * policy.retry_longest,
            for_lease: policy.lease + policy.resume_every,
        })
    }
}

/// What tables and provider say of an order at the end.
#[derive(Debug, Clone, Copy)]
pub struct Found<'a> {
    pub status: &'a str,
    pub truth: Truth,
    /// How often a worker has settled it as paid.
    pub settlements: i64,
    /// Why it is listed for a person, and since when.
    pub unresolved: Option<(&'a str, Timestamp)>,
}

/// An allowed end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End<'a> {
    Closed,
    PaidByCallback,
    /// By a worker that has found the money at the provider.
    Settled,
    /// Listed for a person, for this reason.
    Unresolved(&'a str),
}

/// A broken promise.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Broken {
    /// Closed, and the provider has its money.
    ClosedDespiteMoney,
    /// Closed, and the provider may still take money for it.
    ReleasedOnUnknown,
    PaidWithoutMoney,
    SettledTwice,
    /// Listed for a person, though the provider could be asked, or for a reason that no part of a run gives.
    UnresolvedWithoutCause,
    /// Neither closed nor paid nor listed.
    NotEnded,
}

impl Broken {
    pub fn words(self) -> &'static str {
        match self {
            Self::ClosedDespiteMoney => "closed, though the payment provider has its money",
            Self::ReleasedOnUnknown => "closed, though the payment provider may still take money for it",
            Self::PaidWithoutMoney => "paid, though the payment provider has no money of it",
            Self::SettledTwice => "settled as paid more than once",
            Self::UnresolvedWithoutCause => "left to a person, though the payment provider could be asked",
            Self::NotEnded => "neither closed nor paid nor listed for a person",
        }
    }
}

/// What became of all orders with an attempt at the provider.
#[derive(Debug, Default, Clone, Serialize)]
pub struct ProviderReport {
    pub orders: usize,
    pub closed: usize,
    pub paid_by_callback: usize,
    /// Of which no callback came, or came later than the worker's question.
    pub settled_as_paid: usize,
    /// Listed for a person, by reason.
    pub unresolved: BTreeMap<String, usize>,
    pub closed_despite_money: usize,
    pub stock_released_on_unknown: usize,
    pub unresolved_without_cause: usize,
    /// Of all orders of the run, those closed or settled later than any fault excuses, because a lease had to be over.
    pub waited_for_lease: usize,
}

impl ProviderReport {
    pub fn count(&mut self, end: Result<End<'_>, Broken>) {
        self.orders += 1;
        match end {
            Ok(End::Closed) => self.closed += 1,
            Ok(End::PaidByCallback) => self.paid_by_callback += 1,
            Ok(End::Settled) => self.settled_as_paid += 1,
            Ok(End::Unresolved(reason)) => *self.unresolved.entry(reason.to_owned()).or_default() += 1,
            Err(Broken::ClosedDespiteMoney) => self.closed_despite_money += 1,
            Err(Broken::ReleasedOnUnknown) => self.stock_released_on_unknown += 1,
            Err(Broken::UnresolvedWithoutCause) => self.unresolved_without_cause += 1,
            Err(Broken::PaidWithoutMoney | Broken::SettledTwice | Broken::NotEnded) => {}
        }
    }
}

/// How an order at the provider has ended.
pub fn judge<'a>(
    record: &OrderRecord,
    found: Found<'a>,
    completed: &[CompletedFault],
    waits: Waits,
) -> Result<End<'a>, Broken> {
    match (found.status, found.truth, found.unresolved) {
        ("closed", Truth::Closed, _) => Ok(End::Closed),
        ("closed", Truth::Paid, _) => Err(Broken::ClosedDespiteMoney),
        ("closed", Truth::Open, _) => Err(Broken::ReleasedOnUnknown),
        ("paid", _, _) if found.settlements > 1 => Err(Broken::SettledTwice),
        ("paid", Truth::Paid, _) if found.settlements == 1 => Ok(End::Settled),
        ("paid", Truth::Paid, _) => Ok(End::PaidByCallback),
        ("paid", _, _) => Err(Broken::PaidWithoutMoney),
        ("closing", _, Some((reason, since))) => {
            let is_never_answered = record.at_provider == Some(AtProvider::NeverAnswered);
            let has_cause = is_never_answered || met_fault(record.deadline, since, completed, waits);
            if reason == "no_answer" && has_cause {
                Ok(End::Unresolved(reason))
            } else {
                Err(Broken::UnresolvedWithoutCause)
            }
        }
        _ => Err(Broken::NotEnded),
    }
}

/// Whether a fault of the provider may have kept it from answering between these times.
fn met_fault(from: Timestamp, until: Timestamp, completed: &[CompletedFault], waits: Waits) -> bool {
    let of_provider = completed.iter().filter(|fault| fault.affected == Affected::AtProvider);
    of_provider.into_iter().any(|fault| fault.from <= until && fault.until + waits.for_provider >= from)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::tests::{at, fault, order};

    const WAITS: Waits = Waits { for_provider: Duration::from_secs(3), for_lease: Duration::from_secs(30) };

    fn found(status: &str, truth: Truth) -> Found<'_> {
        Found { status, truth, settlements: 0, unresolved: None }
    }

    fn judged<'a>(found: Found<'a>, planned: AtProvider, completed: &[CompletedFault]) -> Result<End<'a>, Broken> {
        judge(&OrderRecord { at_provider: Some(planned), ..order() }, found, completed, WAITS)
    }

    fn plainly(found: Found<'_>) -> Result<End<'_>, Broken> {
        judged(found, AtProvider::NeverPaid, &[])
    }

    #[test]
    fn money_at_provider_forbids_close() {
        assert_eq!(plainly(found("closed", Truth::Closed)), Ok(End::Closed));
        assert_eq!(plainly(found("closed", Truth::Paid)), Err(Broken::ClosedDespiteMoney));
    }

    #[test]
    fn payable_attempt_forbids_close() {
        assert_eq!(plainly(found("closed", Truth::Open)), Err(Broken::ReleasedOnUnknown));
    }

    #[test]
    fn paid_needs_money_at_provider() {
        let settled = |settlements, truth| plainly(Found { settlements, ..found("paid", truth) });
        assert_eq!(settled(0, Truth::Paid), Ok(End::PaidByCallback));
        assert_eq!(settled(1, Truth::Paid), Ok(End::Settled));
        assert_eq!(settled(2, Truth::Paid), Err(Broken::SettledTwice));
        assert_eq!(settled(1, Truth::Closed), Err(Broken::PaidWithoutMoney));
        assert_eq!(settled(0, Truth::Open), Err(Broken::PaidWithoutMoney));
    }

    #[test]
    fn every_order_ends_or_is_listed() {
        for status in ["unpaid", "closing"] {
            assert_eq!(plainly(found(status, Truth::Open)), Err(Broken::NotEnded), "{status}");
        }
    }

    #[test]
    fn listed_orders_need_unanswered_provider() {
        let listed = |reason, since| Found { unresolved: Some((reason, at(since))), ..found("closing", Truth::Open) };
        let no_answer = listed("no_answer", 20_000);
        let without_cause = Err(Broken::UnresolvedWithoutCause);
        assert_eq!(judged(no_answer, AtProvider::NeverAnswered, &[]), Ok(End::Unresolved("no_answer")));
        assert_eq!(judged(no_answer, AtProvider::NeverPaid, &[]), without_cause);
        for (from, until, end) in [
            (11_000, 15_000, Ok(End::Unresolved("no_answer"))),
            (4_000, 7_500, Ok(End::Unresolved("no_answer"))),
            (4_000, 6_500, without_cause),
            (20_500, 24_000, without_cause),
        ] {
            let of_provider = fault(from, until, Affected::AtProvider);
            assert_eq!(judged(no_answer, AtProvider::NeverPaid, &[of_provider]), end, "{from} to {until}");
        }
        let of_database = fault(11_000, 15_000, Affected::All);
        assert_eq!(judged(no_answer, AtProvider::NeverPaid, &[of_database]), without_cause);
        let refunded = listed("refunded", 20_000);
        assert_eq!(judged(refunded, AtProvider::NeverAnswered, &[]), without_cause);
    }

    #[test]
    fn violations_are_counted_by_kind() {
        let mut report = ProviderReport::default();
        let broken = [Broken::ClosedDespiteMoney, Broken::ReleasedOnUnknown, Broken::UnresolvedWithoutCause];
        broken.into_iter().for_each(|one| report.count(Err(one)));
        [End::Closed, End::Settled, End::Unresolved("no_answer")].into_iter().for_each(|end| report.count(Ok(end)));
        assert_eq!((report.closed_despite_money, report.stock_released_on_unknown), (1, 1));
        assert_eq!((report.unresolved_without_cause, report.orders, report.settled_as_paid), (1, 6, 1));
        assert_eq!(report.unresolved, [("no_answer".to_owned(), 1)].into());
    }
}

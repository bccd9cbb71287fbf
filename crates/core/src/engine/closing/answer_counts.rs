//! What providers answered about orders, for the brake: each order once, with its first verdict.
//!
//! Pure. An order whose provider was not asked, because its circuit breaker was open, is without an answer, too. Whether a
//! verdict is the first is known to the caller.

use super::Claim;
use super::claimed_order::OrderVerdict;
use crate::brake::ProviderCounts;

#[derive(Debug, Default)]
pub(super) struct AnswerCounts(ProviderCounts);

impl AnswerCounts {
    /// The first verdict about an order that was asked about.
    pub fn note(&mut self, claim: &Claim, verdict: &OrderVerdict) {
        if claim.rounds == 0 && !claim.has_waited && !claim.attempts.is_empty() {
            self.0.asked += 1;
            self.0.paid += u64::from(matches!(verdict, OrderVerdict::SettlePaid { .. }));
            self.0.unknown += u64::from(matches!(verdict, OrderVerdict::AskAgain { .. }));
        }
    }

    pub fn take(&mut self) -> ProviderCounts {
        std::mem::take(&mut self.0)
    }
}

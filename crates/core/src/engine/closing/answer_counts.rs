//! What providers answered about orders, for the brake: each order once, with its first verdict.
//!
//! Pure. An order whose provider was not asked, because its circuit breaker was open, is without an answer, too.

use std::collections::BTreeSet;

use super::Claim;
use super::claimed_order::OrderVerdict;
use crate::brake::ProviderCounts;
use crate::order::OrderId;

/// So many orders are remembered that come again as if it were the first time. Beyond, some count again.
const REMEMBERED: usize = 10_000;

#[derive(Debug, Default)]
pub(super) struct AnswerCounts {
    counts: ProviderCounts,
    /// Counted, and no round of theirs has ended.
    without_round: BTreeSet<OrderId>,
}

impl AnswerCounts {
    /// A verdict about an order that was asked about.
    pub fn note(&mut self, claim: &Claim, verdict: &OrderVerdict) {
        let is_counted = self.without_round.remove(&claim.order_id);
        let is_first = claim.rounds == 0 && !claim.has_waited && !claim.attempts.is_empty();
        if let OrderVerdict::AskAgain { is_round: false, .. } = verdict {
            if self.without_round.len() >= REMEMBERED {
                self.without_round.clear();
            }
            self.without_round.insert(claim.order_id.clone());
        }
        if is_first && !is_counted {
            self.counts.asked += 1;
            self.counts.paid += u64::from(matches!(verdict, OrderVerdict::SettlePaid { .. }));
            self.counts.unknown += u64::from(matches!(verdict, OrderVerdict::AskAgain { .. }));
        }
    }

    pub fn take(&mut self) -> ProviderCounts {
        std::mem::take(&mut self.counts)
    }
}

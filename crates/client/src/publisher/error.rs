//! Why a publisher did not connect, and why an alarm is not known to be scheduled.
//!
//! Each error names its cause in `source()` alone, so that a report of the whole chain says nothing twice.

use order_timeout_amqp::connect::BrokerError;
use order_timeout_amqp::publisher::PublishError;
use order_timeout_core::InvalidSetting;
use order_timeout_core::order::OrderIdError;

/// Why a publisher did not connect.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// The builder was given a value that cannot be used. A retry will not help.
    #[error("the publisher's settings cannot be used")]
    InvalidSetting(#[from] InvalidSetting),
    /// The variants of [`BrokerError`] say whether a retry may help. An exchange that is missing is
    /// [`BrokerError::Refused`].
    #[error(transparent)]
    Broker(#[from] BrokerError),
}

/// Why an alarm is not known to be scheduled. The cause is in `source()`. The call may be repeated: a second alarm for
/// the same order does no harm.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ScheduleError {
    /// The text cannot be an order id. A retry will not help.
    #[error("not scheduled")]
    OrderId(#[from] OrderIdError),
    /// The deadline is further ahead than
    /// [`max_delay`](super::PublisherBuilder::max_delay), by this machine's clock. A retry will not help.
    #[error("not scheduled: the deadline lies further ahead than delay.max_delay allows; is its unit right?")]
    TooFar,
    /// The broker has not confirmed it. The variants of [`PublishError`] say whether a retry may help.
    #[error("not scheduled")]
    Publish(#[from] PublishError),
}

impl ScheduleError {
    /// Whether the same call may succeed later, because the broker is unavailable, blocked or overloaded now.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Publish(PublishError::NotConnected(BrokerError::Away(_))) => true,
            Self::Publish(fault) => matches!(
                fault,
                PublishError::TimedOut(_)
                    | PublishError::Unconfirmed(_)
                    | PublishError::Blocked
                    | PublishError::Nacked
                    | PublishError::ChannelClosed(_)
            ),
            Self::OrderId(_) | Self::TooFar => false,
        }
    }
}

/// The failure of some alarms of [`Publisher::schedule_all`](super::Publisher::schedule_all).
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ScheduleManyError {
    /// How many were confirmed; they need no second call.
    pub scheduled: usize,
    /// The ids of the others, each with its reason; first those that were not sent because their id or deadline is
    /// invalid, then the rest in the order of the call.
    pub failed: Vec<(String, ScheduleError)>,
}

impl std::fmt::Display for ScheduleManyError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} of {} alarms not scheduled", self.failed.len(), self.failed.len() + self.scheduled)?;
        self.failed.first().map_or(Ok(()), |(order_id, _)| write!(f, "; the first is that of order {order_id}"))
    }
}

impl std::error::Error for ScheduleManyError {
    /// Why the first one failed.
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        // Its own sentence, "not scheduled", says nothing more.
        self.failed.first().map(|(_, why)| why.source().unwrap_or(why))
    }
}

#[cfg(test)]
mod tests {
    use order_timeout_core::with_causes;

    use super::*;

    #[test]
    fn report_names_first_cause_once() {
        let failed = vec![("7".to_owned(), ScheduleError::Publish(PublishError::Blocked))];
        let text = with_causes(&ScheduleManyError { scheduled: 2, failed });
        let expected = "1 of 3 alarms not scheduled; the first is that of order 7: \
                        the broker blocks publishers; it is short of memory or disk";
        assert_eq!(text, expected);
        let empty = ScheduleManyError { scheduled: 0, failed: Vec::new() };
        assert_eq!(with_causes(&empty), "0 of 0 alarms not scheduled");
    }
}

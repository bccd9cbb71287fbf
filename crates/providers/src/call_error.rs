//! Why a call gave no answer that the provider documents, as one sentence, and whether that is the provider's fault.
//!
//! No sentence contains a key, a header or more of an answer than the words that a provider's documents define.

use std::time::Duration;

use order_timeout_core::payment::Unknown;

use crate::breaker::CallResult;

/// Why nothing is known after a call.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum CallError {
    #[error("no connection could be opened ({0})")]
    Unreachable(String),
    #[error("no complete answer came within {}", humantime(.0))]
    TimedOut(Duration),
    #[error("the connection broke before the answer was complete")]
    Cut,
    #[error("the answer is longer than {0} bytes")]
    TooLong(usize),
    #[error("it redirects (HTTP {0}), which is never followed; write the final address as its url")]
    Redirected(u16),
    #[error("it accepts no more requests for now (HTTP 429)")]
    Throttled { retry_after: Option<Duration> },
    #[error("it failed (HTTP {status})")]
    Failed { status: u16, retry_after: Option<Duration> },
    #[error("its answer (HTTP {status}) is not the JSON that it documents")]
    Unreadable { status: u16 },
    #[error("its answer cannot be trusted: {0}")]
    Untrusted(String),
    #[error("its answer is about another payment than the one asked for")]
    OtherPayment,
    #[error("its answer (HTTP {status}, {said}) is not in the table of its documented answers")]
    Undocumented { status: u16, said: String },
    #[error("it refuses this client (HTTP {status}); check the keys and their rights in {section}")]
    Refused { status: u16, section: String },
    #[error(
        "it knows no such payment, so its key is of another mode or account (or the attempt's reference is wrong); check {0}"
    )]
    NotKnown(String),
    #[error("{0}")]
    Undecided(&'static str),
    #[error("{0}")]
    NotSent(&'static str),
    #[error("{0}")]
    InvalidAttempt(&'static str),
    #[error("it was not asked, because its last calls failed ({last}); it is tried again in {}", humantime(.pause))]
    CircuitOpen { pause: Duration, last: String },
    #[error("it was not asked, because too many calls wait for their turn; raise {0}.limits, or wait")]
    QueueFull(String),
}

fn humantime(duration: &Duration) -> String {
    format!("{:.1} s", duration.as_secs_f64())
}

impl CallError {
    /// What it says of the provider's health, for the circuit breaker. What is wrong with one attempt, with the keys or with
    /// the settings here is an answer all the same; what was never sent says nothing.
    pub(crate) fn as_result(&self) -> CallResult {
        match self {
            Self::Unreachable(_)
            | Self::TimedOut(_)
            | Self::Cut
            | Self::TooLong(_)
            | Self::Throttled { .. }
            | Self::Failed { .. }
            | Self::Unreadable { .. }
            | Self::Untrusted(_) => CallResult::Failed(self.retry_after()),
            Self::Redirected(_)
            | Self::OtherPayment
            | Self::Undocumented { .. }
            | Self::Refused { .. }
            | Self::NotKnown(_)
            | Self::Undecided(_) => CallResult::Answered,
            Self::NotSent(_) | Self::InvalidAttempt(_) | Self::CircuitOpen { .. } | Self::QueueFull(_) => {
                CallResult::NothingLearnt
            }
        }
    }

    /// How long the provider is to be left alone.
    pub(crate) fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Throttled { retry_after } | Self::Failed { retry_after, .. } => *retry_after,
            Self::CircuitOpen { pause, .. } => Some(*pause),
            _ => None,
        }
    }

    /// What the caller is told.
    pub(crate) fn into_unknown(self, provider: &str) -> Unknown {
        let was_asked = !matches!(self, Self::CircuitOpen { .. } | Self::QueueFull(_));
        Unknown { why: format!("{provider}: {self}"), retry_after: self.retry_after(), was_asked }
    }
}

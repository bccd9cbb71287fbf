//! What a payment provider can be asked about one attempt to pay, and what it can answer.
//!
//! Data only: no request, no signature, no name of a provider's field. The crate `order-timeout-providers` sends the
//! calls and maps each documented answer to an [`Answer`]; the engine decides what it means for the order.

use std::fmt;
use std::time::Duration;

/// The longest reference accepted, in bytes.
pub const MAX_REFERENCE_BYTES: usize = 200;

/// An amount in the currency's smallest unit, such as cents.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Money {
    /// In the smallest unit: 1999 is 19.99 EUR, and 1999 JPY.
    pub amount_minor: i64,
    /// The currency, in which that unit is meant.
    pub currency: Currency,
}

impl Money {
    /// No money, in the code that ISO 4217 has for no currency.
    pub const NOTHING: Self = Self { amount_minor: 0, currency: Currency(*b"XXX") };
}

impl fmt::Display for Money {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} (smallest unit)", self.amount_minor, self.currency)
    }
}

/// A currency code of ISO 4217: three upper-case letters.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Currency([u8; 3]);

/// Why a text is no currency code.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("a currency is three upper-case letters of ISO 4217, such as EUR")]
pub struct CurrencyError;

impl Currency {
    /// Takes three upper-case letters; whether ISO 4217 lists them is not checked.
    ///
    /// # Errors
    /// [`CurrencyError`] if the text is anything else.
    pub fn new(text: &str) -> Result<Self, CurrencyError> {
        let code: [u8; 3] = text.as_bytes().try_into().map_err(|_| CurrencyError)?;
        if code.iter().all(u8::is_ascii_uppercase) { Ok(Self(code)) } else { Err(CurrencyError) }
    }

    /// The code, such as `EUR`.
    #[must_use]
    pub fn as_str(&self) -> &str {
        std::str::from_utf8(&self.0).expect("only ASCII letters are taken")
    }
}

impl fmt::Display for Currency {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl fmt::Debug for Currency {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// One attempt to pay an order. An order may have several, and a verdict on one is none on the order.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Attempt {
    /// The provider's name in the settings, such as `stripe`.
    pub provider: String,
    /// What the provider knows the attempt by: 1 to [`MAX_REFERENCE_BYTES`] bytes.
    pub reference: String,
    /// What this attempt is to pay.
    pub money: Money,
}

/// What a provider says of one attempt. Asking and cancelling have the same answers, because a cancelled attempt may
/// turn out to be paid.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    /// The money was taken, or is certain to be.
    Paid {
        /// What was paid; `None` where the answer has no amount.
        money: Option<Money>,
    },
    /// Not paid, and the customer can still pay it.
    Open,
    /// The customer is paying at this moment, or the provider decides within minutes.
    InProgress,
    /// The customer has done what there is to do, and a bank or the provider decides, which may take days.
    Pending,
    /// Not paid, and it cannot be paid any more.
    Closed,
    /// It was paid and the money was given back: a step is missing that a person has to find.
    Refunded,
    /// The provider knows no such attempt. This is no proof that it is unpaid: the customer may be about to confirm it.
    Absent,
    /// The provider gave the number itself, and does not know it. It forgets attempts that were not paid.
    Forgotten {
        /// It forgets none earlier than so long after it was begun: until then the key is one of another account.
        after: Duration,
    },
    /// Anything else: no answer, an error, or one that the provider's documents do not name.
    Unknown(Unknown),
}

impl Answer {
    /// The word in metrics and on the command line.
    #[must_use]
    pub const fn as_str(&self) -> &'static str {
        match self {
            Self::Paid { .. } => "paid",
            Self::Open => "open",
            Self::InProgress => "in_progress",
            Self::Pending => "pending",
            Self::Closed => "closed",
            Self::Refunded => "refunded",
            Self::Absent => "absent",
            Self::Forgotten { .. } => "forgotten",
            Self::Unknown(Unknown { was_asked: true, .. }) => "unknown",
            Self::Unknown(_) => "not_asked",
        }
    }
}

/// Why nothing is known of an attempt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unknown {
    /// One sentence without secrets, for logs and for the list of unresolved orders.
    pub why: String,
    /// How long the provider asks to be left alone (`Retry-After`).
    pub retry_after: Option<Duration>,
    /// Whether the provider was asked at all; not if its circuit breaker is open or its queue is full.
    pub was_asked: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refuses_currencies_of_another_form() {
        assert_eq!(Currency::new("EUR").unwrap().as_str(), "EUR");
        for text in ["", "eur", "EURO", "E1R", "€"] {
            assert_eq!(Currency::new(text), Err(CurrencyError), "{text}");
        }
    }
}

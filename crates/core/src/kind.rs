//! The name of a *kind*: one sort of deadline, such as that of an unpaid order or of a merchant's acceptance.
//!
//! Only the name. What a kind is (its lanes, its statements, its event) is in the worker's settings. Pure.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use serde::{Deserialize, Serialize, Serializer};

/// The default kind's name.
const ORDER: &str = "order";
/// So that a queue's name, which contains it, stays far below the 255 bytes of AMQP.
const LONGEST: usize = 40;

/// The name of a kind: a lower-case letter, then up to 39 lower-case letters, digits and `_`. Cheap to clone.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Deserialize)]
#[serde(try_from = "String")]
pub struct Kind(
    // `None` is the default kind, so that there is one value for each name, and most alarms allocate nothing for it.
    Option<Arc<str>>,
);

/// Why a text names no kind.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} names no kind; write a lower-case letter, then up to 39 lower-case letters, digits or \"_\", such as \"acceptance\""
)]
pub struct KindError(String);

impl Kind {
    /// The kind of a message, a row or a command that names none: an order that is to be paid.
    pub const ORDER: Self = Self(None);

    /// # Errors
    /// [`KindError`] if the text is no name of a kind.
    pub fn new(name: &str) -> Result<Self, KindError> {
        if name == ORDER {
            return Ok(Self::ORDER);
        }
        let is_letter = |byte: u8| byte.is_ascii_lowercase();
        let fits = name.len() <= LONGEST
            && name.bytes().next().is_some_and(is_letter)
            && name.bytes().all(|byte| is_letter(byte) || byte.is_ascii_digit() || byte == b'_');
        if fits { Ok(Self(Some(name.into()))) } else { Err(KindError(name.chars().take(2 * LONGEST).collect())) }
    }

    /// The name.
    #[must_use]
    pub fn as_str(&self) -> &str {
        self.0.as_deref().unwrap_or(ORDER)
    }

    /// Whether this is [`Kind::ORDER`], which a message need not name.
    #[must_use]
    pub fn is_default(&self) -> bool {
        self.0.is_none()
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for Kind {
    type Err = KindError;

    fn from_str(name: &str) -> Result<Self, KindError> {
        Self::new(name)
    }
}

impl TryFrom<String> for Kind {
    type Error = KindError;

    fn try_from(name: String) -> Result<Self, KindError> {
        Self::new(&name)
    }
}

impl Serialize for Kind {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_of_kinds_are_taken() {
        for name in ["a", "acceptance", "hold_10m", &"k".repeat(40)] {
            assert_eq!(Kind::new(name).unwrap().as_str(), name);
        }
        for name in ["", "7d", "_a", "Trial", "a-b", "a.b", "ä", "order.unpaid", &"k".repeat(41)] {
            assert!(Kind::new(name).is_err(), "{name}");
        }
    }

    #[test]
    fn default_kind_has_one_value() {
        assert_eq!(Kind::new("order"), Ok(Kind::ORDER));
        assert!(Kind::ORDER.is_default() && !Kind::new("orders").unwrap().is_default());
    }
}

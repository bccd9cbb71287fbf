//! Durations as text: `30m`, `250ms`, `1h 30m`. Settings, the names of lanes and the worker's command line have this
//! form.
//!
//! humantime parses them, one term at a time: adding up several terms, 2.4.0 panics if the sum exceeds `u64::MAX`
//! seconds by exactly one (found by the fuzzer).

use std::fmt;
use std::time::Duration;

use humantime::DurationError;
use serde::de::{Error, Unexpected, Visitor};
use serde::{Deserialize, Deserializer};

/// Parses a duration such as `1h 30m`.
///
/// # Errors
/// humantime's, for the first invalid term, or for a sum that a [`Duration`] cannot hold.
pub fn parse(text: &str) -> Result<Duration, DurationError> {
    let mut sum = Duration::ZERO;
    for term in terms(text) {
        sum = sum.checked_add(humantime::parse_duration(term)?).ok_or(DurationError::NumberOverflow)?;
    }
    Ok(sum)
}

/// A term begins with a number, at the beginning of the text or after a unit.
fn terms(text: &str) -> Vec<&str> {
    let (mut terms, mut begin, mut behind_a_unit) = (Vec::new(), 0, false);
    for (index, character) in text.char_indices() {
        if character.is_ascii_digit() && behind_a_unit {
            terms.push(&text[begin..index]);
            begin = index;
        }
        if !character.is_whitespace() {
            behind_a_unit = character.is_alphabetic();
        }
    }
    terms.push(&text[begin..]);
    terms
}

/// For `deserialize_with`.
///
/// # Errors
/// The deserializer's, if the text is not a duration.
pub fn read<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
    Written::deserialize(deserializer).map(|Written(duration)| duration)
}

/// The same for an optional value.
///
/// # Errors
/// As of [`read`].
pub fn read_if_given<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Duration>, D::Error> {
    let written = Option::<Written>::deserialize(deserializer)?;
    Ok(written.map(|Written(duration)| duration))
}

struct Written(Duration);

impl<'de> Deserialize<'de> for Written {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_str(Word).map(Self)
    }
}

struct Word;

impl Visitor<'_> for Word {
    type Value = Duration;

    fn expecting(&self, formatter: &mut fmt::Formatter) -> fmt::Result {
        formatter.write_str("a duration")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Duration, E> {
        parse(text).map_err(|_| E::invalid_value(Unexpected::Str(text), &self))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn sums_terms_up_to_overflow() {
        let seconds = |text| parse(text).map(|duration| duration.as_secs());
        assert_eq!(seconds("1h 30m5s"), Ok(5_405));
        assert_eq!(seconds("18446744073709551615s 999ms"), Ok(u64::MAX));
        assert_eq!(seconds("18446744073709551615s1000ms"), Err(DurationError::NumberOverflow));
        assert!(parse("").is_err() && parse("5").is_err() && parse("s5").is_err());
    }

    proptest! {
        #[test]
        fn formatted_durations_parse_back(secs in 0..u64::MAX, nanos in 0..1_000_000_000_u32) {
            let duration = Duration::new(secs, nanos);
            prop_assert_eq!(parse(&humantime::format_duration(duration).to_string()), Ok(duration));
        }
    }
}

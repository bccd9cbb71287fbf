//! Why a value of a setting is refused, and the checks that the settings of several crates share.
//!
//! Knows no setting: each section of the settings is defined in the crate that uses its values.

use std::time::Duration;

use serde::de::value::{Error as NotAWord, StrDeserializer};
use serde::de::{DeserializeOwned, Error as _};
use serde::{Deserialize, Deserializer};

/// An invalid setting: its key, and the rest of a sentence that says what is wrong and how to fix it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{key}: {why}")]
pub struct InvalidSetting {
    /// The full key, such as `delay.lanes`.
    pub key: String,
    /// One sentence. Repeats no part of an address, which may contain a password.
    pub why: String,
}

impl InvalidSetting {
    /// An error of this key.
    pub fn new(key: impl Into<String>, why: impl std::fmt::Display) -> Self {
        Self { key: key.into(), why: why.to_string() }
    }

    /// Checks that a number is within these bounds.
    ///
    /// # Errors
    /// The setting is outside them; the sentence names both.
    pub fn between<N: Copy + PartialOrd + std::fmt::Display>(
        key: &str,
        value: N,
        least: N,
        most: N,
    ) -> Result<(), Self> {
        if least <= value && value <= most {
            return Ok(());
        }
        Err(Self::new(key, format!("{value} is not between {least} and {most}")))
    }

    /// Checks that a duration is within these bounds.
    ///
    /// # Errors
    /// The setting is outside them; the sentence names both.
    pub fn within(key: &str, value: Duration, least: Duration, most: Duration) -> Result<(), Self> {
        if (least..=most).contains(&value) {
            return Ok(());
        }
        let [value, least, most] = [value, least, most].map(humantime::format_duration);
        Err(Self::new(key, format!("{value} is not between {least} and {most}")))
    }
}

/// Reads an enum as serde does from text: serde's error names the valid words, the config crate's does not.
///
/// # Errors
/// The deserializer's, which names the valid words.
pub fn one_of_its_words<'de, D: Deserializer<'de>, T: DeserializeOwned>(deserializer: D) -> Result<T, D::Error> {
    let word = String::deserialize(deserializer)?;
    T::deserialize(StrDeserializer::<NotAWord>::new(&word)).map_err(D::Error::custom)
}

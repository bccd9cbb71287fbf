//! Every setting that is in effect, with where it came from: what `order-timeout config` prints.
//!
//! Reads what `load.rs` has merged. Never holds a secret: the value of an address is left out.

use std::path::Path;

use config::{Value, ValueKind};
use serde::Serialize;

use super::load::{check, environment, leaves, merge};
use super::{Settings, SettingsError};

/// The settings whose value may hold a password.
const SECRETS: [&str; 2] = ["amqp.url", "database.url"];

/// One setting as it is in effect.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct EffectiveSetting {
    /// As in `config/default.toml`, with its section: `delay.lead`.
    pub key: String,
    /// As TOML; `None` for a secret.
    pub value: Option<String>,
    /// A file, the environment or `--set`; `None` for a default.
    pub origin: Option<String>,
}

impl Settings {
    /// Loads settings like [`Settings::load`], and lists all of them by key.
    ///
    /// # Errors
    /// As [`Settings::load`].
    pub fn effective(
        file: Option<&Path>,
        overrides: &[String],
    ) -> Result<(Self, Vec<EffectiveSetting>), SettingsError> {
        let merged = merge(file, environment(), overrides)?;
        let cache = merged.cache.clone();
        let (settings, origins) = check(merged)?;
        let values = leaves("", &cache);
        let list = values.into_iter().map(|(key, value)| EffectiveSetting {
            value: (!SECRETS.contains(&key.as_str())).then(|| toml(value)),
            // From `origins`: that of an address that was read from a file is not in the value.
            origin: origins.iter().find(|(known, _)| *known == key).and_then(|(_, origin)| origin.clone()),
            key,
        });
        Ok((settings, list.collect()))
    }
}

fn toml(value: &Value) -> String {
    match &value.kind {
        ValueKind::Array(list) => format!("[{}]", list.iter().map(toml).collect::<Vec<_>>().join(", ")),
        ValueKind::Table(table) => {
            let mut fields: Vec<String> = table.iter().map(|(key, value)| format!("{key} = {}", toml(value))).collect();
            fields.sort();
            format!("{{ {} }}", fields.join(", "))
        }
        ValueKind::String(text) => format!("{text:?}"),
        other => other.to_string(),
    }
}

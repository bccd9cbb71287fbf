//! `order-timeout config`: prints every setting that is in effect, with its origin and without secrets.

use clap::Args;
use order_timeout_amqp::connect;
use serde_json::json;

use crate::cli::{CommandOutcome, SettingsArgs};
use crate::config::{EffectiveSetting, Settings};
use crate::postgres;

/// Shown for a setting whose origin is the built-in file.
const DEFAULT: &str = "default";

/// Arguments of `config`.
#[derive(Debug, Args)]
pub struct ConfigArgs {
    /// Print one JSON object per setting, with key, value and origin
    #[arg(long)]
    json: bool,
}

/// # Errors
/// If settings cannot be loaded.
pub fn run(args: &ConfigArgs, given: &SettingsArgs) -> anyhow::Result<CommandOutcome> {
    let (settings, list) = Settings::effective(given.config.as_deref(), &given.overrides)?;
    let mut outcome = CommandOutcome::default();
    for EffectiveSetting { key, value, origin } in list {
        let value = value.unwrap_or_else(|| redacted(&key, &settings));
        let origin = origin.unwrap_or_else(|| DEFAULT.to_owned());
        if args.json {
            outcome.line(json!({ "key": key, "value": value, "origin": origin }));
        } else {
            let setting = format!("{key} = {value}");
            outcome.line(format!("{setting:<50} # {origin}"));
        }
    }
    Ok(outcome)
}

/// The server of an address, without user and password.
fn redacted(key: &str, settings: &Settings) -> String {
    let server = match key {
        "amqp.url" => connect::place(&settings.amqp).ok(),
        _ => postgres::place(&settings.database).ok(),
    };
    let server = server.map_or_else(String::new, |server| format!(", server {server}"));
    format!("<redacted{server}>")
}

//! Adopting an orders table of the shop's own: `propose.rs` proposes a mapping, `check.rs` proves the configured one.
//!
//! Changes nothing in the database: what is tried is rolled back.

pub mod check;
mod dry_close;
mod dry_payment;
pub mod propose;

use serde::Serialize;

/// How serious a finding is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Level {
    /// Proven.
    Proven,
    /// Worth knowing.
    Note,
    /// The mapping must not be used as it is.
    Wrong,
}

/// One result of a check.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Whether it prevents the adoption.
    pub level: Level,
    /// The setting, such as `kinds.order.table.open`.
    pub key: String,
    /// Where the setting came from; `None` for a default.
    pub file: Option<String>,
    /// One sentence, with the fix where one is needed.
    pub sentence: String,
}

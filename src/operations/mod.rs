//! Use cases of operators: each once, typed and serialisable. The command line calls them.
//!
//! Formats nothing for a terminal or a page.

pub mod adopt;
pub mod close_orders;
pub mod first_backlog;
pub mod late_payments;
pub mod move_deadlines;
pub mod orders_statements;
pub mod orders_table;
pub mod paced;
pub mod preview;
pub mod prune_slots;
pub mod retry_parked;
pub mod show;
pub mod status;
pub mod unresolved;

use serde::Serialize;

/// Something that an answer leaves out, because it cannot be known. It is never shown as zero.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct NotKnown {
    /// A word or two.
    pub what: &'static str,
    /// One sentence.
    pub why: String,
}

/// The answer, or `None` and an entry in the list of what is not known.
fn known<T>(what: &'static str, answer: Result<T, String>, not_known: &mut Vec<NotKnown>) -> Option<T> {
    answer.map_err(|why| not_known.push(NotKnown { what, why })).ok()
}

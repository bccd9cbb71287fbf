//! Use cases of operators: each once, typed and serialisable. The command line calls them.
//!
//! Formats nothing for a terminal or a page.

pub mod prune_slots;
pub mod retry_parked;

//! Use cases of operators: each once, typed and serialisable. The command line calls them.
//!
//! Formats nothing for a terminal or a page.

pub mod adopt;
pub mod first_backlog;
pub mod orders_statements;
pub mod retry_parked;

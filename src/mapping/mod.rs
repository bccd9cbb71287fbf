//! A mapping instead of SQL: the statements of the orders contract for the default tables and for a table of the shop's own,
//! rendered from settings and from what the catalog says of the table; what operators ask of it; and the functions that move
//! deadlines and pay orders.
//!
//! Pure: no I/O. `render.rs` writes the statements, `ids.rs` their ids, `quote.rs` names and values; `predicate.rs`
//! reads the operator's SQL as far as that is necessary. `src/postgres/catalog.rs` finds the facts.

pub mod default_tables;
pub mod ids;
pub mod predicate;
pub mod quote;
pub mod render;

use std::collections::BTreeMap;

use order_timeout_core::kind::Kind;

use crate::config::kinds::TableSettings;

pub use render::{KindFunction, Questions, Rendered, render};

/// The first moment that a deadline can be. An earlier one, such as `-infinity` where an unset time is written so, is never
/// due: no message can carry it.
pub const FIRST_DEADLINE: &str = "'0001-01-01 00:00:00+00'::timestamptz";
/// The first moment that it cannot be.
pub const AFTER_LAST_DEADLINE: &str = "'10000-01-01 00:00:00+00'::timestamptz";

/// What a relation is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RelationKind {
    /// A plain table.
    Table,
    /// A table in partitions.
    PartitionedTable,
    /// A view, which cannot be locked.
    View,
    /// A copy that no UPDATE changes.
    MaterializedView,
    /// A table in another database.
    ForeignTable,
    /// Anything else.
    Other,
}

/// A relation as the catalog has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Relation {
    /// Its schema; empty for our own tables, which the `search_path` finds.
    pub schema: String,
    /// Its name, without quotes.
    pub name: String,
    /// What it is.
    pub kind: RelationKind,
    /// By name.
    pub columns: BTreeMap<String, ColumnType>,
}

impl Relation {
    /// The name with its schema if it has one, quoted.
    #[must_use]
    pub fn qualified(&self) -> String {
        if self.schema.is_empty() {
            return quote::name(&self.name);
        }
        format!("{}.{}", quote::name(&self.schema), quote::name(&self.name))
    }

    /// Why a close cannot lock its rows, and what to do; `None` if it can.
    #[must_use]
    pub fn why_not_lockable(&self) -> Option<String> {
        let why = match self.kind {
            RelationKind::Table | RelationKind::PartitionedTable => return None,
            RelationKind::View => {
                "a view, whose rows cannot be locked; name the table behind it, add a kind for each of several tables, or write statements of your own (docs/OWN-SQL.md)"
            }
            RelationKind::MaterializedView => {
                "a materialized view, a copy that no close can change; name the table that it is made from"
            }
            RelationKind::ForeignTable => {
                "a foreign table, whose rows only its own database can lock; run the worker on that database"
            }
            RelationKind::Other => "no table; name the table itself",
        };
        Some(format!("{} is {why}", self.qualified()))
    }

    /// The statement that creates an index on this table. A partitioned table takes none with CONCURRENTLY.
    #[must_use]
    pub fn create_index(&self, is_unique: bool, columns: &str, condition: Option<&str>) -> String {
        let unique = if is_unique { "UNIQUE " } else { "" };
        let concurrently = if self.kind == RelationKind::PartitionedTable { "" } else { "CONCURRENTLY " };
        let condition = condition.map_or_else(String::new, |condition| format!(" WHERE {condition}"));
        format!("CREATE {unique}INDEX {concurrently}ON {} ({columns}){condition}", self.qualified())
    }
}

/// A column's type.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ColumnType {
    /// The name in `pg_type`, of the base type for a domain: `int8`.
    pub base: String,
    /// The name as SQL casts to it, with its length or precision: `bigint`, `character(12)`.
    pub sql: String,
}

/// What the database says about the tables of a mapping.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Facts {
    /// The orders table.
    pub orders: Relation,
    /// The type of the deadline as the wire protocol's client names it: `TIMESTAMPTZ`, `TIMESTAMP`.
    pub deadline_type: String,
    /// The shop's own table of attempts to pay.
    pub attempts: Option<Relation>,
    /// For each entry of `stock`: its items and its stock.
    pub stock: Vec<(Relation, Relation)>,
    /// The column whose word is an order's status, which only the default table has.
    pub status: Option<&'static str>,
    /// Why `amount` or `currency` cannot be used: no close needs them, so a worker closes without.
    pub money_fault: Option<MappingError>,
}

/// What the statements of a kind write besides what its table says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KindWords {
    /// For the event and the alarm.
    pub kind: Kind,
    /// The event's routing key, and its type without the version.
    pub event: String,
    /// Why orders of this kind are closed.
    pub reason: String,
}

/// Why a mapping does not fit its tables: the setting within the table's section, and one sentence with the fix.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{key} {why}")]
pub struct MappingError {
    /// The key below `kinds.NAME.table`.
    pub key: String,
    /// One sentence, without the key.
    pub why: String,
}

impl MappingError {
    /// `key` is below `kinds.NAME.table`; `why` is the rest of the sentence.
    #[must_use]
    pub fn new(key: impl Into<String>, why: impl Into<String>) -> Self {
        Self { key: key.into(), why: why.into() }
    }
}

/// The column that holds the deadline, if `deadline` is a plain column.
#[must_use]
pub fn deadline_column<'a>(table: &'a TableSettings, orders: &'a Relation) -> Option<&'a str> {
    let written = table.deadline.trim();
    let unquoted = written.strip_prefix('"').and_then(|rest| rest.strip_suffix('"'));
    let folded = written.to_lowercase();
    let name = unquoted.unwrap_or(&folded);
    orders.columns.keys().find(|column| *column == name).map(String::as_str)
}

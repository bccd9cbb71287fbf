//! The section `kinds`: what a sort of deadline is, and where its orders are. Today there is one kind, `order`, and all
//! that can be said of it is its table.
//!
//! Reads and checks settings alone. Whether the table has these columns is checked on the database
//! (`src/operations/orders_statements.rs`).

use std::collections::BTreeMap;

use serde::Deserialize;

use super::{OrdersSettings, SettingsError};
use crate::mapping::predicate;

/// The kind of a message without `kind`.
pub const ORDER: &str = "order";

/// The settings of one kind. Documented in `config/default.toml`.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs)]
pub struct KindSettings {
    pub table: Option<TableSettings>,
    /// Where `table` came from, such as a file; `None` if it is not given.
    #[serde(skip)]
    pub origin: Option<String>,
}

/// A mapping: how the worker closes orders in a table of the shop's own. `open`, `paid`, `deadline`, `set`, `quantity`
/// and `sql` are the operator's SQL; all others are names of tables and columns, or values.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TableSettings {
    /// The orders table, with its schema.
    pub table: String,
    /// The columns that identify an order. Several are written on the wire as `tenant/number`.
    pub id: Names,
    /// A condition on the row: the order is still open.
    pub open: String,
    /// A condition on the row: the order is paid.
    pub paid: String,
    /// A column or an expression; NULL is never due.
    pub deadline: String,
    /// The zone of the table's times without a zone.
    #[serde(default)]
    pub time_zone: Option<String>,
    /// What a closed order's columns are set to: a value, or `now`.
    pub close: BTreeMap<String, String>,
    /// The stock that a closed order gives back.
    #[serde(default)]
    pub give_back: Vec<GiveBackSettings>,
    /// Statements in the same transaction.
    #[serde(default)]
    pub also: Vec<AlsoSettings>,
}

/// Stock that closed orders give back.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GiveBackSettings {
    /// The table of the orders' items.
    pub items: String,
    /// Its columns that hold the order's id.
    pub order: Names,
    /// Its columns that hold the stock row's key.
    pub key: Names,
    /// Its column, or an expression on its row: how much of the stock the item reserves.
    pub quantity: String,
    /// The table of the stock.
    pub stock: String,
    /// Its key.
    pub stock_key: Names,
    /// An expression for each column to change; `quantity` is the sum that is given back.
    pub set: BTreeMap<String, String>,
}

/// A statement of the shop's own.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AlsoSettings {
    /// One statement; `closed` is the table of the closed orders' ids.
    pub sql: String,
}

/// One name, or a list of names.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(from = "OneOrMany")]
pub struct Names(pub Vec<String>);

#[derive(Deserialize)]
#[serde(untagged)]
enum OneOrMany {
    One(String),
    Many(Vec<String>),
}

impl From<OneOrMany> for Names {
    fn from(given: OneOrMany) -> Self {
        match given {
            OneOrMany::One(name) => Self(vec![name]),
            OneOrMany::Many(names) => Self(names),
        }
    }
}

/// The key of a mapping's setting, as in a file.
#[must_use]
pub fn key_of(name: &str) -> String {
    format!("kinds.{ORDER}.table.{name}")
}

/// Checks the kinds, and that the orders table is named only once.
pub(super) fn validate(kinds: &BTreeMap<String, KindSettings>, orders: &OrdersSettings) -> Result<(), SettingsError> {
    if let Some(kind) = kinds.keys().find(|kind| *kind != ORDER) {
        let why = format!("there is no kind {kind:?}; the only one is {ORDER:?}, so write [kinds.{ORDER}.table]");
        return Err(SettingsError::of(&format!("kinds.{kind}"), why));
    }
    let Some(table) = kinds.get(ORDER).and_then(|kind| kind.table.as_ref()) else { return Ok(()) };
    if !orders.close_sql.is_empty() {
        let why = "is given, and so is orders.close_sql; leave out the one that does not describe your orders table";
        return Err(SettingsError::of(&key_of("table"), why));
    }
    table.validate().map_err(|(name, why)| SettingsError::of(&key_of(&name), why))
}

/// A setting's name within the table's section, and what is wrong with it.
type Fault = (String, String);

impl TableSettings {
    fn validate(&self) -> Result<(), Fault> {
        require_text("table", &self.table)?;
        require_names("id", &self.id, None)?;
        for (name, condition) in [("open", &self.open), ("paid", &self.paid)] {
            require_expression(name, condition)?;
            // It would read what was committed when the statement began, possibly before the row's lock.
            if predicate::has_subquery(condition) {
                return Err((name.into(), SUBQUERY.into()));
            }
        }
        require_expression("deadline", &self.deadline)?;
        if let Some(zone) = &self.time_zone {
            require_text("time_zone", zone)?;
        }
        if self.close.is_empty() {
            return Err((
                "close".into(),
                "is empty; write what closes an order, such as { status = \"closed\" }".into(),
            ));
        }
        for (index, give_back) in self.give_back.iter().enumerate() {
            give_back.validate(self.id.0.len()).map_err(|(name, why)| (format!("give_back[{index}].{name}"), why))?;
            let earlier = &self.give_back[..index];
            if earlier.iter().any(|other| other.stock == give_back.stock) {
                let why = format!(
                    "names {} a second time, and one statement changes a row only once; make a view of both kinds of items and name it in one give_back",
                    give_back.stock
                );
                return Err((format!("give_back[{index}].stock"), why));
            }
        }
        for (index, also) in self.also.iter().enumerate() {
            let name = format!("also[{index}].sql");
            require_text(&name, &also.sql)?;
            if let Some(why) = predicate::why_not_one_statement(&also.sql) {
                return Err((name, why.into()));
            }
        }
        Ok(())
    }
}

/// Why `open` and `paid` may hold none.
const SUBQUERY: &str = "has a subquery, which reads what was committed before the order's row was locked, so that a payment in the same instant would be missed; let a payment update a column of the order's row and test that, or call a VOLATILE function in plpgsql, or write orders.close_sql";

impl GiveBackSettings {
    fn validate(&self, id_columns: usize) -> Result<(), Fault> {
        require_text("items", &self.items)?;
        require_names("order", &self.order, Some((id_columns, "id")))?;
        require_names("key", &self.key, None)?;
        require_expression("quantity", &self.quantity)?;
        require_text("stock", &self.stock)?;
        require_names("stock_key", &self.stock_key, Some((self.key.0.len(), "key")))?;
        if self.set.is_empty() {
            let why = "is empty; write what gives stock back, such as { reserved = \"reserved - quantity\" }";
            return Err(("set".into(), why.into()));
        }
        for (column, expression) in &self.set {
            require_expression(&format!("set.{column}"), expression)?;
        }
        Ok(())
    }
}

fn require_text(name: &str, text: &str) -> Result<(), Fault> {
    if text.trim().is_empty() { Err((name.into(), "is empty; write it, or leave it out".into())) } else { Ok(()) }
}

fn require_expression(name: &str, text: &str) -> Result<(), Fault> {
    require_text(name, text)?;
    let is_placeholder = predicate::bare(text).is_some_and(|bare| bare.trim().ends_with('?'));
    if is_placeholder {
        return Err((name.into(), "still has a question mark of the proposal; write what it asks for".into()));
    }
    match predicate::why_no_expression(text) {
        Some(why) => Err((name.into(), why.into())),
        None => Ok(()),
    }
}

/// `as_many`: the number that there must be, and the setting that it comes from.
fn require_names(name: &str, names: &Names, as_many: Option<(usize, &str)>) -> Result<(), Fault> {
    let Names(names) = names;
    if names.is_empty() || names.iter().any(|one| one.trim().is_empty()) {
        return Err((name.into(), "names no column; write it as [\"id\"]".into()));
    }
    match as_many {
        Some((count, other)) if count != names.len() => {
            let why =
                format!("names {} column(s), but {other} names {count}; name as many, in the same order", names.len());
            Err((name.into(), why))
        }
        _ => Ok(()),
    }
}

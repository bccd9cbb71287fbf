//! What `order-timeout audit` asks of a mapped table: a page of its orders with what is wrong among them, and the stock that its
//! open orders do not account for.
//!
//! Pure. No statement locks or changes a row, and none needs a table of ours. What the mapping does not tell is said by name.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{MappingError, NOW, NULL, PATH, Parts, as_numbered, ended, ids, literal, name, numbered};
use crate::config::kinds::{StockChanges, TableSettings, key_of};
use crate::mapping::{Facts, KindWords};

type Columns = BTreeMap<String, String>;

const PAGE: &str = include_str!("audit_page.sql");
const KEPT: &str = include_str!("audit_kept.sql");
const STOCK: &str = include_str!("audit_stock.sql");

/// What can be wrong with an order, or with a row of stock. `audit_page.sql` says when it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs)] // their names say it
pub enum Fault {
    ClosedAlthoughPaid,
    PaidAfterClose,
    MoneyKept,
    OpenAlthoughPaid,
    OpenLongAfterDeadline,
    ClosedEarly,
    ClosedLate,
    ClosedWithoutDeadline,
    StockNotGivenBack,
    StockGivenBackTwice,
}

impl Fault {
    /// In a few words.
    #[must_use]
    pub fn title(self) -> String {
        serde_json::json!(self).as_str().unwrap_or_default().replace('_', " ")
    }
}

/// The statements of an audit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AuditStatements {
    /// `audit_page.sql`.
    pub page: String,
    /// `audit_stock.sql` for each entry of `stock` with a column that counts what orders reserve: the stock's table as it is
    /// written, and the statement.
    pub stock: Vec<(String, String)>,
    /// What can be found.
    pub known: Vec<Fault>,
    /// What cannot be known: a few words, and one sentence with the setting that would tell it.
    pub not_known: Vec<(&'static str, String)>,
}

/// Renders the statements of an audit. `has_payments`: our own tables of payments are there, and may be read.
///
/// # Errors
/// [`MappingError`] names the setting that does not fit the table.
pub fn audit(
    words: &KindWords,
    table: &TableSettings,
    facts: &Facts,
    has_payments: bool,
) -> Result<AuditStatements, MappingError> {
    let parts = Parts::new(words, table, facts)?;
    let told = Told::by(&parts);
    let mut statements = AuditStatements {
        page: parts.audited_page(&told, has_payments),
        stock: Vec::new(),
        known: told.faults(has_payments),
        not_known: told.not_known(&parts),
    };
    for index in 0..table.stock.len() {
        parts.audit_stock(index, &mut statements)?;
    }
    if table.stock.is_empty() {
        let why = format!("{} is not given; write what orders reserve", key_of(&words.kind, "stock"));
        statements.not_known.push(("stock", why));
    }
    Ok(statements)
}

/// What the mapping tells of closed and paid orders.
struct Told {
    /// A condition on a row: it has what a close writes, and a payment does not. `None` if there is nothing.
    is_closed: Option<String>,
    /// When it was closed and paid: timestamptz.
    closed_at: Option<String>,
    paid_at: Option<String>,
    /// Whether a close leaves the deadline as it was.
    keeps_deadline: bool,
}

impl Told {
    fn by(parts: &Parts) -> Self {
        let (close, pay) = (parts.table.close.columns(), parts.table.pay.as_ref());
        let deadline = parts.table.deadline.to_lowercase();
        let read: Vec<_> = deadline.split(|c: char| !c.is_alphanumeric() && c != '_').collect();
        // A paid order may have the same value. The time comes last: a shop's own close may have left it out.
        let tells = |(column, value): &(&String, &String)| match pay {
            Some(pay) => pay.get(*column) != Some(*value),
            None => *value != NULL,
        };
        let telling = close.into_iter().flatten().filter(tells).map(|(column, value)| (column.clone(), value.clone()));
        let (times, values): (Columns, Columns) = telling.partition(|(_, value)| value == NOW);
        Self {
            is_closed: [values, times].iter().find(|set| !set.is_empty()).map(|set| parts.has_values(set)),
            closed_at: close.and_then(|close| parts.moment_of(close, pay)),
            paid_at: pay.and_then(|pay| parts.moment_of(pay, close)),
            keeps_deadline: !close.into_iter().flatten().any(|(column, _)| read.contains(&&*column.to_lowercase())),
        }
    }

    fn faults(&self, has_payments: bool) -> Vec<Fault> {
        use Fault::*;
        let (has_rows, closed, paid) = (self.is_closed.is_some(), self.closed_at.is_some(), self.paid_at.is_some());
        let is_timed = closed && self.keeps_deadline;
        let of_order = [ClosedAlthoughPaid, PaidAfterClose, MoneyKept, OpenAlthoughPaid];
        let of_time = [OpenLongAfterDeadline, ClosedEarly, ClosedLate, ClosedWithoutDeadline];
        let is_known = [has_rows, closed && paid, has_rows && has_payments, paid, true, is_timed, is_timed, is_timed];
        let known = of_order.into_iter().chain(of_time).zip(is_known).filter(|(_, is_known)| *is_known);
        known.map(|(fault, _)| fault).collect()
    }

    fn not_known(&self, parts: &Parts) -> Vec<(&'static str, String)> {
        let [close, pay, deadline] = ["close", "pay", "deadline"].map(|name| key_of(&parts.words.kind, name));
        let has_rows = self.is_closed.is_some();
        let mut found = Vec::new();
        if !has_rows {
            found.push(("closed orders", format!("{close} leaves no row, or only values that paid orders have too")));
        } else if self.closed_at.is_none() {
            let why =
                format!("{close} sets no column to \"now\" that pay leaves alone; add such as closed_at = \"now\"");
            found.push(("when orders were closed", why));
        } else if !self.keeps_deadline {
            let why = format!("{close} changes a column of {deadline}, so the deadline of a closed order is lost");
            found.push(("early and late closes", why));
        }
        if self.paid_at.is_none() {
            let why = format!("{pay} sets no column to \"now\" that close leaves alone; add such as paid_at = \"now\"");
            found.push(("when orders were paid", why));
        }
        if has_rows && !parts.table.is_built_in {
            let why =
                "no setting names them: an order that was paid, cancelled and refunded seems closed although paid";
            found.push(("refunds", why.to_owned()));
        }
        found.extend(parts.why_no_money().map(|why| ("money", why)));
        found
    }
}

impl Parts<'_> {
    /// The earliest of the moments that a setting writes, on a row of the table. A column that the other one writes as well says
    /// nothing about either.
    fn moment_of(&self, set: &Columns, other: Option<&Columns>) -> Option<String> {
        let is_shared =
            |column: &String| other.is_some_and(|other| other.get(column).is_some_and(|value| value == NOW));
        let moments =
            set.iter().filter(|(column, value)| *value == NOW && !is_shared(column)).filter_map(|(column, _)| {
                let quoted = format!("{}.{}", self.alias(), name(column));
                match self.facts.orders.columns.get(column)?.base.as_str() {
                    "timestamptz" => Some(quoted),
                    "timestamp" => self.zone().map(|zone| format!("({quoted} AT TIME ZONE {zone})")),
                    _ => None,
                }
            });
        let earliest = format!("least({})", moments.collect::<Vec<_>>().join(", "));
        // No difference to infinity can be taken.
        (earliest != "least()").then(|| format!("CASE WHEN isfinite({earliest}) THEN {earliest} END"))
    }

    /// Whether `close` says that the shop has released the order, which it may before the deadline.
    fn is_released(&self) -> String {
        let path = self.table.close.columns().into_iter().flatten().find(|(_, value)| *value == PATH);
        path.map_or_else(
            || "false".to_owned(),
            |(column, _)| format!("{}.{}::text = 'released'", self.alias(), name(column)),
        )
    }

    fn audited_page(&self, told: &Told, has_payments: bool) -> String {
        let count = self.id.len();
        let or_null = |time: &Option<String>| time.clone().unwrap_or_else(|| "NULL::timestamptz".to_owned());
        let utc = |time: &str| format!("to_char(r.{time} AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.MS\"Z\"')");
        let keys = numbered("a.k", count);
        let behind = |key: &String| format!("(SELECT {key} FROM ot_after a)");
        let first = keys
            .iter()
            .zip(&self.id)
            .map(|(key, (_, column))| behind(&format!("coalesce({key}, {})", ids::smallest(column))));
        let id = ids::print(&numbered("r.k", count));
        let kept = fill(KEPT, &[("id", id.clone()), ("kind", self.kind_literal())]);
        fill(
            PAGE,
            &[
                ("after", self.after("$1")),
                ("id_as_keys", self.id_as_keys(&self.alias())),
                ("deadline", self.usable_deadline()),
                // A claimed order waits for its provider, and is as late.
                ("open", format!("({}) OR {}", ended(&self.table.open), self.is_closing())),
                ("paid", ended(&self.table.paid)),
                ("is_closed", told.is_closed.clone().unwrap_or_else(|| "false".to_owned())),
                ("is_released", self.is_released()),
                ("closed_at", or_null(&told.closed_at)),
                ("paid_at", or_null(&told.paid_at)),
                ("money", self.money()),
                ("orders", self.orders()),
                ("alias", self.alias()),
                ("ids", self.id_columns(&self.alias()).join(", ")),
                ("first", first.collect::<Vec<_>>().join(", ")),
                ("behind", keys.iter().map(behind).collect::<Vec<_>>().join(", ")),
                ("kept", if has_payments { kept } else { "NULL::bigint".to_owned() }),
                ("keeps_deadline", told.keeps_deadline.to_string()),
                ("id", id),
                ("keys_descending", numbered("r.k", count).join(" DESC, ") + " DESC"),
                ("utc_deadline", utc("deadline")),
                ("utc_closed_at", utc("closed_at")),
                ("utc_paid_at", utc("paid_at")),
                ("zone", self.zone().unwrap_or_else(|| "'UTC'".to_owned())),
            ],
        )
    }

    fn audit_stock(&self, index: usize, to: &mut AuditStatements) -> Result<(), MappingError> {
        let (settings, (items, stock)) = (&self.table.stock[index], &self.facts.stock[index]);
        let columns = self.stock_columns(index)?;
        let key = |name: &str| key_of(&self.words.kind, &format!("stock[{index}].{name}"));
        let Some(column) = reduced(&settings.give_back).next() else {
            let why = format!(
                "{} sets no column to itself minus quantity, so none counts what is reserved",
                key("give_back")
            );
            to.not_known.push(("stock", why));
            return Ok(());
        };
        let mut known = vec![Fault::StockGivenBackTwice];
        if reduced(&settings.consume).any(|consumed| consumed == column) {
            known.push(Fault::StockNotGivenBack);
        } else {
            let why = format!(
                "{} does not set {column} to itself minus quantity, so paid orders may still reserve it",
                key("consume")
            );
            to.not_known.push(("stock not given back", why));
        }
        let tells_more = known.len() > 1;
        known.retain(|fault| !to.known.contains(fault));
        to.known.extend(known);
        // A claimed order keeps its stock. No index has those, so the table is read.
        let open = match self.table.closing {
            Some(_) => format!("{} OR {}", self.is_unpaid(" "), self.is_closing()),
            None => self.is_unpaid(" "),
        };
        let (of_id, of_key) = (self.id.len(), columns.stock_key.len());
        let listed = |prefix: &str, count: usize| numbered(prefix, count).join(", ");
        let statement = fill(
            STOCK,
            &[
                ("item_keys", listed("i.s", of_key)),
                ("id_as_keys", self.id_as_keys(&self.alias())),
                ("orders", self.orders()),
                ("alias", self.alias()),
                ("open", open),
                ("item_order", as_numbered(&columns.order, "k")),
                ("item_key", as_numbered(&columns.item_key, "s")),
                ("quantity", ended(&settings.quantity)),
                ("items", format!("{} AS {}", items.qualified(), columns.alias)),
                ("order_keys", listed("i.k", of_id)),
                ("open_keys", listed("d.k", of_id)),
                ("table", literal(&settings.table)),
                ("tells_more", tells_more.to_string()),
                ("printed", ids::print(&numbered("t.s", of_key))),
                ("stock_as_keys", as_numbered(&columns.stock_key, "s")),
                ("column", name(column)),
                ("stock", stock.qualified()),
                ("needed_keys", listed("n.s", of_key)),
                ("stock_keys", listed("t.s", of_key)),
            ],
        );
        to.stock.push((settings.table.clone(), statement));
        Ok(())
    }
}

/// The columns that are set to themselves minus `quantity`, whichever cast that has.
fn reduced(changes: &StockChanges) -> impl Iterator<Item = &str> {
    let is_reduced = |(column, expression): &(&String, &String)| {
        let bare = expression.split_whitespace().collect::<String>().replace('"', "").to_lowercase();
        let Some((left, right)) = bare.split_once('-') else { return false };
        let (left, right) = (left.trim_start_matches("stock."), right.trim_start_matches("item."));
        left == column.to_lowercase()
            && ["quantity", "quantity::bigint", "quantity::integer", "quantity::int"].contains(&right)
    };
    changes.iter().filter(is_reduced).map(|(column, _)| column.as_str())
}

/// The template with a value for each `{name}`, which is not looked at again.
fn fill(template: &str, values: &[(&str, String)]) -> String {
    let mut parts = template.split('{');
    let mut filled = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let (name, rest) = part.split_once('}').unwrap_or_default();
        filled += values.iter().find(|(known, _)| *known == name).map_or("", |(_, value)| value.as_str());
        filled += rest;
    }
    filled
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reduced_columns_are_read_from_expressions() {
        let of = |column: &str, expression: &str| {
            reduced(&[(column.to_owned(), expression.to_owned())].into()).next().is_some()
        };
        for expression in ["reserved - quantity", "stock.reserved-item.quantity", "\"reserved\" - quantity::bigint"] {
            assert!(of("reserved", expression), "{expression}");
        }
        for expression in ["available + quantity", "reserved - 1", "other - quantity", "reserved - quantity * 2", "0"] {
            assert!(!of("reserved", expression), "{expression}");
        }
    }

    #[test]
    fn templates_name_known_values() {
        assert_eq!(fill("a {b} c{d}", &[("b", "{d}".into()), ("d", "!".into())]), "a {d} c!");
        for template in [PAGE, KEPT, STOCK] {
            let this = include_str!("audit.rs");
            for part in template.split('{').skip(1) {
                let (name, _) = part.split_once('}').unwrap();
                assert!(this.contains(&format!("(\"{name}\", ")), "{name}");
            }
        }
    }
}

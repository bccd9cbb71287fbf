//! Renders the statements of the orders contract for a mapped table: `close` and `overdue`. What operators ask about it is in
//! `render/questions.rs` and `render/audit.rs`, how payments pay its orders in `render/functions.rs`, and how deadlines move in
//! `render/deadlines.rs`.
//!
//! Pure. Conditions are evaluated on the row that is locked, in a step of their own behind the lock.

mod audit;
mod deadlines;
mod functions;
mod questions;

use super::quote::{literal, name};
use std::collections::BTreeMap;

use super::{
    AFTER_LAST_DEADLINE, ColumnType, FIRST_DEADLINE, Facts, KindWords, MappingError, Relation, RelationKind,
    TableSettings, deadline_column, ids, predicate,
};
use crate::config::kinds::{CloseSettings, StockChanges, StockSettings};

pub use audit::{AuditStatements, Fault, audit};
pub use functions::KindFunction;
pub use questions::Questions;

/// The statements for a mapped table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rendered {
    /// Closes the requested orders that are open and due, and returns for each order what it found (docs/OWN-SQL.md). An order
    /// with an attempt to pay that may bring money is claimed instead. One statement is one transaction.
    pub close: String,
    /// The next overdue orders, in the order (deadline, id).
    pub overdue: String,
    /// Why no deadline can be moved, in one sentence; `None` if they can.
    pub why_not_moved: Option<String>,
    /// The statement that creates the index for `overdue`.
    pub index: String,
    /// What operators ask.
    pub questions: Questions,
    /// What moves deadlines and releases orders, and with `pay` how payments pay them.
    pub functions: Vec<KindFunction>,
}

/// Renders the statements.
///
/// # Errors
/// [`MappingError`] names the setting that does not fit the table.
pub fn render(words: &KindWords, table: &TableSettings, facts: &Facts) -> Result<Rendered, MappingError> {
    let parts = Parts::new(words, table, facts)?;
    let (close, overdue, index, why_not_moved) =
        (parts.close()?, parts.overdue(), parts.index(), parts.why_not_moved());
    let (questions, functions) = (parts.questions()?, parts.functions(&close)?);
    Ok(Rendered { close, overdue, why_not_moved, index, questions, functions })
}

/// The types of times without a zone, by their names in `pg_type`.
const ZONELESS: [&str; 3] = ["timestamp", "date", "time"];

/// Values that `close`, `closing`, `pay` and `reopen` may write: the moment of the change, and nothing.
const NOW: &str = "now";
const NULL: &str = "null";
/// A value that `close` may write: the path that closes the order, as its event says.
const PATH: &str = "path";

/// A condition on `d`, a row of `ot_decided` with a deadline. The moment is one for all orders; a release does not wait for theirs.
const IS_DUE: &str =
    "d.deadline <= (SELECT CASE WHEN $2::text = 'released' THEN 'infinity' ELSE m.now END FROM ot_moment m)";

/// Part of the error with which the close refuses to leave an order open.
pub const LEAVES_OPEN: &str = "leaves the order open";

/// What the statements are made of.
struct Parts<'a> {
    words: &'a KindWords,
    table: &'a TableSettings,
    facts: &'a Facts,
    /// The id's columns: quoted name and type.
    id: Vec<(String, &'a ColumnType)>,
    /// The deadline as a timestamptz, on a row of the table.
    deadline: String,
}

impl<'a> Parts<'a> {
    fn new(words: &'a KindWords, table: &'a TableSettings, facts: &'a Facts) -> Result<Self, MappingError> {
        if let Some(why) = facts.orders.why_not_lockable() {
            return Err(MappingError::new("table", why));
        }
        let id = table.id.0.iter().map(|column| id_column(&facts.orders, column)).collect::<Result<Vec<_>, _>>()?;
        Ok(Self { words, table, facts, id, deadline: deadline(table, facts)? })
    }

    fn orders(&self) -> String {
        self.facts.orders.qualified()
    }

    /// The bare name, so that the operator's expressions may qualify their columns with it.
    fn alias(&self) -> String {
        name(&self.facts.orders.name)
    }

    /// `k1, k2`, each behind `prefix`.
    fn keys(&self, prefix: &str) -> String {
        numbered(prefix, self.id.len()).join(", ")
    }

    /// The id's columns of the table behind `alias`.
    fn id_columns(&self, alias: &str) -> Vec<String> {
        self.id.iter().map(|(column, _)| format!("{alias}.{column}")).collect()
    }

    /// The same, named `k1, k2`.
    fn id_as_keys(&self, alias: &str) -> String {
        as_numbered(&self.id_columns(alias), "k")
    }

    fn parsed(&self, text: &str) -> Vec<String> {
        let of = self.id.len();
        let parsed = (1..).zip(&self.id).map(|(number, (_, column))| {
            // A part is an expression that is written once for each mention, so several parts are named first.
            let part = if of == 1 { text.to_owned() } else { format!("{text}{number}") };
            ids::parse(column, &part)
        });
        parsed.collect()
    }

    /// A FROM item `p` with the columns `text_id` and, for an id of several columns, `p1, p2` for its parts.
    fn with_parts(&self, source: &str) -> String {
        let of = self.id.len();
        if of == 1 {
            return format!("({source}) AS p");
        }
        let parts: Vec<String> =
            (1..=of).map(|number| format!("{} AS p{number}", ids::part("g.text_id", number, of))).collect();
        format!("(SELECT g.text_id, {} FROM ({source}) AS g OFFSET 0) AS p", parts.join(", "))
    }

    fn part_text(&self) -> &'static str {
        if self.id.len() == 1 { "p.text_id" } else { "p.p" }
    }

    /// `a.k1 IS NULL OR a.k2 IS NULL`
    fn is_malformed(&self) -> String {
        let nulls: Vec<String> = numbered("a.k", self.id.len()).iter().map(|key| format!("{key} IS NULL")).collect();
        nulls.join(" OR ")
    }

    /// The deadline; NULL, which is never due, where it is one that no message can carry.
    fn usable_deadline(&self) -> String {
        let deadline = &self.deadline;
        format!("CASE WHEN {deadline} >= {FIRST_DEADLINE} AND {deadline} < {AFTER_LAST_DEADLINE} THEN {deadline} END")
    }

    /// The word for what the row says: `paid`, `closing`, `unpaid` or `closed`, and any other that the default table has.
    fn status(&self) -> String {
        if let Some(column) = self.facts.status {
            return format!("{}.{}::text", self.alias(), name(column));
        }
        let closing = match self.table.closing {
            Some(_) => format!(" WHEN {} THEN 'closing'", self.is_closing()),
            None => String::new(),
        };
        let (paid, open) = (ended(&self.table.paid), ended(&self.table.open));
        format!("CASE WHEN ({paid}) THEN 'paid'{closing} WHEN ({open}) THEN 'unpaid' ELSE 'closed' END")
    }

    /// The columns of the orders table whose names are in these expressions: to sort whole rows takes 2 % of a close in the default
    /// table, and more in a wider one. All of them if an expression may mean the row itself, or escape a name.
    fn columns_in(&self, expressions: &str) -> String {
        // As both may be written: Postgres folds ASCII alone, and a quote in a name is doubled.
        let text = expressions.to_ascii_lowercase();
        let written = |plain: &str| plain.replace('"', "\"\"").to_ascii_lowercase();
        let row = written(&self.facts.orders.name);
        let mut behind_rows = text.match_indices(&row).map(|(at, _)| text[at + row.len()..].trim_start_matches('"'));
        if text.contains(".*") || text.contains("u&") || behind_rows.any(|behind| !behind.starts_with('.')) {
            return "o.*".to_owned();
        }
        let read = self.facts.orders.columns.keys().filter(|column| text.contains(&written(column)));
        read.map(|column| format!("o.{}", name(column))).collect::<Vec<_>>().join(", ")
    }

    fn zone(&self) -> Option<String> {
        self.table.time_zone.as_deref().map(literal)
    }

    fn close(&self) -> Result<String, MappingError> {
        let (orders, alias) = (self.orders(), self.alias());
        let count = self.id.len();
        let read = format!(
            "SELECT {},\n           {} AS deadline,\n           coalesce(({}), false) AS is_open,\n           coalesce(({}), false) AS is_paid{}",
            self.id_as_keys(&alias),
            self.usable_deadline(),
            ended(&self.table.open),
            ended(&self.table.paid),
            self.claimable_columns(),
        );
        let mut steps = vec![
            step(
                "ot_asked",
                &format!(
                    "SELECT p.text_id, {}\n    FROM {}",
                    as_numbered(&self.parsed(self.part_text()), "k"),
                    self.with_parts("SELECT DISTINCT unnest($1::text[]) AS text_id")
                ),
            ),
            // Orders that are there but not in the next step are held by another session. This comes first, so that an unknown
            // id costs one lookup. By the id and nothing else: with a condition on the status the planner may scan the
            // deadline index, which costs sixty times as much on a table that was never analysed.
            step(
                "ot_there AS MATERIALIZED",
                &format!(
                    "SELECT {} FROM {orders} AS o WHERE {}",
                    self.id_as_keys("o"),
                    among(&self.id_columns("o"), "ot_asked", "k")
                ),
            ),
            // In id order, so that two workers cannot deadlock. NO KEY, so that a foreign key's share lock does not conflict,
            // except where the row is deleted, for which such a lock must be gone.
            // SKIP LOCKED, so that the close does not wait for a payment in flight. The conditions are outside, so that they
            // are evaluated behind the lock: a row that another session has changed meanwhile is read as it is now.
            step(
                "ot_decided AS MATERIALIZED",
                &format!(
                    "{read}\n    FROM (\n        SELECT {} FROM {orders} AS o\n        WHERE {}\n        ORDER BY {}\n        FOR {lock} OF o SKIP LOCKED\n    ) AS {alias}",
                    self.columns_in(&read),
                    among(&self.id_columns("o"), "ot_there", "k"),
                    self.id_columns("o").join(", "),
                    lock = if self.table.close.columns().is_some() { "NO KEY UPDATE" } else { "UPDATE" },
                ),
            ),
            // One time for all orders. clock_timestamp(), not now(): the transaction may have begun before the deadline.
            step(
                "ot_moment AS MATERIALIZED",
                "SELECT clock_timestamp() AS now WHERE (SELECT count(*) FROM ot_decided) >= 0",
            ),
        ];
        steps.extend(self.due_steps()?);
        let mut without_stock = Vec::new();
        for index in self.given_back() {
            let (locks, busy) = self.stock_to_lock(index)?;
            steps.extend(locks);
            without_stock.push(busy);
        }
        let is_without_stock = |prefix: &str| among_rows(&numbered(prefix, count), "ot_without_stock", "k");
        let (mut has_stock, mut busy_by_stock) = (String::new(), String::new());
        if !without_stock.is_empty() {
            steps.push(step("ot_without_stock AS MATERIALIZED", &without_stock.join("\n    UNION\n    ")));
            has_stock = format!(" WHERE NOT {}", is_without_stock("t.k"));
            busy_by_stock = format!("\n           WHEN {} THEN 'busy'", is_without_stock("a.k"));
        }
        steps.push(step("closed", &self.close_update(&has_stock)?));
        let is_closed = |prefix: &str| {
            let ids: Vec<String> = self.id.iter().map(|(column, _)| format!("c.{column}")).collect();
            format!("({}) IN (SELECT {} FROM closed c)", numbered(prefix, count).join(", "), ids.join(", "))
        };
        steps.push(step("ot_event", &self.event(&is_closed("d.k"))));
        let mut written = vec!["(SELECT count(*) FROM ot_event)".to_owned()];
        // A SELECT that is not read is not run, and the update of an empty stock table may read nothing. So the result reads
        // these steps; those that write are run in any case.
        let mut selects = Vec::new();
        for (number, also) in (1..).zip(&self.table.also) {
            steps.push(also_step(number, &also.sql));
            written.push(format!("(SELECT count(*) FROM ot_also_{number})"));
            selects.extend(is_query(&also.sql).then(|| format!("ot_also_{number}")));
        }
        let (claims, claim_outcomes) = self.claim_steps()?;
        steps.extend(claims);
        if let Some(parts) = self.parts_step(&is_closed("d.k")) {
            steps.push(parts);
            selects.push("ot_parts".to_owned());
            written.extend(["(SELECT count(*) FROM ot_claim)", "(SELECT count(*) FROM ot_parts)"].map(str::to_owned));
        }
        // Last, after all other writes: other batches that return the same stock wait for this commit, and in a flash sale
        // every batch does. The result does not read the stock, so Postgres returns it before.
        let mut behind = written.join(" + ");
        for index in self.given_back() {
            steps.push(self.give_back(index, &is_closed("i.k"), &behind)?);
            behind = format!("(SELECT count(*) FROM ot_given_{})", index + 1);
        }
        let mut reads: String =
            selects.iter().map(|step| format!("\n  AND (SELECT count(*) FROM {step}) >= 0")).collect();
        if without_stock.is_empty() && self.claims() {
            // So that the parameter has a type.
            reads += "\n  AND $3::boolean IS NOT NULL";
        }
        let malformed = self.is_malformed();
        let join: Vec<String> = (1..=count).map(|number| format!("d.k{number} = a.k{number}")).collect();
        let is_there = among_rows(&numbered("a.k", count), "ot_there", "k");
        // A row that goes when its order is closed, paid or cancelled is missed by no alarm, but an operator may mistype an id.
        let (gone, is_known) = match self.table.close {
            CloseSettings::Set(_) => (String::new(), format!("{malformed} OR {is_there}")),
            CloseSettings::Delete => (
                format!("\n           WHEN NOT {is_there} THEN 'already_closed'"),
                format!("{malformed} OR {is_there} OR $2::text <> 'manual'"),
            ),
        };
        Ok(format!(
            "-- Closes orders of {orders}, as kinds.{kind}.table says. $1 text[]: ids; $2 text: the path; $3 boolean: whether to\n-- wait for locked stock{claimed}.\nWITH {}\nSELECT a.text_id AS order_id,\n       CASE\n           WHEN {malformed} THEN 'malformed'\n           WHEN {} THEN 'closed'{gone}\n           WHEN d.k1 IS NULL THEN 'busy'\n           WHEN d.is_paid THEN 'paid'{claim_outcomes}\n           WHEN NOT {} THEN 'already_closed'{busy_by_stock}\n           ELSE 'not_due'\n       END AS outcome,\n       d.deadline AS deadline\nFROM ot_asked a\nLEFT JOIN ot_decided d ON {}\nWHERE ({is_known}){reads}",
            steps.join(",\n"),
            is_closed("a.k"),
            self.is_open_or_claimed(),
            join.join(" AND "),
            claimed = if self.claims() { "; $4 boolean: whether they were claimed" } else { "" },
            kind = self.words.kind,
        ))
    }

    /// The places of the stock that a close gives back.
    fn given_back(&self) -> impl Iterator<Item = usize> {
        (0..self.table.stock.len()).filter(|index| !self.table.stock[*index].give_back.is_empty())
    }

    /// The items of due orders with the stock rows of theirs that can be locked now, and the orders of which one cannot.
    /// Without waiting ($3 is false) an order is closed only if all its stock rows can; otherwise the updates wait. A stock
    /// row that does not exist keeps no order open.
    fn stock_to_lock(&self, index: usize) -> Result<(Vec<String>, String), MappingError> {
        let (settings, (items, stock), number) = (&self.table.stock[index], &self.facts.stock[index], index + 1);
        let StockColumns { alias, order, item_key, stock_key } = self.stock_columns(index)?;
        // Few shops fill the tables of a further one: those pay for one look at an empty table, not for one per order.
        let has_items = match (index, items.kind) {
            (1.., RelationKind::Table) => format!("(SELECT EXISTS (SELECT FROM {}))\n      AND ", items.qualified()),
            _ => String::new(),
        };
        let [items_step, free, held] = ["items", "stock_free", "stock_held"].map(|what| format!("ot_{what}_{number}"));
        let locks = vec![
            step(
                &format!("{items_step} AS MATERIALIZED"),
                &format!(
                    "SELECT {}, {}, ({}) AS quantity\n    FROM {} AS {alias}\n    WHERE {has_items}{}",
                    as_numbered(&order, "k"),
                    as_numbered(&item_key, "s"),
                    ended(&settings.quantity),
                    items.qualified(),
                    among(&order, "ot_due", "k")
                ),
            ),
            step(
                &format!("{free} AS MATERIALIZED"),
                &format!(
                    "SELECT {} FROM {} AS s\n    WHERE NOT $3::boolean AND {}\n    ORDER BY {}\n    FOR NO KEY UPDATE OF s SKIP LOCKED",
                    as_numbered(&stock_key, "s"),
                    stock.qualified(),
                    among(&stock_key, &items_step, "s"),
                    stock_key.join(", ")
                ),
            ),
            // What is there and not free is held by another session. In a step, so that a row which many orders of a flash sale
            // name is looked up once, not once for each of their items.
            step(
                &format!("{held} AS MATERIALIZED"),
                &format!(
                    "SELECT {} FROM {} AS s\n    WHERE NOT $3::boolean AND {}",
                    as_numbered(&stock_key, "s"),
                    stock.qualified(),
                    among_those(
                        &stock_key,
                        &items_step,
                        "s",
                        &format!(" WHERE NOT {}", among_rows(&numbered("t.s", stock_key.len()), &free, "s")),
                    ),
                ),
            ),
        ];
        let busy = format!(
            "SELECT {} FROM {items_step} i\n    WHERE NOT $3::boolean AND {}",
            self.keys("i.k"),
            among_rows(&numbered("i.s", stock_key.len()), &held, "s"),
        );
        Ok((locks, busy))
    }

    /// `has_stock`: a condition on `t`, the orders that are due.
    fn close_update(&self, has_stock: &str) -> Result<String, MappingError> {
        let alias = self.alias();
        let is_due = among_those(&self.id_columns(&alias), "ot_due", "k", has_stock);
        let mut returning: Vec<String> = self.id.iter().map(|(column, _)| format!("{alias}.{column}")).collect();
        let Some(columns) = self.table.close.columns() else {
            let (orders, returning) = (self.orders(), returning.join(", "));
            return Ok(format!("DELETE FROM {orders} AS {alias}\n    WHERE {is_due}\n    RETURNING {returning}"));
        };
        let set = self.assignments("close", columns)?;
        // An order that is still open would be found and closed again, and its stock be given back each time. The cast
        // fails with this text as the error, and takes the whole close back. Not a constant, which would fail when the
        // statement is planned.
        returning.push(format!(
            "CASE WHEN ({open}) IS TRUE THEN ('kinds.{kind}.table.close {LEAVES_OPEN}; set there what open tests. Order ' || {id})::integer END AS ot_open",
            open = ended(&self.table.open),
            id = ids::print(&self.id_columns(&alias)),
            kind = self.words.kind,
        ));
        Ok(format!(
            "UPDATE {} AS {alias}\n    SET {}\n    WHERE {}\n    RETURNING {}",
            self.orders(),
            set,
            is_due,
            returning.join(", ")
        ))
    }

    /// `column = value, …` for a setting such as `close`.
    fn assignments(&self, setting: &str, columns: &BTreeMap<String, String>) -> Result<String, MappingError> {
        let mut set = Vec::new();
        for (column, value) in columns {
            let key = format!("{setting}.{column}");
            let kind = require(&self.facts.orders, column, &key)?;
            let value = match value.as_str() {
                NOW => self.now(&key, column, kind)?,
                NULL => "NULL".to_owned(),
                // In the functions that pay, `$2` is another parameter.
                PATH if ["close", "closing"].contains(&setting) => "$2::text".to_owned(),
                value => literal(value),
            };
            set.push(format!("{} = {value}", name(column)));
        }
        Ok(set.join(", "))
    }

    /// The moment of the change, as this column has times.
    fn now(&self, key: &str, column: &str, kind: &ColumnType) -> Result<String, MappingError> {
        const MOMENT: &str = "(SELECT m.now FROM ot_moment m)";
        if kind.base == "timestamptz" {
            return Ok(MOMENT.to_owned());
        }
        if !ZONELESS.contains(&kind.base.as_str()) {
            let why = format!(
                "is {}, which \"now\" cannot be written to; name a column of type timestamptz, timestamp, date or time, or let a trigger of the table set this one",
                kind.sql
            );
            return Err(MappingError::new(key, why));
        }
        match self.zone() {
            Some(zone) => Ok(format!("({MOMENT} AT TIME ZONE {zone})::{}", kind.base)),
            None => Err(MappingError::new(
                "time_zone",
                format!(
                    "is not given, but {column} is {}, without time zone; name the zone in which the shop writes it, such as \"Asia/Shanghai\"",
                    kind.sql
                ),
            )),
        }
    }

    /// Its time is formatted once for all orders. The conditions are not joins: the planner expects a few rows, and would
    /// compare every order with every other.
    fn event(&self, is_closed: &str) -> String {
        let utc = "'YYYY-MM-DD\"T\"HH24:MI:SS.US\"Z\"'";
        let KindWords { event, reason, .. } = self.words;
        let (kind_column, kind) = self.kind_column();
        let order_id =
            if self.claims() { "d.order_id".to_owned() } else { ids::print(&numbered("d.k", self.id.len())) };
        let payload = format!(
            "jsonb_build_object(\n               'order_id', {order_id},\n               'deadline', to_char(d.deadline AT TIME ZONE 'UTC', {utc}),\n               'closed_at', (SELECT to_char(m.now AT TIME ZONE 'UTC', {utc}) FROM ot_moment m),\n               'closed_by', $2::text,\n               'reason', {})",
            literal(reason)
        );
        // Written twice: an operator for each row would cost a hundredth of the close.
        format!(
            "INSERT INTO event_outbox (routing_key, type, payload{kind_column})\n    SELECT {}, {},\n           CASE WHEN {why} IS NULL THEN {payload}\n           ELSE {payload} || jsonb_build_object('why', {why}) END{kind}\n    FROM ot_decided d\n    WHERE ({is_closed}) IS TRUE\n    RETURNING 1",
            literal(event),
            literal(&format!("{event}.v1")),
            why = setting("why"),
        )
    }

    /// A further column of an outbox's INSERT and its value; none for the default kind, which is the column's default.
    fn kind_column(&self) -> (&'static str, String) {
        let kind = &self.words.kind;
        if kind.is_default() { ("", String::new()) } else { (", kind", format!(", {}", literal(kind.as_str()))) }
    }

    /// One update of stock, behind everything that `behind` counts.
    fn give_back(&self, index: usize, is_closed: &str, behind: &str) -> Result<String, MappingError> {
        let number = index + 1;
        // The planner takes one row in 200 for such a comparison. So it looks up each stock row by its key, in the order of the
        // keys, even if the tables were empty when they were last analysed.
        let items =
            format!("ot_items_{number} i\n        WHERE CASE WHEN {is_closed} THEN 1 END = 1 AND {behind} >= 0");
        let update = self.stock_update(index, "give_back", &self.table.stock[index].give_back, &items)?;
        Ok(step(&format!("ot_given_{number}"), &format!("{update}\n    RETURNING 1")))
    }

    /// The columns of this entry of `stock`.
    fn stock_columns(&self, index: usize) -> Result<StockColumns, MappingError> {
        let (settings, (items, stock)) = (&self.table.stock[index], &self.facts.stock[index]);
        let key = |name: &str| format!("stock[{index}].{name}");
        if let Some(why) = stock.why_not_lockable() {
            return Err(MappingError::new(key("table"), why));
        }
        let alias = name(&items.name);
        Ok(StockColumns {
            order: require_all(items, &alias, &settings.order.0, &key("order"))?,
            item_key: require_all(items, &alias, &settings.key.0, &key("key"))?,
            stock_key: require_all(stock, "s", &settings.stock_key.0, &key("stock_key"))?,
            alias,
        })
    }

    /// Changes the stock of these items: `i`, with the columns `s1, s2` and `quantity`. `setting` is where the changes are.
    fn stock_update(
        &self,
        index: usize,
        setting: &str,
        changes: &StockChanges,
        items: &str,
    ) -> Result<String, MappingError> {
        let (StockSettings { key, stock_key, .. }, (_, stock)) = (&self.table.stock[index], &self.facts.stock[index]);
        let mut set = Vec::new();
        for (column, expression) in changes {
            require(stock, column, &format!("stock[{index}].{setting}.{column}"))?;
            set.push(format!("{} = {}", name(column), ended(expression)));
        }
        let matches: Vec<String> =
            (1..).zip(&stock_key.0).map(|(n, column)| format!("stock.{} = item.ot_s{n}", name(column))).collect();
        let given: Vec<String> = (1..=key.0.len()).map(|n| format!("i.s{n} AS ot_s{n}")).collect();
        // Summed: UPDATE … FROM changes each row only once.
        Ok(format!(
            "UPDATE {} AS stock\n    SET {}\n    FROM (\n        SELECT {}, coalesce(sum(i.quantity), 0) AS quantity\n        FROM {items}\n        GROUP BY {sorted}\n        ORDER BY {sorted}\n    ) AS item\n    WHERE {}",
            stock.qualified(),
            set.join(", "),
            given.join(", "),
            matches.join(" AND "),
            sorted = numbered("i.s", key.0.len()).join(", "),
        ))
    }

    fn overdue(&self) -> String {
        let (alias, deadline) = (self.alias(), &self.deadline);
        format!(
            "-- Overdue orders of {orders}, as kinds.{kind}.table says, by (deadline, id). $1 float8: seconds after the deadline;\n-- $2 timestamptz, $3 text: the last row of the page before; $4 bigint: limit.\nWITH {after}\nSELECT {printed} AS order_id, {deadline} AS deadline\nFROM {orders} AS {alias}\nWHERE {is_unpaid}\n  AND {deadline} >= {FIRST_DEADLINE}\n  AND {deadline} <= statement_timestamp() - make_interval(secs => $1::float8)\n{is_unclaimed}  AND {is_after}\nORDER BY {deadline}, {ids}\nLIMIT $4::bigint",
            is_unclaimed = self.is_unclaimed().map_or_else(String::new, |unclaimed| format!("  AND {unclaimed}\n")),
            kind = self.words.kind,
            orders = self.orders(),
            after = self.after("$3"),
            printed = ids::print(&self.id_columns(&alias)),
            is_unpaid = self.is_unpaid("\n  "),
            is_after = self.is_after("$2", "$3", "  "),
            ids = self.id_columns(&alias).join(", "),
        )
    }

    /// A condition on the table. An order that is open by one value of a column is not paid by another: tested twice, the column
    /// would be read from the table instead of from the condition of the index.
    fn is_unpaid(&self, separator: &str) -> String {
        let open = format!("({})", ended(&self.table.open));
        match predicate::exclude_each_other(&self.table.open, &self.table.paid) {
            true => open,
            false => format!("{open}{separator}AND ({}) IS NOT TRUE", ended(&self.table.paid)),
        }
    }

    /// The id behind which a page begins, as the step `ot_after`.
    fn after(&self, id: &str) -> String {
        let parts = self.with_parts(&format!("SELECT {id}::text AS text_id"));
        format!(
            "ot_after AS MATERIALIZED (\n    SELECT {}\n    FROM {parts}\n)",
            as_numbered(&self.parsed(self.part_text()), "k")
        )
    }

    /// Rows behind the last one of the page before; all from that deadline on if its id is empty. The first comparison is
    /// the one that an index scan begins with.
    fn is_after(&self, deadline: &str, id: &str, indent: &str) -> String {
        let alias = self.alias();
        let after: Vec<String> = numbered("a.k", self.id.len());
        let first: Vec<String> = after
            .iter()
            .zip(&self.id)
            .map(|(key, (_, column))| format!("coalesce({key}, {})", ids::smallest(column)))
            .collect();
        let from = |values: &[String]| -> String {
            let values: Vec<String> = values.iter().map(|value| format!("(SELECT {value} FROM ot_after a)")).collect();
            values.join(", ")
        };
        format!(
            "({of_row}, {ids}) >= ({deadline}::timestamptz, {first})\n{indent}AND ({id}::text = '' OR ({of_row}, {ids}) > ({deadline}::timestamptz, {after}))",
            of_row = self.deadline,
            ids = self.id_columns(&alias).join(", "),
            first = from(&first),
            after = from(&after),
        )
    }

    /// On what `overdue` sorts by, for the orders that it returns.
    fn index(&self) -> String {
        let alias = self.alias();
        let deadline = match deadline_column(self.table, &self.facts.orders) {
            Some(column) if self.facts.deadline_type == "TIMESTAMPTZ" => format!("{alias}.{}", name(column)),
            // In brackets already, as an index needs an expression.
            _ => self.deadline.clone(),
        };
        let columns = [vec![deadline], self.id_columns(&alias)].concat().join(", ");
        let columns = columns.replace(&format!("{alias}."), "");
        self.facts.orders.create_index(false, &columns, Some(&one_line(&self.table.open)))
    }
}

/// The column's type.
fn require<'a>(relation: &'a Relation, column: &str, key: &str) -> Result<&'a ColumnType, MappingError> {
    relation.columns.get(column).ok_or_else(|| {
        let known: Vec<&str> = relation.columns.keys().map(String::as_str).collect();
        let meant = known.iter().max_by(|a, b| {
            strsim::normalized_damerau_levenshtein(a, column)
                .total_cmp(&strsim::normalized_damerau_levenshtein(b, column))
        });
        let meant = meant.map_or_else(String::new, |name| format!("; did you mean {name}?"));
        MappingError::new(key, format!("{} has no column {column}{meant}", relation.qualified()))
    })
}

/// These columns of a relation, by its alias in the statement. An error names the setting `key`.
fn require_all(relation: &Relation, alias: &str, columns: &[String], key: &str) -> Result<Vec<String>, MappingError> {
    columns.iter().map(|column| require(relation, column, key).map(|_| format!("{alias}.{}", name(column)))).collect()
}

fn id_column<'a>(orders: &'a Relation, column: &str) -> Result<(String, &'a ColumnType), MappingError> {
    let kind = require(orders, column, "id")?;
    if !ids::TYPES.contains(&kind.base.as_str()) {
        return Err(MappingError::new(
            "id",
            format!(
                "{column} is {}; an id may be a smallint, integer, bigint, uuid, text, varchar, char or citext: name such a unique column, or write orders.close_sql",
                kind.sql
            ),
        ));
    }
    Ok((name(column), kind))
}

/// The deadline as a timestamptz.
fn deadline(table: &TableSettings, facts: &Facts) -> Result<String, MappingError> {
    // A plain column without brackets, so that the statement reads well.
    let written = match deadline_column(table, &facts.orders) {
        Some(column) => format!("{}.{}", name(&facts.orders.name), name(column)),
        None => format!("({})", ended(&table.deadline)),
    };
    let set = [table.close.columns(), table.closing.as_ref(), table.pay.as_ref(), table.reopen.as_ref()];
    let uses_zone = set.into_iter().flatten().flatten().any(|(column, value)| {
        value == NOW && facts.orders.columns.get(column).is_some_and(|kind| ZONELESS.contains(&kind.base.as_str()))
    });
    match (facts.deadline_type.as_str(), &table.time_zone) {
        ("TIMESTAMPTZ", Some(_)) if !uses_zone => Err(MappingError::new(
            "time_zone",
            "is given, but the deadline is a timestamp with time zone, which names its moment; leave time_zone out",
        )),
        ("TIMESTAMPTZ", _) => Ok(written),
        ("TIMESTAMP", Some(zone)) => Ok(format!("({written} AT TIME ZONE {})", literal(zone))),
        ("TIMESTAMP", None) => Err(MappingError::new(
            "time_zone",
            "is not given, but the deadline is a timestamp without time zone; name the zone in which the shop writes it, such as \"Asia/Shanghai\", because the wrong one closes orders hours early or late",
        )),
        (other, _) => Err(MappingError::new(
            "deadline",
            format!(
                "is {}, not a timestamp; write an expression of type timestamptz, such as to_timestamp(expires) for seconds since 1970",
                other.to_lowercase()
            ),
        )),
    }
}

/// The operator's SQL, with a line break behind a comment that would hide what follows.
fn ended(sql: &str) -> String {
    let sql = sql.trim();
    if sql.contains("--") { format!("{sql}\n") } else { sql.to_owned() }
}

/// The operator's SQL for a sentence; with a comment it needs its lines.
fn one_line(sql: &str) -> String {
    let sql = sql.trim();
    if sql.contains("--") { sql.to_owned() } else { sql.split_whitespace().collect::<Vec<_>>().join(" ") }
}

/// The columns of an entry of `stock`, with the aliases of their tables.
struct StockColumns {
    /// Of the items.
    alias: String,
    order: Vec<String>,
    item_key: Vec<String>,
    /// Of the stock, whose alias is `s`.
    stock_key: Vec<String>,
}

/// What `Operator` and the function `release` say for their transaction; NULL otherwise.
fn setting(name: &str) -> String {
    format!("(SELECT nullif(current_setting('order_timeout.{name}', true), ''))")
}

fn step(head: &str, body: &str) -> String {
    let head = if head.contains(" AS ") || head.ends_with(" AS") { head.to_owned() } else { format!("{head} AS") };
    format!("{head} (\n    {body}\n)")
}

fn is_query(sql: &str) -> bool {
    predicate::bare(sql).is_some_and(|bare| bare.trim_start().starts_with("select"))
}

/// A statement of the shop's own as a step that can be counted, so that stock is locked behind it.
fn also_step(number: usize, sql: &str) -> String {
    let sql = sql.trim().trim_end_matches(';').trim_end();
    let materialized = if is_query(sql) { " AS MATERIALIZED" } else { "" };
    let returning = if predicate::returns_rows(sql) { "" } else { "\n    RETURNING 1" };
    step(&format!("ot_also_{number}{materialized}"), &format!("{}{returning}", ended(sql).trim_end_matches(' ')))
}

/// `k1, k2`
fn numbered(prefix: &str, count: usize) -> Vec<String> {
    (1..=count).map(|number| format!("{prefix}{number}")).collect()
}

/// `a AS k1, b AS k2`
fn as_numbered(columns: &[String], prefix: &str) -> String {
    let named: Vec<String> =
        (1..).zip(columns).map(|(number, column)| format!("{column} AS {prefix}{number}")).collect();
    named.join(", ")
}

/// Rows of a table whose columns are among the keys of a step. As an array for one column: then the plan looks up each
/// key in the index, even if it was made for an empty table.
fn among(columns: &[String], step: &str, prefix: &str) -> String {
    among_those(columns, step, prefix, "")
}

/// The same for those rows `t` of the step that a condition chooses.
fn among_those(columns: &[String], step: &str, prefix: &str, condition: &str) -> String {
    match columns {
        [one] => format!("{one} = ANY (ARRAY(SELECT t.{prefix}1 FROM {step} t{condition}))"),
        several => {
            let keys = numbered(&format!("t.{prefix}"), several.len()).join(", ");
            format!("({}) IN (SELECT {keys} FROM {step} t{condition})", several.join(", "))
        }
    }
}

/// The same between two steps.
fn among_rows(columns: &[String], step: &str, prefix: &str) -> String {
    let keys = numbered(&format!("t.{prefix}"), columns.len()).join(", ");
    format!("({}) IN (SELECT {keys} FROM {step} t)", columns.join(", "))
}

#[cfg(test)]
mod tests;

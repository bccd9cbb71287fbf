//! `adopt`: proposes a mapping for a table, with a comment for each guess, and the indexes that it needs.
//!
//! Reads the catalog and counts statuses. What it cannot know it asks, in a comment.

use order_timeout_core::kind::Kind;
use serde::Serialize;
use sqlx::PgConnection;

use crate::mapping::{ColumnType, Relation, ids, quote};
use crate::postgres::catalog::{self, CatalogError};
use crate::postgres::grants;
use crate::postgres::survey::{self, ForeignKey, Survey};
use crate::postgres::{Database, DatabaseError, one_line};
use crate::sanitize;

/// A proposed mapping.
#[derive(Debug, Serialize)]
pub struct Proposal {
    /// The orders table, with its schema.
    pub table: String,
    /// Other tables that could be meant.
    pub others: Vec<String>,
    /// The section of a settings file, with comments.
    pub toml: String,
    /// The statements that create what the mapping needs, with comments.
    pub ddl: Vec<String>,
}

/// Proposes a mapping of this kind for this table, or for the one that looks most like orders.
///
/// # Errors
/// [`DatabaseError`] if there is no such table, or the database does not answer.
pub async fn propose(database: &Database, kind: &Kind, table: Option<&str>) -> Result<Proposal, DatabaseError> {
    let looked = database.run(async |connection| Ok(look(connection, kind, table).await)).await;
    let looked = looked.map_err(|error| DatabaseError(one_line(&error)))?;
    looked.map_err(|fault| match fault {
        CatalogError::Mapping(fault) => DatabaseError(fault.why),
        CatalogError::Database(_) => DatabaseError(fault.to_string()),
    })
}

/// A column that says what has become of an order, and its values with their number.
struct Status {
    column: String,
    is_number: bool,
    values: Vec<(String, i64)>,
}

/// A table of items and the stock that they reserve.
struct Reservation {
    items: Relation,
    order: Vec<String>,
    /// `None`: no foreign key says which stock it is.
    stock: Option<(ForeignKey, Relation)>,
}

async fn look(connection: &mut PgConnection, kind: &Kind, table: Option<&str>) -> Result<Proposal, CatalogError> {
    let mut others = survey::likely_orders(connection).await?;
    let table = match table {
        Some(table) => table.to_owned(),
        None if others.is_empty() => {
            let why = "no table looks like orders; name it, as in `order-timeout adopt --table public.orders`";
            return Err(crate::mapping::MappingError::new("table", why).into());
        }
        None => others.remove(0),
    };
    if let Some(why) = grants::why_unreadable(connection, &table).await? {
        return Err(crate::mapping::MappingError::new("table", why).into());
    }
    let orders = survey::survey(connection, "table", &table).await?;
    others.retain(|other| *other != table);
    let status = status(connection, &orders.relation).await?;
    let mut reservations = Vec::new();
    for key in &orders.referenced_by {
        if let Some(found) = reservation(connection, key).await? {
            reservations.push(found);
        }
    }
    let zone: String = sqlx::query_scalar("SELECT current_setting('TimeZone')").fetch_one(connection).await?;
    Ok(Draft { kind: kind.clone(), orders, status, reservations, zone }.proposal(others))
}

const STATUS: [&str; 8] = [
    "status",
    "state",
    "order_status",
    "order_state",
    "payment_status",
    "payment_state",
    "pay_status",
    "financial_status",
];

async fn status(connection: &mut PgConnection, orders: &Relation) -> Result<Option<Status>, sqlx::Error> {
    let exact = STATUS.iter().find(|name| orders.columns.contains_key(**name)).map(|name| (*name).to_owned());
    let like = || orders.columns.keys().find(|name| name.contains("status") || name.contains("state")).cloned();
    let Some(column) = exact.or_else(like) else { return Ok(None) };
    let counted = survey::values(connection, orders, &column).await?;
    let mut values: Vec<(String, i64)> =
        counted.into_iter().filter_map(|(value, count)| Some((value?, count))).collect();
    for label in survey::enum_labels(connection, orders, &column).await? {
        if !values.iter().any(|(value, _)| *value == label) {
            values.push((label, 0));
        }
    }
    let is_number = orders.columns[&column].base.starts_with("int");
    Ok(Some(Status { column, is_number, values }))
}

async fn reservation(connection: &mut PgConnection, key: &ForeignKey) -> Result<Option<Reservation>, CatalogError> {
    let items = catalog::relation(connection, "items", &key.table).await?;
    if first_like(&items, &QUANTITY).is_none() {
        return Ok(None);
    }
    let mut stock = None;
    for of_items in survey::foreign_keys(connection, &items.qualified(), false).await? {
        let target = catalog::relation(connection, "stock", &of_items.target).await?;
        if of_items.target != key.target
            && (first_like(&target, &TAKEN).is_some() || first_like(&target, &FREE).is_some())
        {
            stock = Some((of_items, target));
            break;
        }
    }
    Ok(Some(Reservation { items, order: key.columns.clone(), stock }))
}

const QUANTITY: [&str; 6] = ["quantity", "qty", "product_quantity", "amount", "units", "count"];
/// Columns of stock that is promised to orders.
const TAKEN: [&str; 6] = ["reserved", "reserved_quantity", "lock_stock", "locked", "allocated", "quantity_allocated"];
/// Columns of stock that can be sold.
const FREE: [&str; 6] = ["available", "available_quantity", "stock", "count_on_hand", "on_hand", "size"];
const DEADLINES: [&str; 10] = [
    "expires_at",
    "expires",
    "expire_time",
    "expired_time",
    "expiry",
    "pay_until",
    "payment_deadline",
    "deadline",
    "due_at",
    "valid_until",
];
const CREATED: [&str; 7] =
    ["created_at", "create_time", "created", "creation_date", "inserted_at", "placed_at", "datetime"];
const CLOSED_AT: [&str; 9] = [
    "closed_at",
    "cancelled_at",
    "canceled_at",
    "expired_at",
    "modify_time",
    "update_time",
    "updated_at",
    "modified_at",
    "modified",
];
const OPEN_WORDS: [&str; 14] = [
    "unpaid",
    "pending",
    "open",
    "new",
    "created",
    "awaiting",
    "awaiting_payment",
    "pending_payment",
    "payment",
    "not_paid",
    "balance_due",
    "held",
    "reserved",
    "n",
];
const PAID_WORDS: [&str; 11] = [
    "paid",
    "confirmed",
    "completed",
    "complete",
    "shipped",
    "fulfilled",
    "processing",
    "captured",
    "delivered",
    "sold",
    "p",
];
const CLOSED_WORDS: [&str; 10] =
    ["closed", "expired", "cancelled", "canceled", "timeout", "void", "abandoned", "released", "e", "c"];

/// The first of these columns that the relation has.
fn first_like<'a>(relation: &'a Relation, names: &[&str]) -> Option<(&'a str, &'a ColumnType)> {
    names.iter().find_map(|name| relation.columns.get_key_value(*name)).map(|(name, kind)| (name.as_str(), kind))
}

/// The first column of a time whose name has a part of such a word.
fn sounds_like_deadline(relation: &Relation) -> Option<(&str, &ColumnType)> {
    let sounds = |name: &str| ["due", "expir", "deadline", "until"].iter().any(|part| name.contains(part));
    let mut columns = relation.columns.iter().map(|(name, kind)| (name.as_str(), kind));
    columns.find(|(name, kind)| kind.base.starts_with("timestamp") && sounds(name))
}

/// What the proposal is written from.
struct Draft {
    kind: Kind,
    orders: Survey,
    status: Option<Status>,
    reservations: Vec<Reservation>,
    zone: String,
}

impl Status {
    /// Its values among these words, or these numbers for a column of numbers.
    fn like(&self, words: &[&str], numbers: &[&str]) -> Vec<&str> {
        let wanted = if self.is_number { numbers } else { words };
        let is_wanted = |value: &str| wanted.contains(&value.to_lowercase().as_str());
        self.values.iter().map(|(value, _)| value.as_str()).filter(|value| is_wanted(value)).collect()
    }

    fn literal(&self, value: &str) -> String {
        if self.is_number { value.to_owned() } else { quote::literal(value) }
    }

    fn condition(&self, values: &[&str]) -> String {
        let column = column(&self.column);
        match values {
            [one] => format!("{column} = {}", self.literal(one)),
            several => {
                let list: Vec<String> = several.iter().map(|value| self.literal(value)).collect();
                format!("{column} IN ({})", list.join(", "))
            }
        }
    }
}

/// A column's name as SQL needs it.
fn column(name: &str) -> String {
    let is_plain = name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_');
    if is_plain { name.to_owned() } else { quote::name(name) }
}

/// A text as TOML.
fn toml(text: &str) -> String {
    toml_list(&[text.to_owned()]).trim_matches(['[', ']']).to_owned()
}

fn toml_list(texts: &[String]) -> String {
    let quoted: Vec<String> =
        texts.iter().map(|text| format!("\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\""))).collect();
    format!("[{}]", quoted.join(", "))
}

impl Draft {
    fn proposal(self, others: Vec<String>) -> Proposal {
        let relation = &self.orders.relation;
        let table = format!("{}.{}", relation.schema, relation.name);
        let mut lines = vec![
            format!("[kinds.{}.table]", self.kind),
            match self.orders.rows {
                ..=0 => "# ANALYZE has not counted its rows yet.".to_owned(),
                rows => format!("# About {rows} rows."),
            },
            format!("table = {}", toml(&table)),
        ];
        lines.extend(self.id());
        let open = self.conditions(&mut lines);
        let deadline = self.deadline(&mut lines);
        self.close(&mut lines);
        let mut ddl = Vec::new();
        for reservation in &self.reservations {
            reservation.write(&self.kind, &mut lines, &mut ddl, self.orders.primary_key.len());
        }
        let keys: Vec<String> = self.orders.primary_key.iter().map(|name| column(name)).collect();
        ddl.insert(0, format!("-- The sweep reads this index four times a second.\nCREATE INDEX CONCURRENTLY ON {} ({deadline}, {}) WHERE {open};", relation.qualified(), keys.join(", ")));
        Proposal { table, others, toml: lines.join("\n") + "\n", ddl }
    }

    fn id(&self) -> Vec<String> {
        let keys = &self.orders.primary_key;
        if keys.is_empty() {
            return vec!["# It has no primary key: which columns identify an order?".into(), "id = [\"?\"]".into()];
        }
        let mut lines = Vec::new();
        for key in keys {
            let kind = &self.orders.relation.columns[key];
            if !ids::TYPES.contains(&kind.base.as_str()) {
                lines.push(format!("# {key} is {}, which an id cannot be; name other unique columns.", kind.sql));
            }
        }
        lines.push(format!("# The primary key. On the wire an id is {}.", keys.join("/")));
        lines.push(format!("id = {}", toml_list(keys)));
        lines
    }

    /// Writes `open` and `paid`; returns the former.
    fn conditions(&self, lines: &mut Vec<String>) -> String {
        let Some(status) = &self.status else {
            lines.push("# No column looks like a status: when is an order open, and when is it paid?".into());
            lines.extend(["open = \"?\"".into(), "paid = \"?\"".into()]);
            return "?".into();
        };
        let seen: Vec<String> =
            status.values.iter().map(|(value, count)| format!("{} ({count})", sanitize::one_line(value))).collect();
        lines.push(format!("# Found in {}: {}.", status.column, seen.join(", ")));
        let (open, paid) = (status.like(&OPEN_WORDS, &["0"]), status.like(&PAID_WORDS, &["1", "2", "3"]));
        let open = if open.is_empty() {
            lines.push("# Which of them is an order that waits for its payment?".into());
            format!("{} = ?", column(&status.column))
        } else {
            lines.push(
                "# A guess by the words; add what must never be closed, such as \"AND payment_method <> 'invoice'\"."
                    .into(),
            );
            status.condition(&open)
        };
        lines.push(format!("open = {}", toml(&open)));
        let paid = if paid.is_empty() {
            lines.push("# Which of them is paid?".into());
            format!("{} = ?", column(&status.column))
        } else {
            status.condition(&paid)
        };
        lines.push(format!("paid = {}", toml(&paid)));
        open
    }

    /// Writes `deadline` and `time_zone`; returns the deadline as a column of an index.
    fn deadline(&self, lines: &mut Vec<String>) -> String {
        let relation = &self.orders.relation;
        let (written, kind) = if let Some((name, kind)) =
            first_like(relation, &DEADLINES).or_else(|| sounds_like_deadline(relation))
        {
            (column(name), kind.base.as_str())
        } else if let Some((name, _)) = relation.columns.iter().find(|(_, kind)| kind.base == "tstzrange") {
            lines.push("# The end of the range; without an end it is NULL, which is never due.".into());
            (format!("upper({})", column(name)), "timestamptz")
        } else if let Some((name, kind)) = first_like(relation, &CREATED) {
            lines.push("# No column looks like a deadline; how long may an order stay unpaid?".into());
            let name = column(name);
            let written = if kind.base == "timestamp" {
                format!("{name} + interval '30 minutes'")
            } else {
                // An index takes no expression that depends on the session's zone.
                format!("({name} AT TIME ZONE 'UTC' + interval '30 minutes') AT TIME ZONE 'UTC'")
            };
            (written, kind.base.as_str())
        } else {
            lines
                .extend(["# No column looks like a deadline or a time of creation.".into(), "deadline = \"?\"".into()]);
            return "?".into();
        };
        lines.push(format!("deadline = {}", toml(&written)));
        match kind {
            "timestamp" => {
                lines.push(
                    "# The column has no time zone. This is the session's; is it the one that the shop writes?".into(),
                );
                lines.push(format!("time_zone = {}", toml(&self.zone)));
                format!("(({written}) AT TIME ZONE {})", quote::literal(&self.zone))
            }
            "timestamptz" if written.contains([' ', '(']) => format!("({written})"),
            "timestamptz" => written,
            other => {
                lines.push(format!(
                    "# It is {other}: write an expression of type timestamptz, such as to_timestamp({written})."
                ));
                written
            }
        }
    }

    fn close(&self, lines: &mut Vec<String>) {
        let mut set = Vec::new();
        if let Some(status) = &self.status {
            let word = status.like(&CLOSED_WORDS, &["4"]).first().map_or("?", |word| *word).to_owned();
            lines.push("# What a closed order's row says; \"now\" is the moment of the close.".into());
            set.push(format!("{} = {}", toml_key(&status.column), toml(&word)));
        }
        if let Some((name, kind)) = first_like(&self.orders.relation, &CLOSED_AT)
            && kind.base.starts_with("timestamp")
        {
            set.push(format!("{} = \"now\"", toml_key(name)));
        }
        lines.push(format!("close = {{ {} }}", set.join(", ")));
    }
}

fn toml_key(name: &str) -> String {
    if column(name) == name { name.to_owned() } else { toml(name) }
}

impl Reservation {
    fn write(&self, kind: &Kind, lines: &mut Vec<String>, ddl: &mut Vec<String>, id_columns: usize) {
        let items = format!("{}.{}", self.items.schema, self.items.name);
        let Some((key, stock)) = &self.stock else {
            lines.push(format!(
                "\n# {items} has items of orders; if they reserve stock, add [[kinds.{kind}.table.give_back]] for it."
            ));
            return;
        };
        let (quantity, _) = first_like(&self.items, &QUANTITY).unwrap_or(("quantity", &ANY));
        let mut set = Vec::new();
        let change = |name: &str, sign: char| {
            let own = if name == "quantity" { "stock.quantity".to_owned() } else { column(name) };
            format!("{} = {}", toml_key(name), toml(&format!("{own} {sign} quantity")))
        };
        let (taken, free) = (first_like(stock, &TAKEN), first_like(stock, &FREE));
        if let Some((name, _)) = taken {
            set.push(change(name, '-'));
        }
        // Beside a column of what is taken, one of what is there may not change until an order is shipped.
        let is_asked = taken.is_some();
        let free = free.map(|(name, _)| change(name, '+'));
        if let Some(change) = free.as_ref().filter(|_| !is_asked) {
            set.push(change.clone());
        }
        lines.push(format!(
            "\n# By its foreign keys {items} reserves rows of {}. Is this how stock is given back?",
            key.target
        ));
        lines.push(format!("[[kinds.{kind}.table.give_back]]"));
        lines.push(format!("items = {}", toml(&items)));
        lines.push(format!("order = {}", toml_list(&self.order)));
        if self.order.len() != id_columns {
            lines.push("# The foreign key has another number of columns than the id: name as many.".into());
        }
        lines.push(format!("key = {}", toml_list(&key.columns)));
        lines.push(format!("quantity = {}", toml(&column(quantity))));
        lines.push(format!("stock = {}", toml(&format!("{}.{}", stock.schema, stock.name))));
        lines.push(format!("stock_key = {}", toml_list(&key.target_columns)));
        if let Some(change) = free.filter(|_| is_asked) {
            lines.push(format!("# Is it reduced when an order is placed? Then add {change} as well."));
        }
        lines.push(format!("set = {{ {} }}", set.join(", ")));
        let columns: Vec<String> = self.order.iter().map(|name| column(name)).collect();
        ddl.push(format!(
            "-- Only if none begins with {}.\nCREATE INDEX CONCURRENTLY ON {} ({});",
            columns.join(", "),
            self.items.qualified(),
            columns.join(", ")
        ));
    }
}

static ANY: ColumnType = ColumnType { base: String::new(), sql: String::new() };

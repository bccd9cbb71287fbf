//! `adopt`: proposes a mapping for a table, with a comment for each guess, and the indexes that it needs.
//!
//! Reads the catalog and counts statuses. What it cannot know it asks, in a comment.

use order_timeout_core::kind::Kind;
use serde::Serialize;
use sqlx::PgConnection;

use crate::mapping::{ColumnType, MappingError, Relation, RelationKind, ids, quote};
use crate::postgres::catalog::{self, CatalogError};
use crate::postgres::grants;
use crate::postgres::survey::{self, Clues, ForeignKey, Survey};
use crate::postgres::{Database, DatabaseError, is_forbidden, one_line};
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
    /// What a new row of a column of numbers has: it is open.
    first: String,
    values: Vec<(String, i64)>,
}

/// A table of items and the stock that they reserve.
struct Reservation {
    items: Relation,
    order: Vec<String>,
    /// `None`: each item is one.
    quantity: Option<String>,
    /// `None`: no foreign key says which stock it is.
    stock: Option<Stock>,
}

struct Stock {
    key: ForeignKey,
    relation: Relation,
    /// The column of what is promised to orders, and that of what can be sold.
    taken: Option<String>,
    free: Option<String>,
    /// The column of what each row is, where a row is one place or piece.
    status: Option<Status>,
}

async fn look(connection: &mut PgConnection, kind: &Kind, table: Option<&str>) -> Result<Proposal, CatalogError> {
    let (table, others) = match table {
        Some(table) => (table.to_owned(), Vec::new()),
        None => {
            let mut likely = survey::likely_orders(connection).await?;
            if likely.is_empty() {
                let why = "no table looks like orders; name it, as in `order-timeout adopt --table public.orders`";
                return Err(MappingError::new("table", why).into());
            }
            (likely.remove(0), likely)
        }
    };
    if let Some(why) = grants::why_unreadable(connection, &table).await? {
        return Err(MappingError::new("table", why).into());
    }
    let orders = survey::survey(connection, "table", &table).await?;
    if let Some(why) = orders.relation.why_not_lockable() {
        let behind = survey::behind(connection, &orders.relation).await?;
        let behind = if behind.is_empty() { String::new() } else { format!("; it reads {}", behind.join(", ")) };
        return Err(MappingError::new("table", format!("{why}{behind}")).into());
    }
    let clues = survey::clues(connection, &orders.relation).await?;
    let status = status(connection, &orders.relation, &clues).await?;
    let deadline = deadline(connection, &orders.relation, &clues).await?;
    let (mut reservations, mut attempts_to_pay, mut unread) = (Vec::new(), Vec::new(), Vec::new());
    for key in &orders.referenced_by {
        let found = match attempts(connection, key).await {
            Ok(Some(attempts)) => {
                attempts_to_pay.push(attempts);
                continue;
            }
            Ok(None) => reservation(connection, key).await,
            Err(error) => Err(error),
        };
        match found {
            Ok(reservation) => reservations.extend(reservation),
            // Whether it matters is not known.
            Err(CatalogError::Database(error)) if is_forbidden(&error) => {
                unread.push(format!("{}: {}", key.table, one_line(&error)));
            }
            Err(error) => return Err(error),
        }
    }
    let zone: String = sqlx::query_scalar("SELECT current_setting('TimeZone')").fetch_one(connection).await?;
    Ok(Draft {
        kind: kind.clone(),
        orders,
        clues,
        status,
        deadline,
        reservations,
        attempts: attempts_to_pay,
        unread,
        zone,
    }
    .proposal(others))
}

/// What a word among a column's values says of its order.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Meaning {
    Open,
    Paid,
    Closed,
}

/// Parts of values in lower case, without blanks, hyphens and the like, divided by blanks; whole values behind `=`. The
/// first that fits counts, so that "unpaid" is not taken for "paid". English, German, Spanish, French, Italian, Chinese.
const MEANINGS: [(Meaning, &str); 5] = [
    (Meaning::Open, "unpaid notpaid nonpay unbezahlt nichtbezahlt nopagad impag 未付 待付 待支付"),
    (
        Meaning::Open,
        "pending await arranging waiting balancedue held reserved offen wartet pendient abiert attente attesa",
    ),
    (
        Meaning::Closed,
        "cancel expir closed timeout timedout void abandon released stornier abgelaufen anulad vencid annul scadut \
         取消 关闭 =e =c",
    ),
    (
        Meaning::Paid,
        "paid settled captured confirm complet shipped deliver fulfil processing sold bezahlt versand pagad enviad \
         paye payé pagat 已付 已支付 =p",
    ),
    (Meaning::Open, "=open =new =created =payment =n"),
];

fn meaning(value: &str) -> Option<Meaning> {
    let plain = plain(value);
    let fits = |part: &str| part.strip_prefix('=').map_or_else(|| plain.contains(part), |whole| plain == whole);
    MEANINGS.iter().find(|(_, parts)| parts.split_whitespace().any(fits)).map(|(meaning, _)| *meaning)
}

/// `PaymentSettled`, `payment-settled` and `payment_settled` as one.
fn plain(name: &str) -> String {
    name.to_lowercase().chars().filter(|c| c.is_alphanumeric()).collect()
}

/// Whether a name has one of these parts, which blanks divide.
fn has_part(name: &str, parts: &str) -> bool {
    let plain = plain(name);
    parts.split_whitespace().any(|part| plain.contains(part))
}

const STATUS: &str = "status state stage zustand estado statut stato settled 状态";
const QUANTITY: &str = "quantity qty units count menge anzahl cantidad 数量";
/// Columns of stock that is promised to orders.
const TAKEN: &str = "reserved lockstock locked allocated booked onhold reserviert";
/// Columns of stock that can be sold.
const FREE: &str = "available stock onhand size free bestand disponible 库存";
const DEADLINE: &str = "expir due deadline until validto timeout frist ablauf fällig faellig bis vence vencim limite \
                        échéance echeance scaden 截止 过期";
const CREATED: &str = "creat insert placed datetime angelegt erstellt bestellt creado inizio 创建";
const PAID_AT: &str = "paid complet payment pay bezahlt pagad paye payé 支付";
const CLOSED_AT: &str = "closed cancel storn anulad geschlossen";
/// Of what an order costs in all, of a part of that, and of its currency.
const AMOUNT: &str = "payamount grandtotal total amount price betrag summe importe 金额";
const PART_OF_AMOUNT: &str = "sub tax discount ship item promo fee";
/// Of a table of attempts to pay, of what a payment provider knows one by, and of the provider.
const ATTEMPTS: &str = "pay attempt transaction charge 支付";
const REFERENCE: &str =
    "reference outtradeno tradeno intent transactionid paymentid responsecode externalid psp number";
const PROVIDER: &str = "provider gateway channel psp method";
const CURRENCY: &str = "currency währung waehrung moneda devise";
const CHANGED_AT: &str = "modif updat chang geändert actualiz";

/// The column with the most to say for it, if that is enough.
fn best<T>(found: Vec<(i32, T)>, least: i32) -> Option<T> {
    // The first of equals, in the order of the table.
    let best = found.into_iter().rev().max_by_key(|(points, _)| *points);
    best.filter(|(points, _)| *points >= least).map(|(_, found)| found)
}

/// Rows that are read to find the column of the status.
const SOME_ROWS: i64 = 10_000;

/// The column whose values are words of an order's state, whatever its name is.
async fn status(connection: &mut PgConnection, of: &Relation, clues: &[Clues]) -> Result<Option<Status>, sqlx::Error> {
    const TYPES: [&str; 8] = ["text", "varchar", "bpchar", "citext", "char", "int2", "int4", "bool"];
    let mut found = Vec::new();
    for clue in clues.iter().filter(|clue| !clue.is_key) {
        let kind = &of.columns[&clue.name];
        let is_named = has_part(&clue.name, STATUS);
        let (is_number, is_flag) = (kind.base.starts_with("int"), kind.base == "bool");
        // A number and a flag have no words.
        if !(clue.is_enum || TYPES.contains(&&*kind.base)) || (is_number || is_flag) && !is_named && !clue.is_condition
        {
            continue;
        }
        let values = survey::values(connection, of, &clue.name, SOME_ROWS).await?;
        if i64::try_from(values.len()).is_ok_and(|values| values >= survey::MOST_VALUES) {
            continue;
        }
        let has = |wanted| i32::from(values.iter().any(|(value, _)| meaning(value) == Some(wanted)));
        let words = 4 * has(Meaning::Open) + 4 * has(Meaning::Paid) + 3 * has(Meaning::Closed);
        let points = words + 4 * i32::from(is_named) + 3 * i32::from(clue.is_condition) + 2 * i32::from(clue.is_enum)
            - 2 * i32::from(is_flag);
        found.push((points, Status { column: clue.name.clone(), is_number, first: number_in(clue), values }));
    }
    let Some(mut status) = best(found, 4) else { return Ok(None) };
    status.values = survey::values(connection, of, &status.column, i64::MAX).await?;
    Ok(Some(status))
}

fn number_in(clue: &Clues) -> String {
    let digits = clue.default.iter().flat_map(|default| default.chars().skip_while(|c| !c.is_ascii_digit()));
    let number: String = digits.take_while(char::is_ascii_digit).collect();
    if number.is_empty() { "0".to_owned() } else { number }
}

/// The column of the deadline: of a type that has times, not written when the row is.
async fn deadline(
    connection: &mut PgConnection,
    orders: &Relation,
    clues: &[Clues],
) -> Result<Option<String>, sqlx::Error> {
    let mut found = Vec::new();
    for clue in clues.iter().filter(|clue| !clue.is_now) {
        let base = orders.columns[&clue.name].base.as_str();
        let is_time = base.starts_with("timestamp") || base == "date";
        let is_range = base == "tstzrange";
        let is_named = has_part(&clue.name, DEADLINE);
        if !(is_time || is_range || (base == "int8" && is_named && !clue.is_key)) {
            continue;
        }
        let is_past = [CREATED, CLOSED_AT, CHANGED_AT].iter().any(|parts| has_part(&clue.name, parts));
        let is_ahead = is_time && clue.leads_index && survey::has_future(connection, orders, &clue.name).await?;
        let points = 6 * i32::from(is_named)
            + 5 * i32::from(is_range)
            + 6 * i32::from(is_ahead)
            + 2 * i32::from(clue.leads_index)
            - 6 * i32::from(is_past);
        found.push((points, clue.name.clone()));
    }
    Ok(best(found, 5))
}

async fn reservation(connection: &mut PgConnection, key: &ForeignKey) -> Result<Option<Reservation>, CatalogError> {
    let items = catalog::relation(connection, "items", &key.table).await?;
    let quantity = number_like(&items, QUANTITY);
    let mut found = Vec::new();
    for of_items in survey::foreign_keys(connection, &items.qualified(), false).await? {
        if of_items.target == key.target {
            continue;
        }
        let relation = catalog::relation(connection, "stock", &of_items.target).await?;
        let (taken, free) = (number_like(&relation, TAKEN), number_like(&relation, FREE));
        // A row of its own for each place or piece.
        let mut place = None;
        if taken.is_none() && free.is_none() && quantity.is_none() {
            let clues = survey::clues(connection, &relation).await?;
            place = status(connection, &relation, &clues).await?;
        }
        let place = place.filter(|status| status.values.iter().any(|(value, _)| has_part(value, PLACES)));
        let points = 3 * i32::from(taken.is_some()) + 2 * i32::from(free.is_some()) + i32::from(place.is_some());
        found.push((points, Stock { key: of_items, relation, taken, free, status: place }));
    }
    let stock = best(found, 1);
    let is_about_stock = stock.is_some() || quantity.is_some();
    Ok(is_about_stock.then(|| Reservation { items, order: key.columns.clone(), quantity, stock }))
}

/// Words of a place or a piece that can be taken.
const PLACES: &str = "free available reserved held sold booked taken frei";

/// What may be a table of attempts to pay: rows of an order with a reference and an amount.
async fn attempts(connection: &mut PgConnection, key: &ForeignKey) -> Result<Option<Attempts>, CatalogError> {
    let table = catalog::relation(connection, "attempts.table", &key.table).await?;
    let texts = || table.columns.iter().filter(|(_, kind)| ["text", "varchar", "bpchar"].contains(&&*kind.base));
    let named = |parts: &str| {
        let mut parts = parts.split_whitespace();
        parts.find_map(|part| texts().find(|(name, _)| plain(name).contains(part))).map(|(name, _)| name.clone())
    };
    let is_named = has_part(&table.name, ATTEMPTS);
    let amount = number_like(&table, AMOUNT).filter(|_| is_named);
    let (reference, provider, currency) = (named(REFERENCE), named(PROVIDER), named(CURRENCY));
    Ok(amount.map(|amount| Attempts { order: key.columns.clone(), reference, amount, provider, currency, table }))
}

/// The first numeric column with one of these parts in its name.
fn number_like(relation: &Relation, parts: &str) -> Option<String> {
    let is_number = |kind: &ColumnType| kind.base.starts_with("int") || kind.base == "numeric";
    let found = |part| relation.columns.iter().find(|(name, kind)| is_number(kind) && plain(name).contains(part));
    parts.split_whitespace().find_map(found).map(|(name, _)| name.clone())
}

/// A table that may be one of attempts to pay.
struct Attempts {
    table: Relation,
    order: Vec<String>,
    reference: Option<String>,
    amount: String,
    provider: Option<String>,
    currency: Option<String>,
}

impl Attempts {
    /// A comment, because it needs `pay`.
    fn write(&self, kind: &Kind, lines: &mut Vec<String>) {
        let table = format!("{}.{}", self.table.schema, self.table.name);
        let name = |column_name: &Option<String>| toml(&column_name.as_deref().map_or("'?'".to_owned(), column));
        lines.extend([
            format!("\n# With pay: is {table} what the shop writes before a customer goes to a payment provider (docs/ADOPTING.md)?"),
            format!("# [kinds.{kind}.table.attempts]"),
            format!("# table = {}", toml(&table)),
            format!("# order = {}", toml_list(&self.order)),
            "# open = \"?\"".into(),
            format!("# provider = {}", name(&self.provider)),
            format!("# reference = {}", name(&self.reference)),
            format!("# amount = {}", toml(&column(&self.amount))),
            format!("# currency = {}", name(&self.currency)),
        ]);
    }
}

/// What the proposal is written from.
struct Draft {
    kind: Kind,
    orders: Survey,
    clues: Vec<Clues>,
    status: Option<Status>,
    deadline: Option<String>,
    reservations: Vec<Reservation>,
    attempts: Vec<Attempts>,
    /// Tables that refer to the orders and cannot be read, with the error.
    unread: Vec<String>,
    zone: String,
}

impl Status {
    /// Its values with this meaning; of a column of numbers, those that shops use for it most.
    fn like(&self, wanted: Meaning) -> Vec<&str> {
        let numbers: &[&str] = match wanted {
            Meaning::Open => &[&self.first],
            Meaning::Paid => &["1", "2", "3"],
            Meaning::Closed => &["4"],
        };
        let is_open = |value: &str| value == self.first && wanted != Meaning::Open;
        let is_wanted = |value: &str| match self.is_number {
            true => numbers.contains(&value) && !is_open(value),
            false => meaning(value) == Some(wanted),
        };
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
        self.money(&mut lines);
        self.close(&mut lines);
        self.pay(&mut lines);
        let mut ddl = Vec::new();
        for reservation in &self.reservations {
            reservation.write(&self.kind, &mut lines, &mut ddl, self.orders.primary_key.len());
        }
        lines.extend(self.unread.iter().map(|unread| {
            format!(
                "\n# Not looked at: {unread}. GRANT SELECT and propose again if orders reserve stock or are paid there."
            )
        }));
        self.attempts.iter().for_each(|attempts| attempts.write(&self.kind, &mut lines));
        let keys: Vec<String> = self.orders.primary_key.iter().map(|name| column(name)).collect();
        let columns = [vec![deadline], keys].concat().join(", ");
        let mut index = "-- The sweep reads this index four times a second.".to_owned();
        if relation.kind == RelationKind::PartitionedTable {
            index += "\n-- It blocks writes while it is built, except for partitions that have the same index already: create it there\n-- first, with CONCURRENTLY.";
        }
        ddl.insert(0, format!("{index}\n{};", relation.create_index(false, &columns, Some(&open))));
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
        let (open, paid) = (status.like(Meaning::Open), status.like(Meaning::Paid));
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
        let (written, kind) = if let Some(name) = &self.deadline {
            match relation.columns[name].base.as_str() {
                "tstzrange" => {
                    lines.push("# The end of the range; without an end it is NULL, which is never due.".into());
                    (format!("upper({})", column(name)), "timestamptz")
                }
                base => (column(name), base),
            }
        } else if let Some((name, kind)) = self.created() {
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

    /// What an order costs: for the forecast and for payments, so that without a currency it is proposed as a comment.
    fn money(&self, lines: &mut Vec<String>) {
        let columns = &self.orders.relation.columns;
        // The first part fits best, and the whole name better than a part of it.
        let named = |parts: &str, types: &[&str]| {
            let is_of = |name: &&String| types.contains(&columns[*name].base.as_str());
            let is_whole = |clue: &&Clues| !clue.is_key && !has_part(&clue.name, PART_OF_AMOUNT);
            let names = || self.clues.iter().filter(is_whole).map(|clue| &clue.name).filter(is_of);
            let whole = parts.split_whitespace().find_map(|part| names().find(|name| plain(name) == part));
            let in_part = || parts.split_whitespace().find_map(|part| names().find(|name| has_part(name, part)));
            whole.or_else(in_part).cloned()
        };
        let Some(amount) = named(AMOUNT, &["numeric", "int4", "int8"]) else { return };
        let currency = named(CURRENCY, &["text", "varchar", "bpchar", "citext"]);
        let comment = if currency.is_some() { "" } else { "# " };
        lines.push(match &currency {
            Some(_) => "# A guess by the names: what an order costs.".into(),
            None => "# A guess by its name: what an order costs. In which currency?".into(),
        });
        lines.push(format!("{comment}amount = {}", toml(&column(&amount))));
        if columns[&amount].base == "numeric" {
            lines.push("# With two decimal places, as EUR has them? JPY has none, KWD three; for several, write a CASE in amount.".into());
            lines.push(format!("{comment}minor_units = 2"));
        } else {
            lines.push("# It counts the smallest unit, such as cents; otherwise add minor_units.".into());
        }
        let currency = currency.map_or_else(|| "'EUR'".to_owned(), |currency| column(&currency));
        lines.push(format!("{comment}currency = {}", toml(&currency)));
    }

    /// The column of the time at which the order was created, and its type.
    fn created(&self) -> Option<(&str, &ColumnType)> {
        let of_time = |clue: &&Clues| self.orders.relation.columns[&clue.name].base.starts_with("timestamp");
        let times = || self.clues.iter().filter(of_time);
        let found = times().find(|clue| has_part(&clue.name, CREATED)).or_else(|| times().find(|clue| clue.is_now))?;
        Some((&found.name, &self.orders.relation.columns[&found.name]))
    }

    fn close(&self, lines: &mut Vec<String>) {
        let mut set = Vec::new();
        if let Some(status) = &self.status {
            let word = status.like(Meaning::Closed).first().map_or("?", |word| *word).to_owned();
            lines.push("# What a closed order's row says; \"now\" is the moment of the close.".into());
            set.push(format!("{} = {}", toml_key(&status.column), toml(&word)));
        }
        let time = self.time_like(CLOSED_AT).or_else(|| self.time_like(CHANGED_AT));
        set.extend(time.map(|name| format!("{} = \"now\"", toml_key(name))));
        lines.push(format!("close = {{ {} }}", set.join(", ")));
    }

    /// What a payment writes: a comment, because it needs `adopt --install`.
    fn pay(&self, lines: &mut Vec<String>) {
        let Some(status) = &self.status else { return };
        let Some(word) = status.like(Meaning::Paid).first().copied() else { return };
        let mut set = vec![format!("{} = {}", toml_key(&status.column), toml(word))];
        set.extend(self.time_like(PAID_AT).map(|name| format!("{} = \"now\"", toml_key(name))));
        lines.push("# What a paid order's row says, so that payment_received pays it and its provider is asked before the close (docs/PAYMENTS.md).".into());
        lines.push(format!("# pay = {{ {} }}", set.join(", ")));
        let forgets = self.time_like(CLOSED_AT).map(|name| format!(" {} = \"null\" ", toml_key(name)));
        lines.push("# What a closed order's row gets besides when late money pays it; without it such money only goes back. It needs pay, and take of each stock.".into());
        lines.push(format!("# reopen = {{{}}}", forgets.unwrap_or_default()));
    }

    /// The first column of a time with such a name, except the deadline.
    fn time_like(&self, parts: &str) -> Option<&str> {
        let is_time = |name: &str| self.orders.relation.columns[name].base.starts_with("timestamp");
        let names = self.clues.iter().map(|clue| clue.name.as_str());
        names.filter(|name| is_time(name) && self.deadline.as_deref() != Some(name)).find(|name| has_part(name, parts))
    }
}

fn toml_key(name: &str) -> String {
    if column(name) == name { name.to_owned() } else { toml(name) }
}

impl Reservation {
    fn write(&self, kind: &Kind, lines: &mut Vec<String>, ddl: &mut Vec<String>, id_columns: usize) {
        let items = format!("{}.{}", self.items.schema, self.items.name);
        let Some(Stock { key, relation: stock, taken, free, status }) = &self.stock else {
            lines.push(format!(
                "\n# {items} has items of orders; if they reserve stock, add [[kinds.{kind}.table.stock]] for it."
            ));
            return;
        };
        let quantity = self.quantity.as_deref().map_or_else(|| "1".to_owned(), column);
        let own = |name: &str| if name == "quantity" { "stock.quantity".to_owned() } else { column(name) };
        let change =
            |name: &str, sign| format!("{} = {}", toml_key(name), toml(&format!("{} {sign} quantity", own(name))));
        lines.push(format!(
            "\n# By its foreign keys {items} reserves rows of {}. Is this how stock is given back?",
            key.target
        ));
        lines.push(format!("[[kinds.{kind}.table.stock]]"));
        lines.extend([
            format!("items = {}", toml(&items)),
            format!("order = {}", toml_list(&self.order)),
            format!("key = {}", toml_list(&key.columns)),
            format!("quantity = {}", toml(&quantity)),
            format!("table = {}", toml(&format!("{}.{}", stock.schema, stock.name))),
            format!("stock_key = {}", toml_list(&key.target_columns)),
        ]);
        if self.order.len() != id_columns {
            lines.push("# The foreign key has another number of columns than the id: name as many.".into());
        }
        // Beside a column of what is taken, one of what is there may not change until an order is shipped.
        if let Some((free, _)) = free.as_ref().zip(taken.as_ref()) {
            let further = change(free, '+');
            lines.push(format!(
                "# Is {free} reduced when an order is placed? Then add {further} as well, and the reverse to take."
            ));
        }
        if let Some(status) = status {
            let seen: Vec<&str> = status.values.iter().map(|(value, _)| value.as_str()).collect();
            lines.push(format!("# Which of its values is a free one: {}?", sanitize::one_line(&seen.join(", "))));
            lines.push(format!("give_back = {{ {} = \"?\" }}", toml_key(&status.column)));
        }
        // What changes when an order is placed, and in which direction a close undoes it.
        let changed =
            taken.as_ref().map(|name| (name, '-', '+')).or_else(|| free.as_ref().map(|name| (name, '+', '-')));
        if let Some((name, back, again)) = changed {
            lines.push(format!("give_back = {{ {} }}", change(name, back)));
            if taken.is_some() {
                lines.push("# With pay: is this how a payment consumes what was reserved?".into());
                lines.push(format!("# consume = {{ {} }}", change(name, '-')));
            }
            let left = match (taken, free) {
                (Some(taken), Some(free)) => format!("{} - {}", own(free), own(taken)),
                (None, Some(free)) => own(free),
                (_, None) => "?".to_owned(),
            };
            lines.push("# With reopen: is this how a closed order reserves it again, and how many are left?".into());
            lines.push(format!("# take = {{ {} }}", change(name, again)));
            lines.push(format!("# left = {}", toml(&left)));
        }
        let columns: Vec<String> = self.order.iter().map(|name| column(name)).collect();
        let columns = columns.join(", ");
        let index = self.items.create_index(false, &columns, None);
        ddl.push(format!("-- Only if none begins with {columns}.\n{index};"));
    }
}

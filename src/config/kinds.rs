//! The section `kinds`: what each sort of deadline is, and where its orders are.
//!
//! Reads and checks settings alone. Whether the table has these columns is checked on the database
//! (`src/operations/orders_statements.rs`).

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::Duration;

use order_timeout_core::delay::{KindLanes, Lane};
use order_timeout_core::duration;
use order_timeout_core::kind::Kind;
use serde::de::value::MapAccessDeserializer;
use serde::de::{self, MapAccess, Unexpected, Visitor};
use serde::{Deserialize, Deserializer};

use super::{Settings, SettingsError};
use crate::mapping::{KindWords, default_tables, predicate};

/// Connections besides the closers': sweep, parking, the brake's count of what falls due, the outboxes and their lock, and
/// four for inspections (of the catalog, of the plans, of the broker, and the registration), so that no task waits for another.
const OTHER_CONNECTIONS: u32 = 9;
/// How many more each further kind needs: sweep, parking, the brake's count, and two for inspections; and one if it has reminders. A kind never
/// has more than these in use, so that one whose queries hang takes none from the others.
const CONNECTIONS_OF_KIND: u32 = 5;
/// And those of its own with which a kind with providers takes claimed orders over, and ends them in three ways.
pub const CONNECTIONS_OF_CLOSING: u32 = 4;
/// The routing key of an event, and its type without the version. So that both fit AMQP's 255 bytes.
const LONGEST_EVENT: usize = 200;
/// Each costs a worker connections, and the broker queues.
const MOST_KINDS: usize = 32;
/// Of the word in an event that says why an order was closed.
const LONGEST_REASON: usize = 100;

/// The settings of one kind. Documented in `config/default.toml`.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs)]
pub struct KindSettings {
    #[serde(default)]
    pub lanes: Vec<Lane>,
    pub event: Option<String>,
    pub reason: Option<String>,
    #[serde(default)]
    pub remind: Vec<Remind>,
    #[serde(default, deserialize_with = "duration::read_if_given")]
    pub extend_max: Option<Duration>,
    #[serde(default)]
    pub providers: Vec<String>,
    #[serde(default)]
    pub close_sql: String,
    #[serde(default)]
    pub overdue_sql: String,
    pub table: Option<TableSettings>,
    /// Whether the embedding program handles its orders (`handler.rs`), which no file can say.
    #[serde(skip)]
    pub is_handled: bool,
    /// Where `table` came from, such as a file; `None` if it is not given.
    #[serde(skip)]
    pub origin: Option<String>,
}

/// How long before the deadline a reminder is announced.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(transparent)]
pub struct Remind(#[serde(deserialize_with = "duration::read")] pub Duration);

/// Reminders are announced once a second.
const SHORTEST_REMIND: Duration = Duration::from_secs(1);

/// Where the orders of a kind are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OrdersOf<'a> {
    /// Wherever the statements in these files find them.
    Statements {
        /// The file of the close statement.
        close_sql: &'a str,
        /// The file of the overdue statement.
        overdue_sql: &'a str,
    },
    /// In a mapped table: the default one, which only the default kind has, or one of the shop's own.
    Table(&'a TableSettings),
    /// Known to the embedding program only.
    Handler,
}

impl Settings {
    /// Every kind that is configured, the default one first.
    #[must_use]
    pub fn all_kinds(&self) -> BTreeSet<Kind> {
        self.kinds.keys().cloned().chain([Kind::ORDER]).collect()
    }

    /// The kinds that a worker with these settings serves.
    #[must_use]
    pub fn served_kinds(&self) -> BTreeSet<Kind> {
        if self.worker.kinds.is_empty() {
            return self.all_kinds().into_iter().filter(|kind| self.orders_of(kind).is_some()).collect();
        }
        let handled = self.kinds.iter().filter(|(_, settings)| settings.is_handled).map(|(kind, _)| kind);
        self.worker.kinds.iter().chain(handled).cloned().collect()
    }

    /// The database connections that a worker with these settings needs, besides those of its closers.
    #[must_use]
    pub fn connections_besides_closers(&self) -> u32 {
        let served = self.served_kinds();
        let further = u32::try_from(served.len().saturating_sub(1)).unwrap_or(u32::MAX);
        let reminding = served.iter().filter(|kind| !self.reminders_of(kind).is_empty()).count();
        OTHER_CONNECTIONS
            .saturating_add(further.saturating_mul(CONNECTIONS_OF_KIND))
            .saturating_add(u32::try_from(reminding).unwrap_or(u32::MAX))
    }

    /// The further ones of its kinds with providers.
    #[must_use]
    pub fn connections_of_closing(&self) -> u32 {
        let asking = self.served_kinds().into_iter().filter(|kind| self.closing_policy(kind).is_some());
        u32::try_from(asking.count()).unwrap_or(u32::MAX).saturating_mul(CONNECTIONS_OF_CLOSING)
    }

    /// How long before the deadline each reminder of this kind is announced.
    #[must_use]
    pub fn reminders_of(&self, kind: &Kind) -> Vec<Duration> {
        let reminders = self.kinds.get(kind).map(|settings| settings.remind.iter().map(|Remind(before)| *before));
        reminders.into_iter().flatten().collect()
    }

    /// Where the orders of this kind are; `None` if that is not said here, so that another worker serves it.
    #[must_use]
    pub fn orders_of(&self, kind: &Kind) -> Option<OrdersOf<'_>> {
        let settings = self.kinds.get(kind);
        if settings.is_some_and(|settings| settings.is_handled) {
            return Some(OrdersOf::Handler);
        }
        if let Some(table) = settings.and_then(|settings| settings.table.as_ref()) {
            return Some(OrdersOf::Table(table));
        }
        let (close_sql, overdue_sql) = if kind.is_default() {
            (self.orders.close_sql.as_str(), self.orders.overdue_sql.as_str())
        } else {
            let settings = settings?;
            (settings.close_sql.as_str(), settings.overdue_sql.as_str())
        };
        match close_sql.is_empty() {
            false => Some(OrdersOf::Statements { close_sql, overdue_sql }),
            true => kind.is_default().then(|| OrdersOf::Table(default_tables::table())),
        }
    }

    /// The mapping of this kind's table, if it has one of the shop's own.
    #[must_use]
    pub fn table_of(&self, kind: &Kind) -> Option<&TableSettings> {
        match self.orders_of(kind) {
            Some(OrdersOf::Table(table)) if !table.is_built_in => Some(table),
            _ => None,
        }
    }

    /// Whether this kind has the built-in mapping: its orders are in the default tables.
    #[must_use]
    pub fn has_built_in_table(&self, kind: &Kind) -> bool {
        matches!(self.orders_of(kind), Some(OrdersOf::Table(table)) if table.is_built_in)
    }

    /// Whether orders of this kind are claimed, so that their providers are asked before they are closed.
    #[must_use]
    pub fn claims_orders(&self, kind: &Kind) -> bool {
        matches!(self.orders_of(kind), Some(OrdersOf::Table(table)) if table.pay.is_some())
    }

    /// Whether deadlines of this kind can be moved by a function of ours.
    fn moves_deadlines(&self, kind: &Kind) -> bool {
        matches!(self.orders_of(kind), Some(OrdersOf::Table(_)))
    }

    /// How much later than it was first a deadline can be, for each served kind with a table; `None`: as much as is wanted.
    #[must_use]
    pub fn extensions(&self) -> BTreeMap<Kind, Option<Duration>> {
        let served = self.served_kinds().into_iter().filter(|kind| self.moves_deadlines(kind));
        let of = |kind: &Kind| self.kinds.get(kind).and_then(|settings| settings.extend_max);
        served.map(|kind| (kind.clone(), of(&kind))).collect()
    }

    /// The routing key of the event of this kind's closes, and its type without the version.
    fn event_of(&self, kind: &Kind) -> String {
        let given = self.kinds.get(kind).and_then(|settings| settings.event.clone());
        given.unwrap_or_else(|| format!("{kind}.closed"))
    }

    /// The word in that event that says why the order was closed.
    fn reason_of(&self, kind: &Kind) -> String {
        let given = self.kinds.get(kind).and_then(|settings| settings.reason.clone());
        given.unwrap_or_else(|| if kind.is_default() { "unpaid".to_owned() } else { kind.to_string() })
    }

    /// What the rendered statements of this kind write.
    #[must_use]
    pub fn words_of(&self, kind: &Kind) -> KindWords {
        KindWords { kind: kind.clone(), event: self.event_of(kind), reason: self.reason_of(kind) }
    }

    /// The lanes of each kind.
    #[must_use]
    pub fn lanes(&self) -> KindLanes {
        KindLanes::new(self.delay.clone(), self.lanes_of_other_kinds())
    }

    /// The lanes of the kinds besides the default one, whose lanes are `delay.lanes`.
    pub(super) fn lanes_of_other_kinds(&self) -> impl Iterator<Item = (Kind, Vec<Lane>)> {
        let others = self.kinds.iter().filter(|(kind, _)| !kind.is_default());
        others.map(|(kind, settings)| (kind.clone(), settings.lanes.clone()))
    }

    /// Checks the kinds, and that each kind's orders are named only once.
    pub(super) fn validate_kinds(&self) -> Result<(), SettingsError> {
        if self.kinds.len() > MOST_KINDS {
            let why =
                format!("{} kinds are more than {MOST_KINDS}; a further one needs another namespace", self.kinds.len());
            return Err(SettingsError::of("kinds", why));
        }
        for (kind, settings) in &self.kinds {
            let of = |name: &str, why: String| SettingsError::of(&format!("kinds.{kind}.{name}"), why);
            if kind.is_default() {
                settings.validate_default().map_err(|(name, why)| of(&name, why))?;
                if settings.table.is_some() && !self.orders.close_sql.is_empty() {
                    let why = "is given, and so is orders.close_sql; leave out the one that does not describe your orders table";
                    return Err(of("table.table", why.to_owned()));
                }
            } else {
                settings.validate_statements().map_err(|(name, why)| of(&name, why))?;
            }
            self.validate_event(kind, settings).map_err(|(name, why)| of(&name, why))?;
            self.validate_reminders(settings).map_err(|(name, why)| of(&name, why))?;
            self.validate_extend_max(kind, settings).map_err(|(name, why)| of(&name, why))?;
            self.validate_providers_of(kind, settings).map_err(|(name, why)| of(&name, why))?;
            if let Some(table) = &settings.table {
                table.validate().map_err(|(name, why)| SettingsError::of(&key_of(kind, &name), why))?;
            }
        }
        self.lanes().validate()?;
        self.validate_served_kinds()
    }

    fn validate_event(&self, kind: &Kind, settings: &KindSettings) -> Result<(), Fault> {
        if let Some(event) = &settings.event
            && !is_event(event)
        {
            let why = format!(
                "{event:?} is no routing key of an event; write words of letters, digits, \"-\" and \"_\" with dots between them, at most {LONGEST_EVENT} in all, such as \"{kind}.closed\""
            );
            return Err(("event".into(), why));
        }
        if let Some(reason) = &settings.reason
            && (reason.trim().is_empty() || reason.len() > LONGEST_REASON)
        {
            let why =
                format!("{reason:?} is empty or longer than {LONGEST_REASON} bytes; write a word, or leave it out");
            return Err(("reason".into(), why));
        }
        let given = [("event", &settings.event), ("reason", &settings.reason)];
        let has_words = match self.orders_of(kind) {
            Some(OrdersOf::Table(table)) => !table.is_built_in,
            Some(OrdersOf::Statements { .. }) => false,
            Some(OrdersOf::Handler) | None => true,
        };
        match given.into_iter().find(|(_, given)| given.is_some() && !has_words) {
            Some((name, _)) => {
                let why = "is only for a kind with a table of its own: your own close statement, or that of the default tables, says which event it writes; leave it out";
                Err((name.into(), why.into()))
            }
            None => Ok(()),
        }
    }

    fn validate_reminders(&self, settings: &KindSettings) -> Result<(), Fault> {
        let longest = self.delay.max_delay;
        for (index, Remind(before)) in settings.remind.iter().enumerate() {
            let why = if *before < SHORTEST_REMIND || *before > longest {
                format!(
                    "{before:?} is not between {SHORTEST_REMIND:?} and delay.max_delay ({longest:?}); write such as \"5m\""
                )
            } else if settings.remind[..index].iter().any(|Remind(other)| other == before) {
                format!("{before:?} is given twice; give it once")
            } else {
                continue;
            };
            return Err(("remind".into(), why));
        }
        Ok(())
    }

    /// What moves deadlines only by the operator's own statements keeps no cap of ours.
    fn validate_extend_max(&self, kind: &Kind, settings: &KindSettings) -> Result<(), Fault> {
        let Some(extend_max) = settings.extend_max else { return Ok(()) };
        let longest = self.delay.max_delay;
        let why = if extend_max > longest {
            format!("{extend_max:?} is more than delay.max_delay ({longest:?}); write such as \"2h\"")
        } else if self.moves_deadlines(kind) {
            return Ok(());
        } else {
            "is only for the default tables and for a kind with a table of its own, whose deadlines are moved here; leave it out"
                .to_owned()
        };
        Err(("extend_max".into(), why))
    }

    fn validate_served_kinds(&self) -> Result<(), SettingsError> {
        let known: Vec<String> = self.all_kinds().iter().map(|kind| format!("{:?}", kind.as_str())).collect();
        for (index, kind) in self.worker.kinds.iter().enumerate() {
            let why = if self.worker.kinds[..index].contains(kind) {
                format!("\"{kind}\" is named twice; name it once")
            } else if !self.all_kinds().contains(kind) {
                format!(
                    "there is no kind \"{kind}\", only {}; add [kinds.{kind}], or correct the name",
                    known.join(", ")
                )
            } else if self.orders_of(kind).is_none() {
                format!(
                    "\"{kind}\" cannot be served here, because it has no orders: give it [kinds.{kind}.table], or kinds.{kind}.close_sql and kinds.{kind}.overdue_sql"
                )
            } else {
                continue;
            };
            return Err(SettingsError::of("worker.kinds", why));
        }
        Ok(())
    }
}

fn is_event(text: &str) -> bool {
    let is_word = |word: &str| {
        !word.is_empty() && word.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_')
    };
    text.len() <= LONGEST_EVENT && text.split('.').all(is_word)
}

impl KindSettings {
    /// What the default kind has elsewhere.
    fn validate_default(&self) -> Result<(), Fault> {
        let elsewhere = [
            ("lanes", !self.lanes.is_empty(), "delay.lanes"),
            ("close_sql", !self.close_sql.is_empty(), "orders.close_sql"),
            ("overdue_sql", !self.overdue_sql.is_empty(), "orders.overdue_sql"),
        ];
        match elsewhere.into_iter().find(|(_, is_given, _)| *is_given) {
            Some((name, _, key)) => Err((name.into(), format!("the default kind has it as {key}; use that setting"))),
            None => Ok(()),
        }
    }

    /// Both statements must be about the same table, and a mapping renders both.
    fn validate_statements(&self) -> Result<(), Fault> {
        let (given, missing) = match (self.close_sql.is_empty(), self.overdue_sql.is_empty()) {
            (true, true) => return Ok(()),
            (false, true) => ("close_sql", "overdue_sql"),
            (true, false) => ("overdue_sql", "close_sql"),
            (false, false) if self.table.is_none() => return Ok(()),
            (false, false) => {
                return Err(("table.table".into(), "is given, and so is close_sql; leave one of them out".into()));
            }
        };
        Err((given.into(), format!("is given without {missing}; give both, or neither")))
    }
}

/// A mapping: how the worker closes orders in a table of the shop's own. `open`, `paid`, `deadline`, `amount`, `currency`,
/// `sql`, and of stock what it changes, `left` and `quantity`, are the operator's SQL; all others are names of tables and
/// columns, or values.
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
    pub time_zone: Option<String>,
    /// What the order costs, a column or an expression.
    pub amount: Option<String>,
    /// In which currency: a column or an expression, such as `'CNY'`.
    pub currency: Option<String>,
    /// How many decimal places of `amount` make the currency's smallest unit; without it, `amount` counts that unit.
    pub minor_units: Option<u8>,
    /// What becomes of a closed order's row.
    pub close: CloseSettings,
    /// What the columns of an order are set to while its providers are asked; without it, it stays open meanwhile.
    pub closing: Option<BTreeMap<String, String>>,
    /// What a paid order's columns are set to. Needed where payments are reported, or providers are asked.
    pub pay: Option<BTreeMap<String, String>>,
    /// What the columns of a closed order are set to when late money pays it, besides what `pay` sets; without it, late money
    /// reopens none.
    pub reopen: Option<BTreeMap<String, String>>,
    /// The shop's own table of attempts to pay; without it, the shop writes ours.
    pub attempts: Option<AttemptsSettings>,
    /// The stock that orders reserve, in the order in which it is locked.
    #[serde(default)]
    pub stock: Vec<StockSettings>,
    /// Statements in the same transaction.
    #[serde(default)]
    pub also: Vec<AlsoSettings>,
    /// Whether it is that of the default tables, which no file can say.
    #[serde(skip)]
    pub is_built_in: bool,
}

/// What becomes of a closed order's row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CloseSettings {
    /// Its columns are set: each to a value, to `now`, to `null`, or to `path` for what has closed it.
    Set(BTreeMap<String, String>),
    /// It goes: the row is a hold.
    Delete,
}

/// Not by a derived choice of variants, which would take no number for the text that Postgres reads.
impl<'de> Deserialize<'de> for CloseSettings {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ColumnsOrDelete;

        impl<'de> Visitor<'de> for ColumnsOrDelete {
            type Value = CloseSettings;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("columns and values, such as { status = \"closed\" }, or \"delete\"")
            }

            fn visit_map<A: MapAccess<'de>>(self, columns: A) -> Result<Self::Value, A::Error> {
                BTreeMap::deserialize(MapAccessDeserializer::new(columns)).map(CloseSettings::Set)
            }

            fn visit_str<E: de::Error>(self, word: &str) -> Result<Self::Value, E> {
                if word == "delete" {
                    Ok(CloseSettings::Delete)
                } else {
                    Err(E::invalid_value(Unexpected::Str(word), &self))
                }
            }
        }

        deserializer.deserialize_any(ColumnsOrDelete)
    }
}

impl CloseSettings {
    /// The columns that are set; `None` if the row goes.
    #[must_use]
    pub const fn columns(&self) -> Option<&BTreeMap<String, String>> {
        match self {
            Self::Set(columns) => Some(columns),
            Self::Delete => None,
        }
    }
}

/// The shop's own table of attempts to pay. Besides `table` and `order`, all are expressions on its row.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AttemptsSettings {
    /// The table, with its schema.
    pub table: String,
    /// Its columns that hold the order's id.
    pub order: Names,
    /// A condition: money may come by the attempt, or has come and its order's row does not say so yet.
    pub open: String,
    /// The provider's name in the settings.
    pub provider: String,
    /// What the provider knows the attempt by.
    pub reference: String,
    /// What it is to pay, with as many decimal places as the mapping's `minor_units` says.
    pub amount: String,
    /// In which currency.
    pub currency: String,
    /// When it began; without it, the moment at which a worker first sees it.
    pub created_at: Option<String>,
    /// After this moment the provider takes no payment for it.
    pub payable_until: Option<String>,
}

impl AttemptsSettings {
    /// Its expressions, with their names.
    #[must_use]
    pub fn expressions(&self) -> Vec<(&'static str, &str)> {
        let always = [
            ("open", &self.open),
            ("provider", &self.provider),
            ("reference", &self.reference),
            ("amount", &self.amount),
            ("currency", &self.currency),
        ];
        let times = [("created_at", &self.created_at), ("payable_until", &self.payable_until)];
        let times = times.into_iter().filter_map(|(name, time)| time.as_ref().map(|time| (name, time)));
        always.into_iter().chain(times).map(|(name, expression)| (name, expression.as_str())).collect()
    }

    fn validate(&self, id_columns: usize) -> Result<(), Fault> {
        require_text("table", &self.table)?;
        require_names("order", &self.order, Some((id_columns, "id")))?;
        self.expressions().into_iter().try_for_each(|(name, expression)| require_expression(name, expression))
    }
}

/// An expression for each column of the stock that changes; `quantity` is what the orders reserve of the row.
pub type StockChanges = BTreeMap<String, String>;

/// Stock that orders reserve.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StockSettings {
    /// The table of the orders' items.
    pub items: String,
    /// Its columns that hold the order's id.
    pub order: Names,
    /// Its columns that hold the stock row's key.
    pub key: Names,
    /// Its column, or an expression on its row: how much of the stock the item reserves.
    pub quantity: String,
    /// The table of the stock.
    pub table: String,
    /// Its key.
    pub stock_key: Names,
    /// What a closed order gives back.
    #[serde(default)]
    pub give_back: StockChanges,
    /// What a paid order consumes of what it has reserved.
    #[serde(default)]
    pub consume: StockChanges,
    /// What an order that is reopened reserves again, before it consumes.
    #[serde(default)]
    pub take: StockChanges,
    /// How many of the row can be taken: an expression on it; NULL is without limit.
    pub left: Option<String>,
}

impl StockSettings {
    /// The settings of its changes, with their names.
    #[must_use]
    pub fn changes(&self) -> [(&'static str, &StockChanges); 3] {
        [("give_back", &self.give_back), ("consume", &self.consume), ("take", &self.take)]
    }
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
pub fn key_of(kind: &Kind, name: &str) -> String {
    format!("kinds.{kind}.table.{name}")
}

/// A setting's name within its section, and what is wrong with it.
pub(super) type Fault = (String, String);

impl TableSettings {
    /// The tables that a close changes, as far as their names can be read.
    #[must_use]
    pub fn changed_by_close(&self) -> Vec<String> {
        let given_back = self.stock.iter().filter(|stock| !stock.give_back.is_empty());
        let stocks = given_back.map(|stock| stock.table.clone());
        let also = self.also.iter().filter_map(|also| predicate::changed_table(&also.sql));
        std::iter::once(self.table.clone()).chain(stocks).chain(also).collect()
    }

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
        self.validate_money()?;
        let changes = [("close", self.close.columns()), ("closing", self.closing.as_ref()), ("pay", self.pay.as_ref())];
        for (name, columns) in changes {
            if columns.is_some_and(BTreeMap::is_empty) {
                let why = "is empty; write the columns that it changes, such as { status = \"closed\" }";
                return Err((name.into(), why.into()));
            }
        }
        self.validate_payments()?;
        if let Some(attempts) = &self.attempts {
            attempts.validate(self.id.0.len()).map_err(|(name, why)| (format!("attempts.{name}"), why))?;
        }
        for (index, stock) in self.stock.iter().enumerate() {
            stock.validate(self.id.0.len()).map_err(|(name, why)| (format!("stock[{index}].{name}"), why))?;
            let earlier = &self.stock[..index];
            if earlier.iter().any(|other| other.table == stock.table) {
                let why = format!(
                    "names {} a second time, and one statement changes a row only once; make a view of both kinds of items and name it in one entry",
                    stock.table
                );
                return Err((format!("stock[{index}].table"), why));
            }
        }
        self.validate_reopening()?;
        for (index, also) in self.also.iter().enumerate() {
            let name = format!("also[{index}].sql");
            require_text(&name, &also.sql)?;
            if let Some(why) = predicate::why_not_one_statement(&also.sql) {
                return Err((name, why.into()));
            }
        }
        Ok(())
    }

    /// What says nothing without `pay`.
    fn validate_payments(&self) -> Result<(), Fault> {
        for (column, value) in self.closing.iter().flatten() {
            let ends = [("close", self.close.columns()), ("pay", self.pay.as_ref())];
            let is_left = |set: &BTreeMap<String, String>| set.get(column).is_none_or(|end| end == value);
            if let Some((name, _)) = ends.into_iter().find(|(_, set)| set.is_some_and(is_left)) {
                let why = format!(
                    "is not overwritten by {name}, so an order that has ended would still be closing; set the column there to another value"
                );
                return Err((format!("closing.{column}"), why));
            }
        }
        let mut alone = vec![
            ("closing".to_owned(), self.closing.is_some()),
            ("reopen".to_owned(), self.reopen.is_some()),
            ("attempts".to_owned(), self.attempts.is_some()),
        ];
        alone.extend(
            self.stock
                .iter()
                .enumerate()
                .map(|(index, stock)| (format!("stock[{index}].consume"), !stock.consume.is_empty())),
        );
        match alone.into_iter().find(|(_, is_given)| *is_given && self.pay.is_none()) {
            Some((name, _)) => Err((
                name,
                "is given without pay; write what a paid order's columns are set to, or leave it out".into(),
            )),
            None => Ok(()),
        }
    }

    /// What a close has given back must be taken again.
    fn validate_reopening(&self) -> Result<(), Fault> {
        if self.reopen.is_some() && self.close.columns().is_none() {
            let why =
                "is given, but close = \"delete\" leaves no row to reopen; leave it out, and late money is given back";
            return Err(("reopen".into(), why.into()));
        }
        for (index, stock) in self.stock.iter().enumerate() {
            let (name, why) = match (self.reopen.is_some(), stock.take.is_empty()) {
                (true, true) if !stock.give_back.is_empty() => (
                    "take",
                    "is not given, but reopen is, and the close gives this stock back; write how it is taken again, such as take = { reserved = \"reserved + quantity\" }",
                ),
                (false, false) => (
                    "take",
                    "is given without reopen; write what a reopened order's columns are set to, or leave it out",
                ),
                _ => continue,
            };
            return Err((format!("stock[{index}].{name}"), why.into()));
        }
        Ok(())
    }

    /// An amount means nothing without its currency.
    fn validate_money(&self) -> Result<(), Fault> {
        let Some(amount) = &self.amount else {
            let alone = [("currency", self.currency.is_some()), ("minor_units", self.minor_units.is_some())];
            return match alone.into_iter().find(|(_, is_given)| *is_given) {
                Some((name, _)) => Err((name.into(), NO_AMOUNT.into())),
                None => Ok(()),
            };
        };
        let Some(currency) = &self.currency else {
            let why = "is given without currency; write currency = \"'EUR'\", or name the column that has it";
            return Err(("amount".into(), why.into()));
        };
        require_expression("amount", amount)?;
        require_expression("currency", currency)?;
        match self.minor_units {
            Some(digits) if digits > MOST_MINOR_UNITS => Err((
                "minor_units".into(),
                format!("is {digits}; a currency has 0 to {MOST_MINOR_UNITS} decimal places, most have 2"),
            )),
            _ => Ok(()),
        }
    }
}

const NO_AMOUNT: &str =
    "is given without amount; write what an order costs, such as amount = \"total\", or leave it out";
/// Decimal places of the finest currency (ISO 4217).
const MOST_MINOR_UNITS: u8 = 4;

/// Why `open` and `paid` may hold none.
const SUBQUERY: &str = "has a subquery, which reads what was committed before the order's row was locked, so that a payment in the same instant would be missed; let a payment update a column of the order's row and test that, or call a VOLATILE function in plpgsql, or write orders.close_sql";

impl StockSettings {
    fn validate(&self, id_columns: usize) -> Result<(), Fault> {
        require_text("items", &self.items)?;
        require_names("order", &self.order, Some((id_columns, "id")))?;
        require_names("key", &self.key, None)?;
        require_expression("quantity", &self.quantity)?;
        require_text("table", &self.table)?;
        require_names("stock_key", &self.stock_key, Some((self.key.0.len(), "key")))?;
        if self.changes().iter().all(|(_, changes)| changes.is_empty()) {
            let why = "is not given, nor are consume and take, so nothing changes this stock; write what gives it back, such as give_back = { reserved = \"reserved - quantity\" }, or leave the entry out";
            return Err(("give_back".into(), why.into()));
        }
        for (name, changes) in self.changes() {
            for (column, expression) in changes {
                require_expression(&format!("{name}.{column}"), expression)?;
            }
        }
        match (self.take.is_empty(), &self.left) {
            (false, None) => {
                let why = "is not given, but take is; write how many of a row can be taken, such as left = \"available\", so that a lack is refused";
                Err(("left".into(), why.into()))
            }
            (true, Some(_)) => {
                Err(("left".into(), "is given without take; write how stock is taken again, or leave it out".into()))
            }
            (false, Some(left)) => require_expression("left", left),
            (true, None) => Ok(()),
        }
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

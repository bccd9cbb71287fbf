//! What is wrong with a deployment: a cause, and one sentence each for what it is, why it matters and how to fix it.
//!
//! Pure. A worker's `/readyz`, `order-timeout doctor`, `setup` and the page all print problems; none of them reads what
//! another has printed.

use serde::{Deserialize, Serialize};

use crate::kind::Kind;

macro_rules! causes {
    ($($(#[$doc:meta])* $name:ident = $word:literal: $why:literal,)*) => {
        /// Why something is wrong. The word is the metric's label, and appears in `/readyz`, in the log and in reports.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        pub enum Cause {
            $($(#[$doc])* #[serde(rename = $word)] $name,)*
        }

        impl Cause {
            /// All causes, in the order of reports.
            pub const ALL: [Self; [$($word),*].len()] = [$(Self::$name),*];

            /// The word in metrics and reports.
            #[must_use]
            pub const fn as_str(self) -> &'static str {
                match self {
                    $(Self::$name => $word,)*
                }
            }

            /// What happens to orders because of it.
            #[must_use]
            pub const fn why(self) -> &'static str {
                match self {
                    $(Self::$name => $why,)*
                }
            }
        }
    };
}

causes! {
    /// The worker starts, stops, or waits because nothing could be settled.
    Worker = "worker": "it takes no alarm meanwhile; other workers do",
    /// A loop makes no progress.
    Stalled = "stalled": "what that loop does is not done; a restart ends it",
    /// A file with a secret can be written by every user of the machine.
    SecretFiles = "secret_files": "a program of another user could lead the worker to other servers, or read its pages and keys",
    /// The database cannot be used.
    Database = "database": "without the database nothing is closed",
    /// A pooler shares sessions.
    DatabasePooler = "database_pooler": "the worker's locks, timeouts and prepared statements belong to a session, so it does not start",
    /// The server's version is not supported.
    DatabaseVersion = "database_version": "our statements use what later versions have",
    /// The database has too few connections left for a worker.
    DatabaseConnections = "database_connections": "a worker that is replaced by a new one, or that reconnects after an outage, finds none and closes nothing",
    /// Tables, columns, indexes, constraints or migrations that a guarantee depends on are missing.
    Schema = "schema": "a guarantee depends on it: a statement fails, orders are closed twice or early, or overdue ones are found slowly",
    /// The database accepts no writes.
    ReadOnly = "read_only": "orders stay open until it accepts writes",
    /// The worker's role lacks a right, or row security hides rows from it.
    DatabaseRights = "database_rights": "what a statement may not read or write is not closed, not sent or not parked",
    /// A deadline in the message and one in the row differ by whole quarter hours, or the zone of the rows is assumed.
    TimeZone = "time_zone": "deadlines in a column of type timestamp are hours off if two zones differ",
    /// The statements on the orders cannot be used, contradict each other, or return something outside the contract.
    OrdersContract = "orders_contract": "a worker does not start, or does not close these orders",
    /// The query for overdue orders reads the whole table.
    SlowOverdueQuery = "slow_overdue_query": "four times a second it costs the database as much as the table is large, and ends at database.statement_timeout; then there is no safety net",
    /// Workers may not close the orders that are overdue already.
    FirstBacklog = "first_backlog": "a worker refuses to start, so that old orders are not closed by surprise",
    /// No worker runs.
    NoWorker = "no_worker": "without a worker no order is closed",
    /// Closing is paused.
    ClosingPaused = "closing_paused": "no order of it is closed until closing is resumed; alarms wait in the broker, and workers read no queue",
    /// Orders stay overdue although workers run.
    OrdersOverdue = "orders_overdue": "they are not closed, and their stock is not given back",
    /// No live worker serves a kind that the settings name.
    KindNotServed = "kind_not_served": "its alarms wait in their queue and its deadlines pass",
    /// Workers on this database run with settings that contradict one another.
    WorkersDisagree = "workers_disagree": "a publisher or worker writes alarms where another does not look for them, or takes them for another deadline",
    /// A kind of this worker could not start; its start is tried again while the others run.
    KindNotStarted = "kind_not_started": "no order of it is closed",
    /// Reminders cannot be announced.
    Reminders = "reminders": "they are tried again each second; one whose order is due first is left out",
    /// An outbox cannot be read or written.
    OutboxUnreadable = "outbox_unreadable": "its rows are not sent, and how many wait is not known",
    /// Rows of an outbox are not sent.
    RelayStalled = "relay_stalled": "alarms are not armed, so the sweep closes their orders late, and the shop does not learn of closed orders",
    /// A queue bound to the events' exchange, or the webhook, refuses events.
    EventsRefused = "events_refused": "the shop does not learn that orders were closed",
    /// Alarms are parked.
    ParkedAlarms = "parked_alarms": "each could not be handled; its order is closed by the sweep, or there is no such order",
    /// A payment provider is not asked, because its last calls failed, too many wait, or no live worker has it.
    ProviderAway = "provider_away": "its orders stay unclosed, with their stock reserved",
    /// The broker cannot be used.
    Broker = "broker": "no alarm arrives; workers read deadlines from the database meanwhile, and events wait",
    /// The broker's version cannot do what the strategy needs.
    BrokerVersion = "broker_version": "alarms may be lost between two queues, or cannot be scheduled",
    /// The broker's user may not declare or look at our objects.
    BrokerRights = "broker_rights": "a worker cannot compare its queues, and declares none again that was deleted",
    /// Exchanges, queues or bindings are missing or have other arguments.
    Topology = "topology": "alarms or events that are published there are returned or lost",
    /// One of our exchanges has an alternate exchange, which takes unroutable alarms.
    AlternateExchange = "alternate_exchange": "if a queue or binding is missing, alarms go there silently, and their publisher is told that they are scheduled",
    /// Alarms that were due did not arrive; the sweep closes their orders.
    AlarmsNotArriving = "alarms_not_arriving": "the sweep closes the orders of these alarms, late by sweep.grace and more",
    /// Another consumer takes our messages.
    ForeignConsumers = "foreign_consumers": "they take alarms, and the sweep closes those orders late",
    /// A broker policy expires or drops alarms in our queues, or ends sessions.
    BrokerPolicy = "broker_policy": "alarms expire, are dropped or go elsewhere, and the sweep closes their orders late",
    /// The broker returns alarms more often than the wheel needs.
    AlarmsCirculate = "alarms_circulate": "they cost the broker work; no order is late because of it",
    /// A queue holds a message that ends every session.
    UnreadableMessage = "unreadable_message": "it ends each session that it is delivered to; workers read deadlines from the database meanwhile",
}

impl Cause {
    /// What to do about it where the problem itself does not say, for the person on call.
    #[must_use]
    pub fn remedy(self) -> String {
        match self {
            Self::Database => "Start the database, or correct `database.url`. No order is closed until then and none is lost: what is due is closed as soon as the database is back.".to_owned(),
            Self::Broker => "Start the broker, or correct `amqp.url`. Until then workers read deadlines from the database, so orders are closed on time; events wait.".to_owned(),
            Self::ProviderAway => "Check that the payment provider answers, and its settings. It is asked again by itself; its orders stay unclosed until then, with their stock reserved.".to_owned(),
            Self::ClosingPaused => "Remove the cause for which closing was paused, then `order-timeout resume --who NAME --why TEXT`.".to_owned(),
            Self::NoWorker => "Start one: `order-timeout worker`.".to_owned(),
            Self::Worker | Self::Stalled => "Wait; if it lasts, read the worker's log and restart it.".to_owned(),
            cause => format!("See docs/operating/troubleshoot.md, \"Degraded\", about `{}`.", cause.as_str()),
        }
    }
}

/// Something that is wrong.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Problem {
    /// Its name.
    pub cause: Cause,
    /// The kind that it is about; `None` for all of a deployment.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kind: Option<Kind>,
    /// One sentence without a full stop.
    pub what: String,
    /// What happens to orders because of it.
    pub why: String,
    /// A command, a statement or a setting.
    pub fix: String,
}

impl Problem {
    /// With what the cause says about orders.
    #[must_use]
    pub fn new(cause: Cause, what: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { cause, kind: None, what: what.into(), why: cause.why().to_owned(), fix: fix.into() }
    }

    /// One whose sentence says by itself what to do, or whose cause does.
    #[must_use]
    pub fn described(cause: Cause, what: impl Into<String>) -> Self {
        Self::new(cause, what, cause.remedy())
    }

    /// Because of something more particular than the cause says.
    #[must_use]
    pub fn because(self, why: impl Into<String>) -> Self {
        Self { why: why.into(), ..self }
    }

    /// About this kind.
    #[must_use]
    pub fn of_kind(self, kind: Option<&Kind>) -> Self {
        Self { kind: kind.cloned(), ..self }
    }

    /// What is wrong, as a line of `/readyz` begins.
    #[must_use]
    pub fn title(&self) -> String {
        self.titled(&self.what)
    }

    /// A line of `/readyz`.
    #[must_use]
    pub fn line(&self) -> String {
        self.titled(&self.sentence())
    }

    fn titled(&self, text: &str) -> String {
        let kind = self.kind.iter().map(|kind| format!("kind {kind}: ")).collect::<String>();
        let word = self.cause.as_str();
        match self.cause {
            Cause::Worker | Cause::Database | Cause::Broker => format!("{kind}{word}: {text}"),
            Cause::Stalled | Cause::ClosingPaused => format!("{kind}{text}"),
            _ => format!("degraded: {word}: {kind}{text}"),
        }
    }

    /// What is wrong and how to fix it, in one sentence. The remedy of a cause is left out.
    #[must_use]
    pub fn sentence(&self) -> String {
        if self.fix == self.cause.remedy() { self.what.clone() } else { format!("{}: {}", self.what, self.fix) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sentence_has_fix_of_its_own() {
        assert_eq!(Problem::new(Cause::Schema, "no index", "CREATE INDEX").sentence(), "no index: CREATE INDEX");
        let described = Problem::described(Cause::Database, "connection refused");
        assert_eq!(described.sentence(), "connection refused");
        assert!(described.fix.contains("Start the database"));
        assert!(Problem::described(Cause::Topology, "a queue is missing").fix.contains("about `topology`"));
    }

    #[test]
    fn words_name_one_cause_each() {
        let words: std::collections::BTreeSet<_> = Cause::ALL.iter().map(|cause| cause.as_str()).collect();
        assert_eq!(words.len(), Cause::ALL.len());
    }
}

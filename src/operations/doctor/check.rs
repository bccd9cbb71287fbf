//! The checks by name, and what each has found.
//!
//! Pure: no check is made here.

use serde::Serialize;

macro_rules! check_names {
    ($($(#[$doc:meta])* $name:ident = $word:literal,)*) => {
        /// What is checked. The word is the name in reports and in `docs/operating/doctor.md`.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
        pub enum CheckName {
            $($(#[$doc])* #[serde(rename = $word)] $name,)*
        }

        impl CheckName {
            /// All of them, in the order of reports.
            pub const ALL: [Self; [$($word),*].len()] = [$(Self::$name),*];

            /// The word in reports.
            #[must_use]
            pub const fn as_str(self) -> &'static str {
                match self {
                    $(Self::$name => $word,)*
                }
            }
        }
    };
}

check_names! {
    /// A connection to the database can be opened.
    DatabaseReachable = "database_reachable",
    /// No pooler shares sessions.
    DatabasePooler = "database_pooler",
    /// The connection to another machine is encrypted, and the server verified.
    DatabaseTls = "database_tls",
    /// The password is not publicly known.
    DatabasePassword = "database_password",
    /// The server's version is supported.
    DatabaseVersion = "database_version",
    /// The database accepts writes.
    DatabaseWritable = "database_writable",
    /// Commits survive a crash of the server.
    DatabaseDurability = "database_durability",
    /// The schema has every migration.
    SchemaMigrated = "schema_migrated",
    /// Tables, columns, indexes and constraints are there.
    SchemaComplete = "schema_complete",
    /// No table loses its rows in a crash.
    SchemaLogged = "schema_logged",
    /// The role has the rights that a worker needs, and row security hides nothing from it.
    RoleRights = "role_rights",
    /// The role has no rights that no worker needs.
    RoleLeastPrivilege = "role_least_privilege",
    /// The database has connections left for a worker.
    DatabaseConnections = "database_connections",
    /// Dead rows are removed.
    Vacuum = "vacuum",
    /// Transaction ids are far from their end.
    TransactionIds = "transaction_ids",
    /// No transaction is open for minutes.
    LongTransactions = "long_transactions",
    /// It is known in which time zone deadlines without a zone are read.
    TimeZone = "time_zone",
    /// The database's clock and this machine's agree.
    DatabaseClock = "database_clock",
    /// The statements on the orders fit their table.
    OrdersStatements = "orders_statements",
    /// The statement that finds overdue orders uses an index.
    OverduePlan = "overdue_plan",
    /// Workers may close the orders that are overdue already.
    FirstBacklog = "first_backlog",
    /// A worker runs where orders are overdue.
    WorkersAlive = "workers_alive",
    /// No order stays overdue although workers run.
    OrdersOverdue = "orders_overdue",
    /// Every kind has a worker.
    KindsServed = "kinds_served",
    /// Workers and this configuration agree on lanes, lead, shards and rings.
    WorkersAgree = "workers_agree",
    /// Alarms leave their outbox.
    AlarmOutbox = "alarm_outbox",
    /// Events leave their outbox.
    EventOutbox = "event_outbox",
    /// No alarm is parked.
    ParkedAlarms = "parked_alarms",
    /// Alarms close the orders, not the sweep.
    ClosesBySweep = "closes_by_sweep",
    /// Payment providers accept the keys, and know the payments.
    Providers = "providers",
    /// A connection to the broker can be opened.
    BrokerReachable = "broker_reachable",
    /// The connection to another machine is encrypted.
    BrokerTls = "broker_tls",
    /// The password is not publicly known.
    BrokerPassword = "broker_password",
    /// The broker's version can do what the strategy needs.
    BrokerVersion = "broker_version",
    /// The user may declare and look at our objects.
    BrokerRights = "broker_rights",
    /// Exchanges and queues are there.
    TopologyComplete = "topology_complete",
    /// Their other arguments are ours.
    TopologyArguments = "topology_arguments",
    /// All queues are quorum queues.
    QueueType = "queue_type",
    /// Dead letters leave a queue when the next one has confirmed them.
    DeadLettering = "dead_lettering",
    /// No exchange has an alternate exchange.
    AlternateExchange = "alternate_exchange",
    /// Workers read every processing queue.
    QueuesRead = "queues_read",
    /// No other consumer takes our messages.
    ForeignConsumers = "foreign_consumers",
    /// The first message of each delay queue leaves it in time.
    DelayQueues = "delay_queues",
    /// Bindings are there.
    TopologyBindings = "topology_bindings",
    /// No policy changes our queues.
    Policies = "policies",
    /// The broker waits long enough for acknowledgements.
    ConsumerTimeout = "consumer_timeout",
    /// The broker has memory, disk and file descriptors left.
    BrokerResources = "broker_resources",
    /// Feature flags that at-least-once dead-lettering needs are enabled.
    FeatureFlags = "feature_flags",
    /// The broker's clock and this machine's agree.
    BrokerClock = "broker_clock",
}

/// What is wrong, why it matters, and what to do.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// One sentence without a full stop.
    pub what: String,
    /// What happens to orders because of it.
    pub why: String,
    /// A command, a statement or a setting.
    pub fix: String,
}

/// The result of a check.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "status", rename_all = "snake_case")]
pub enum Verdict {
    /// Nothing is wrong.
    Ok {
        /// The fact, if it is worth knowing.
        #[serde(skip_serializing_if = "Option::is_none")]
        what: Option<String>,
    },
    /// Orders are closed on time, and something may keep them from it.
    Warning(Finding),
    /// Orders are closed late or not at all, or money or messages may be lost.
    Error(Finding),
    /// It could not be found out.
    NotKnown {
        /// Why not.
        what: String,
    },
}

/// A check and its result.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Check {
    /// Which.
    pub name: CheckName,
    /// What it has found.
    #[serde(flatten)]
    pub verdict: Verdict,
}

/// All results.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Report {
    /// In the order of [`CheckName::ALL`]. A check that has found several things is there several times.
    pub checks: Vec<Check>,
}

impl Report {
    /// What is wrong.
    pub fn findings(&self) -> impl Iterator<Item = (CheckName, &Finding)> {
        self.checks.iter().filter_map(|check| match &check.verdict {
            Verdict::Warning(finding) | Verdict::Error(finding) => Some((check.name, finding)),
            Verdict::Ok { .. } | Verdict::NotKnown { .. } => None,
        })
    }

    /// 2 if there is an error, 1 if there is a warning, otherwise 0.
    #[must_use]
    pub fn exit_code(&self) -> u8 {
        let code = |check: &Check| match check.verdict {
            Verdict::Ok { .. } | Verdict::NotKnown { .. } => 0,
            Verdict::Warning(_) => 1,
            Verdict::Error(_) => 2,
        };
        self.checks.iter().map(code).max().unwrap_or(0)
    }
}

/// Collects results. A check without one has passed.
#[derive(Debug, Default)]
pub(super) struct Checks(Vec<Check>);

impl Checks {
    fn note(&mut self, name: CheckName, verdict: Verdict) {
        self.0.push(Check { name, verdict });
    }

    pub fn fact(&mut self, name: CheckName, what: String) {
        self.note(name, Verdict::Ok { what: Some(what) });
    }

    pub fn warning(&mut self, name: CheckName, finding: Finding) {
        self.note(name, Verdict::Warning(finding));
    }

    pub fn error(&mut self, name: CheckName, finding: Finding) {
        self.note(name, Verdict::Error(finding));
    }

    pub fn not_known(&mut self, name: CheckName, why: impl Into<String>) {
        self.note(name, Verdict::NotKnown { what: why.into() });
    }

    /// None of these could be made, for the same reason.
    pub fn skip(&mut self, names: &[CheckName], why: &str) {
        names.iter().for_each(|name| self.not_known(*name, why));
    }

    /// A later look says more.
    pub fn forget(&mut self, name: CheckName) {
        self.0.retain(|check| check.name != name);
    }

    /// Whether this check has found something.
    pub fn has_finding(&self, name: CheckName) -> bool {
        self.0
            .iter()
            .any(|check| check.name == name && matches!(check.verdict, Verdict::Warning(_) | Verdict::Error(_)))
    }

    /// The report on these checks. What was found counts more than what is not known.
    pub fn report(mut self, made: &[CheckName]) -> Report {
        for name in made {
            if !self.0.iter().any(|check| check.name == *name) {
                self.note(*name, Verdict::Ok { what: None });
            }
        }
        let is_finding = |check: &Check| matches!(check.verdict, Verdict::Warning(_) | Verdict::Error(_));
        let found: Vec<CheckName> = self.0.iter().filter(|check| is_finding(check)).map(|check| check.name).collect();
        self.0.retain(|check| is_finding(check) || !found.contains(&check.name));
        self.0.sort_by_key(|check| check.name);
        Report { checks: self.0 }
    }
}

impl Finding {
    pub(super) fn new(what: impl Into<String>, why: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { what: what.into(), why: why.into(), fix: fix.into() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn worst_finding_is_exit_code() {
        let finding = || Finding::new("a", "b", "c");
        let mut checks = Checks::default();
        checks.not_known(CheckName::Vacuum, "no rights");
        let report = |checks: Checks| checks.report(&CheckName::ALL);
        assert_eq!(report(Checks(checks.0.clone())).exit_code(), 0);
        checks.warning(CheckName::Vacuum, finding());
        assert_eq!(report(Checks(checks.0.clone())).exit_code(), 1);
        checks.error(CheckName::DatabaseTls, finding());
        let report = report(checks);
        assert_eq!(report.exit_code(), 2);
        assert_eq!(report.checks.len(), CheckName::ALL.len(), "a finding replaces what is not known");
        assert_eq!(
            report.findings().map(|(name, _)| name).collect::<Vec<_>>(),
            [CheckName::DatabaseTls, CheckName::Vacuum]
        );
    }
}

//! What the doctor has looked at, and what it has found.
//!
//! Pure: no check is made here.

use order_timeout_core::kind::Kind;
use order_timeout_core::problem::{Cause, Problem};
use serde::{Serialize, Serializer};

/// What the doctor looks at, in the order of reports.
pub const CHECKED: [Cause; 35] = {
    use Cause as C;
    [
        C::SecretFiles,
        C::Database,
        C::DatabasePooler,
        C::DatabaseVersion,
        C::ReadOnly,
        C::Schema,
        C::DatabaseRights,
        C::DatabaseConnections,
        C::TimeZone,
        C::OrdersContract,
        C::SlowOverdueQuery,
        C::FirstBacklog,
        C::NoWorker,
        C::ClosingPaused,
        C::OrdersOverdue,
        C::KindNotStarted,
        C::KindNotServed,
        C::WorkersDisagree,
        C::OutboxUnreadable,
        C::RelayStalled,
        C::EventsRefused,
        C::Reminders,
        C::ParkedAlarms,
        C::ProviderAway,
        C::AlarmsNotArriving,
        C::Broker,
        C::BrokerVersion,
        C::BrokerRights,
        C::Topology,
        C::AlternateExchange,
        C::ForeignConsumers,
        C::BrokerPolicy,
        C::SlotNotConfirming,
        C::AlarmsCirculate,
        C::UnreadableMessage,
    ]
};

/// The result of a check.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// Nothing is wrong.
    Ok {
        /// The fact, if it is worth knowing.
        what: Option<String>,
    },
    /// Orders are closed on time, and something may keep them from it.
    Warning(Problem),
    /// Orders are closed late or not at all, or money or messages may be lost.
    Error(Problem),
    /// It could not be found out.
    NotKnown {
        /// Why not.
        what: String,
    },
}

/// A check and its result.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Check {
    /// What was looked for.
    pub cause: Cause,
    /// What was found.
    pub verdict: Verdict,
}

impl Check {
    /// What is wrong.
    #[must_use]
    pub const fn problem(&self) -> Option<&Problem> {
        match &self.verdict {
            Verdict::Warning(problem) | Verdict::Error(problem) => Some(problem),
            Verdict::Ok { .. } | Verdict::NotKnown { .. } => None,
        }
    }
}

/// One object: `why`, `fix` and `kind` are a problem's.
impl Serialize for Check {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        #[derive(Serialize)]
        struct Row<'a> {
            cause: Cause,
            status: &'static str,
            #[serde(skip_serializing_if = "Option::is_none")]
            kind: Option<&'a Kind>,
            #[serde(skip_serializing_if = "Option::is_none")]
            what: Option<&'a str>,
            #[serde(skip_serializing_if = "Option::is_none")]
            why: Option<&'a str>,
            #[serde(skip_serializing_if = "Option::is_none")]
            fix: Option<&'a str>,
        }
        let (status, what) = match &self.verdict {
            Verdict::Ok { what } => ("ok", what.as_deref()),
            Verdict::Warning(problem) => ("warning", Some(&*problem.what)),
            Verdict::Error(problem) => ("error", Some(&*problem.what)),
            Verdict::NotKnown { what } => ("not_known", Some(&**what)),
        };
        let problem = self.problem();
        let (why, fix) = (problem.map(|problem| &*problem.why), problem.map(|problem| &*problem.fix));
        let kind = problem.and_then(|problem| problem.kind.as_ref());
        Row { cause: self.cause, status, kind, what, why, fix }.serialize(to)
    }
}

/// All results.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Report {
    /// In the order of [`CHECKED`]. A check that has found several things is there several times.
    pub checks: Vec<Check>,
}

impl Report {
    /// What is wrong.
    pub fn problems(&self) -> impl Iterator<Item = &Problem> {
        self.checks.iter().filter_map(Check::problem)
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
    fn note(&mut self, cause: Cause, verdict: Verdict) {
        self.0.push(Check { cause, verdict });
    }

    pub fn fact(&mut self, cause: Cause, what: String) {
        self.note(cause, Verdict::Ok { what: Some(what) });
    }

    pub fn warning(&mut self, problem: Problem) {
        self.note(problem.cause, Verdict::Warning(problem));
    }

    pub fn error(&mut self, problem: Problem) {
        self.note(problem.cause, Verdict::Error(problem));
    }

    pub fn not_known(&mut self, cause: Cause, why: impl Into<String>) {
        self.note(cause, Verdict::NotKnown { what: why.into() });
    }

    /// None of these could be made, for the same reason.
    pub fn skip(&mut self, causes: &[Cause], why: &str) {
        causes.iter().for_each(|cause| self.not_known(*cause, why));
    }

    /// A later look says more.
    pub fn forget(&mut self, cause: Cause) {
        self.0.retain(|check| check.cause != cause);
    }

    /// Whether this was found.
    pub fn has_found(&self, cause: Cause) -> bool {
        self.0.iter().any(|check| check.cause == cause && check.problem().is_some())
    }

    /// The report on these checks. What was found counts more than what is not known; what was not to be looked at is left out.
    pub fn report(mut self, made: &[Cause]) -> Report {
        self.0.retain(|check| made.contains(&check.cause) || !matches!(check.verdict, Verdict::NotKnown { .. }));
        for cause in made {
            if !self.0.iter().any(|check| check.cause == *cause) {
                self.note(*cause, Verdict::Ok { what: None });
            }
        }
        let found: Vec<Cause> = self.0.iter().filter_map(Check::problem).map(|problem| problem.cause).collect();
        self.0.retain(|check| check.problem().is_some() || !found.contains(&check.cause));
        self.0.sort_by_key(|check| CHECKED.iter().position(|cause| *cause == check.cause));
        Report { checks: self.0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn worst_problem_is_exit_code() {
        let mut checks = Checks::default();
        checks.not_known(Cause::SlowOverdueQuery, "no answer");
        let report = |checks: &Checks| Checks(checks.0.clone()).report(&CHECKED);
        assert_eq!(report(&checks).exit_code(), 0);
        checks.warning(Problem::new(Cause::SlowOverdueQuery, "a", "b"));
        assert_eq!(report(&checks).exit_code(), 1);
        checks.error(Problem::new(Cause::DatabasePooler, "a", "b"));
        let report = report(&checks);
        assert_eq!(report.exit_code(), 2);
        assert_eq!(report.checks.len(), CHECKED.len(), "a problem replaces what is not known");
        let found: Vec<Cause> = report.problems().map(|problem| problem.cause).collect();
        assert_eq!(found, [Cause::DatabasePooler, Cause::SlowOverdueQuery]);
    }

    #[test]
    fn check_is_one_object() {
        let verdict = Verdict::Error(Problem::new(Cause::Schema, "no index", "CREATE INDEX"));
        let check = serde_json::to_value(Check { cause: Cause::Schema, verdict }).unwrap();
        let why = Cause::Schema.why();
        let wanted = serde_json::json!(
            {"cause": "schema", "status": "error", "what": "no index", "why": why, "fix": "CREATE INDEX"}
        );
        assert_eq!(check, wanted);
    }
}

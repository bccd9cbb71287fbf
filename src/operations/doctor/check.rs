//! What the doctor has looked at, and what it has found.
//!
//! Pure: no check is made here.

use std::ops::RangeBounds;

use order_timeout_core::problem::{Cause, Problem};
use serde::Serialize;

/// What the doctor looks at, in the order of reports: all but what a worker says of itself.
pub const CHECKED: &[Cause] = Cause::ALL.split_at(2).1;

/// A check and its result: one object, with the fields of a problem.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "status", rename_all = "snake_case")]
pub enum Check {
    /// Nothing is wrong.
    Ok {
        /// What was looked for.
        cause: Cause,
        /// The fact, if it is worth knowing.
        #[serde(skip_serializing_if = "Option::is_none")]
        what: Option<String>,
    },
    /// Orders are closed on time, and something may keep them from it.
    Warning(Problem),
    /// Orders are closed late or not at all, or money or messages may be lost.
    Error(Problem),
    /// It could not be found out.
    NotKnown {
        /// What was looked for.
        cause: Cause,
        /// Why that is not known.
        what: String,
    },
}

impl Check {
    /// What was looked for.
    #[must_use]
    pub const fn cause(&self) -> Cause {
        match self {
            Self::Ok { cause, .. } | Self::NotKnown { cause, .. } => *cause,
            Self::Warning(problem) | Self::Error(problem) => problem.cause,
        }
    }

    /// What is wrong.
    #[must_use]
    pub const fn problem(&self) -> Option<&Problem> {
        match self {
            Self::Warning(problem) | Self::Error(problem) => Some(problem),
            Self::Ok { .. } | Self::NotKnown { .. } => None,
        }
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
        let code = |check: &Check| match check {
            Check::Ok { .. } | Check::NotKnown { .. } => 0,
            Check::Warning(_) => 1,
            Check::Error(_) => 2,
        };
        self.checks.iter().map(code).max().unwrap_or(0)
    }
}

/// Collects results. A check without one has passed.
#[derive(Debug, Default)]
pub(super) struct Checks(Vec<Check>);

impl Checks {
    pub fn fact(&mut self, cause: Cause, what: String) {
        self.0.push(Check::Ok { cause, what: Some(what) });
    }

    pub fn warning(&mut self, problem: Problem) {
        self.0.push(Check::Warning(problem));
    }

    pub fn error(&mut self, problem: Problem) {
        self.0.push(Check::Error(problem));
    }

    pub fn not_known(&mut self, cause: Cause, why: impl Into<String>) {
        self.0.push(Check::NotKnown { cause, what: why.into() });
    }

    /// None of these could be made, for the same reason.
    pub fn skip(&mut self, causes: impl RangeBounds<Cause>, why: &str) {
        CHECKED.iter().filter(|cause| causes.contains(cause)).for_each(|cause| self.not_known(*cause, why));
    }

    /// A later look says more.
    pub fn forget(&mut self, cause: Cause) {
        self.0.retain(|check| check.cause() != cause);
    }

    /// Whether this was found.
    pub fn has_found(&self, cause: Cause) -> bool {
        self.0.iter().filter_map(Check::problem).any(|problem| problem.cause == cause)
    }

    /// The report on these checks. What was found counts more than what is not known; what was not to be looked at is left out.
    pub fn report(mut self, made: &[Cause]) -> Report {
        self.0.retain(|check| made.contains(&check.cause()) || !matches!(check, Check::NotKnown { .. }));
        for cause in made {
            if !self.0.iter().any(|check| check.cause() == *cause) {
                self.0.push(Check::Ok { cause: *cause, what: None });
            }
        }
        let found: Vec<Cause> = self.0.iter().filter_map(Check::problem).map(|problem| problem.cause).collect();
        self.0.retain(|check| check.problem().is_some() || !found.contains(&check.cause()));
        self.0.sort_by_key(Check::cause);
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
        let report = |checks: &Checks| Checks(checks.0.clone()).report(CHECKED);
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
        let check = Check::Error(Problem::new(Cause::Schema, "no index", "CREATE INDEX"));
        let check = serde_json::to_value(check).unwrap();
        let why = Cause::Schema.why();
        let wanted = serde_json::json!(
            {"cause": "schema", "status": "error", "what": "no index", "why": why, "fix": "CREATE INDEX"}
        );
        assert_eq!(check, wanted);
    }
}

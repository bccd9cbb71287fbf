//! `doctor`: looks at everything that closing orders on time depends on, and says what is wrong, why it matters and how
//! to fix it.
//!
//! Changes nothing. `check.rs` has the checks by name. The others each read
//! from one place and judge what they read by functions without I/O.

mod addresses;
mod broker;
mod check;
mod clocks;
mod database;
mod management;
mod orders;
mod providers;
mod server;
mod workers;

use std::time::Duration;

use check::Checks;
pub use check::{Check, CheckName, Finding, Report, Verdict};
pub use management::ManagementAddress;

use crate::config::Settings;

/// What is to be looked at besides what is always looked at.
#[derive(Debug, Clone)]
pub struct Options {
    /// The broker's management API.
    pub management: Option<ManagementAddress>,
    /// A transaction that is open for longer is a finding.
    pub long_transaction: Duration,
}

/// The default of [`Options::long_transaction`].
pub const LONG_TRANSACTION: Duration = Duration::from_secs(300);

impl Default for Options {
    fn default() -> Self {
        Self { management: None, long_transaction: LONG_TRANSACTION }
    }
}

/// Makes all checks. A server that does not answer is a finding, not an error.
pub async fn examine(settings: &Settings, options: &Options) -> Report {
    let mut checks = Checks::default();
    addresses::examine(settings, &mut checks);
    let database = database::examine(settings, options, &mut checks).await;
    let workers = match &database {
        Some(database) => workers::examine(settings, database, &mut checks).await,
        None => None,
    };
    providers::examine(settings, database.as_ref(), &mut checks).await;
    if !settings.delay.strategy.needs_broker() {
        return checks.report(&OF_DATABASE);
    }
    broker::examine(settings, options, database.as_ref(), workers.as_deref(), &mut checks).await;
    checks.report(&CheckName::ALL)
}

/// The checks of a deployment without a broker.
const OF_DATABASE: [CheckName; 30] = {
    let mut names = [CheckName::DatabaseReachable; 30];
    let mut at = 0;
    while at < names.len() {
        names[at] = CheckName::ALL[at];
        at += 1;
    }
    names
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checks_without_broker_come_first() {
        assert_eq!(OF_DATABASE[29], CheckName::Providers);
        assert_eq!(CheckName::ALL[30], CheckName::BrokerReachable);
    }
}

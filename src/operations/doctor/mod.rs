//! `doctor`: looks at everything that closing orders on time depends on, and says what is wrong, why it matters and how
//! to fix it.
//!
//! Changes nothing. `check.rs` has the checks. The others each read
//! from one place and judge what they read by functions without I/O.

mod broker;
mod check;
mod database;
mod management;
mod orders;
mod providers;
mod server;
mod workers;

use check::Checks;
pub use check::{CHECKED, Check, Report, Verdict};
pub use management::ManagementAddress;
use order_timeout_core::problem::Cause;

use crate::config::Settings;

/// What is to be looked at besides what is always looked at.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// The broker's management API.
    pub management: Option<ManagementAddress>,
}

/// Makes all checks. A server that does not answer is a finding, not an error.
pub async fn examine(settings: &Settings, options: &Options) -> Report {
    let mut checks = Checks::default();
    settings.writable_secret_files().into_iter().for_each(|problem| checks.warning(problem));
    let database = database::examine(settings, &mut checks).await;
    let workers = match &database {
        Some(database) => workers::examine(settings, database, &mut checks).await,
        None => None,
    };
    providers::examine(settings, database.as_ref(), &mut checks).await;
    if !settings.delay.strategy.needs_broker() {
        let of_database = CHECKED.into_iter().take_while(|cause| *cause != Cause::AlarmsNotArriving);
        return checks.report(&of_database.collect::<Vec<_>>());
    }
    broker::examine(settings, options, database.as_ref(), workers.as_deref(), &mut checks).await;
    checks.report(&CHECKED)
}

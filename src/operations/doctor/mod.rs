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
pub use check::{CHECKED, Check, Report};
pub use management::ManagementAddress;
use order_timeout_core::problem::Cause;

use crate::config::Settings;
use crate::observe::inspect::registration::Registration;

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
    let registration = database.as_ref().map(|database| Registration::new(database.clone(), settings));
    let live = match database.as_ref().zip(registration.as_ref()) {
        Some((database, registration)) => workers::examine(settings, database, registration, &mut checks).await,
        None => None,
    };
    providers::examine(settings, database.as_ref(), &mut checks).await;
    if !settings.delay.strategy.needs_broker() {
        return checks.report(CHECKED.split(|cause| *cause == Cause::Broker).next().unwrap_or_default());
    }
    broker::examine(settings, options, database.as_ref(), registration.zip(live), &mut checks).await;
    checks.report(CHECKED)
}

//! `order-timeout doctor`: what is wrong with the deployment, why it matters and how to fix it, as text or JSON.

use std::time::Duration;

use clap::Args;
use serde_json::json;

use crate::cli::{CommandOutcome, parse_duration};
use crate::config::Settings;
use crate::operations::doctor::{self, Finding, ManagementAddress, Options, Report, Verdict};

/// Arguments of `doctor`.
#[derive(Debug, Args)]
pub struct DoctorArgs {
    /// The broker's management API, as http://user:password@host:15672; without an account, that of amqp.url. Without this,
    /// policies, bindings and the broker's memory are not looked at
    #[arg(long, value_name = "URL")]
    management: Option<ManagementAddress>,
    /// Report transactions that are open for longer
    #[arg(long, value_name = "DURATION", value_parser = parse_duration, default_value = "5m")]
    long_transaction: Duration,
    /// Print one JSON object with every check
    #[arg(long)]
    json: bool,
}

/// # Errors
/// None: a server that cannot be used is a finding.
pub async fn run(args: DoctorArgs, settings: Settings) -> anyhow::Result<CommandOutcome> {
    let DoctorArgs { management, long_transaction, json } = args;
    let report = doctor::examine(&settings, &Options { management, long_transaction }).await;
    let mut outcome = CommandOutcome { code: report.exit_code(), ..CommandOutcome::default() };
    if json {
        outcome.line(json!(report));
    } else {
        write(&report, &mut outcome);
    }
    Ok(outcome)
}

fn write(report: &Report, to: &mut CommandOutcome) {
    let mut passed = 0_usize;
    // Those with the same reason in one line.
    let mut not_known: Vec<(&str, Vec<&str>)> = Vec::new();
    for check in &report.checks {
        let name = check.name.as_str();
        match &check.verdict {
            Verdict::Ok { .. } => passed += 1,
            Verdict::NotKnown { what } => match not_known.iter_mut().find(|(why, _)| why == what) {
                Some((_, names)) => names.push(name),
                None => not_known.push((what, vec![name])),
            },
            Verdict::Warning(finding) => write_finding("warning", name, finding, to),
            Verdict::Error(finding) => write_finding("error", name, finding, to),
        }
    }
    for (why, names) in not_known {
        to.line(format!("not known: {}: {why}", names.join(", ")));
    }
    to.line(format!("{passed} checks passed"));
}

fn write_finding(level: &str, name: &str, Finding { what, why, fix }: &Finding, to: &mut CommandOutcome) {
    to.line(format!("{level}: {name}: {what}"));
    to.indented(format!("why: {why}"));
    to.indented(format!("fix: {fix}"));
}

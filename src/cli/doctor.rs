//! `order-timeout doctor`: what is wrong with the deployment, why it matters and how to fix it, as text or JSON.

use clap::Args;
use order_timeout_core::problem::Problem;

use crate::cli::CommandOutcome;
use crate::config::Settings;
use crate::operations::doctor::{self, Check, ManagementAddress, Options, Report};

/// Arguments of `doctor`.
#[derive(Debug, Args)]
pub struct DoctorArgs {
    /// The broker's management API, as http://user:password@host:15672; without an account, that of amqp.url. Without this,
    /// policies and bindings are not looked at
    #[arg(long, value_name = "URL")]
    management: Option<ManagementAddress>,
    /// Print one JSON object with every check
    #[arg(long)]
    json: bool,
}

/// # Errors
/// None: a server that cannot be used is a finding.
pub async fn run(args: DoctorArgs, settings: Settings) -> anyhow::Result<CommandOutcome> {
    let DoctorArgs { management, json } = args;
    let report = doctor::examine(&settings, &Options { management }).await;
    Ok(CommandOutcome { code: report.exit_code(), ..CommandOutcome::of(&report, json, write) })
}

fn write(report: &Report, to: &mut CommandOutcome) {
    let mut passed = 0_usize;
    // Those with the same reason in one line.
    let mut not_known: Vec<(&str, Vec<&str>)> = Vec::new();
    for check in &report.checks {
        let name = check.cause().as_str();
        match check {
            Check::Ok { what, .. } => {
                passed += 1;
                what.iter().for_each(|what| to.line(format!("ok: {name}: {what}")));
            }
            Check::NotKnown { what, .. } => match not_known.iter_mut().find(|(why, _)| why == what) {
                Some((_, names)) => names.push(name),
                None => not_known.push((what, vec![name])),
            },
            Check::Warning(problem) => write_problem("warning", problem, to),
            Check::Error(problem) => write_problem("error", problem, to),
        }
    }
    for (why, names) in not_known {
        to.line(format!("not known: {}: {why}", names.join(", ")));
    }
    to.line(format!("{passed} checks passed"));
}

fn write_problem(level: &str, Problem { cause, kind, what, why, fix }: &Problem, to: &mut CommandOutcome) {
    let kind = kind.iter().map(|kind| format!("kind {kind}: ")).collect::<String>();
    to.line(format!("{level}: {}: {kind}{what}", cause.as_str()));
    to.indented(format!("why: {why}"));
    to.indented(format!("fix: {fix}"));
}

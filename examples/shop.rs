//! The demo: a shop that takes orders, lets some customers pay (a few of them at the last moment), and watches
//! order-timeout close the rest; then it checks from the database that every promise was kept. Run it by `scripts/demo`.
//!
//! This file is the story; each of the others is one thing the shop has. It is also how to use the library: `till.rs`
//! schedules an alarm for an order, `premises.rs` runs a worker inside another program, `listener.rs` reads the events.

// Not `examples/shop/main.rs`: this is the path people look for, and the one that the Dockerfile names.
#[path = "shop/args.rs"]
mod args;
#[path = "shop/audit.rs"]
mod audit;
#[path = "shop/commit_probe.rs"]
mod commit_probe;
#[path = "shop/listener.rs"]
mod listener;
#[path = "shop/plan.rs"]
mod plan;
#[path = "shop/premises.rs"]
mod premises;
#[path = "shop/progress.rs"]
mod progress;
#[path = "shop/report.rs"]
mod report;
#[path = "shop/till.rs"]
mod till;

use std::io::Write;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use clap::Parser;
use order_timeout::{Settings, logging};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until};

use args::Args;
use audit::Findings;
use commit_probe::CommitProbe;
use listener::Listener;
use plan::Plan;
use premises::Premises;
use progress::Progress;
use report::Report;
use till::{Served, Till};

/// What a shell expects of a program that was interrupted: 128 + SIGINT.
const INTERRUPTED: u8 = 130;
const WRONG_SETTINGS: u8 = 2;
const FAILED: u8 = 1;
/// How long after the last deadline the run waits for what should have happened by then. Lateness is a finding; only
/// what never comes ends here.
const TIMEOUT: Duration = Duration::from_secs(10);
/// How often the run looks whether everything has been decided.
const LOOK_EVERY: Duration = Duration::from_millis(50);

fn main() -> ExitCode {
    let args = Args::parse();
    // Before anything opens a TLS connection: rustls wants to be told which cryptography to use.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let settings = match Settings::load_with_database(None, &[]) {
        Ok(settings) => settings,
        Err(fault) => return fail(&fault, WRONG_SETTINGS),
    };
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return fail(&format!("the runtime cannot start: {error}"), FAILED),
    };
    match runtime.block_on(run(&args, settings)) {
        Ok(code) => ExitCode::from(code),
        Err(error) => fail(&format!("{error:#}"), FAILED),
    }
}

fn fail(why: &dyn std::fmt::Display, code: u8) -> ExitCode {
    eprintln!("shop: {why}");
    ExitCode::from(code)
}

/// Opens the shop, does business, reports, and clears everything away, whatever happened in between.
async fn run(args: &Args, settings: Settings) -> anyhow::Result<u8> {
    let mut interrupt = signal(SignalKind::interrupt()).context("Ctrl-C cannot be watched for")?;
    let mut terminate = signal(SignalKind::terminate()).context("SIGTERM cannot be watched for")?;
    let _log = logging::install(&args.log(&settings));
    let mut premises = if args.no_worker { Premises::shared(settings, args) } else { Premises::own(settings, args)? };
    // Not to be interrupted half-way: what a server is still busy making cannot be removed yet. Ctrl-C is remembered.
    let outcome = match premises.open().await {
        Ok(()) => tokio::select! {
            () = either(&mut interrupt, &mut terminate) => {
                eprintln!("shop: interrupted; clearing away");
                Ok(INTERRUPTED)
            }
            outcome = do_business_and_report(args, &mut premises) => outcome,
        },
        Err(error) => Err(error),
    };
    let cleared = premises.clear_away().await;
    if let (Err(_), Err(left_behind)) = (&outcome, &cleared) {
        // The first error is the one to mend; this one must not hide it.
        eprintln!("shop: {left_behind:#}");
        return outcome;
    }
    cleared.and(outcome)
}

async fn either(one: &mut Signal, other: &mut Signal) {
    tokio::select! {
        _ = one.recv() => {}
        _ = other.recv() => {}
    }
}

async fn do_business_and_report(args: &Args, premises: &mut Premises) -> anyhow::Result<u8> {
    let plan = Plan::draw(args.orders, args.duration(), &premises.terms());
    if !args.json {
        print(&report::introduction(args, premises, &plan))?;
    }
    let report = do_business(premises, &plan, &Progress::new(&plan, args.shows_progress())).await?;
    for violation in &report.violations {
        eprintln!("shop: {violation}");
    }
    if args.json {
        print(&report.json_line()?)?;
    } else {
        print(&report.for_people())?;
    }
    Ok(if report.violations.is_empty() { 0 } else { FAILED })
}

fn print(text: &str) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{text}").and_then(|()| out.flush()).context("standard output cannot be written")
}

async fn do_business(premises: &mut Premises, plan: &Plan, progress: &Progress) -> anyhow::Result<Report> {
    let settings = premises.settings.clone();
    let pool = premises.pool().await?;
    // Before the first order, or the first event could be missed.
    let listener = Listener::start(&settings, &premises.event_queue(), plan.ids(), progress.clone()).await?;
    let till = Till::open(pool.clone(), premises.publisher().await?, &plan.articles).await?;
    let probe = CommitProbe::start(premises.probe_pool().await?, premises.mark.clone(), plan.length());

    let served = serve_customers(plan, &till, progress).await?;
    let last_deadline = served.iter().map(|served| served.deadline).max().context("there were no orders")?;
    wait_until_all_is_decided(plan, &till, &listener, till.instant_of(last_deadline)).await?;
    progress.finish();

    let commit_p99_ms = probe.p99_ms().await?;
    let findings = Findings::from_database(&pool, plan).await?;
    let announced = listener.close().await;
    Ok(Report::new(
        settings.delay.strategy,
        findings,
        &served,
        &announced,
        commit_p99_ms,
        premises.hint_if_left_unpaid(),
    ))
}

/// Every customer is a task of their own, so that one slow commit holds up nobody else.
async fn serve_customers(plan: &Plan, till: &Till, progress: &Progress) -> anyhow::Result<Vec<Served>> {
    let opening = Instant::now();
    let mut customers = JoinSet::new();
    for customer in &plan.customers {
        let (customer, till, progress) = (Arc::clone(customer), till.clone(), progress.clone());
        customers.spawn(async move {
            sleep_until(opening + customer.arrives_after).await;
            till.serve(&customer, &progress).await
        });
    }
    let mut all_served = Vec::with_capacity(plan.customers.len());
    while let Some(served) = customers.join_next().await {
        // The first failure ends the run; dropping the set ends the other customers.
        all_served.push(served.context("a customer's task panicked")??);
    }
    Ok(all_served)
}

/// Waits until no order is open and every close has been announced, or until waiting longer is pointless: what is
/// missing then is for the audit to say.
async fn wait_until_all_is_decided(
    plan: &Plan,
    till: &Till,
    listener: &Listener,
    last_deadline: Instant,
) -> anyhow::Result<()> {
    let give_up_at = last_deadline + TIMEOUT;
    while Instant::now() < give_up_at {
        if listener.has_ended() {
            bail!(
                "the event consumer lost its connection to the broker, so the events cannot be counted; run it again"
            );
        }
        let so_far = till.count_decided(plan.uuids()).await?;
        if so_far.open == 0 && listener.count() >= so_far.closed {
            break;
        }
        sleep(LOOK_EVERY).await;
    }
    Ok(())
}

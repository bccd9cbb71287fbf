//! The demo: a shop that takes orders, lets some customers pay (a few of them at the last moment), and watches
//! order-timeout close the rest; then it checks from the database that every promise was kept. Run it with
//! `scripts/demo`.
//!
//! This file is the overall flow; each of the others is one part of the shop. They also show how to use the library:
//! `checkout.rs` schedules an alarm for an order, `environment.rs` runs a worker inside another program, `listener.rs`
//! reads the events.

// Not `examples/shop/main.rs`: this is the usual path, and the one in the Dockerfile.
#[path = "shop/args.rs"]
mod args;
#[path = "shop/audit.rs"]
mod audit;
#[path = "shop/checkout.rs"]
mod checkout;
#[path = "shop/commit_probe.rs"]
mod commit_probe;
#[path = "shop/environment.rs"]
mod environment;
#[path = "shop/listener.rs"]
mod listener;
#[path = "shop/plan.rs"]
mod plan;
#[path = "shop/progress.rs"]
mod progress;
#[path = "shop/report.rs"]
mod report;

use std::io::Write;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use clap::Parser;
use order_timeout::Settings;
use order_timeout::observe::logging;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until};

use args::Args;
use audit::Findings;
use checkout::{Checkout, Served};
use commit_probe::CommitProbe;
use environment::Environment;
use listener::{EventSource, Listener};
use plan::Plan;
use progress::Progress;
use report::Report;

/// The conventional exit code of an interrupted program: 128 + SIGINT.
const INTERRUPTED: u8 = 130;
const WRONG_SETTINGS: u8 = 2;
const FAILED: u8 = 1;
/// How long after the last deadline the run waits for late closes and events. Lateness is a result; only what never
/// happens is cut off here.
const TIMEOUT: Duration = Duration::from_secs(10);
/// How often the run checks whether every order is decided.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

fn main() -> ExitCode {
    let args = Args::parse();
    // Before any TLS connection: rustls needs a cryptography provider.
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

/// Opens the shop, runs it, reports, and cleans up, whatever happened in between.
async fn run(args: &Args, settings: Settings) -> anyhow::Result<u8> {
    let mut interrupt = signal(SignalKind::interrupt()).context("Ctrl-C cannot be watched for")?;
    let mut terminate = signal(SignalKind::terminate()).context("SIGTERM cannot be watched for")?;
    let _log = logging::install(&args.log(&settings));
    let mut environment =
        if args.no_worker { Environment::shared(settings, args) } else { Environment::own(settings, args)? };
    // Not interruptible: objects that a server is still creating cannot be removed yet. Ctrl-C is remembered.
    let outcome = match environment.open().await {
        Ok(()) => tokio::select! {
            () = either(&mut interrupt, &mut terminate) => {
                eprintln!("shop: interrupted; clearing away");
                Ok(INTERRUPTED)
            }
            outcome = do_business_and_report(args, &mut environment) => outcome,
        },
        Err(error) => Err(error),
    };
    let cleared = environment.clean_up().await;
    if let (Err(_), Err(left_behind)) = (&outcome, &cleared) {
        // The first error is the one to fix; this one must not hide it.
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

async fn do_business_and_report(args: &Args, environment: &mut Environment) -> anyhow::Result<u8> {
    let plan = Plan::draw(args.orders, args.duration(), &environment.terms());
    if !args.json {
        print(&report::introduction(args, environment, &plan))?;
    }
    let report = do_business(environment, &plan, &Progress::new(&plan, args.shows_progress())).await?;
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

async fn do_business(environment: &mut Environment, plan: &Plan, progress: &Progress) -> anyhow::Result<Report> {
    let settings = environment.settings.clone();
    let pool = environment.pool().await?;
    // Before the first order, so that no event is missed.
    let source = match settings.delay.strategy.needs_broker() {
        true => EventSource::Queue { settings: &settings, queue: environment.event_queue() },
        false => EventSource::Channel(&pool),
    };
    let listener = Listener::start(source, plan.ids(), progress.clone()).await?;
    let checkout = Checkout::open(pool.clone(), environment.publisher().await?, &plan.articles).await?;
    let probe = CommitProbe::start(environment.probe_pool().await?, environment.mark.clone(), plan.length());

    let served = serve_customers(plan, &checkout, progress).await?;
    let last_deadline = served.iter().map(|served| served.deadline).max().context("there were no orders")?;
    wait_until_all_decided(plan, &checkout, &listener, checkout.instant_of(last_deadline)).await?;
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
        environment.hint_if_left_unpaid(),
    ))
}

/// Every customer is a separate task, so that a slow commit delays no other customer.
async fn serve_customers(plan: &Plan, checkout: &Checkout, progress: &Progress) -> anyhow::Result<Vec<Served>> {
    let opening = Instant::now();
    let mut customers = JoinSet::new();
    for customer in &plan.customers {
        let (customer, checkout, progress) = (Arc::clone(customer), checkout.clone(), progress.clone());
        customers.spawn(async move {
            sleep_until(opening + customer.arrives_after).await;
            checkout.serve(&customer, &progress).await
        });
    }
    let mut all_served = Vec::with_capacity(plan.customers.len());
    while let Some(served) = customers.join_next().await {
        // The first failure ends the run; dropping the set ends the other customers.
        all_served.push(served.context("a customer's task panicked")??);
    }
    Ok(all_served)
}

/// Waits until no order is open and every close has been announced, or until waiting longer is pointless: the audit
/// reports what is missing then.
async fn wait_until_all_decided(
    plan: &Plan,
    checkout: &Checkout,
    listener: &Listener,
    last_deadline: Instant,
) -> anyhow::Result<()> {
    let give_up_at = last_deadline + TIMEOUT;
    while Instant::now() < give_up_at {
        if listener.has_ended() {
            bail!("the event consumer lost its connection, so the events cannot be counted; run it again");
        }
        let so_far = checkout.count_decided(plan.uuids()).await?;
        if so_far.open == 0 && listener.count() >= so_far.closed {
            break;
        }
        sleep(POLL_INTERVAL).await;
    }
    Ok(())
}

//! Orders fall due at a constant rate, each with an attempt at a payment provider that takes its time for each call: how late
//! the closes are, and whether the provider's limits are kept. Beside them there may be orders about which the provider fails,
//! and a second provider; neither may make the others late.

use std::path::Path;
use std::time::Duration;

use anyhow::ensure;
use order_timeout_core::order::Timestamp;
use order_timeout_providers::settings::LimitsSettings;
use order_timeout_testkit::payment_service::{Fault, PaymentService, SeenLoad};
use serde_json::{Map, json};

use crate::Options;
use crate::bench_env::ledger::Ledger;
use crate::bench_env::process::Program;
use crate::bench_env::servers::Servers;
use crate::bench_env::{BenchEnv, MANY_ARTICLES, sleep_until};
use crate::{progress, report};

/// An order is asked about, and then cancelled.
const CALLS: u32 = 2;
/// How much more than the load the provider's limits allow, so that a short delay is caught up on.
const SPARE: f64 = 2.0;
/// From the start until the first deadline: for filling the tables, and for publishing.
const PREPARING: Duration = Duration::from_secs(30);
/// An order that is still open so long after the last deadline is lost.
const TIMEOUT: Duration = Duration::from_secs(60);

/// The command line's options.
#[derive(Debug, Clone, Copy)]
pub struct Load {
    pub rate: u32,
    pub seconds: u32,
    pub answer: Duration,
    pub failing: u32,
    pub idle_provider: bool,
}

impl Load {
    fn requests_per_s(self) -> f64 {
        f64::from(self.rate * CALLS)
    }

    /// Calls under way at a time, on average.
    fn concurrency(self) -> f64 {
        self.requests_per_s() * self.answer.as_secs_f64()
    }

    /// The defaults where they are enough.
    fn limits(self) -> LimitsSettings {
        // Far below the largest number.
        let with_spare = |load: f64| (load * SPARE).ceil() as u32;
        let defaults = LimitsSettings::default();
        LimitsSettings {
            concurrency: defaults.concurrency.max(with_spare(self.concurrency())),
            requests_per_s: defaults.requests_per_s.max(with_spare(self.requests_per_s())),
            ..defaults
        }
    }
}

/// How many orders a second these limits carry.
fn carried_per_s(limits: &LimitsSettings, answer: Duration) -> f64 {
    let by_concurrency = f64::from(limits.concurrency) / answer.as_secs_f64();
    by_concurrency.min(f64::from(limits.requests_per_s)) / f64::from(CALLS)
}

pub async fn run(servers: &Servers, options: &Options, load: Load) -> anyhow::Result<()> {
    let (service, limits) = (PaymentService::start(), load.limits());
    service.set_pause(load.answer);
    let file = servers.output.join("provider.toml");
    std::fs::write(&file, settings(&service, &limits, load))?;
    let measured = run_with(servers, options, &file, load, &service).await;
    let (ledger, seen) = (measured?, service.seen_load());
    let defaults = LimitsSettings::default();
    let facts = json!({
        "rate_per_s": load.rate,
        "seconds": load.seconds,
        "answer_ms": load.answer.as_millis(),
        "failing": load.failing,
        "idle_provider": load.idle_provider,
        "limits_concurrency": limits.concurrency,
        "limits_requests_per_s": limits.requests_per_s,
        "limits_carry_orders_per_s": report::whole(carried_per_s(&limits, load.answer)),
        "default_limits_carry_orders_per_s": report::whole(carried_per_s(&defaults, load.answer)),
        "seen_concurrency": seen.concurrency,
        "seen_requests_per_s": seen.requests_per_s,
        "calls": service.calls(),
    });
    let facts = facts.as_object().cloned().unwrap_or_else(Map::new);
    report::print_ledger("provider", servers, options, &ledger, facts)?;
    ensure_within(seen, &limits)
}

/// The worker's file: the service is asked about orders of the default kind.
fn settings(service: &PaymentService, limits: &LimitsSettings, load: Load) -> String {
    let names = if load.idle_provider { "\"card\", \"idle\"" } else { "\"card\"" };
    let of_provider = |name: &str, limits: &LimitsSettings| {
        format!(
            "[providers.{name}]
kind = \"http\"
url = \"{}\"
bearer_token_file = \"{}\"
[providers.{name}.limits]
concurrency = {}
requests_per_s = {}
",
            service.url(),
            service.token_file().display(),
            limits.concurrency,
            limits.requests_per_s
        )
    };
    let idle = LimitsSettings { requests_per_s: 1, ..LimitsSettings::default() };
    let idle = if load.idle_provider { of_provider("idle", &idle) } else { String::new() };
    format!("[kinds.order]\nproviders = [{names}]\n{}{idle}", of_provider("card", limits))
}

fn ensure_within(seen: SeenLoad, limits: &LimitsSettings) -> anyhow::Result<()> {
    let SeenLoad { concurrency, requests_per_s } = seen;
    ensure!(
        concurrency <= limits.concurrency as usize && requests_per_s <= limits.requests_per_s as usize,
        "the provider had {concurrency} calls at a time and {requests_per_s} requests in a second, and {} and {} are allowed",
        limits.concurrency,
        limits.requests_per_s
    );
    Ok(())
}

async fn run_with(
    servers: &Servers,
    options: &Options,
    file: &Path,
    load: Load,
    service: &PaymentService,
) -> anyhow::Result<Ledger> {
    let env = BenchEnv::for_worker_with_file(servers, options, file).await?;
    let measured = run_in(&env, servers, load, service).await;
    env.clean_up().await?;
    measured
}

async fn run_in(env: &BenchEnv<'_>, servers: &Servers, load: Load, service: &PaymentService) -> anyhow::Result<Ledger> {
    let first = Timestamp::now_by_local_clock() + PREPARING;
    let orders = load.rate * load.seconds;
    let deadlines: Vec<Timestamp> =
        (0..orders).map(|number| first + Duration::from_secs(1) * number / load.rate).collect();
    progress::say(format!("provider: writing {orders} orders"));
    let mut alarms = env.fill(&deadlines, MANY_ARTICLES).await?;
    let failing =
        env.fill(&vec![first + Duration::from_secs(1); usize::try_from(load.failing)?], MANY_ARTICLES).await?;
    failing.iter().for_each(|(id, _)| service.fail(id.as_str(), Some(Fault::Error)));
    let failing_ids: Vec<String> = failing.iter().map(|(id, _)| id.to_string()).collect();
    alarms.extend(failing);
    sqlx::query(
        "INSERT INTO payment_attempts (provider, reference, order_id, amount_minor, currency)
         SELECT 'card', id::text, id::text, 1999, 'EUR' FROM orders",
    )
    .execute(&env.pool)
    .await?;
    let mut worker = env.start_worker(&servers.output.join("provider.log")).await?;
    env.publisher().await?.schedule_all(alarms).await?;
    ensure!(Timestamp::now_by_local_clock() < first, "scheduling took longer than planned; is the machine busy?");
    progress::say("provider: every alarm is published");
    let last = first + Duration::from_secs(load.seconds.into());
    wait_until_decided(env, last, &failing_ids, &mut worker).await?;
    worker.stop().await?;
    // The ledger is of the others.
    let take_out = "UPDATE orders SET expires_at = expires_at + interval '1 year' WHERE id::text = ANY($1)";
    sqlx::query(take_out).bind(&failing_ids).execute(&env.pool).await?;
    env.ledger(last).await
}

/// Waits until no order but the failing ones is unpaid or with the provider, or the time is up.
async fn wait_until_decided(
    env: &BenchEnv<'_>,
    last: Timestamp,
    failing: &[String],
    worker: &mut Program,
) -> anyhow::Result<()> {
    sleep_until(last).await;
    while Timestamp::now_by_local_clock() < last + TIMEOUT {
        worker.ensure_runs()?;
        let open =
            "SELECT EXISTS (SELECT FROM orders WHERE status IN ('unpaid', 'closing') AND NOT id::text = ANY($1))";
        if !sqlx::query_scalar::<_, bool>(open).bind(failing).fetch_one(&env.pool).await? {
            return Ok(());
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    Ok(())
}

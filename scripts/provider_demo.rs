//! The demo with payment providers: a shop whose customers pay at two providers. One of them says paid to some orders of
//! which no callback comes, fails, hangs, and is dead for a while; the other one is healthy. Every order must end closed,
//! paid, or listed for a person, and none may be closed despite money.
//!
//! `scripts/demo --provider http` runs it with a broker and a database. It works in a namespace and a database of its own,
//! which it removes. The exit code is 1 if a promise is broken.

use std::process::ExitCode;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use clap::{Parser, ValueEnum};
use order_timeout_providers::settings::LimitsSettings;
use order_timeout_testkit::payment_service::{Fault, PaymentService, Truth, wide_limits};
use order_timeout_testkit::{TestEnv, wait_promised};
use serde::Serialize;
use sqlx::PgPool;
use uuid::Uuid;

/// Between two deadlines of one provider's orders.
const BETWEEN_DEADLINES: Duration = Duration::from_millis(20);
/// From the creation of orders to the first deadline: their alarms are relayed meanwhile.
const BEFORE_DEADLINES: Duration = Duration::from_secs(3);
/// How long after the last deadline, and after the dead provider is back, every order must have ended.
const LONGEST_END: Duration = Duration::from_secs(300);
/// The largest ratio of the healthy provider's lateness beside the sick one and alone.
const LARGEST_RATIO: f64 = 1.5;

/// Runs a shop with two payment providers, one of which fails in every way, and checks how each order ends.
#[derive(Debug, Parser)]
#[command(name = "scripts/demo --provider http")]
struct Args {
    /// The sort of providers
    #[arg(long)]
    provider: Sort,
    /// How many orders each provider has
    #[arg(long, default_value_t = 1_000, value_parser = clap::value_parser!(u32).range(100..=100_000))]
    orders: u32,
    /// How many seconds one provider is dead
    #[arg(long, default_value_t = 30)]
    dead_s: u64,
    /// Print the counts as one line of JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Sort {
    /// The documented HTTP contract, answered by a local payment service
    Http,
}

/// What became of the orders.
#[derive(Debug, Default, Clone, Serialize)]
struct Counts {
    orders: usize,
    settled_as_paid: usize,
    closed: usize,
    /// Closed orders whose money the provider has.
    closed_despite_money: usize,
    /// Closed orders whose attempt the provider has not closed.
    stock_released_on_unknown: usize,
    unresolved_listed: usize,
    /// Orders that have not ended in one of these ways.
    not_ended: usize,
    stock_balanced: bool,
    healthy_p99_ms: f64,
    healthy_p99_ratio: f64,
}

impl Counts {
    fn what_is_broken(&self) -> Option<String> {
        if self.closed_despite_money + self.stock_released_on_unknown + self.not_ended > 0 || !self.stock_balanced {
            Some("a promise is broken".to_owned())
        } else if self.healthy_p99_ratio > LARGEST_RATIO {
            let ratio = self.healthy_p99_ratio;
            Some(format!("the sick provider has delayed orders of the healthy one: ratio {ratio:.2}"))
        } else {
            None
        }
    }
}

/// Creates orders with an attempt at this provider each, with the order's id as its reference.
async fn create(pool: &PgPool, count: usize, provider: &str) -> Vec<Uuid> {
    let ids: Vec<Uuid> = (0..count).map(|_| Uuid::now_v7()).collect();
    sqlx::query(
        "WITH moment AS MATERIALIZED (SELECT clock_timestamp() AS now), made AS (
             INSERT INTO orders (id, expires_at, amount_minor, currency)
             SELECT id, m.now + make_interval(secs => $2 + n * $3), 1999, 'EUR'
             FROM moment m, unnest($1::uuid[]) WITH ORDINALITY AS o (id, n)
             RETURNING id, expires_at
         ), items AS (
             INSERT INTO order_items (order_id, article_id, quantity) SELECT id, 'article', 1 FROM made
         ), reserved AS (
             UPDATE stock SET available = available - n.n, reserved = reserved + n.n
             FROM (SELECT count(*) AS n FROM made) n WHERE article_id = 'article'
         ), attempts AS (
             INSERT INTO payment_attempts (provider, reference, order_id, amount_minor, currency)
             SELECT $4, id::text, id::text, 1999, 'EUR' FROM made
         )
         INSERT INTO alarm_outbox (order_id, deadline) SELECT id::text, expires_at FROM made",
    )
    .bind(&ids)
    .bind(BEFORE_DEADLINES.as_secs_f64())
    .bind(BETWEEN_DEADLINES.as_secs_f64())
    .bind(provider)
    .execute(pool)
    .await
    .expect("the orders are created");
    ids
}

/// The 99th percentile of the lateness of these orders' closes, in milliseconds.
async fn p99_ms(pool: &PgPool, ids: &[Uuid]) -> f64 {
    let p99 = sqlx::query_scalar(
        "SELECT percentile_cont(0.99) WITHIN GROUP (ORDER BY extract(epoch FROM closed_at - expires_at) * 1000.0)
         FROM orders WHERE id = ANY ($1) AND status = 'closed'",
    );
    p99.bind(ids).fetch_one(pool).await.expect("the orders are closed")
}

const NOT_ENDED: &str = "SELECT count(*) FROM orders o
    LEFT JOIN close_attempts c ON c.order_id = o.id::text AND c.unresolved_at IS NOT NULL
    WHERE o.status NOT IN ('paid', 'closed') AND c.order_id IS NULL";

async fn wait_for_ends(env: &TestEnv, longest: Duration) {
    wait_promised(longest, "every order ended or listed", async || env.count(NOT_ENDED).await == 0).await;
}

async fn run(env: &TestEnv, sick: &PaymentService, args: &Args) -> Counts {
    let count = args.orders as usize;
    let spread = BEFORE_DEADLINES + BETWEEN_DEADLINES * args.orders;
    let worker = env.worker().await;
    // Not measured: the worker's first orders wait for connections.
    create(&env.pool, 50, "bank").await;
    wait_for_ends(env, LONGEST_END).await;
    eprintln!("{count} orders at the healthy provider alone");
    let alone = create(&env.pool, count, "bank").await;
    wait_for_ends(env, spread + LONGEST_END).await;
    eprintln!("{count} orders at each provider; one is dead for {} s, and fails some orders for good", args.dead_s);
    let of_sick = create(&env.pool, count, "card").await;
    for (n, id) in of_sick.iter().enumerate() {
        match n % 100 {
            0..5 => assert!(sick.pay(&id.to_string())),
            5..15 => sick.fail(&id.to_string(), Some(Fault::Error)),
            15..17 => sick.fail(&id.to_string(), Some(Fault::Hang)),
            _ => {}
        }
    }
    let beside = create(&env.pool, count, "bank").await;
    tokio::time::sleep(BEFORE_DEADLINES + Duration::from_secs(2)).await;
    sick.set_dead(true);
    tokio::time::sleep(Duration::from_secs(args.dead_s)).await;
    sick.set_dead(false);
    let ended = tokio::time::timeout(spread + LONGEST_END, async {
        while env.count(NOT_ENDED).await > 0 {
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    });
    // If not: counted below.
    let _ = ended.await;
    worker.stop().await;
    let before = p99_ms(&env.pool, &alone).await;
    judge(env, sick, before, p99_ms(&env.pool, &beside).await).await
}

async fn judge(env: &TestEnv, sick: &PaymentService, alone: f64, beside: f64) -> Counts {
    let rows: Vec<(String, String, String)> = sqlx::query_as(
        "SELECT o.id::text, o.status::text, a.provider FROM orders o JOIN payment_attempts a ON a.order_id = o.id::text",
    )
    .fetch_all(&env.pool)
    .await
    .expect("the orders");
    let mut counts = Counts { orders: rows.len(), ..Counts::default() };
    for (id, status, provider) in &rows {
        counts.settled_as_paid += usize::from(status == "paid");
        counts.closed += usize::from(status == "closed");
        if status == "closed" && provider == "card" {
            counts.closed_despite_money += usize::from(sick.truth(id) == Truth::Paid);
            counts.stock_released_on_unknown += usize::from(sick.truth(id) == Truth::Open);
        }
    }
    let counted = async |sql| usize::try_from(env.count(sql).await).expect("a count");
    counts.unresolved_listed = counted("SELECT count(*) FROM close_attempts WHERE unresolved_at IS NOT NULL").await;
    counts.not_ended = counted(NOT_ENDED).await;
    let stock: (i64, i64) = sqlx::query_as("SELECT 1000000 - available - reserved, reserved FROM stock")
        .fetch_one(&env.pool)
        .await
        .expect("the article");
    let reserved = counts.unresolved_listed + counts.not_ended;
    counts.stock_balanced = stock == (counts.settled_as_paid as i64, reserved as i64);
    counts.healthy_p99_ms = (beside * 10.0).round() / 10.0;
    counts.healthy_p99_ratio = (beside / alone * 100.0).round() / 100.0;
    counts
}

fn main() -> ExitCode {
    let args = Arc::new(Args::parse());
    let Sort::Http = args.provider;
    // Before any TLS connection: rustls needs a cryptography provider. Fails only if there is one already.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let (sick, healthy) = (Arc::new(PaymentService::start()), PaymentService::start());
    let result = Arc::new(OnceLock::new());
    let (told, given, asked) = (result.clone(), args.clone(), sick.clone());
    TestEnv::builder()
        .settings(|settings| {
            settings.closing.retry_first = Duration::from_millis(200);
            settings.closing.retry_longest = Duration::from_secs(2);
            settings.closing.max_rounds = 3;
            let timeout = Duration::from_millis(500);
            // In the end only orders that fail for good are left: then the breaker is open, and its test calls are all
            // that brings them nearer to the list.
            let limits = LimitsSettings { timeout, concurrency: 32, failures_to_open: 100, ..wide_limits() };
            sick.join(settings, "card", limits);
            healthy.join(settings, "bank", wide_limits());
        })
        .run(async move |env| {
            let counts = run(&env, &asked, &given).await;
            told.set(counts).expect("one run");
        });
    let counts = result.get().cloned().unwrap_or_default();
    if args.json {
        println!("{}", serde_json::to_string(&counts).expect("numbers"));
    } else {
        println!(
            "{} orders: {} closed, {} settled as paid, {} listed for a person, {} not ended; {} closed despite money, {} without proof; p99 at the healthy provider {} ms, {} times as long as alone",
            counts.orders,
            counts.closed,
            counts.settled_as_paid,
            counts.unresolved_listed,
            counts.not_ended,
            counts.closed_despite_money,
            counts.stock_released_on_unknown,
            counts.healthy_p99_ms,
            counts.healthy_p99_ratio
        );
    }
    match counts.what_is_broken() {
        None => ExitCode::SUCCESS,
        Some(why) => {
            eprintln!("scripts/demo: {why}");
            ExitCode::FAILURE
        }
    }
}

//! Races payments against closes: for each order a payment callback is sent at a random moment within a few milliseconds
//! of the deadline at which a real worker closes the order. Counts who won, and whether any order has both or neither.
//!
//! `scripts/race` runs it with a broker and a database. It works in a namespace and a database of its own, which it
//! removes. The exit code is 1 if a promise is broken, or if one side wins so rarely that the race proves little.

use std::collections::HashMap;
use std::process::ExitCode;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use clap::Parser;
use order_timeout::config::Settings;
use order_timeout::postgres;
use order_timeout_client::payment::{Attempt, Currency, Money};
use order_timeout_client::postgres::{LateReason, PaymentVerdict, payment_received};
use order_timeout_core::order::Timestamp;
use order_timeout_testkit::ledger::Ledger;
use order_timeout_testkit::payment_service::{PaymentService, wide_limits};
use order_timeout_testkit::{RunningWorker, TestEnv, wait_for};
use secrecy::ExposeSecret;
use serde::Serialize;
use sqlx::PgPool;
use sqlx::postgres::PgPoolOptions;
use tokio::time::{Instant, sleep_until};
use uuid::Uuid;

/// Orders that are created at once.
const WAVE: usize = 500;
/// Between two deadlines of a wave: the closes of one must not delay the payments of the next.
const BETWEEN_DEADLINES: Duration = Duration::from_millis(4);
/// From the creation of a wave to its first deadline: its alarms are relayed meanwhile.
const BEFORE_DEADLINES: Duration = Duration::from_millis(1_500);
/// Payments that may be in flight at once.
const PAYERS: u32 = 16;
/// What an order costs.
const PRICE: i64 = 1_999;
/// The smallest share of races that each side must win.
const SMALLEST_SHARE: f64 = 0.05;

/// Races payments against closes at the deadline, and checks that each order has exactly one of both.
#[derive(Debug, Parser)]
#[command(name = "scripts/race")]
struct Args {
    /// How many races
    #[arg(long, default_value_t = 1_000, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    times: u64,
    /// Payments are sent at most this long before or after the deadline, in milliseconds; 5, and with a provider, which is
    /// asked first, 250
    #[arg(long)]
    offset_ms: Option<f64>,
    /// The seed of the random moments
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Ask a payment provider before each close: a local payment service, at which the customer pays
    #[arg(long)]
    provider: Option<Sort>,
    /// Print the counts as one line of JSON
    #[arg(long)]
    json: bool,
}

impl Args {
    fn offset_ms(&self) -> f64 {
        self.offset_ms.unwrap_or(if self.provider.is_some() { 250.0 } else { 5.0 })
    }
}

#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum Sort {
    /// The documented HTTP contract
    Http,
}

/// The counts.
#[derive(Debug, Default, Clone, Serialize)]
struct Counts {
    races: u64,
    paid_won: u64,
    close_won: u64,
    /// Orders that are paid and were closed.
    both: u64,
    /// Orders that are neither, or whose payment was answered otherwise than the row says.
    neither: u64,
    stock_balanced: bool,
}

impl Counts {
    fn what_is_broken(&self) -> Option<String> {
        let smallest = self.paid_won.min(self.close_won) as f64 / self.races as f64;
        if self.both + self.neither > 0 || !self.stock_balanced {
            Some("a promise is broken".to_owned())
        } else if smallest < SMALLEST_SHARE {
            Some(format!("one side has won only {:.1} % of the races; choose another --offset-ms", smallest * 100.0))
        } else {
            None
        }
    }
}

/// The database's clock on this machine's monotonic one.
#[derive(Debug, Clone, Copy)]
struct Clock {
    at: Instant,
    time: Timestamp,
}

impl Clock {
    /// Of several readings the one with the shortest round trip.
    async fn read(pool: &PgPool) -> Self {
        let mut connection = pool.acquire().await.expect("a connection");
        let mut best = (Duration::MAX, None);
        for _ in 0..20 {
            let begun = Instant::now();
            let time = postgres::now(&mut connection).await.expect("the database tells the time");
            let took = begun.elapsed();
            if took < best.0 {
                best = (took, Some(Self { at: begun + took / 2, time }));
            }
        }
        best.1.expect("twenty readings")
    }

    fn instant_of(self, time: Timestamp, offset_ms: f64) -> Instant {
        let ahead = time.since(self.time).as_secs_f64() + offset_ms / 1_000.0;
        self.at + Duration::from_secs_f64(ahead.max(0.0))
    }
}

/// The orders of a wave with their deadlines, their stock reserved and their alarms written.
async fn create_wave(pool: &PgPool, count: usize) -> Vec<(Uuid, Timestamp)> {
    let ids: Vec<Uuid> = (0..count).map(|_| Uuid::now_v7()).collect();
    let rows: Vec<(Uuid, time::OffsetDateTime)> = sqlx::query_as(
        "WITH moment AS MATERIALIZED (SELECT clock_timestamp() AS now), made AS (
             INSERT INTO orders (id, expires_at, amount_minor, currency)
             SELECT id, m.now + make_interval(secs => $2 + n * $3), $4, 'EUR'
             FROM moment m, unnest($1::uuid[]) WITH ORDINALITY AS o (id, n)
             RETURNING id, expires_at
         ), items AS (
             INSERT INTO order_items (order_id, article_id, quantity) SELECT id, 'article', 1 FROM made
         ), reserved AS (
             UPDATE stock SET available = available - n.n, reserved = reserved + n.n
             FROM (SELECT count(*) AS n FROM made) n WHERE article_id = 'article'
         ), alarms AS (
             INSERT INTO alarm_outbox (order_id, deadline) SELECT id::text, expires_at FROM made
         ), attempts AS (
             INSERT INTO payment_attempts (provider, reference, order_id, amount_minor, currency)
             SELECT 'race', id::text, id::text, $4, 'EUR' FROM made
         )
         SELECT id, expires_at FROM made",
    )
    .bind(&ids)
    .bind(BEFORE_DEADLINES.as_secs_f64())
    .bind(BETWEEN_DEADLINES.as_secs_f64())
    .bind(PRICE)
    .fetch_all(pool)
    .await
    .expect("a wave of orders");
    rows.into_iter().map(|(id, at)| (id, Timestamp::from(at))).collect()
}

/// Sends the payment at its moment. Returns what it was answered; `None` if the provider has taken no money.
async fn pay(
    pool: PgPool,
    id: Uuid,
    at: Instant,
    service: Option<Arc<PaymentService>>,
) -> (Uuid, Option<PaymentVerdict>) {
    sleep_until(at).await;
    if service.is_some_and(|service| !service.pay(&id.to_string())) {
        return (id, None);
    }
    let money = Money { amount_minor: PRICE, currency: Currency::new("EUR").expect("three letters") };
    let received = Attempt { provider: "race".into(), reference: id.to_string(), money };
    let outcome = payment_received(&pool, id.to_string(), &received).await.expect("an answer to each payment");
    (id, Some(outcome.verdict))
}

async fn race_wave(
    env: &TestEnv,
    payers: &PgPool,
    count: usize,
    (args, service): (&Args, &Option<Arc<PaymentService>>),
    random: &mut fastrand::Rng,
) -> Counts {
    let orders = create_wave(&env.pool, count).await;
    let clock = Clock::read(payers).await;
    let payments: Vec<_> = orders
        .iter()
        .map(|(id, deadline)| {
            let offset_ms = (random.f64() * 2.0 - 1.0) * args.offset_ms();
            tokio::spawn(pay(payers.clone(), *id, clock.instant_of(*deadline, offset_ms), service.clone()))
        })
        .collect();
    let mut answers = HashMap::new();
    for payment in payments {
        let (id, verdict) = payment.await.expect("the payer's task");
        answers.insert(id, verdict);
    }
    let open = "SELECT count(*) FROM orders WHERE status NOT IN ('paid', 'closed')";
    wait_for("every order decided", async || env.count(open).await == 0).await;
    judge(&env.pool, &answers).await
}

/// Compares the answers with the rows.
async fn judge(pool: &PgPool, answers: &HashMap<Uuid, Option<PaymentVerdict>>) -> Counts {
    let ids: Vec<Uuid> = answers.keys().copied().collect();
    let rows: Vec<(Uuid, String, i64)> = sqlx::query_as(
        "SELECT o.id, o.status::text,
                (SELECT count(*) FROM order_events e WHERE e.order_id = o.id AND e.event IN ('paid', 'closed'))
         FROM orders o WHERE o.id = ANY ($1)",
    )
    .bind(&ids)
    .fetch_all(pool)
    .await
    .expect("the rows");
    let mut counts = Counts { races: answers.len() as u64, ..Counts::default() };
    for (id, status, ends) in rows {
        match (&answers[&id], status.as_str(), ends) {
            (_, _, 2..) => counts.both += 1,
            (Some(PaymentVerdict::Paid { surplus_minor: 0 }), "paid", 1) => counts.paid_won += 1,
            (Some(PaymentVerdict::Late { reason: LateReason::Closed }) | None, "closed", 1) => counts.close_won += 1,
            _ => counts.neither += 1,
        }
    }
    counts
}

async fn race(env: &TestEnv, args: &Args, service: &Option<Arc<PaymentService>>) -> Counts {
    let payers = PgPoolOptions::new().min_connections(PAYERS).max_connections(PAYERS);
    let payers = payers.connect(env.settings.database.url.expose_secret()).await.expect("connections for the payers");
    let worker: RunningWorker = env.worker().await;
    let (mut random, mut all) = (fastrand::Rng::with_seed(args.seed), Counts::default());
    while all.races < args.times {
        let count = usize::try_from(args.times - all.races).unwrap_or(WAVE).min(WAVE);
        let wave = race_wave(env, &payers, count, (args, service), &mut random).await;
        all.races += wave.races;
        all.paid_won += wave.paid_won;
        all.close_won += wave.close_won;
        all.both += wave.both;
        all.neither += wave.neither;
        eprintln!("{} of {} races: {} paid, {} closed", all.races, args.times, all.paid_won, all.close_won);
    }
    worker.stop().await;
    payers.close().await;
    let Ledger { reserved, promised, closed_twice, early, paid_closed } =
        Ledger::read(&env.pool).await.expect("the ledger");
    let consumed = env.count("SELECT 1000000 - available - reserved FROM stock").await;
    all.stock_balanced =
        reserved == promised && u64::try_from(consumed) == Ok(all.paid_won) && closed_twice + early + paid_closed == 0;
    all
}

fn main() -> ExitCode {
    let args = Arc::new(Args::parse());
    // Before any TLS connection: rustls needs a cryptography provider. Fails only if there is one already.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let result = Arc::new(OnceLock::new());
    let (told, given) = (result.clone(), args.clone());
    let service = args.provider.map(|Sort::Http| Arc::new(PaymentService::start()));
    let asked = service.clone();
    let join = |settings: &mut Settings| {
        if let Some(service) = service {
            service.join(settings, "race", wide_limits());
        }
    };
    TestEnv::builder().settings(join).run(async move |env| {
        let counts = race(&env, &given, &asked).await;
        told.set(counts).expect("one run");
    });
    let counts = result.get().cloned().unwrap_or_default();
    if args.json {
        println!("{}", serde_json::to_string(&counts).expect("numbers"));
    } else {
        println!(
            "{} races: {} won by the payment, {} by the close, {} by both, {} by neither; the stock {}",
            counts.races,
            counts.paid_won,
            counts.close_won,
            counts.both,
            counts.neither,
            if counts.stock_balanced { "balances" } else { "does not balance" }
        );
    }
    match counts.what_is_broken() {
        None => ExitCode::SUCCESS,
        Some(why) => {
            eprintln!("scripts/race: {why}");
            ExitCode::FAILURE
        }
    }
}

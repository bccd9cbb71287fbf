//! A flash sale: very many orders due at one moment that was known minutes before, among them paid ones, with two workers and
//! the brake as it is by default. It must not trip.

use std::time::Duration;

use anyhow::{Context, ensure};
use order_timeout_client::postgres::Timestamptz;
use order_timeout_core::order::Timestamp;
use serde_json::{Map, Value, json};
use sqlx::PgPool;

use crate::Options;
use crate::bench_env::ledger::Ledger;
use crate::bench_env::process::Program;
use crate::bench_env::servers::Servers;
use crate::bench_env::{BenchEnv, MANY_ARTICLES, OrderDeadline, SETTLING, sleep_until};
use crate::{progress, report};

/// How many orders are closed for each one that is paid. The brake knows this share from the days before.
const CLOSED_FOR_EACH_PAID: usize = 5;
/// What was closed in each minute of the day before. A thousand and more within two minutes trip the brake then, unless
/// they were foreseen.
const HISTORY: &str = "
    INSERT INTO closing_minutes (kind, minute, closed, woken_closed, woken_paid, foreseen, closed_of_due)
    SELECT 'order', date_trunc('minute', clock_timestamp()) - ago * interval '1 minute', 5, 5, 1, 5, 5
    FROM generate_series(1, 1440) AS ago";
/// From the last alarm to the moment: an order is foreseen if it was counted two minutes before its own minute, and orders
/// are counted each minute.
const KNOWN_BEFORE: Duration = Duration::from_secs(4 * 60);
/// When it is checked that they were counted.
const CHECKED_BEFORE: Duration = Duration::from_secs(20);
/// A slow machine's rates of inserting orders and of writing alarms into the wheel, used to choose the moment.
const SLOWEST_FILLING_PER_S: f64 = 8_000.0;
const SLOWEST_ARMING_PER_S: f64 = 3_000.0;
/// For connecting, and for the database to analyse and write what was inserted.
const SPARE: Duration = Duration::from_secs(10);

pub async fn run(servers: &Servers, options: &Options, orders: usize) -> anyhow::Result<()> {
    let env = BenchEnv::for_worker(servers, options, &[]).await?;
    let measured = run_in(&env, servers, orders).await;
    env.clean_up().await?;
    let (ledger, facts) = measured?;
    report::print_ledger("flash-sale", servers, options, &ledger, facts)
}

async fn run_in(env: &BenchEnv<'_>, servers: &Servers, orders: usize) -> anyhow::Result<(Ledger, Map<String, Value>)> {
    sqlx::query(HISTORY).execute(&env.pool).await?;
    let mut workers = Vec::new();
    for log in ["flash-sale-1.log", "flash-sale-2.log"] {
        let log = servers.output.join(log);
        workers.push(env.start_worker(&log).await?);
        // The second consumes as well, and not only the first.
        env.http_of(&log).await?;
    }
    sleep_until(Timestamp::now_by_local_clock() + SETTLING).await;

    let paid = orders / CLOSED_FOR_EACH_PAID;
    let preparing = (orders + paid) as f64 * (1.0 / SLOWEST_FILLING_PER_S + 1.0 / SLOWEST_ARMING_PER_S);
    let known_at = Timestamp::now_by_local_clock() + Duration::from_secs_f64(preparing) + SPARE;
    let due = known_at + KNOWN_BEFORE;
    progress::say(format!("flash-sale: writing {orders} orders, and {paid} that are paid"));
    let alarms = env.fill(&vec![due; orders + paid], MANY_ARTICLES).await?;
    pay(&env.pool, &alarms).await?;
    env.publisher().await?.schedule_all(alarms).await?;
    ensure!(Timestamp::now_by_local_clock() < known_at, "scheduling took longer than planned; is the machine busy?");
    progress::say(format!(
        "flash-sale: all are due in {:.0} s",
        due.since(Timestamp::now_by_local_clock()).as_secs_f64()
    ));
    sleep_until(due - CHECKED_BEFORE).await;
    let foreseen = foreseen(&env.pool, due).await?;
    ensure!(foreseen >= orders as i64, "only {foreseen} of {orders} orders were foreseen");

    let (first, rest) = workers.split_first_mut().context("two workers were started")?;
    env.wait_until_closed(due, first).await?;
    rest.iter_mut().try_for_each(Program::ensure_runs)?;
    let pauses: Vec<String> = sqlx::query_scalar("SELECT reason FROM closing_pauses").fetch_all(&env.pool).await?;
    for worker in workers {
        worker.stop().await?;
    }
    ensure!(pauses.is_empty(), "the brake has tripped: {}", pauses.join("; "));
    let ledger = without_paid(env.ledger(due).await?, &env.pool).await?;
    let facts = json!({
        "workers": 2,
        "paid": paid,
        "foreseen": foreseen,
        "brake_tripped": false,
        "last_close_after_ms": ledger.lateness_us.max() / 1_000,
        "closed_per_s": report::whole(ledger.closed_per_s()),
    });
    Ok((ledger, facts.as_object().cloned().unwrap_or_else(Map::new)))
}

/// Every sixth is paid in time.
async fn pay(pool: &PgPool, alarms: &[OrderDeadline]) -> anyhow::Result<()> {
    let paid = alarms.iter().skip(CLOSED_FOR_EACH_PAID).step_by(CLOSED_FOR_EACH_PAID + 1);
    let ids: Vec<String> = paid.map(|(order_id, _)| order_id.as_str().to_owned()).collect();
    sqlx::query("UPDATE orders SET status = 'paid', paid_at = clock_timestamp() WHERE id = ANY ($1::uuid[])")
        .bind(ids)
        .execute(pool)
        .await?;
    Ok(())
}

/// How many orders were known to fall due in this minute.
async fn foreseen(pool: &PgPool, due: Timestamp) -> anyhow::Result<i64> {
    let known = "SELECT coalesce(max(foreseen), 0) FROM closing_minutes WHERE minute = date_trunc('minute', $1)";
    Ok(sqlx::query_scalar(known).bind(Timestamptz(due)).fetch_one(pool).await?)
}

/// A paid order is not lost.
async fn without_paid(ledger: Ledger, pool: &PgPool) -> anyhow::Result<Ledger> {
    let paid: i64 = sqlx::query_scalar("SELECT count(*) FROM orders WHERE status = 'paid'").fetch_one(pool).await?;
    let paid = u64::try_from(paid)?;
    Ok(Ledger { orders: ledger.orders - paid, lost: ledger.lost - paid, ..ledger })
}

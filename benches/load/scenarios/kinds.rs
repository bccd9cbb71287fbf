//! Five kinds in one worker: one's statement fails, another's table is locked, a third is flooded; how late the closes of
//! each kind are.

use std::time::Duration;

use anyhow::{Context, ensure};
use order_timeout_client::Publisher;
use order_timeout_client::postgres::Timestamptz;
use order_timeout_core::kind::Kind;
use order_timeout_core::order::Timestamp;
use serde_json::{Value, json};
use sqlx::{AssertSqlSafe, PgPool};

use crate::Options;
use crate::bench_env::ledger::{histogram, lateness_ms};
use crate::bench_env::process::Program;
use crate::bench_env::servers::Servers;
use crate::bench_env::{BenchEnv, SETTLING, sleep_until};
use crate::progress;
use crate::report::print_line;

const FAILING: &str = "failing";
const LOCKED: &str = "locked";
const FLOODED: &str = "flooded";
/// The kinds that are not in trouble, and of which some orders fall due all the time.
const OTHERS: [&str; 2] = ["calm", "quiet"];
/// Of each of the others, for this long on both sides of the flood.
const ORDERS_PER_S: u32 = 100;
const AROUND: Duration = Duration::from_secs(10);
/// Orders of each kind that cannot be closed.
const STUCK: u32 = 1_000;
/// From the start of publishing to the first deadline of the others: for publishing the flood.
const PUBLISHING: Duration = Duration::from_secs(20);
/// An order that is still open so long after the last deadline is lost.
const TIMEOUT: Duration = Duration::from_secs(60);

pub async fn run(servers: &Servers, options: &Options, flood: usize) -> anyhow::Result<()> {
    let file = servers.output.join("kinds.toml");
    std::fs::write(&file, all().map(settings_of).collect::<String>())?;
    let env = BenchEnv::for_worker_with_file(servers, options, &file).await?;
    let measured = run_in(&env, servers, flood).await;
    env.clean_up().await?;
    print_line(&measured?, options.json);
    Ok(())
}

fn all() -> impl Iterator<Item = &'static str> {
    [FAILING, LOCKED, FLOODED].into_iter().chain(OTHERS)
}

fn settings_of(kind: &str) -> String {
    format!(
        "[kinds.{kind}.table]
table = \"public.{kind}\"
id = [\"id\"]
open = \"state = 'open'\"
paid = \"state = 'done'\"
deadline = \"until\"
close = {{ state = \"closed\", closed_at = \"now\" }}
"
    )
}

async fn run_in(env: &BenchEnv<'_>, servers: &Servers, flood: usize) -> anyhow::Result<Value> {
    for kind in all() {
        create_table(&env.pool, kind).await?;
    }
    let mut worker = env.start_worker(&servers.output.join("kinds.log")).await?;
    sleep_until(Timestamp::now_by_local_clock() + SETTLING).await;
    execute(&env.pool, "ALTER TABLE public.failing RENAME COLUMN state TO other").await?;
    let mut lock = env.pool.begin().await?;
    sqlx::raw_sql("LOCK TABLE public.locked IN ACCESS EXCLUSIVE MODE").execute(&mut *lock).await?;

    let begin = Timestamp::now_by_local_clock() + PUBLISHING;
    let (flooded_at, last) = (begin + AROUND, begin + 2 * AROUND);
    let publisher = env.publisher().await?;
    progress::say(format!("kinds: publishing {flood} orders of one kind, due at one moment"));
    schedule(env, &publisher, FLOODED, &vec![flooded_at; flood]).await?;
    let number = ORDERS_PER_S * u32::try_from((2 * AROUND).as_secs())?;
    let spread: Vec<Timestamp> =
        (0..number).map(|number| begin + Duration::from_secs(1) * number / ORDERS_PER_S).collect();
    for kind in OTHERS {
        schedule(env, &publisher, kind, &spread).await?;
    }
    // Without rows: what is asked about them fails, or waits.
    for kind in [FAILING, LOCKED] {
        let ids: Vec<String> = (1..=STUCK).map(|id| id.to_string()).collect();
        publisher.schedule_all_kind(&Kind::new(kind)?, ids.iter().map(|id| (id, begin))).await?;
    }
    ensure!(Timestamp::now_by_local_clock() < begin, "publishing took longer than planned; is the machine busy?");
    wait_until_closed(env, last, &mut worker).await?;
    lock.rollback().await?;
    worker.stop().await?;

    let (mut lateness, mut lost) = (serde_json::Map::new(), 0);
    for kind in [FLOODED].into_iter().chain(OTHERS) {
        lateness.insert(kind.to_owned(), lateness_of(&env.pool, kind).await?);
        lost += open(&env.pool, kind).await?;
    }
    ensure!(lost == 0, "{lost} orders of the kinds that can be closed are still open");
    Ok(json!({
        "scenario": "kinds",
        "flood": flood,
        "orders_of_each_other_kind": number,
        "lateness_ms": lateness,
    }))
}

async fn execute(pool: &PgPool, sql: &str) -> anyhow::Result<()> {
    sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).execute(pool).await?;
    Ok(())
}

async fn create_table(pool: &PgPool, kind: &str) -> anyhow::Result<()> {
    let create = format!(
        "CREATE TABLE public.{kind} (id bigserial PRIMARY KEY, state text NOT NULL DEFAULT 'open',
             until timestamptz NOT NULL, closed_at timestamptz, CHECK (closed_at >= until));
         CREATE INDEX ON public.{kind} (until, id) WHERE state = 'open'"
    );
    execute(pool, &create).await
}

/// Creates orders of this kind with these deadlines, and publishes their alarms.
async fn schedule(
    env: &BenchEnv<'_>,
    publisher: &Publisher,
    kind: &str,
    deadlines: &[Timestamp],
) -> anyhow::Result<()> {
    let until: Vec<Timestamptz> = deadlines.iter().map(|moment| Timestamptz(*moment)).collect();
    let insert = format!("INSERT INTO public.{kind} (until) SELECT unnest($1::timestamptz[]) RETURNING id, until");
    let rows: Vec<(i64, Timestamptz)> = sqlx::query_as(AssertSqlSafe(insert)).bind(until).fetch_all(&env.pool).await?;
    let alarms: Vec<(String, Timestamp)> =
        rows.into_iter().map(|(id, Timestamptz(until))| (id.to_string(), until)).collect();
    publisher.schedule_all_kind(&Kind::new(kind)?, alarms.iter().map(|(id, until)| (id, *until))).await?;
    Ok(())
}

async fn open(pool: &PgPool, kind: &str) -> anyhow::Result<i64> {
    let count = format!("SELECT count(*) FROM public.{kind} WHERE state = 'open'");
    Ok(sqlx::query_scalar(AssertSqlSafe(count)).fetch_one(pool).await?)
}

/// Waits until nothing is open that can be closed, or the time is up.
async fn wait_until_closed(env: &BenchEnv<'_>, last: Timestamp, worker: &mut Program) -> anyhow::Result<()> {
    sleep_until(last).await;
    while Timestamp::now_by_local_clock() < last + TIMEOUT {
        worker.ensure_runs()?;
        let mut left = 0;
        for kind in [FLOODED].into_iter().chain(OTHERS) {
            left += open(&env.pool, kind).await?;
        }
        if left == 0 {
            return Ok(());
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    Ok(())
}

/// The commit's time minus the deadline.
async fn lateness_of(pool: &PgPool, kind: &str) -> anyhow::Result<Value> {
    let select = format!(
        "SELECT (extract(epoch FROM pg_xact_commit_timestamp(xmin) - until) * 1000000)::bigint
         FROM public.{kind} WHERE state = 'closed'"
    );
    let late_us: Vec<i64> = sqlx::query_scalar(AssertSqlSafe(select)).fetch_all(pool).await?;
    let mut lateness_us = histogram();
    for late_us in late_us {
        lateness_us.record(u64::try_from(late_us).context("an order was closed early")?)?;
    }
    Ok(lateness_ms(&lateness_us))
}

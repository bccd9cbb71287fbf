//! How fast the page's pages are with a million orders. Prints; takes minutes, and needs a quiet machine, so it runs only by
//! name: `cargo test --test browser -- --ignored --nocapture million`.

use std::time::{Duration, Instant};

use order_timeout_testkit::figures::get;
use order_timeout_testkit::page::with_page;
use order_timeout_testkit::{RunningWorker, TestEnv, wait_for};

use crate::execute;

/// What a page may take, for 99 of 100 requests.
const LONGEST: Duration = Duration::from_millis(100);
const REQUESTS: usize = 100;

/// 700 000 orders that fall due within a day, 300 000 closed ones, and their rows in both outboxes.
const MILLION: &str = "
    INSERT INTO orders (id, expires_at, amount_minor, currency)
    SELECT gen_random_uuid(), now() + interval '1 hour' + interval '1 second' * (n % 86400), 4999, 'EUR'
    FROM generate_series(1, 700000) n;
    INSERT INTO orders (id, expires_at, amount_minor, currency, status, closed_at, closed_by, close_reason)
    SELECT gen_random_uuid(), now() - interval '1 second' * (n % 86400), 4999, 'EUR', 'closed', now(), 'alarm', 'unpaid'
    FROM generate_series(1, 300000) n;
    INSERT INTO order_items (order_id, article_id, quantity) SELECT id, 'article', 1 FROM orders;
    INSERT INTO order_events (order_id, event, by, reason)
    SELECT id, 'closed', 'alarm', 'unpaid' FROM orders WHERE status = 'closed';
    INSERT INTO event_outbox (routing_key, type, payload, sent_at)
    SELECT 'order.closed', 'order.closed.v1',
           jsonb_build_object('order_id', id, 'closed_at', closed_at, 'deadline', expires_at), now()
    FROM orders WHERE status = 'closed';
    INSERT INTO alarm_outbox (order_id, deadline, sent_at)
    SELECT id::text, expires_at, now() FROM orders WHERE status = 'unpaid' LIMIT 500000;
    ANALYZE";

/// Asks for these paths in turn, and prints how long the answers took.
async fn measure(worker: &RunningWorker, name: &str, paths: &[String]) -> Duration {
    let mut took = Vec::with_capacity(REQUESTS);
    for path in paths.iter().cycle().take(REQUESTS) {
        let began = Instant::now();
        let (status, body) = get(worker, path).await;
        took.push(began.elapsed());
        assert_eq!(status, 200, "{path}: {body}");
    }
    took.sort();
    let (p50, p99) = (took[REQUESTS / 2], took[REQUESTS * 99 / 100 - 1]);
    println!("{name:<14} p50 {:>6.1} ms  p99 {:>6.1} ms", p50.as_secs_f64() * 1e3, p99.as_secs_f64() * 1e3);
    p99
}

#[test]
#[ignore = "takes minutes and needs a quiet machine; run it by name"]
fn pages_are_fast_with_million_orders() {
    TestEnv::builder().settings(with_page(None)).run(async |env| {
        execute(&env, MILLION).await;
        let worker = env.worker().await;
        let ids = "(SELECT id::text FROM orders WHERE status = 'closed' LIMIT 50)
                   UNION ALL (SELECT id::text FROM orders WHERE status = 'unpaid' LIMIT 50)";
        let ids: Vec<String> = sqlx::query_scalar(ids).fetch_all(&env.pool).await.unwrap();
        let stories: Vec<String> = ids.iter().map(|id| format!("/orders/{id}")).collect();
        // The first forecast is counted in the background.
        wait_for("the forecast", async || get(&worker, "/").await.1.contains("next 30 minutes")).await;
        let one = |path: &str| vec![path.to_owned()];
        for (name, paths) in [
            ("status", one("/")),
            ("forecast", one("/forecast")),
            ("search", one("/forecast?text=nothing")),
            ("parked alarms", one("/parked")),
            ("late money", one("/late")),
            ("an order", stories),
        ] {
            let p99 = measure(&worker, name, &paths).await;
            assert!(p99 < LONGEST, "{name}: {p99:?}");
        }
        worker.stop().await;
    });
}

//! The effect of several processing queues: the broker alone and the worker in a burst, with one queue and with more.

use serde_json::json;

use super::burst;
use crate::bench_env::MANY_ARTICLES;
use crate::bench_env::servers::Servers;
use crate::measurement::{Candidate, measure};
use crate::report::{print_line, round, whole};
use crate::{AlarmRoute, Options, limits};

const COUNTS: [u8; 4] = [1, 2, 4, 8];

/// By lane, which has several queues: a single slot of the wheel would be the bottleneck.
const ROUTE: AlarmRoute = AlarmRoute::Lane;

pub async fn run(servers: &Servers, options: &Options, orders: usize) -> anyhow::Result<()> {
    let plan = burst::plan(orders, MANY_ARTICLES, ROUTE);
    let mut by_shards = Vec::new();
    for shards in COUNTS {
        let settings = [burst::settings(ROUTE), vec![format!("worker.shards={shards}")]].concat();
        let broker = limits::broker::measure(servers, options, &settings, orders, ROUTE).await?;
        let worker = measure(servers, options, "worker", &Candidate::Worker(settings), &plan).await?;
        worker.ledger.ensure_kept("worker")?;
        by_shards.push(json!({
            "shards": shards,
            "broker_limit_per_s": whole(broker.handed_over_per_s),
            "broker_publish_limit_per_s": whole(broker.published_per_s),
            "worker_closed_per_s": whole(worker.ledger.closed_per_s()),
            "worker_last_lateness_ms": worker.ledger.lateness_us.max() / 1_000,
            "worker_cpu_s": round(worker.cpu_s, 2),
            "broker_cpu_s": worker.broker_cpu_s.map(|cpu_s| round(cpu_s, 2)),
        }));
    }
    let line = json!({
        "scenario": "shards", "strategy": options.strategy, "broker": servers.broker.version()?, "orders": orders,
        "by_shards": by_shards,
    });
    print_line(&line, options.json);
    Ok(())
}

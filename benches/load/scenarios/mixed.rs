//! Random delays behind long ones: no alarm may wait behind another. For comparison, other designs for delaying.

use std::time::Duration;

use serde_json::json;

use crate::Options;
use crate::bench_env::MANY_ARTICLES;
use crate::bench_env::servers::Servers;
use crate::controls::{self, Control};
use crate::measurement::{Candidate, Plan, measure};
use crate::report::{Report, round};

const SHORTEST_MS: u64 = 1_000;
const LONGEST_MS: u64 = 120_000;
/// The delay of those published first, which are not waited for.
const LONG: Duration = Duration::from_secs(600);
/// One of this many is a long one.
const LONG_ONE_IN: usize = 50;

pub async fn run(servers: &Servers, options: &Options, orders: usize) -> anyhow::Result<()> {
    let delays = delays(orders);
    let horizon = Duration::from_millis(LONGEST_MS);
    let plan = Plan {
        ahead: Duration::ZERO,
        after_first: delays.clone(),
        live: false,
        lane: None,
        aligned_to: None,
        horizon,
        articles: MANY_ARTICLES,
    };
    let mut report = Report::begin("mixed", servers, options);
    let worker = measure(servers, options, "worker", &Candidate::Worker(Vec::new()), &plan).await?;
    let per_message = worker.broker_cpu_s.map(|cpu_s| round(cpu_s * 1e3 / orders as f64, 3));
    report.note("broker_cpu_ms_per_message", json!(per_message));
    report.add(worker);
    if !options.alone {
        let one_queue = controls::measure(servers, Control::OneQueue, &delays, horizon).await?;
        report.note("control_one_ttl_queue", one_queue);
        let ladder = controls::measure(servers, Control::BinaryLadder, &delays, horizon).await?;
        report.note("control_binary_ladder", ladder);
    }
    report.print()
}

/// The long ones first.
fn delays(orders: usize) -> Vec<Duration> {
    let mut random = fastrand::Rng::with_seed(1);
    let long = orders.div_ceil(LONG_ONE_IN);
    let short = (long..orders).map(|_| Duration::from_millis(random.u64(SHORTEST_MS..LONGEST_MS)));
    std::iter::repeat_n(LONG, long).chain(short).collect()
}

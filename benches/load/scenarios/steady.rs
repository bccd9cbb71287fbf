//! A constant rate of orders, all with one delay, for some time: how late the closes of an ordinary day are and what
//! they cost.

use std::time::Duration;

use serde_json::json;

use crate::bench_env::MANY_ARTICLES;
use crate::bench_env::servers::Servers;
use crate::measurement::{Candidate, Figures, Plan, measure};
use crate::report::Report;
use crate::watching::Watch;
use crate::{AlarmRoute, Options};

const WATCHED: &str = "worker, watched";

/// The command line's options.
#[derive(Debug, Clone, Copy)]
pub struct Load {
    pub rate: u32,
    pub seconds: u32,
    pub delay: Duration,
    pub route: AlarmRoute,
}

pub async fn run(servers: &Servers, options: &Options, load: Load) -> anyhow::Result<()> {
    let plan = plan(load);
    let measured = async |name: &str, candidate: Candidate| measure(servers, options, name, &candidate, &plan).await;
    // One loop: at this rate a second one would only double the queries.
    let poller = |every_ms| Candidate::Poller { every: Duration::from_millis(every_ms), connections: 1 };
    let settings = match load.route {
        AlarmRoute::Lane => vec![format!("delay.lanes={}ms", load.delay.as_millis())],
        AlarmRoute::Wheel => Vec::new(),
        AlarmRoute::Far => {
            anyhow::bail!("steady waits for as long as --delay says; choose --route wheel and a longer --delay")
        }
    };
    let mut report = Report::begin("steady", servers, options);
    report.note("rate_per_s", json!(load.rate));
    report.note("seconds", json!(load.seconds));
    report.note("delay_s", json!(load.delay.as_secs_f64()));
    report.add(measured("worker", Candidate::Worker(settings.clone())).await?);
    if let Some(watch) = Watch::of(options) {
        report.add(measured(WATCHED, Candidate::Watched(settings, watch)).await?);
        let late = |quantile| move |figures: &Figures| figures.ledger.lateness_us.value_at_quantile(quantile) as f64;
        report.note_ratio_of("p50_watched_to_unwatched", WATCHED, late(0.5));
        report.note_ratio_of("p99_watched_to_unwatched", WATCHED, late(0.99));
        report.note_ratio_of("cpu_watched_to_unwatched", WATCHED, |figures| figures.working_cpu_s);
    }
    if !options.alone {
        report.add(measured("poller, 10 ms", poller(10)).await?);
        report.add(measured("poller, 100 ms", poller(100)).await?);
        report.add(measured("look-ahead poller", Candidate::LookAhead { connections: 2 }).await?);
    }
    report.print()
}

fn plan(load: Load) -> Plan {
    let orders = load.rate * load.seconds;
    let horizon = Duration::from_secs(load.seconds.into());
    let after_first = (0..orders).map(|number| Duration::from_secs(1) * number / load.rate).collect();
    Plan { ahead: load.delay, after_first, live: true, lane: None, aligned_to: None, horizon, articles: MANY_ARTICLES }
}

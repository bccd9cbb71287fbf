//! Orders that are all due at one instant: of many articles, or (a flash sale) all of one.

use std::time::Duration;

use order_timeout::Settings;

use crate::bench_env::MANY_ARTICLES;
use crate::bench_env::servers::Servers;
use crate::measurement::{Candidate, Figures, Plan, measure};
use crate::report::Report;
use crate::watching::Watch;
use crate::{AlarmRoute, DATABASE, Options, limits};

/// A slow machine's rate of writing alarms into the wheel, used to choose the instant.
const SLOWEST_ARMING_PER_S: f64 = 3_000.0;
/// An additional margin before the alarms leave the broker.
const SPARE: Duration = Duration::from_secs(2);
/// The standard delay of a burst by lane: longer than `delay.lead`, so that alarms wait in the lane.
const LANE: Duration = Duration::from_secs(30);
/// Publishing begins this much earlier than the lane's delay before the instant: alarms published up to a second
/// earlier or later still take the lane.
const SOONER: Duration = Duration::from_millis(500);
/// Loops of each competitor, as many as the worker has closers.
const CONNECTIONS: u32 = 2;
const LEAD_0: &str = "worker, lead 0";
const WATCHED: &str = "worker, watched";

pub async fn burst(servers: &Servers, options: &Options, orders: usize, route: AlarmRoute) -> anyhow::Result<()> {
    let plan = plan(orders, MANY_ARTICLES, route);
    let measured = async |name: &str, candidate: Candidate| measure(servers, options, name, &candidate, &plan).await;
    let mut report = Report::begin("burst", servers, options);
    if !options.alone {
        report.postgres = Some(limits::postgres::measure(servers, orders, MANY_ARTICLES, batch_size()).await?);
        if options.strategy != DATABASE {
            report.broker = Some(limits::broker::measure(servers, options, &settings(route), orders, route).await?);
        }
    }
    report.add(measured("worker", Candidate::Worker(settings(route))).await?);
    if let Some(watch) = Watch::of(options) {
        report.add(measured(WATCHED, Candidate::Watched(settings(route), watch)).await?);
        report.note_ratio_of("last_lateness_watched_to_unwatched", WATCHED, last_lateness);
    }
    if !options.alone {
        // Without a lead, only alarms published within a fifth of a second take the lane.
        if route != AlarmRoute::Lane && options.strategy != DATABASE {
            let without_lead = Candidate::Worker(vec!["delay.lead=0s".to_owned()]);
            report.add(measured(LEAD_0, without_lead).await?);
            report.note_ratio("last_lateness_to_lead_0", LEAD_0, last_lateness);
        }
        report.add(measured("poller, 10 ms", poller(10)).await?);
        report.add(measured("poller, 100 ms", poller(100)).await?);
        report.add(measured("look-ahead poller", Candidate::LookAhead { connections: CONNECTIONS }).await?);
        report.note_ratio("last_lateness_to_poller", "poller, 10 ms", last_lateness);
        report.note_ratio("last_lateness_to_look_ahead_poller", "look-ahead poller", last_lateness);
    }
    report.print()
}

pub async fn flash(servers: &Servers, options: &Options, orders: usize, route: AlarmRoute) -> anyhow::Result<()> {
    let one_article = plan(orders, 1, route);
    let many_articles = plan(orders, MANY_ARTICLES, route);
    let worker = Candidate::Worker(settings(route));
    let mut report = Report::begin("flash", servers, options);
    if !options.alone {
        report.postgres = Some(limits::postgres::measure(servers, orders, 1, batch_size()).await?);
    }
    report.add(measure(servers, options, "worker", &worker, &one_article).await?);
    if !options.alone {
        report.add(measure(servers, options, "worker, many articles", &worker, &many_articles).await?);
        report.add(measure(servers, options, "poller, 10 ms", &poller(10), &one_article).await?);
        report.note_ratio("rate_to_many_articles", "worker, many articles", |figures| figures.ledger.closed_per_s());
        report.note_ratio("last_lateness_to_poller", "poller, 10 ms", last_lateness);
    }
    report.print()
}

fn poller(every_ms: u64) -> Candidate {
    Candidate::Poller { every: Duration::from_millis(every_ms), connections: CONNECTIONS }
}

fn last_lateness(figures: &Figures) -> f64 {
    figures.ledger.lateness_us.max() as f64
}

pub fn plan(orders: usize, articles: usize, route: AlarmRoute) -> Plan {
    let settings = Settings::defaults();
    let wheel = settings.delay.wheel().expect("the default rings mesh");
    let [finest, next, ..] = wheel.rings() else { panic!("the default wheel has coarser rings") };
    let arming = Duration::from_secs_f64(orders as f64 / SLOWEST_ARMING_PER_S);
    let by_the_finest = arming + SPARE + settings.delay.lead;
    // Due at the beginning of a slot, which has no more than its `early` for dead-lettering.
    let (ahead, lane, slot) = match route {
        AlarmRoute::Wheel => (by_the_finest, None, finest.unit),
        AlarmRoute::Far => (by_the_finest + finest.span(), None, next.unit),
        AlarmRoute::Lane => (LANE + SOONER, Some(LANE), finest.unit),
    };
    Plan {
        ahead,
        after_first: vec![Duration::ZERO; orders],
        live: false,
        lane,
        aligned_to: Some(slot),
        horizon: Duration::ZERO,
        articles,
    }
}

pub fn settings(route: AlarmRoute) -> Vec<String> {
    match route {
        AlarmRoute::Wheel | AlarmRoute::Far => Vec::new(),
        AlarmRoute::Lane => vec![format!("delay.lanes={}s", LANE.as_secs())],
    }
}

fn batch_size() -> usize {
    Settings::defaults().worker.batch_size
}

//! The output of a scenario: a readable table, a chart of lateness, and one line of JSON.

mod histogram;
mod table;

use anyhow::ensure;
use serde_json::{Map, Value, json};

use crate::Options;
use crate::bench_env::ledger::{self, Ledger};
use crate::bench_env::servers::Servers;
use crate::limits::broker::BrokerLimit;
use crate::limits::postgres::PostgresLimit;
use crate::measurement::Figures;

/// A scenario's outcome: the worker's figures first, then those of the others.
pub struct Report<'a> {
    scenario: &'static str,
    candidates: Vec<Figures>,
    pub postgres: Option<PostgresLimit>,
    pub broker: Option<BrokerLimit>,
    /// Further keys of the JSON line.
    notes: Map<String, Value>,
    servers: &'a Servers,
    options: &'a Options,
}

impl<'a> Report<'a> {
    pub fn begin(scenario: &'static str, servers: &'a Servers, options: &'a Options) -> Self {
        Self { scenario, candidates: Vec::new(), postgres: None, broker: None, notes: Map::new(), servers, options }
    }

    pub fn add(&mut self, figures: Figures) {
        self.candidates.push(figures);
    }

    pub fn note(&mut self, key: &str, value: Value) {
        self.notes.insert(key.into(), value);
    }

    /// Notes the ratio of the worker's figure to another candidate's.
    pub fn note_ratio(&mut self, key: &str, other: &str, figure: impl Fn(&Figures) -> f64) {
        let ratio = round(figure(&self.candidates[0]) / figure(self.candidate(other)), 3);
        self.note(key, json!(ratio));
    }

    /// Notes the ratio of another candidate's figure to the worker's.
    pub fn note_ratio_of(&mut self, key: &str, other: &str, figure: impl Fn(&Figures) -> f64) {
        let ratio = round(figure(self.candidate(other)) / figure(&self.candidates[0]), 3);
        self.note(key, json!(ratio));
    }

    fn candidate(&self, name: &str) -> &Figures {
        self.candidates.iter().find(|figures| figures.name == name).expect("it was measured")
    }

    /// Prints everything, and fails if the worker or a competitor lost an order, or closed one twice or early: its
    /// figures would be worthless then.
    pub fn print(&self) -> anyhow::Result<()> {
        let chart = self.servers.output.join(format!("{}.svg", self.scenario));
        let series = self.candidates.iter().map(|figures| (figures.name.as_str(), &figures.ledger.lateness_us));
        histogram::draw(&chart, self.scenario, &series.collect::<Vec<_>>())?;
        let line = self.json()?;
        if !self.options.json {
            self.print_table(&line);
            println!("\nlateness: {}\n", chart.display());
        }
        println!("{}", Value::Object(line));
        for figures in &self.candidates {
            ensure!(figures.ledger.orders > 0, "{}: no order was due", figures.name);
            figures.ledger.ensure_kept(&figures.name)?;
        }
        Ok(())
    }

    fn print_table(&self, line: &Map<String, Value>) {
        table::print_contestants(&self.candidates);
        println!();
        let skipped = ["scenario", "strategy", "competitors", "lateness_ms"];
        let rows = line.iter().filter(|(key, _)| !skipped.contains(&key.as_str()));
        table::print_rows(rows);
    }

    fn json(&self) -> anyhow::Result<Map<String, Value>> {
        let (worker, others) = self.candidates.split_first().expect("the worker has played");
        let mut line = facts(worker);
        line.insert("scenario".into(), json!(self.scenario));
        line.insert("strategy".into(), json!(self.options.strategy));
        line.insert("broker".into(), json!(self.servers.broker.version()?));
        line.insert("worker_cpu_s".into(), json!(round(worker.cpu_s, 2)));
        line.insert("worker_peak_rss_mib".into(), json!(round(worker.peak_rss_mib, 1)));
        if let Some(limit) = &self.postgres {
            let by_connections = limit.by_connections.iter();
            let by_connections = by_connections.map(|(count, per_s)| (count.to_string(), json!(whole(*per_s))));
            line.insert("postgres_limit_per_s".into(), json!(whole(limit.best())));
            line.insert("postgres_limit_by_connections".into(), Value::Object(by_connections.collect()));
            line.insert("ratio_to_postgres".into(), json!(round(worker.ledger.closed_per_s() / limit.best(), 3)));
        }
        if let Some(limit) = &self.broker {
            line.insert("broker_limit_per_s".into(), json!(whole(limit.handed_over_per_s)));
            line.insert("broker_publish_limit_per_s".into(), json!(whole(limit.published_per_s)));
        }
        line.extend(self.notes.clone());
        let others = others.iter().map(|figures| (figures.name.clone(), Value::Object(competitor(figures))));
        line.insert("competitors".into(), Value::Object(others.collect()));
        Ok(line)
    }
}

fn competitor(figures: &Figures) -> Map<String, Value> {
    let mut facts = facts(figures);
    facts.insert("cpu_s".into(), json!(round(figures.cpu_s, 2)));
    facts.insert("peak_rss_mib".into(), json!(round(figures.peak_rss_mib, 1)));
    facts
}

/// Figures of the worker and its competitors.
fn facts(figures: &Figures) -> Map<String, Value> {
    let Figures { ledger, .. } = figures;
    let share_of_a_core = |cpu_s: f64| round(cpu_s / figures.working_s, 3);
    let facts = json!({
        "orders": ledger.orders,
        "closed": ledger.closed,
        "lost": ledger.lost,
        "closed_twice": ledger.closed_twice,
        "early": ledger.early,
        "pending": figures.pending,
        "closed_by": ledger.closed_by,
        "share_by_alarm": round(ledger.share_by_alarm(), 4),
        "lateness_ms": ledger.lateness_ms(),
        "closed_per_s": whole(ledger.closed_per_s()),
        "cpu_share_of_a_core": share_of_a_core(figures.working_cpu_s),
        "postgres_cpu_s": round(figures.postgres_cpu_s, 2),
        "postgres_cpu_share_of_a_core": share_of_a_core(figures.postgres_cpu_s),
        "broker_cpu_s": figures.broker_cpu_s.map(|cpu_s| round(cpu_s, 2)),
        "single_row_commit_ms": ledger::lateness_ms(&figures.commit_us),
        "announced_after_s": figures.announced_s.map(|seconds| round(seconds, 2)),
        "published_late_ms": figures.published_late.as_millis(),
        "watched": figures.watched,
    });
    let Value::Object(facts) = facts else { unreachable!("an object was just made") };
    facts.into_iter().filter(|(_, value)| !value.is_null()).collect()
}

/// Rates have no decimals.
pub fn whole(number: f64) -> u64 {
    number.round() as u64
}

/// To this many decimals.
pub fn round(number: f64, digits: i32) -> f64 {
    let factor = 10_f64.powi(digits);
    (number * factor).round() / factor
}

/// The output of a scenario that only measures the worker's orders; `more` is added to it.
///
/// # Errors
/// If an order was lost, closed twice or closed early.
pub fn print_ledger(
    scenario: &str,
    servers: &Servers,
    options: &Options,
    ledger: &Ledger,
    more: Map<String, Value>,
) -> anyhow::Result<()> {
    let mut line = json!({
        "scenario": scenario, "strategy": options.strategy, "orders": ledger.orders, "closed": ledger.closed,
        "lost": ledger.lost, "closed_twice": ledger.closed_twice, "early": ledger.early,
        "closed_by": ledger.closed_by, "lateness_ms": ledger.lateness_ms(), "broker": servers.broker.version()?,
    });
    line.as_object_mut().expect("an object was just made").extend(more);
    print_line(&line, options.json);
    ledger.ensure_kept("worker")
}

/// Prints one JSON line, or its rows as a readable table: for scenarios that close no orders.
pub fn print_line(line: &Value, as_json: bool) {
    if !as_json {
        table::print_rows(line.as_object().into_iter().flatten());
        println!();
    }
    println!("{line}");
}

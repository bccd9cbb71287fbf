//! The metrics: each listed once, with its name, label and help; and the registry that they are scraped from.
//!
//! Counts, never decides: nothing in the worker reads a metric. No global state, so that several workers in one process
//! have separate figures. A test keeps the table in docs/operating/monitor.md equal to the one here.

use std::time::Duration;

use order_timeout_core::alarm::{ParkReason, SourceQueue};
use order_timeout_core::engine::{CallKind, EndOutcome};
use order_timeout_core::kind::Kind;
use order_timeout_core::order::{CloseError, ClosedBy, Outcome};
use order_timeout_providers::Load;
use prometheus::core::{Collector, Desc};
use prometheus::proto::MetricFamily;
use prometheus::{
    GaugeVec, Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry,
    TextEncoder,
};

use crate::observe::degraded;
use crate::postgres::closing_pauses::PauseCause;

/// The media type of [`Metrics::render`].
pub const CONTENT_TYPE: &str = prometheus::TEXT_FORMAT;

/// From unnoticeable to long enough for a complaint.
const BUCKETS_S: [f64; 15] = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0];

/// An entry in the list of metrics.
#[derive(Debug, Clone, Copy)]
pub struct Listed {
    /// As it is exposed: with a prefix and its unit.
    pub name: &'static str,
    /// Prometheus' metric type: counter, gauge or histogram.
    pub kind: &'static str,
    /// The labels of what has series of its own: none, each kind, or each payment provider of a kind.
    pub of: &'static [&'static str],
    /// What else distinguishes its series, if there are several.
    pub label: Option<Label>,
    /// The help text.
    pub help: &'static str,
    /// Whether its series appear with their first reading and are absent while the value cannot be read.
    pub is_reading: bool,
}

/// The label that distinguishes a metric's series. All series exist from the start, at zero, unless they are readings:
/// a rate over a series that appears with its first event would miss that event.
#[derive(Debug, Clone, Copy)]
pub struct Label {
    /// The label's name.
    pub name: &'static str,
    /// All values that it can have.
    pub values: &'static [&'static str],
}

/// A metric that can be registered.
trait Instrument: Collector + Clone + Sized + 'static {
    const KIND: &'static str;
    const IS_READING: bool = false;

    /// `of`: the labels that all its series have.
    fn new(listed: &Listed, of: Of<'_>) -> prometheus::Result<Self>;
}

/// The label that each kind's series have.
const KIND: &str = "kind";
/// The label that the series of each payment provider have besides.
const PROVIDER: &str = "provider";

/// Labels with the value that all series of a metric have.
type Of<'a> = &'a [(&'static str, &'a str)];

fn options(listed: &Listed, of: Of<'_>) -> Opts {
    of.iter().fold(Opts::new(listed.name, listed.help), |options, (label, value)| options.const_label(*label, *value))
}

fn histogram_options(listed: &Listed, of: Of<'_>) -> HistogramOpts {
    HistogramOpts { common_opts: options(listed, of), buckets: BUCKETS_S.to_vec() }
}

/// Metrics without a label, and those with one.
macro_rules! instruments {
    ($($single:ty, $labelled:ty: $kind:literal by $options:ident;)*) => {$(
        impl Instrument for $single {
            const KIND: &'static str = $kind;

            fn new(listed: &Listed, of: Of<'_>) -> prometheus::Result<Self> {
                Self::with_opts($options(listed, of))
            }
        }

        impl Instrument for $labelled {
            const KIND: &'static str = $kind;

            fn new(listed: &Listed, of: Of<'_>) -> prometheus::Result<Self> {
                let label = listed.label.expect("a metric with series has a label");
                let family = Self::new($options(listed, of), &[label.name])?;
                for value in label.values {
                    let _created = family.with_label_values(&[*value]);
                }
                Ok(family)
            }
        }
    )*};
}

instruments! {
    IntCounter, IntCounterVec: "counter" by options;
    IntGauge, IntGaugeVec: "gauge" by options;
    Histogram, HistogramVec: "histogram" by histogram_options;
}

/// Values that are read from elsewhere. Each is absent before the first reading and after a failed one: an unknown value
/// must not look like zero.
#[derive(Debug, Clone)]
pub struct Readings(GaugeVec);

impl Readings {
    /// The value that was read, `None` if it could not be; `series` is the value of the metric's label, if it has one.
    pub fn show(&self, series: &[&str], value: Option<f64>) {
        match value {
            Some(value) => self.0.with_label_values(series).set(value),
            // Fails if the series is already absent.
            None => drop(self.0.remove_label_values(series)),
        }
    }
}

impl Collector for Readings {
    fn desc(&self) -> Vec<&Desc> {
        self.0.desc()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        self.0.collect()
    }
}

impl Instrument for Readings {
    const KIND: &'static str = "gauge";
    const IS_READING: bool = true;

    fn new(listed: &Listed, of: Of<'_>) -> prometheus::Result<Self> {
        let labels: Vec<&str> = listed.label.iter().map(|label| label.name).collect();
        Ok(Self(GaugeVec::new(options(listed, of), &labels)?))
    }
}

/// A list of metrics and the struct that has them: field name, type, metric name, label with every value, and help.
macro_rules! metrics {
    (
        $(#[$doc:meta])* $name:ident $({ $registry:ident })?, $list:ident, of: $of:expr;
        $($field:ident: $instrument:ty = $metric:literal $({ $label:literal: $values:expr })?, $help:literal;)*
    ) => {
        $(#[$doc])*
        #[derive(Debug)]
        #[allow(missing_docs)] // each field's help is its documentation
        pub struct $name {
            $($registry: Registry,)?
            $(pub $field: $instrument,)*
        }

        const $list: &[Listed] = &[$(
            Listed {
                name: $metric,
                kind: <$instrument as Instrument>::KIND,
                of: &$of,
                label: metrics!(@label $($label, $values)?),
                help: $help,
                is_reading: <$instrument as Instrument>::IS_READING,
            },
        )*];

        impl $name {
            fn register_all(registry: &Registry, of: Of<'_>) -> prometheus::Result<Self> {
                let mut listed = $list.iter();
                $(
                    let $field = <$instrument as Instrument>::new(listed.next().expect("as many as fields"), of)?;
                    registry.register(Box::new($field.clone()))?;
                )*
                Ok(Self { $($registry: registry.clone(),)? $($field,)* })
            }
        }
    };
    (@label) => { None };
    (@label $label:literal, $values:expr) => { Some(Label { name: $label, values: &$values }) };
}

/// All of our own metrics: those of the worker, those that each kind has, then those of each payment provider.
pub fn listed() -> impl Iterator<Item = &'static Listed> {
    OF_WORKER.iter().chain(OF_KIND).chain(OF_PROVIDER)
}

/// Of orders: those that were claimed by hand are closed by a worker, after it has asked a payment provider.
const CLOSED_BY: [&str; 4] = [BY[0], BY[1], BY[2], ClosedBy::Manual.as_str()];
const CLOSED: &str = "closed";
const SETTLED: &str = "settled";
const BREAKER_OPEN: &str = "breaker_open";
const QUEUE_FULL: &str = "queue_full";
const CALLS: [&str; 2] = [CallKind::Ask.as_str(), CallKind::Cancel.as_str()];
const BY: [&str; 3] = [ClosedBy::Alarm.as_str(), ClosedBy::LookAhead.as_str(), ClosedBy::Sweep.as_str()];
/// The label values for the two outboxes.
pub const ALARMS: &str = "alarm";
/// The label value of `event_outbox`.
pub const EVENTS: &str = "event";
const SOURCE_QUEUES: [&str; 3] =
    [SourceQueue::Timeout.as_str(), SourceQueue::Inbox.as_str(), SourceQueue::Parked.as_str()];
const OUTCOMES: [&str; 13] = [
    Outcome::Closed.as_str(),
    Outcome::Paid.as_str(),
    Outcome::AlreadyClosed.as_str(),
    Outcome::Closing.as_str(),
    Outcome::Claimed.as_str(),
    Outcome::NotDue.as_str(),
    Outcome::Busy.as_str(),
    Outcome::Malformed.as_str(),
    Outcome::Unknown.as_str(),
    CloseError::LOCKED,
    CloseError::TRANSIENT,
    CloseError::REJECTED,
    CloseError::AWAY,
];

const ANSWERS: [&str; 10] =
    ["paid", "open", "in_progress", "pending", "closed", "refunded", "absent", "forgotten", "unknown", "not_asked"];
const CLAIMED_OUTCOMES: [&str; 17] = [
    EndOutcome::Closed.as_str(),
    EndOutcome::Settled.as_str(),
    EndOutcome::Postponed.as_str(),
    EndOutcome::AlreadyPaid.as_str(),
    EndOutcome::AlreadyClosed.as_str(),
    EndOutcome::PaidLate.as_str(),
    EndOutcome::Kept.as_str(),
    EndOutcome::NO_DEADLINE,
    EndOutcome::LeaseLost.as_str(),
    EndOutcome::Busy.as_str(),
    EndOutcome::NOT_DUE,
    EndOutcome::AttemptsChanged.as_str(),
    EndOutcome::AmountDiffers.as_str(),
    CloseError::LOCKED,
    CloseError::TRANSIENT,
    CloseError::REJECTED,
    CloseError::AWAY,
];

metrics! {
    /// The worker's metrics, without those that each kind has. Cheap to share behind an `Arc`.
    Metrics { registry }, OF_WORKER, of: [];
    alarms_scheduled: IntCounter = "order_timeout_alarms_scheduled_total",
        "Alarms that the relay took out of alarm_outbox and the broker confirmed.";
    alarms_refused: IntCounter = "order_timeout_alarms_refused_total",
        "Times the relay got no confirm for an alarm; it stays in alarm_outbox and is retried.";
    alarms_expired: IntCounter = "order_timeout_alarms_expired_total",
        "Alarms that passed their deadline in alarm_outbox; the sweep closes their orders.";
    events_announced: IntCounter = "order_timeout_events_announced_total",
        "Events that the relay took out of event_outbox and the broker confirmed.";
    events_refused: IntCounter = "order_timeout_events_refused_total",
        "Times the relay got no confirm for an event; it stays in event_outbox and is retried.";
    relaying: IntGauge = "order_timeout_relaying",
        "1 while this worker is the leader that empties the outboxes.";
    outbox_age: Readings = "order_timeout_outbox_age_seconds" { "outbox": [ALARMS, EVENTS] },
        "Age of the oldest unsent row; 0 if there is none, absent while it cannot be read.";
    degraded: IntGaugeVec = "order_timeout_degraded" { "cause": degraded::WORDS },
        "1 while this cause degrades the worker although orders are closed; /readyz says why.";
    orders_unresolved: Readings = "order_timeout_orders_unresolved",
        "Orders that a provider's answers could not decide and that wait for a person; absent while they cannot be read.";
    build_info: IntGaugeVec = "order_timeout_build_info" { "version": [env!("CARGO_PKG_VERSION")] },
        "1, with the version of the worker.";
}

metrics! {
    /// The metrics of one kind: whatever its engine, its closers and its session count.
    KindMetrics, OF_KIND, of: [KIND];
    alarms_delivered: IntCounterVec = "order_timeout_alarms_delivered_total" { "queue": SOURCE_QUEUES },
        "Alarms that the broker delivered, by the queue they came from.";
    alarm_earliness: Histogram = "order_timeout_alarm_earliness_seconds",
        "How long before its deadline an alarm was delivered from the processing queue; 0 if after it.";
    alarms_held: IntGauge = "order_timeout_alarms_held",
        "Alarms that wait for their deadline in this worker.";
    early_returns: IntCounter = "order_timeout_alarms_returned_early_total",
        "Alarms that the broker returned more than half a second before their slot's time.";
    alarms_rearmed: IntCounter = "order_timeout_alarms_rearmed_total",
        "Alarms that the worker published into the wheel or back to the broker, confirmed.";
    alarms_parked: IntCounterVec = "order_timeout_alarms_parked_total" { "reason": ParkReason::WORDS },
        "Alarms that could not be processed and were written to parked_alarms.";
    orders_closed: IntCounterVec = "order_timeout_orders_closed_total" { "by": CLOSED_BY },
        "Orders closed, by the path that closed them.";
    close_lateness: HistogramVec = "order_timeout_close_lateness_seconds" { "by": BY },
        "Time from an order's deadline to the commit that closed it, by the database's clock; without orders of which a provider was asked.";
    provider_close_lateness: HistogramVec = "order_timeout_provider_close_lateness_seconds" { "end": [CLOSED, SETTLED] },
        "The same for orders of which a payment provider was asked, by how they ended; the wait for its answers is in it.";
    close_results: IntCounterVec = "order_timeout_close_results_total" { "outcome": OUTCOMES },
        "Orders that a batch tried to close, by outcome; an order that is retried counts again.";
    batch_duration: HistogramVec = "order_timeout_batch_duration_seconds" { "by": BY },
        "Duration of a batch's close statement, successful or not.";
    orders_asked_about: IntGauge = "order_timeout_orders_asked_about",
        "Claimed orders that this worker asks a payment provider about.";
    claimed_results: IntCounterVec = "order_timeout_claimed_results_total" { "outcome": CLAIMED_OUTCOMES },
        "Claimed orders that a statement tried to close, settle or postpone, by outcome; an order that is retried counts again.";
    closed_without_alarm: IntCounter = "order_timeout_orders_closed_without_alarm_total",
        "Orders that the sweep or the look-ahead closed although a session was open and their alarms were to arrive in time.";
    orders_backed_off: IntGauge = "order_timeout_orders_backed_off",
        "Overdue orders that could not be closed and wait for a later retry.";
    oldest_overdue: Readings = "order_timeout_oldest_overdue_seconds",
        "Time since the deadline of the oldest unpaid order that the last sweep found; 0 if it found none, absent while the sweep cannot read.";
    sweep_failures: IntCounter = "order_timeout_sweep_failures_total",
        "Times the query for overdue orders failed.";
    closing_paused: IntGaugeVec = "order_timeout_closing_paused" { "cause": PauseCause::WORDS },
        "1 while closing is paused for this cause; /readyz says why, and nothing is closed until it is resumed.";
    session_open: IntGauge = "order_timeout_session_open",
        "1 while a consumer session is open.";
    sessions_opened: IntCounter = "order_timeout_sessions_opened_total",
        "Consumer sessions opened.";
    database_unavailable: IntGauge = "order_timeout_database_unavailable",
        "1 while the database closes nothing, does not answer, or the query for overdue orders fails.";
    clock_offset: Readings = "order_timeout_clock_offset_seconds",
        "The database's clock minus this machine's wall clock, which the worker does not use; absent while it cannot be read.";
    clock_uncertainty: Readings = "order_timeout_clock_uncertainty_seconds",
        "Round trip of the latest reading of the database's clock; the error is at most half of it. Absent while it cannot be read.";
}

metrics! {
    /// The metrics of one payment provider that orders of a kind are asked about at.
    ProviderMetrics, OF_PROVIDER, of: [KIND, PROVIDER];
    answers: IntCounterVec = "order_timeout_provider_answers_total" { "answer": ANSWERS },
        "Calls to the payment provider, by its answer; not_asked: the circuit breaker was open or the queue full.";
    call_duration: HistogramVec = "order_timeout_provider_call_seconds" { "call": CALLS },
        "Duration of a call to the payment provider, with the wait for its turn; without calls that were not made.";
    breaker_open: IntGauge = "order_timeout_provider_breaker_open",
        "1 from when the circuit breaker opens until a call to the payment provider succeeds.";
    calls_waiting: IntGauge = "order_timeout_provider_calls_waiting",
        "Calls that wait for their turn at the payment provider.";
    calls_refused: IntCounterVec = "order_timeout_provider_calls_refused_total" { "reason": [BREAKER_OPEN, QUEUE_FULL] },
        "Calls that were not made because the circuit breaker was open, or because their turn did not come in time.";
}

impl Metrics {
    /// # Panics
    /// If the list has a duplicate or an invalid name; a test registers every metric.
    #[must_use]
    pub fn new() -> Self {
        let metrics = Self::register_all(&Registry::new(), &[]).expect("the list is tested to be valid");
        metrics.build_info.with_label_values(&[env!("CARGO_PKG_VERSION")]).set(1);
        #[cfg(target_os = "linux")]
        metrics
            .registry
            .register(Box::new(prometheus::process_collector::ProcessCollector::for_self()))
            .expect("the process metrics have names of their own");
        metrics
    }

    /// All metrics in Prometheus' text format.
    ///
    /// # Errors
    /// If it cannot be written as text, which is an error in the list.
    pub fn render(&self) -> prometheus::Result<String> {
        TextEncoder::new().encode_to_string(&self.registry.gather())
    }

    /// The metrics of this kind, on the same page. Once for each kind.
    ///
    /// # Panics
    /// If the kind has metrics already.
    #[must_use]
    pub fn of_kind(&self, kind: &Kind) -> KindMetrics {
        KindMetrics::register_all(&self.registry, &[(KIND, kind.as_str())]).expect("a kind is registered once")
    }

    /// The metrics of this provider, on the same page. Once for each provider of a kind.
    ///
    /// # Panics
    /// If the provider has metrics already.
    #[must_use]
    pub fn of_provider(&self, kind: &Kind, provider: &str) -> ProviderMetrics {
        let of = [(KIND, kind.as_str()), (PROVIDER, provider)];
        ProviderMetrics::register_all(&self.registry, &of).expect("a provider is registered once")
    }
}

impl ProviderMetrics {
    /// Shows what the limits do.
    pub fn show(&self, load: &Load) {
        self.breaker_open.set(i64::from(load.breaker_is_open));
        self.calls_waiting.set(i64::try_from(load.waiting).unwrap_or(i64::MAX));
        for (reason, refused) in [(BREAKER_OPEN, load.refused_by_breaker), (QUEUE_FULL, load.refused_by_queue)] {
            let counter = self.calls_refused.with_label_values(&[reason]);
            counter.inc_by(refused.saturating_sub(counter.get()));
        }
    }
}

impl KindMetrics {
    /// Counts an order that was closed by this path, or settled as paid, after a provider was asked.
    pub fn ended_at_provider(&self, closed_by: Option<ClosedBy>, lateness: Option<Duration>) {
        if let Some(by) = closed_by {
            self.orders_closed.with_label_values(&[by.as_str()]).inc();
        }
        if let Some(lateness) = lateness {
            let end = if closed_by.is_some() { CLOSED } else { SETTLED };
            self.provider_close_lateness.with_label_values(&[end]).observe(lateness.as_secs_f64());
        }
    }

    /// Counts an order that was closed this long after its deadline.
    pub fn closed(&self, by: ClosedBy, lateness: Option<Duration>) {
        self.orders_closed.with_label_values(&[by.as_str()]).inc();
        if let Some(lateness) = lateness {
            self.close_lateness.with_label_values(&[by.as_str()]).observe(lateness.as_secs_f64());
        }
    }
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn renders_every_metric_from_start() {
        let metrics = Metrics::new();
        let _of_kind = metrics.of_kind(&Kind::ORDER);
        let _of_provider = metrics.of_provider(&Kind::ORDER, "card");
        let text = metrics.render().unwrap();
        for listed in listed().filter(|listed| !listed.is_reading) {
            let (name, help, kind) = (listed.name, listed.help, listed.kind);
            assert!(text.contains(&format!("# HELP {name} {help}\n# TYPE {name} {kind}\n")), "{name}\n{text}");
            let Some(label) = listed.label else { continue };
            for value in label.values {
                assert!(text.contains(&format!("{}=\"{value}\"", label.name)), "{name} {value}\n{text}");
            }
        }
    }

    #[test]
    fn readings_are_absent_until_known() {
        let metrics = Metrics::new();
        let of_kind = metrics.of_kind(&Kind::ORDER);
        let shown = |series: &str| {
            let text = metrics.render().unwrap();
            text.lines().find_map(|line| line.strip_prefix(series)).map(|value| value.trim().to_owned())
        };
        for listed in listed().filter(|listed| listed.is_reading) {
            assert_eq!(shown(listed.name), None, "{} is shown before it was read", listed.name);
        }
        let overdue = "order_timeout_oldest_overdue_seconds{kind=\"order\"}";
        of_kind.oldest_overdue.show(&[], Some(0.0));
        assert_eq!(shown(overdue), Some("0".into()));
        of_kind.oldest_overdue.show(&[], None);
        assert_eq!(shown(overdue), None, "it could not be read");
        let age = |outbox: &str| format!("order_timeout_outbox_age_seconds{{outbox=\"{outbox}\"}}");
        metrics.outbox_age.show(&[ALARMS], Some(1.5));
        metrics.outbox_age.show(&[EVENTS], None);
        assert_eq!((shown(&age(ALARMS)), shown(&age(EVENTS))), (Some("1.5".into()), None));
        metrics.outbox_age.show(&[ALARMS], None);
        assert_eq!(shown(&age(ALARMS)), None, "it could not be read");
    }

    #[test]
    fn names_follow_conventions() {
        let mut names = BTreeSet::new();
        for Listed { name, kind, help, .. } in listed() {
            assert!(names.insert(name), "{name} is listed twice");
            assert!(name.starts_with("order_timeout_"), "{name}");
            assert_eq!(name.ends_with("_total"), *kind == "counter", "{name}");
            assert!(*kind != "histogram" || name.ends_with("_seconds"), "{name}");
            assert!(help.ends_with('.') && !help.contains('|'), "{name} is a row in a table: {help}");
        }
    }

    #[test]
    fn workers_do_not_share_figures() {
        let (page, other) = (Metrics::new(), Metrics::new().of_kind(&Kind::ORDER));
        let one = page.of_kind(&Kind::ORDER);
        one.closed(ClosedBy::Sweep, Some(Duration::from_millis(3)));
        assert_eq!(one.orders_closed.with_label_values(&["sweep"]).get(), 1);
        assert_eq!(other.orders_closed.with_label_values(&["sweep"]).get(), 0);
        let text = page.render().unwrap();
        let bucket = "order_timeout_close_lateness_seconds_bucket{by=\"sweep\",kind=\"order\",le=";
        assert!(text.contains(&format!("{bucket}\"0.005\"}} 1")), "{text}");
        assert!(text.contains(&format!("{bucket}\"0.002\"}} 0")), "{text}");
    }

    #[test]
    fn each_provider_has_series_of_its_own() {
        let page = Metrics::new();
        let [card, bank] = ["card", "bank"].map(|name| page.of_provider(&Kind::ORDER, name));
        let load = Load { breaker_is_open: true, waiting: 3, refused_by_breaker: 5, refused_by_queue: 0 };
        // What is refused is counted since the start.
        card.show(&Load { refused_by_breaker: 2, ..load });
        card.show(&load);
        bank.answers.with_label_values(&["paid"]).inc();
        let text = page.render().unwrap();
        for line in [
            "order_timeout_provider_breaker_open{kind=\"order\",provider=\"card\"} 1",
            "order_timeout_provider_breaker_open{kind=\"order\",provider=\"bank\"} 0",
            "order_timeout_provider_calls_waiting{kind=\"order\",provider=\"card\"} 3",
            "order_timeout_provider_calls_refused_total{kind=\"order\",provider=\"card\",reason=\"breaker_open\"} 5",
            "order_timeout_provider_answers_total{answer=\"paid\",kind=\"order\",provider=\"bank\"} 1",
        ] {
            assert!(text.lines().any(|shown| shown == line), "{line}\n{text}");
        }
    }

    #[test]
    fn each_kind_has_series_of_its_own() {
        let page = Metrics::new();
        let [order, acceptance] = ["order", "acceptance"].map(|kind| page.of_kind(&Kind::new(kind).unwrap()));
        order.alarms_held.set(3);
        acceptance.orders_closed.with_label_values(&["alarm"]).inc();
        let text = page.render().unwrap();
        for line in [
            "order_timeout_alarms_held{kind=\"order\"} 3",
            "order_timeout_alarms_held{kind=\"acceptance\"} 0",
            "order_timeout_orders_closed_total{by=\"alarm\",kind=\"acceptance\"} 1",
            "order_timeout_orders_closed_total{by=\"alarm\",kind=\"order\"} 0",
        ] {
            assert!(text.lines().any(|shown| shown == line), "{line}\n{text}");
        }
        assert_eq!(text.matches("# HELP order_timeout_alarms_held ").count(), 1, "{text}");
    }
}

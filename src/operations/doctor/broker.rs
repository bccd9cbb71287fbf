//! The broker, as far as AMQP shows it: its version, our rights, our exchanges and queues, and what takes messages from
//! them. `management.rs` looks at what only its management API shows.
//!
//! Declares nothing that is missing.

use std::ops::RangeInclusive;

use order_timeout_amqp::connect::{self, BrokerError, Connection, Server};
use order_timeout_amqp::topology::{Comparison, Head, Names, SeenQueue, TopologyError, in_shell, peek};
use order_timeout_core::address::AmqpAddress;
use order_timeout_core::delay::Strategy;
use order_timeout_core::kind::Kind;
use order_timeout_core::problem::{Cause, Problem};
use secrecy::ExposeSecret;

use super::check::Checks;
use super::{Options, management, workers};
use crate::config::Settings;
use crate::observe::inspect::registration::{Registered, Registration};
use crate::postgres::{Database, one_line};

/// Each missing slot uses up one of a connection's 2 047 channels.
const MOST_SLOTS: usize = 1_500;
/// How long a worker may take to register, and to end its registration: longer than it counts as live after its end.
const REGISTERED_WITHIN: std::time::Duration = std::time::Duration::from_secs(5);
/// Checks of who consumes.
const READERS: RangeInclusive<Cause> = Cause::AlarmsNotArriving..=Cause::ForeignConsumers;

/// `workers`: `None` if they are not known.
pub(super) async fn examine(
    settings: &Settings,
    options: &Options,
    database: Option<&Database>,
    workers: Option<(Registration, Registered)>,
    checks: &mut Checks,
) {
    match connect::connect(&settings.amqp, "doctor").await {
        Ok(connection) => {
            match connect::server(&settings.amqp).await {
                Ok(server) => {
                    judge_server(&server, settings.delay.strategy, checks);
                }
                Err(fault) => checks.not_known(Cause::BrokerVersion, fault.to_string()),
            }
            over_amqp(settings, database.zip(workers.as_ref()), &connection, checks).await;
            connect::close(&connection, settings.amqp.connect_timeout).await;
        }
        Err(BrokerError::Refused(why) | BrokerError::Away(why)) => {
            checks.error(Problem::new(Cause::Broker, why, "start the broker, or correct amqp.url"));
            checks.skip(Cause::BrokerVersion..=Cause::ForeignConsumers, "there is no connection to the broker");
        }
    }
    management::examine(settings, options.management.as_ref(), database, checks).await;
}

async fn over_amqp(
    settings: &Settings,
    workers: Option<(&Database, &(Registration, Registered))>,
    connection: &Connection,
    checks: &mut Checks,
) {
    let Some(seen) = topology(settings, connection, checks).await else { return };
    if settings.delay.strategy == Strategy::DeadLetter {
        match settings.topology().exchange_with_alternate(connection).await {
            Ok(None) => {}
            Ok(Some(exchange)) => {
                checks.error(alternate(&exchange, None, &settings.names()));
            }
            Err(fault @ TopologyError::Refused { .. }) => judge_topology(settings, &fault, checks),
            Err(fault) => checks.not_known(Cause::AlternateExchange, fault.to_string()),
        }
    } else {
        checks.not_known(Cause::AlternateExchange, "the delayed exchange returns every message");
    }
    if let Err(fault @ TopologyError::QueueLimit { .. }) = settings.topology().require_room(connection).await {
        judge_topology(settings, &fault, checks);
    }
    if let Err(fault) = delay_queues(settings, &seen, connection, checks).await {
        checks.not_known(Cause::AlarmsNotArriving, fault.to_string());
    }
    let Some((database, workers)) = workers else {
        return checks.skip(READERS, "the workers are not known without the database");
    };
    foreign_in_delay_queues(settings, &seen, checks);
    for kind in settings.all_kinds() {
        // A missing queue is named already.
        if checks.has_found(Cause::Topology) {
            checks.skip(READERS, "objects are missing on the broker");
        } else if let Some(pause) = workers::paused(database, &kind).await {
            checks.skip(READERS, &pause.sentence());
        } else if let Err(why) = readers(settings, &kind, workers, connection, checks).await {
            checks.skip(READERS, &why);
        }
    }
}

/// What the product and its version mean for our queues (docs/operating/deploy.md).
fn judge_server(server: &Server, strategy: Strategy, checks: &mut Checks) {
    if let Some(why) = server.why_unsuitable() {
        checks.not_known(Cause::BrokerVersion, &why);
        return checks.not_known(Cause::Topology, why);
    }
    let version = &server.version;
    let mut parts = version.split(['.', '-', '+']).map_while(|part| part.parse::<u32>().ok());
    let Some(number) = parts.next().zip(parts.next()) else {
        return checks.not_known(Cause::BrokerVersion, format!("RabbitMQ calls its version {version:?}"));
    };
    if number < (3, 10) {
        return checks.error(
            Problem::new(
                Cause::BrokerVersion,
                format!("RabbitMQ {version} is older than 3.10"),
                "upgrade to 3.10 or newer, and to 4.0 or newer for a cluster",
            )
            .because("it does not dead-letter at least once, so an alarm may be lost between two queues"),
        );
    }
    if strategy == Strategy::DelayedExchange && number >= (4, 3) {
        return checks.error(
            Problem::new(
                Cause::BrokerVersion,
                format!("RabbitMQ {version} cannot run the plugin for delayed messages, whose last version is for 4.2"),
                "set delay.strategy = \"dead-letter\" and run `order-timeout setup` (docs/FROM-THE-PLUGIN.md)",
            )
            .because("no alarm can be scheduled"),
        );
    }
    let meaning = match number {
        (3, _) => ": at-least-once dead-lettering needs the feature flag stream_queue; run no cluster on it",
        (4, 3..) => ": consumer timeouts cancel a consumer, and the plugin for delayed messages does not run",
        _ => "",
    };
    checks.fact(Cause::BrokerVersion, format!("RabbitMQ {version}{meaning}"));
}

/// Returns the queues that exist.
async fn topology(settings: &Settings, connection: &Connection, checks: &mut Checks) -> Option<Vec<SeenQueue>> {
    let mut seen = Vec::new();
    let mut note = |compared: Result<Comparison, TopologyError>, checks: &mut Checks| match compared {
        Ok(Comparison { faults, queues }) => {
            seen.extend(queues);
            faults.iter().for_each(|fault| judge_topology(settings, fault, checks));
            true
        }
        Err(fault) => {
            // What was to be done before this is known already.
            checks.skip(Cause::BrokerRights..=Cause::ForeignConsumers, &fault.to_string());
            false
        }
    };
    if !note(settings.topology().compare(connection).await, checks) {
        return None;
    }
    if settings.delay.strategy == Strategy::DeadLetter {
        let slots = settings.slots();
        if slots.all().nth(MOST_SLOTS).is_some() {
            checks.not_known(
                Cause::Topology,
                format!("the wheel has more than {MOST_SLOTS} slots, which are not looked at"),
            );
        } else {
            let compared = match connect::connect(&settings.amqp, "doctor slots").await {
                Ok(own) => {
                    let compared = slots.compare(&own).await;
                    connect::close(&own, settings.amqp.connect_timeout).await;
                    compared
                }
                Err(fault) => Err(TopologyError::Failed { object: "the wheel".into(), why: fault.to_string() }),
            };
            if !note(compared, checks) {
                return None;
            }
        }
    }
    Some(seen)
}

fn judge_topology(settings: &Settings, fault: &TopologyError, checks: &mut Checks) {
    const SETUP: &str = "run `order-timeout setup` with the workers' settings";
    match fault {
        TopologyError::Missing { object, .. } | TopologyError::NeverSetUp { namespace: object } => checks.error(
            Problem::new(
                Cause::Topology,
                format!("{object} is missing"),
                SETUP,
            ),
        ),
        TopologyError::Differs { object, difference, removal } => {
            let differs =
                |arguments: &[&str]| arguments.iter().any(|argument| difference.contains(&format!("'{argument}'")));
            let why = if differs(&["x-queue-type"]) {
                "a classic queue dead-letters without confirms and is on one node alone, so alarms may be lost"
            } else if differs(&["x-dead-letter-strategy", "x-overflow"]) {
                "without at-least-once and reject-publish together, the broker dead-letters at most once, silently, and an alarm may be lost"
            } else {
                "alarms may expire early or late, go to another queue, or be dropped, and a worker does not start a session"
            };
            let fix = format!("{removal}, then {SETUP}; meanwhile the sweep closes orders");
            checks.error(
                Problem::new(
                    Cause::Topology,
                    format!("{object} has other arguments: {difference}"),
                    fix,
                )
                .because(why),
            );
        }
        TopologyError::Refused { object, why, .. } => checks.error(
            Problem::new(
                Cause::BrokerRights,
                format!("the user may not declare or look at {object}: {why}"),
                settings.names().grant(&user(settings)),
            ),
        ),
        TopologyError::QueueLimit { why, raise, .. } => checks.error(
            Problem::new(
                Cause::Topology,
                format!("no further queue can be declared: {why}"),
                format!("{raise}, or delete queues that are not needed"),
            )
            .because("an alarm whose slot of the wheel does not exist yet cannot wait in the broker, and the sweep closes its order late"),
        ),
        TopologyError::NoDelayedExchange { .. } | TopologyError::NoHashExchange { .. } => checks.error(
            Problem::new(
                Cause::Topology,
                fault.to_string(),
                "enable the plugin, or change the setting that is named",
            )
            .because("an exchange cannot be declared, so no alarm reaches a worker"),
        ),
        TopologyError::Failed { .. } => checks.not_known(Cause::Topology, fault.to_string()),
    }
}

/// `policy`: the name of the policy, if it is known.
pub(super) fn alternate(exchange: &str, policy: Option<&str>, names: &Names) -> Problem {
    let vhost = names.vhost_option();
    let fix = match policy {
        Some(policy) => format!("rabbitmqctl clear_policy{vhost} {}", in_shell(policy)),
        None => format!("rabbitmqctl list_policies{vhost}, then clear_policy of that with alternate-exchange"),
    };
    Problem::new(
        Cause::AlternateExchange,
        format!("the exchange {exchange:?} has an alternate exchange, which a policy sets"),
        format!("{fix}, or give it a pattern that does not match our exchanges"),
    )
}

/// The user of `amqp.url`.
fn user(settings: &Settings) -> String {
    settings.amqp.url.expose_secret().parse::<AmqpAddress>().map_or_else(|_| "USER".to_owned(), |address| address.user)
}

/// Whether a queue without consumers has this name.
fn is_delay_queue(names: &Names, queue: &str) -> bool {
    [names.delay(), names.wheel()].iter().any(|exchange| queue.starts_with(&format!("{exchange}.")))
}

/// Takes the first message of each delay queue and gives it back.
async fn delay_queues(
    settings: &Settings,
    seen: &[SeenQueue],
    connection: &Connection,
    checks: &mut Checks,
) -> Result<(), TopologyError> {
    let names = settings.names();
    for queue in seen.iter().filter(|queue| queue.ready > 0 && is_delay_queue(&names, &queue.name)) {
        let SeenQueue { name, ready, .. } = queue;
        if let Some(Head { has_expiration: false, app_id }) = peek(connection, name).await? {
            checks.error(Problem::new(Cause::AlarmsNotArriving, format!("the first of {ready} messages in {name:?} has no expiration (its app-id is {app_id:?})"), format!(
                        "find its publisher, which must set expiration (docs/WIRE.md); rabbitmqctl purge_queue{} {name} empties the queue at once, and the sweep closes the orders of its alarms",
                        names.vhost_option()
                    )).because("it stays for as long as the queue keeps any message, and alarms behind it wait with it after their time; the sweep closes their orders late"));
        }
    }
    Ok(())
}

/// Consumers of queues that have none.
fn foreign_in_delay_queues(settings: &Settings, seen: &[SeenQueue], checks: &mut Checks) {
    let names = settings.names();
    let vhost = names.vhost_option();
    for SeenQueue { name, consumers, .. } in seen.iter().filter(|queue| queue.consumers > 0) {
        if is_delay_queue(&names, name) {
            checks.error(
                Problem::new(
                    Cause::ForeignConsumers,
                    format!("{consumers} consumers take messages from the delay queue {name:?}, which is to have none"),
                    format!("stop them; `rabbitmqctl list_consumers{vhost} queue_name channel_pid` and `rabbitmqctl list_connections pid name user client_properties` show whose they are"),
                )
                .because("they take alarms before their time, and the sweep closes those orders late"),
            );
        }
    }
}

/// Compares the consumers of a kind's processing queues with the live workers.
async fn readers(
    settings: &Settings,
    kind: &Kind,
    (registration, live): &(Registration, Registered),
    connection: &Connection,
    checks: &mut Checks,
) -> Result<(), String> {
    let (topology, vhost) = (settings.topology().seen_by(kind), settings.names().vhost_option());
    let count = async || topology.count_processing(connection).await.map_err(|fault| fault.to_string());
    let mut found = judge_readers(&vhost, live.serving(kind), &count().await?);
    if !found.is_empty() {
        // A worker that starts, stops or reconnects has registered its consumers by then.
        tokio::time::sleep(REGISTERED_WITHIN).await;
        let live = registration.look().await.map_err(|error| one_line(&error))?;
        found = judge_readers(&vhost, live.serving(kind), &count().await?);
    }
    if live.serving(kind) == 0 {
        checks.not_known(Cause::AlarmsNotArriving, format!("no worker serves the kind {kind}"));
    }
    found.into_iter().for_each(|problem| checks.error(problem));
    Ok(())
}

/// A worker has at most the consumers of one that takes all shards.
fn judge_readers(vhost: &str, serving: usize, queues: &[SeenQueue]) -> Vec<Problem> {
    let mut found = Vec::new();
    for SeenQueue { name, ready, .. } in queues.iter().filter(|queue| queue.consumers == 0 && serving > 0) {
        found.push(
            Problem::new(
                Cause::AlarmsNotArriving,
                format!("no worker reads {name:?}, where {ready} messages wait"),
                "start a worker with that queue in worker.take_shards, and compare worker.shards of all workers; if workers run, their /readyz says why they have no session",
            )
            .because("the sweep closes the orders of these alarms, late"),
        );
    }
    let consumers: u64 = queues.iter().map(|queue| u64::from(queue.consumers)).sum();
    // A single queue has two channels.
    let most = serving * queues.len().max(2);
    if consumers > most as u64 {
        let names: Vec<String> = queues.iter().map(|queue| format!("{:?}", queue.name)).collect();
        found.push(
            Problem::new(
                Cause::ForeignConsumers,
                format!("{} have {consumers} consumers, and live workers have at most {most}", names.join(", ")),
                format!("find them with `rabbitmqctl list_consumers{vhost}`: stop a consumer that is not a worker, restart a worker that hangs"),
            )
            .because("what others take is closed by the sweep, late"),
        );
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::operations::doctor::{CHECKED, Check};

    fn judged(version: &str, strategy: Strategy) -> Check {
        let server = Server { product: "RabbitMQ".into(), version: version.into() };
        let mut checks = Checks::default();
        judge_server(&server, strategy, &mut checks);
        checks.report(CHECKED).checks.into_iter().find(|check| check.cause() == Cause::BrokerVersion).unwrap()
    }

    #[test]
    fn version_is_judged_with_strategy() {
        let is_error = |check| matches!(check, Check::Error(_));
        assert!(is_error(judged("3.9.29", Strategy::DeadLetter)));
        assert!(is_error(judged("4.3.0-rc.1", Strategy::DelayedExchange)));
        for version in ["3.10.8", "3.13.7", "4.0.5", "4.3.1"] {
            let Check::Ok { what: Some(what), .. } = judged(version, Strategy::DeadLetter) else { panic!("{version}") };
            assert!(what.starts_with(&format!("RabbitMQ {version}")), "{what}");
        }
        assert!(!is_error(judged("4.2.0", Strategy::DelayedExchange)));
    }

    #[test]
    fn queues_of_other_products_are_not_known() {
        let server = Server { product: "LavinMQ".into(), version: "2.1.0".into() };
        let mut checks = Checks::default();
        judge_server(&server, Strategy::DeadLetter, &mut checks);
        let report = checks.report(CHECKED);
        let is_named = |check: &&Check| matches!(check, Check::NotKnown { what, .. } if what.contains("\"LavinMQ 2.1.0\", and order-timeout needs RabbitMQ"));
        let not_known = report.checks.iter().filter(is_named).map(Check::cause);
        assert!(not_known.eq([Cause::BrokerVersion, Cause::Topology]), "{report:?}");
    }

    #[test]
    fn more_consumers_than_workers_have_are_foreign() {
        let of = |consumers, serving| {
            let queue = SeenQueue { name: "order.timeout".into(), ready: 0, consumers };
            judge_readers("", serving, &[queue]).into_iter().map(|problem| problem.cause).collect::<Vec<_>>()
        };
        assert_eq!(of(0, 0), []);
        assert_eq!(of(1, 0), [Cause::ForeignConsumers]);
        assert_eq!(of(0, 1), [Cause::AlarmsNotArriving]);
        assert_eq!(of(2, 1), []);
        assert_eq!(of(3, 1), [Cause::ForeignConsumers]);
    }

    #[test]
    fn differing_argument_says_what_is_lost() {
        let why = |argument: &str| {
            let fault = TopologyError::Differs {
                object: "queue \"order.timeout\"".into(),
                difference: format!("PRECONDITION_FAILED - inequivalent arg '{argument}' for queue 'order.timeout'"),
                removal: "delete it".into(),
            };
            let mut checks = Checks::default();
            judge_topology(&Settings::defaults(), &fault, &mut checks);
            checks.report(&[]).checks[0].problem().unwrap().why.clone()
        };
        assert!(why("x-queue-type").starts_with("a classic queue"));
        assert!(why("x-overflow").contains("at most once"));
        assert!(why("x-message-ttl").starts_with("alarms may expire early"));
    }
}

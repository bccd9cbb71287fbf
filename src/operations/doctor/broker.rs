//! The broker, as far as AMQP shows it: its version, our rights, our exchanges and queues, and what takes messages from
//! them. `management.rs` looks at what only its management API shows.
//!
//! Declares nothing that is missing.

use order_timeout_amqp::connect::{self, BrokerError};
use order_timeout_amqp::connection::JoinedConnection;
use order_timeout_amqp::topology::{Comparison, SeenQueue, TopologyError};
use order_timeout_core::delay::Strategy;
use order_timeout_core::kind::Kind;

use super::check::{CheckName, Checks, Finding};
use super::{Options, canaries, management, workers};
use crate::config::Settings;
use crate::observe::canary::store::CanaryStore;
use crate::operations::status::RegisteredWorker;
use crate::postgres::Database;
use crate::quarantine::{self, Server};

/// Each missing slot uses up one of a connection's 2 047 channels.
const MOST_SLOTS: usize = 1_500;
/// How long a worker that has just started may take to record its consumers.
const RECORDED_WITHIN: std::time::Duration = std::time::Duration::from_secs(5);

/// Checks over AMQP.
const OVER_AMQP: [CheckName; 10] = {
    use CheckName as C;
    [
        C::BrokerVersion,
        C::BrokerRights,
        C::TopologyComplete,
        C::TopologyArguments,
        C::QueueType,
        C::DeadLettering,
        C::AlternateExchange,
        C::QueuesRead,
        C::ForeignConsumers,
        C::Canaries,
    ]
};

/// `workers`: the live ones of this namespace; `None` if they are not known.
pub(super) async fn examine(
    settings: &Settings,
    options: &Options,
    database: Option<&Database>,
    workers: Option<&[RegisteredWorker]>,
    checks: &mut Checks,
) {
    match connect::connect(&settings.amqp, "doctor").await {
        Ok(connection) => {
            match quarantine::server(&settings.amqp).await {
                Ok(server) => judge_version(&server, settings.delay.strategy, checks),
                Err(fault) => checks.not_known(CheckName::BrokerVersion, fault.to_string()),
            }
            over_amqp(settings, options, database.zip(workers), &connection, checks).await;
            connect::close(&connection, settings.amqp.connect_timeout).await;
        }
        Err(BrokerError::Refused(why) | BrokerError::Away(why)) => {
            checks.error(
                CheckName::BrokerReachable,
                Finding::new(
                    why,
                    "no alarm arrives; workers read deadlines from the database meanwhile, and events wait",
                    "start the broker, or correct amqp.url",
                ),
            );
            checks.skip(&OVER_AMQP, "there is no connection to the broker");
        }
    }
    management::examine(settings, options.management.as_ref(), checks).await;
}

async fn over_amqp(
    settings: &Settings,
    options: &Options,
    workers: Option<(&Database, &[RegisteredWorker])>,
    connection: &JoinedConnection,
    checks: &mut Checks,
) {
    let Some(seen) = topology(settings, connection, checks).await else { return };
    if settings.delay.strategy == Strategy::DeadLetter {
        match settings.topology().exchange_with_alternate(connection).await {
            Ok(None) => {}
            Ok(Some(exchange)) => checks.error(CheckName::AlternateExchange, alternate(&exchange)),
            Err(fault) => checks.not_known(CheckName::AlternateExchange, fault.to_string()),
        }
    } else {
        checks.not_known(CheckName::AlternateExchange, "the delayed exchange returns every message");
    }
    let Some((database, live)) = workers else {
        let names = [CheckName::QueuesRead, CheckName::ForeignConsumers, CheckName::Canaries];
        return checks.skip(&names, "the workers are not known without the database");
    };
    foreign_in_delay_queues(settings, &seen, checks);
    let unserved = workers::unserved(settings, live);
    for kind in settings.all_kinds() {
        if unserved.contains(&kind) {
            let why = format!("no worker serves the kind {kind}");
            checks.skip(&[CheckName::QueuesRead, CheckName::Canaries], &why);
            continue;
        }
        // A missing queue is named already.
        if checks.has_finding(CheckName::TopologyComplete) {
            checks.skip(
                &[CheckName::QueuesRead, CheckName::ForeignConsumers, CheckName::Canaries],
                "objects are missing on the broker",
            );
            continue;
        }
        if let Some(pause) = workers::paused(database, &kind).await {
            checks.skip(&[CheckName::QueuesRead, CheckName::ForeignConsumers, CheckName::Canaries], &pause.sentence());
            continue;
        }
        let is_known = readers(settings, &kind, database, connection, checks).await;
        canaries::examine(settings, &kind, database, live, options.canary && is_known, checks).await;
    }
}

/// What the version means for our queues (docs/operating/deploy.md).
fn judge_version(server: &Server, strategy: Strategy, checks: &mut Checks) {
    let Server { product, version, .. } = server;
    let mut parts = version.split(['.', '-', '+']).map_while(|part| part.parse::<u32>().ok());
    let Some(number) = parts.next().zip(parts.next()).filter(|_| product == "RabbitMQ") else {
        let name = format!("{product} {version}");
        return checks.not_known(
            CheckName::BrokerVersion,
            format!("the broker calls itself {:?}, and only RabbitMQ has been tried", name.trim()),
        );
    };
    if number < (3, 10) {
        return checks.error(
            CheckName::BrokerVersion,
            Finding::new(
                format!("RabbitMQ {version} is older than 3.10"),
                "it does not dead-letter at least once, so an alarm may be lost between two queues",
                "upgrade to 3.10 or newer, and to 4.0 or newer for a cluster",
            ),
        );
    }
    if strategy == Strategy::DelayedExchange && number >= (4, 3) {
        return checks.error(
            CheckName::BrokerVersion,
            Finding::new(
                format!("RabbitMQ {version} cannot run the plugin for delayed messages, whose last version is for 4.2"),
                "no alarm can be scheduled",
                "set delay.strategy = \"dead-letter\" and run `order-timeout setup` (docs/FROM-THE-PLUGIN.md)",
            ),
        );
    }
    let meaning = match number {
        (3, _) => ": at-least-once dead-lettering needs the feature flag stream_queue; run no cluster on it",
        (4, 3..) => ": consumer timeouts cancel a consumer, and the plugin for delayed messages does not run",
        _ => "",
    };
    checks.fact(CheckName::BrokerVersion, format!("RabbitMQ {version}{meaning}"));
}

/// Returns the queues that exist.
async fn topology(settings: &Settings, connection: &JoinedConnection, checks: &mut Checks) -> Option<Vec<SeenQueue>> {
    let mut seen = Vec::new();
    let mut note = |compared: Result<Comparison, TopologyError>, checks: &mut Checks| match compared {
        Ok(Comparison { faults, queues }) => {
            seen.extend(queues);
            faults.iter().for_each(|fault| judge_topology(fault, checks));
            true
        }
        Err(fault) => {
            // What was to be done before this is known already.
            let rest = OVER_AMQP.into_iter().filter(|name| *name != CheckName::BrokerVersion);
            checks.skip(&rest.collect::<Vec<_>>(), &fault.to_string());
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
                CheckName::TopologyArguments,
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

fn judge_topology(fault: &TopologyError, checks: &mut Checks) {
    const SETUP: &str = "run `order-timeout setup` with the workers' settings";
    match fault {
        TopologyError::Missing { object, .. } | TopologyError::NeverSetUp { namespace: object } => checks.error(
            CheckName::TopologyComplete,
            Finding::new(
                format!("{object} is missing"),
                "alarms or events that are published there are returned or lost",
                SETUP,
            ),
        ),
        TopologyError::Differs { object, difference, removal } => {
            let differs =
                |arguments: &[&str]| arguments.iter().any(|argument| difference.contains(&format!("'{argument}'")));
            let (name, why) = if differs(&["x-queue-type"]) {
                (
                    CheckName::QueueType,
                    "a classic queue dead-letters without confirms and is on one node alone, so alarms may be lost",
                )
            } else if differs(&["x-dead-letter-strategy", "x-overflow"]) {
                (
                    CheckName::DeadLettering,
                    "without at-least-once and reject-publish together, the broker dead-letters at most once, silently, and an alarm may be lost",
                )
            } else {
                (
                    CheckName::TopologyArguments,
                    "alarms may expire early or late, go to another queue, or be dropped, and a worker does not start a session",
                )
            };
            let fix = format!("{removal}, then {SETUP}; meanwhile the sweep closes orders");
            checks.error(name, Finding::new(format!("{object} has other arguments: {difference}"), why, fix));
        }
        TopologyError::Refused { object, why, namespace } => checks.error(
            CheckName::BrokerRights,
            Finding::new(
                format!("the user may not declare or look at {object}: {why}"),
                "a worker cannot compare its queues, and declares none again that was deleted",
                format!(
                    "rabbitmqctl set_permissions -p VHOST USER '^{namespace}\\.' '^{namespace}\\.' '^{namespace}\\.'"
                ),
            ),
        ),
        TopologyError::NoDelayedExchange { .. } | TopologyError::NoHashExchange { .. } => checks.error(
            CheckName::TopologyComplete,
            Finding::new(
                fault.to_string(),
                "an exchange cannot be declared, so no alarm reaches a worker",
                "enable the plugin, or change the setting that is named",
            ),
        ),
        TopologyError::Failed { .. } => checks.not_known(CheckName::TopologyComplete, fault.to_string()),
    }
}

fn alternate(exchange: &str) -> Finding {
    Finding::new(
        format!("the exchange {exchange:?} has an alternate exchange, which a policy sets"),
        "if a queue or binding is missing, alarms go there silently, and their publisher is told that they are scheduled",
        "let no policy with alternate-exchange match our exchanges: rabbitmqctl list_policies, then clear_policy, or a narrower pattern",
    )
}

/// Consumers of queues that have none.
fn foreign_in_delay_queues(settings: &Settings, seen: &[SeenQueue], checks: &mut Checks) {
    let names = settings.names();
    let (lanes, wheel) = (format!("{}.", names.delay()), format!("{}.", names.wheel()));
    for SeenQueue { name, consumers, .. } in seen.iter().filter(|queue| queue.consumers > 0) {
        if name.starts_with(&lanes) || name.starts_with(&wheel) {
            checks.error(
                CheckName::ForeignConsumers,
                Finding::new(
                    format!("{consumers} consumers take messages from the delay queue {name:?}, which is to have none"),
                    "they take alarms before their time, and the sweep closes those orders late",
                    format!("stop them; `rabbitmqctl list_consumers queue_name channel_pid` and `list_connections name user client_properties` show whose they are ({name})"),
                ),
            );
        }
    }
}

/// Compares the consumers of a kind's processing queues with those that workers have recorded. Returns whether all are
/// workers'.
async fn readers(
    settings: &Settings,
    kind: &Kind,
    database: &Database,
    connection: &JoinedConnection,
    checks: &mut Checks,
) -> bool {
    let store = CanaryStore::new(database.clone(), &settings.namespace, kind);
    let topology = settings.topology().seen_by(kind);
    for is_last in [false, true] {
        let look = async {
            let sight = topology.look_at_processing(connection).await.map_err(|fault| fault.to_string())?;
            let known = store.known(&[]).await.map_err(|fault| fault.to_string())?;
            Ok::<_, String>((sight, known.readers))
        };
        let (sight, readers) = match look.await {
            Ok(looked) => looked,
            Err(why) => {
                checks.skip(&[CheckName::QueuesRead, CheckName::ForeignConsumers], &why);
                return false;
            }
        };
        let unread: Vec<&SeenQueue> = sight.queues.iter().filter(|queue| queue.consumers == 0).collect();
        let foreign = i64::from(sight.consumers()) - readers;
        if unread.is_empty() && foreign <= 0 {
            return true;
        }
        if !is_last {
            // A worker that starts, or reconnects, has recorded its consumers by then.
            tokio::time::sleep(RECORDED_WITHIN).await;
            continue;
        }
        for queue in &unread {
            let SeenQueue { name, ready, .. } = queue;
            checks.error(
                CheckName::QueuesRead,
                Finding::new(
                    format!("no worker reads {name:?}, where {ready} messages wait"),
                    "the sweep closes the orders of these alarms, late",
                    "start a worker with that queue in worker.take_shards, and compare worker.shards of all workers; if workers run, their /readyz says why they have no session",
                ),
            );
        }
        if foreign > 0 {
            let queues: Vec<String> = sight.queues.iter().map(|queue| format!("{:?}", queue.name)).collect();
            checks.error(
                CheckName::ForeignConsumers,
                Finding::new(
                    format!("{foreign} consumers of {} are not workers of this version", queues.join(", ")),
                    "what they take is closed by the sweep, late; and no canary can be sent",
                    "find them with rabbitmqctl list_consumers: stop a consumer that is not a worker, upgrade older workers, restart a worker that hangs",
                ),
            );
        }
        return foreign <= 0;
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::operations::doctor::Verdict;

    fn verdict(version: &str, strategy: Strategy) -> Verdict {
        let server = Server { product: "RabbitMQ".into(), version: version.into(), cluster: String::new() };
        let mut checks = Checks::default();
        judge_version(&server, strategy, &mut checks);
        checks.report(&[]).checks.remove(0).verdict
    }

    #[test]
    fn version_is_judged_with_strategy() {
        let is_error = |verdict| matches!(verdict, Verdict::Error(_));
        assert!(is_error(verdict("3.9.29", Strategy::DeadLetter)));
        assert!(is_error(verdict("4.3.0-rc.1", Strategy::DelayedExchange)));
        for version in ["3.10.8", "3.13.7", "4.0.5", "4.3.1"] {
            let Verdict::Ok { what: Some(what) } = verdict(version, Strategy::DeadLetter) else { panic!("{version}") };
            assert!(what.starts_with(&format!("RabbitMQ {version}")), "{what}");
        }
        assert!(!is_error(verdict("4.2.0", Strategy::DelayedExchange)));
    }

    #[test]
    fn differing_argument_decides_check() {
        let name = |argument: &str| {
            let fault = TopologyError::Differs {
                object: "queue \"order.timeout\"".into(),
                difference: format!("PRECONDITION_FAILED - inequivalent arg '{argument}' for queue 'order.timeout'"),
                removal: "delete it",
            };
            let mut checks = Checks::default();
            judge_topology(&fault, &mut checks);
            checks.report(&[]).checks[0].name
        };
        assert_eq!(name("x-queue-type"), CheckName::QueueType);
        assert_eq!(name("x-overflow"), CheckName::DeadLettering);
        assert_eq!(name("x-message-ttl"), CheckName::TopologyArguments);
    }
}

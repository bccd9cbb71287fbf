//! The broker, as far as only its management API shows it: bindings, policies, memory, disk, file descriptors, feature
//! flags and its clock.
//!
//! Sends GET requests alone. No sentence contains the password.

use std::str::FromStr;
use std::time::Duration;

use async_compat::Compat;
use order_timeout_amqp::AmqpSettings;
use order_timeout_amqp::connect::connect_raw;
use order_timeout_amqp::topology::{Binding, Names, in_shell};
use order_timeout_core::address::AmqpAddress;
use order_timeout_core::order::Timestamp;
use secrecy::{ExposeSecret, SecretString};
use serde_json::{Map, Value};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc2822;
use url::Url;

use super::check::{CheckName, Checks, Finding};
use super::{broker, clocks, server};
use crate::config::Settings;
use crate::http;
use crate::postgres::Database;

/// The form of the address, in errors.
const FORM: &str = "http://user:password@host:15672";
/// An answer about thousands of queues takes the broker seconds.
const TIMEOUT: Duration = Duration::from_secs(15);
/// Fewer file descriptors left than this: each queue and each connection needs one, and RabbitMQ 3 three for a queue.
const FEW_DESCRIPTORS: i64 = 200;
/// What an acknowledgement may take besides the hold and a requeue.
const ACKNOWLEDGED_WITHIN: Duration = Duration::from_secs(60);

/// Checks of the management API.
const OVER_HTTP: [CheckName; 6] = {
    use CheckName as C;
    [C::TopologyBindings, C::Policies, C::ConsumerTimeout, C::BrokerResources, C::FeatureFlags, C::BrokerClock]
};

/// The address of the management API.
#[derive(Debug, Clone)]
pub struct ManagementAddress {
    is_tls: bool,
    host: String,
    port: u16,
    /// `None`: those of `amqp.url`.
    account: Option<(String, SecretString)>,
}

impl FromStr for ManagementAddress {
    type Err = String;

    /// # Errors
    /// One sentence that repeats no part of the address.
    fn from_str(text: &str) -> Result<Self, String> {
        let refused = |why: &str| format!("{why}; its form: {FORM}");
        let url = Url::parse(text).map_err(|_| refused("is not an address"))?;
        let is_tls = match url.scheme() {
            "http" => false,
            "https" => true,
            _ => return Err(refused("begins with neither http:// nor https://")),
        };
        if !["", "/"].contains(&url.path()) || url.query().is_some() || url.fragment().is_some() {
            return Err(refused("has a path, a ? or a #"));
        }
        let host = url.host_str().ok_or_else(|| refused("has no host"))?.to_owned();
        let account = url.password().map(|password| (decoded(url.username()), decoded(password).into()));
        Ok(Self { is_tls, host, port: url.port().unwrap_or(15_672), account })
    }
}

fn decoded(text: &str) -> String {
    let pair = format!("a={}", text.replace('+', "%2B"));
    url::form_urlencoded::parse(pair.as_bytes()).next().map(|(_, value)| value.into_owned()).unwrap_or_default()
}

pub(super) async fn examine(
    settings: &Settings,
    address: Option<&ManagementAddress>,
    database: Option<&Database>,
    checks: &mut Checks,
) {
    let Some(address) = address else {
        return checks
            .skip(&OVER_HTTP, "only the broker's management API shows it: give its address with --management");
    };
    let Ok(amqp) = settings.amqp.url.expose_secret().parse::<AmqpAddress>() else {
        return checks.skip(&OVER_HTTP, "amqp.url is not valid");
    };
    let api = Api { settings, address, amqp };
    let vhost = encoded(&api.amqp.vhost);
    let names = settings.queue_names();
    match api.get(&format!("/api/bindings/{vhost}")).await {
        Ok((bindings, date)) => {
            // A missing queue takes its bindings with it.
            match checks.has_finding(CheckName::TopologyComplete) {
                true => checks.not_known(CheckName::TopologyBindings, "objects are missing on the broker"),
                false => judge_bindings(&settings.topology().bindings, &bindings, checks),
            }
            if let Some(database) = database
                && server::has_sent_events(database).await
            {
                judge_events(&settings.names().events(), &bindings, checks);
            }
            api.clock(date.as_deref(), checks).await;
        }
        Err(why) => checks.skip(&[CheckName::TopologyBindings, CheckName::BrokerClock], &why),
    }
    if let Err(why) = alternates(&api, &vhost, checks).await {
        checks.not_known(CheckName::AlternateExchange, why);
    }
    let columns = "name,policy,operator_policy,effective_policy_definition";
    match api.get(&format!("/api/queues/{vhost}?columns={columns}")).await {
        Ok((queues, _)) => judge_policies(&names, &queues, settings, checks),
        Err(why) => checks.skip(&[CheckName::Policies, CheckName::ConsumerTimeout], &why),
    }
    match api.get("/api/nodes").await {
        Ok((nodes, _)) => judge_nodes(&nodes, checks),
        Err(why) => checks.not_known(CheckName::BrokerResources, format!("{why}; the user needs the tag monitoring")),
    }
    match api.get("/api/feature-flags").await {
        Ok((flags, _)) => judge_flags(&flags, checks),
        Err(why) => checks.not_known(CheckName::FeatureFlags, why),
    }
}

/// Alternate exchanges of all our exchanges; over AMQP only those of direct ones are seen.
async fn alternates(api: &Api<'_>, vhost: &str, checks: &mut Checks) -> Result<(), String> {
    let names = api.settings.names();
    let (exchanges, _) = api.get(&format!("/api/exchanges/{vhost}?columns=name,policy")).await?;
    let ours: Vec<String> = api.settings.topology().exchanges.into_iter().map(|exchange| exchange.name).collect();
    for exchange in exchanges.as_array().map_or(&[][..], Vec::as_slice) {
        let (name, policy) = (text(exchange, "name"), text(exchange, "policy"));
        if policy.is_empty() || !ours.iter().any(|our| our == name) {
            continue;
        }
        let path = format!("/api/policies/{vhost}/{}", encoded(policy));
        let (policy_found, _) = api.get(&path).await.map_err(|why| {
            format!("the exchange {name:?} has the policy {policy:?}, whose definition only a user with the tag policymaker can read: {why}")
        })?;
        if !policy_found["definition"]["alternate-exchange"].is_null() {
            // It says more than what AMQP shows.
            checks.forget(CheckName::AlternateExchange);
            checks.error(CheckName::AlternateExchange, broker::alternate(name, Some(policy), &names));
            break;
        }
    }
    Ok(())
}

/// Encoded as a part of a path.
fn encoded(text: &str) -> String {
    let encode = |byte: u8| match byte {
        byte if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) => char::from(byte).to_string(),
        byte => format!("%{byte:02X}"),
    };
    text.bytes().map(encode).collect()
}

struct Api<'a> {
    settings: &'a Settings,
    address: &'a ManagementAddress,
    amqp: AmqpAddress,
}

impl Api<'_> {
    /// A connection with the certificates of the section `amqp`.
    async fn get(&self, path: &str) -> Result<(Value, Option<String>), String> {
        let ManagementAddress { is_tls, host, port, account } = self.address;
        let scheme = if *is_tls { "amqps" } else { "amqp" };
        let url = SecretString::from(format!("{scheme}://{host}:{port}/%2f"));
        let raw = connect_raw(&AmqpSettings { url, ..self.settings.amqp.clone() }).await;
        let raw = raw.map_err(|fault| format!("the management API cannot be reached: {fault}"))?;
        let (user, password) = match account {
            Some((user, password)) => (user.as_str(), password.expose_secret()),
            None => (self.amqp.user.as_str(), self.amqp.password.as_str()),
        };
        let place = format!("{host}:{port}");
        let asked = http::get_json(Compat::new(raw.stream), (&place, path), (user, password), TIMEOUT);
        asked.await.map_err(|why| format!("the management API: {why}"))
    }

    /// The header of a further request, with our own time around it.
    async fn clock(&self, date: Option<&str>, checks: &mut Checks) {
        if date.and_then(time_of).is_none() {
            return checks.not_known(CheckName::BrokerClock, "the management API sends no date");
        }
        let ask = async {
            let (_, date) = self.get("/api/whoami").await?;
            date.as_deref().and_then(time_of).ok_or_else(|| "the management API sends no date".to_owned())
        };
        match clocks::difference(ask).await {
            Ok(ahead_us) => clocks::judge_broker(ahead_us, checks),
            Err(why) => checks.not_known(CheckName::BrokerClock, why),
        }
    }
}

/// RFC 9110, section 5.6.7, `IMF-fixdate`.
fn time_of(date: &str) -> Option<Timestamp> {
    let time = OffsetDateTime::parse(&date.replace("GMT", "+0000"), &Rfc2822).ok()?;
    Some(Timestamp::from_unix_micros(time.unix_timestamp().checked_mul(1_000_000)?))
}

fn text<'a>(value: &'a Value, key: &str) -> &'a str {
    value[key].as_str().unwrap_or_default()
}

fn judge_bindings(wanted: &[Binding], found: &Value, checks: &mut Checks) {
    let found = found.as_array().map_or(&[][..], Vec::as_slice);
    let is_there = |binding: &&Binding| {
        found.iter().any(|one| {
            text(one, "source") == binding.exchange
                && text(one, "destination") == binding.destination.name()
                && text(one, "routing_key") == binding.routing_key
        })
    };
    for binding in wanted.iter().filter(|binding| !is_there(binding)) {
        let Binding { exchange, routing_key, .. } = binding;
        let destination = binding.destination.name();
        checks.error(
            CheckName::TopologyBindings,
            Finding::new(
                format!("the binding of {destination:?} to the exchange {exchange:?} with the key {routing_key:?} is missing"),
                "what is published there is returned, or waits in its delay queue",
                "run `order-timeout setup` with the workers' settings",
            ),
        );
    }
}

/// Events that were published to no queue are gone.
fn judge_events(exchange: &str, found: &Value, checks: &mut Checks) {
    let found = found.as_array().map_or(&[][..], Vec::as_slice);
    if found.iter().all(|binding| text(binding, "source") != exchange) {
        checks.warning(
            CheckName::TopologyBindings,
            Finding::new(
                format!("no queue is bound to the exchange {exchange:?}, and events have been published to it"),
                "every event is lost, so no service learns that an order was closed",
                "declare a queue for each listener and bind it (docs/LISTENING.md), or ignore this if nothing is to listen",
            ),
        );
    }
}

/// What a policy's key does to our queues.
const POLICY_KEYS: [(&str, &str); 9] = [
    ("message-ttl", "alarms expire before their time"),
    ("expires", "a queue without a consumer is deleted with its alarms"),
    ("max-length", "alarms beyond it are refused or dropped"),
    ("max-length-bytes", "alarms beyond it are refused or dropped"),
    ("delivery-limit", "an alarm that is returned more often is parked by the broker"),
    ("overflow", "with another overflow than reject-publish, dead letters may be lost"),
    ("dead-letter-exchange", "dead letters go elsewhere as soon as our argument is missing"),
    ("dead-letter-routing-key", "dead letters go elsewhere as soon as our argument is missing"),
    ("dead-letter-strategy", "dead letters may be lost as soon as our argument is missing"),
];

fn judge_policies(ours: &[String], queues: &Value, settings: &Settings, checks: &mut Checks) {
    let worker = &settings.worker;
    let least = worker.hold_max.max(worker.requeue_after) + ACKNOWLEDGED_WITHIN;
    let mut named: Vec<(String, String)> = Vec::new();
    for queue in queues.as_array().map_or(&[][..], Vec::as_slice) {
        let name = text(queue, "name");
        if !ours.iter().any(|our| our == name) {
            continue;
        }
        let none = Map::new();
        let definition = queue["effective_policy_definition"].as_object().unwrap_or(&none);
        let policies = [("policy", text(queue, "policy")), ("operator policy", text(queue, "operator_policy"))];
        let policies: Vec<String> = policies
            .iter()
            .filter(|(_, policy)| !policy.is_empty())
            .map(|(kind, policy)| format!("{kind} {policy:?}"))
            .collect();
        let policies = policies.join(" or ");
        for (key, effect) in POLICY_KEYS {
            let Some(value) = definition.get(key) else { continue };
            let of_all = (policies.clone(), key.to_owned());
            if named.contains(&of_all) {
                continue;
            }
            named.push(of_all);
            let what = format!("the {policies} sets {key} = {value} for our queue {name:?}, and perhaps for others");
            let finding = Finding::new(what, effect, clear_policy(queue, &settings.names()));
            match key.starts_with("dead-letter") || value == "reject-publish" {
                // Our own argument wins.
                true => checks.warning(CheckName::Policies, finding),
                false => checks.error(CheckName::Policies, finding),
            }
        }
        let timeout = definition.get("consumer-timeout").and_then(Value::as_u64).map(Duration::from_millis);
        if let Some(timeout) =
            timeout.filter(|timeout| *timeout < least && !checks.has_finding(CheckName::ConsumerTimeout))
        {
            checks.error(
                CheckName::ConsumerTimeout,
                Finding::new(
                    format!("the {policies} sets consumer-timeout to {timeout:?} for {name:?}, and a worker may need {least:?}"),
                    "the broker closes the worker's session again and again, and alarms are delivered anew",
                    format!("raise it well above worker.hold_max and worker.requeue_after, or {}", clear_policy(queue, &settings.names())),
                ),
            );
        }
    }
    if !checks.has_finding(CheckName::ConsumerTimeout) {
        checks.fact(
            CheckName::ConsumerTimeout,
            "no policy shortens it; consumer_timeout in rabbitmq.conf is not shown".to_owned(),
        );
    }
}

fn clear_policy(queue: &Value, names: &Names) -> String {
    let narrow = "or give it a pattern that does not match our queues";
    let clear = |what: &str, name: &str| format!("rabbitmqctl clear_{what}{} {}", names.vhost_option(), in_shell(name));
    match (text(queue, "policy"), text(queue, "operator_policy")) {
        (policy, "") => format!("{}, {narrow}", clear("policy", policy)),
        ("", policy) => format!("{}, {narrow}", clear("operator_policy", policy)),
        (policy, operator) => {
            let [policy, operator] = [clear("policy", policy), clear("operator_policy", operator)];
            format!("{policy}, or {operator}, whichever sets it, {narrow}")
        }
    }
}

fn judge_nodes(nodes: &Value, checks: &mut Checks) {
    for node in nodes.as_array().map_or(&[][..], Vec::as_slice) {
        let name = text(node, "name");
        for (alarm, what, fix) in [
            ("mem_alarm", "memory", "free memory, or raise vm_memory_high_watermark"),
            ("disk_free_alarm", "disk", "free disk space, or lower disk_free_limit"),
        ] {
            if node[alarm] == true {
                checks.error(
                    CheckName::BrokerResources,
                    Finding::new(
                        format!("the {what} alarm of node {name} is on"),
                        "the broker takes no message: alarms and events wait in their outboxes, and publishers block",
                        format!("{fix}, on that node (rabbitmqctl status)"),
                    ),
                );
            }
        }
        let left = node["fd_total"].as_i64().zip(node["fd_used"].as_i64()).map(|(total, used)| total - used);
        if let Some(left) = left.filter(|left| *left < FEW_DESCRIPTORS) {
            checks.warning(
                CheckName::BrokerResources,
                Finding::new(
                    format!("node {name} has {left} file descriptors left"),
                    "without any it accepts connections and never answers them",
                    "raise LimitNOFILE to 65536 and restart the node",
                ),
            );
        }
        if node["partitions"].as_array().is_some_and(|partitions| !partitions.is_empty()) {
            checks.error(
                CheckName::BrokerResources,
                Finding::new(
                    format!("node {name} has seen a partition of the cluster"),
                    "parts of the cluster work apart",
                    "restart the nodes of the smaller part (rabbitmqctl cluster_status)",
                ),
            );
        }
    }
}

fn judge_flags(flags: &Value, checks: &mut Checks) {
    let flags = flags.as_array().map_or(&[][..], Vec::as_slice);
    // From 4.0 on it is required and not listed.
    for flag in flags.iter().filter(|flag| ["stream_queue", "quorum_queue"].contains(&text(flag, "name"))) {
        let name = text(flag, "name");
        if text(flag, "state") == "disabled" {
            checks.error(
                CheckName::FeatureFlags,
                Finding::new(
                    format!("the feature flag {name} is disabled"),
                    "without it queues dead-letter at most once, and an alarm may be lost between two of them",
                    format!("rabbitmqctl enable_feature_flag {name}"),
                ),
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::operations::doctor::Verdict;

    fn found(judge: impl FnOnce(&mut Checks)) -> Vec<(CheckName, bool)> {
        let mut checks = Checks::default();
        judge(&mut checks);
        let report = checks.report(&[]);
        let is_error = |verdict: &Verdict| matches!(verdict, Verdict::Error(_));
        let findings = report.checks.iter().filter(|check| !matches!(check.verdict, Verdict::Ok { .. }));
        findings.map(|check| (check.name, is_error(&check.verdict))).collect()
    }

    #[test]
    fn address_is_read_without_path() {
        let address: ManagementAddress = "https://u%40s:p+w@rabbit.internal".parse().unwrap();
        assert_eq!((address.is_tls, &*address.host, address.port), (true, "rabbit.internal", 15_672));
        let (user, password) = address.account.unwrap();
        assert_eq!((&*user, password.expose_secret()), ("u@s", "p+w"));
        for wrong in ["rabbit:15672", "amqp://rabbit", "http://rabbit/api", "http://rabbit?x"] {
            assert!(wrong.parse::<ManagementAddress>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn policies_are_judged_by_key() {
        let ours = ["order.timeout".to_owned()];
        let queue = |definition: Value| {
            json!([{"name": "other", "policy": "p", "effective_policy_definition": {"expires": 1}},
                   {"name": "order.timeout", "policy": "p", "effective_policy_definition": definition}])
        };
        let of = |definition| found(|checks| judge_policies(&ours, &queue(definition), &Settings::defaults(), checks));
        assert_eq!(of(json!({"ha-mode": "all", "consumer-timeout": 1_800_000})), []);
        assert_eq!(of(json!({"message-ttl": 1})), [(CheckName::Policies, true)]);
        assert_eq!(of(json!({"dead-letter-exchange": "x"})), [(CheckName::Policies, false)]);
        assert_eq!(of(json!({"consumer-timeout": 60_000})), [(CheckName::ConsumerTimeout, true)]);
    }

    #[test]
    fn alarms_and_descriptors_are_found() {
        let of = |node| found(|checks| judge_nodes(&json!([node]), checks));
        assert_eq!(of(json!({"name": "n", "mem_alarm": false, "fd_total": 1_024, "fd_used": 60})), []);
        assert_eq!(
            of(json!({"name": "n", "fd_total": 1_024, "fd_used": 1_000})),
            [(CheckName::BrokerResources, false)]
        );
        assert_eq!(of(json!({"name": "n", "disk_free_alarm": true})), [(CheckName::BrokerResources, true)]);
        let flags =
            json!([{"name": "stream_queue", "state": "disabled"}, {"name": "maintenance", "state": "disabled"}]);
        assert_eq!(found(|checks| judge_flags(&flags, checks)), [(CheckName::FeatureFlags, true)]);
    }

    #[test]
    fn date_of_answer_is_read() {
        let time = time_of("Sun, 06 Nov 1994 08:49:37 GMT").unwrap();
        assert_eq!(time.unix_micros(), 784_111_777_000_000);
        assert_eq!(time_of("soon"), None);
    }
}

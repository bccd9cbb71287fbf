//! The broker, as far as only its management API shows it: bindings and policies.
//!
//! Sends GET requests alone. No sentence contains the password.

use std::str::FromStr;
use std::time::Duration;

use order_timeout_amqp::AmqpSettings;
use order_timeout_amqp::connect::connect_raw;
use order_timeout_amqp::topology::{Binding, Names, in_shell};
use order_timeout_core::address::AmqpAddress;
use order_timeout_core::problem::{Cause, Problem};
use percent_encoding::{NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};
use secrecy::{ExposeSecret, SecretString};
use serde_json::{Map, Value};
use url::Url;

use super::check::Checks;
use super::{broker, server};
use crate::config::Settings;
use crate::http;
use crate::postgres::Database;

/// The form of the address, in errors.
const FORM: &str = "http://user:password@host:15672";
/// An answer about thousands of queues takes the broker seconds.
const TIMEOUT: Duration = Duration::from_secs(15);
/// What an acknowledgement may take besides the hold and a requeue.
const ACKNOWLEDGED_WITHIN: Duration = Duration::from_secs(60);

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
    percent_decode_str(text).decode_utf8_lossy().into_owned()
}

pub(super) async fn examine(
    settings: &Settings,
    address: Option<&ManagementAddress>,
    database: Option<&Database>,
    checks: &mut Checks,
) {
    let Some(address) = address else {
        let why = "only the broker's management API shows bindings and policies: give its address with --management";
        checks.not_known(Cause::Topology, why);
        return checks.not_known(Cause::BrokerPolicy, why);
    };
    let Ok(amqp) = settings.amqp.url.expose_secret().parse::<AmqpAddress>() else {
        return checks.not_known(Cause::BrokerPolicy, "amqp.url is not valid");
    };
    let api = Api { settings, address, amqp };
    let vhost = utf8_percent_encode(&api.amqp.vhost, NON_ALPHANUMERIC).to_string();
    let names = settings.queue_names();
    match api.get(&format!("/api/bindings/{vhost}")).await {
        Ok(bindings) => {
            // A missing queue takes its bindings with it.
            match checks.has_found(Cause::Topology) {
                true => checks.not_known(Cause::Topology, "objects are missing on the broker"),
                false => judge_bindings(&settings.topology().bindings, &bindings, checks),
            }
            if let Some(database) = database
                && server::has_sent_events(database).await
            {
                judge_events(&settings.names().events(), &bindings, checks);
            }
        }
        Err(why) => checks.not_known(Cause::Topology, why),
    }
    if let Err(why) = alternates(&api, &vhost, checks).await {
        checks.not_known(Cause::AlternateExchange, why);
    }
    let columns = "name,policy,operator_policy,effective_policy_definition";
    match api.get(&format!("/api/queues/{vhost}?columns={columns}")).await {
        Ok(queues) => judge_policies(&names, &queues, settings, checks),
        Err(why) => checks.not_known(Cause::BrokerPolicy, why),
    }
}

/// Alternate exchanges of all our exchanges; over AMQP only those of direct ones are seen.
async fn alternates(api: &Api<'_>, vhost: &str, checks: &mut Checks) -> Result<(), String> {
    let names = api.settings.names();
    let exchanges = api.get(&format!("/api/exchanges/{vhost}?columns=name,policy")).await?;
    let ours: Vec<String> = api.settings.topology().exchanges.into_iter().map(|exchange| exchange.name).collect();
    for exchange in exchanges.as_array().map_or(&[][..], Vec::as_slice) {
        let (name, policy) = (text(exchange, "name"), text(exchange, "policy"));
        if policy.is_empty() || !ours.iter().any(|our| our == name) {
            continue;
        }
        let path = format!("/api/policies/{vhost}/{}", utf8_percent_encode(policy, NON_ALPHANUMERIC));
        let policy_found = api.get(&path).await.map_err(|why| {
            format!("the exchange {name:?} has the policy {policy:?}, whose definition only a user with the tag policymaker can read: {why}")
        })?;
        if !policy_found["definition"]["alternate-exchange"].is_null() {
            // It says more than what AMQP shows.
            checks.forget(Cause::AlternateExchange);
            checks.error(broker::alternate(name, Some(policy), &names));
            break;
        }
    }
    Ok(())
}

struct Api<'a> {
    settings: &'a Settings,
    address: &'a ManagementAddress,
    amqp: AmqpAddress,
}

impl Api<'_> {
    /// A connection with the certificates of the section `amqp`.
    async fn get(&self, path: &str) -> Result<Value, String> {
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
        let asked = http::get_json(raw, (&place, path), (user, password), TIMEOUT);
        asked.await.map_err(|why| format!("the management API: {why}"))
    }
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
            Problem::new(
                Cause::Topology,
                format!("the binding of {destination:?} to the exchange {exchange:?} with the key {routing_key:?} is missing"),
                "run `order-timeout setup` with the workers' settings",
            )
            .because("what is published there is returned, or waits in its delay queue"),
        );
    }
}

/// Events that were published to no queue are gone.
fn judge_events(exchange: &str, found: &Value, checks: &mut Checks) {
    let found = found.as_array().map_or(&[][..], Vec::as_slice);
    if found.iter().all(|binding| text(binding, "source") != exchange) {
        checks.warning(
            Problem::new(
                Cause::Topology,
                format!("no queue is bound to the exchange {exchange:?}, and events have been published to it"),
                "declare a queue for each listener and bind it (docs/LISTENING.md), or ignore this if nothing is to listen",
            )
            .because("every event is lost, so no service learns that an order was closed"),
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
    let mut is_timeout_named = false;
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
            let problem =
                Problem::new(Cause::BrokerPolicy, what, clear_policy(queue, &settings.names())).because(effect);
            match key.starts_with("dead-letter") || value == "reject-publish" {
                // Our own argument wins.
                true => checks.warning(problem),
                false => checks.error(problem),
            }
        }
        let timeout = definition.get("consumer-timeout").and_then(Value::as_u64).map(Duration::from_millis);
        if let Some(timeout) =
            timeout.filter(|timeout| *timeout < least && !std::mem::replace(&mut is_timeout_named, true))
        {
            checks.error(
                Problem::new(
                    Cause::BrokerPolicy,
                    format!("the {policies} sets consumer-timeout to {timeout:?} for {name:?}, and a worker may need {least:?}"),
                    format!("raise it well above worker.hold_max and worker.requeue_after, or {}", clear_policy(queue, &settings.names())),
                )
                .because("the broker closes the worker's session again and again, and alarms are delivered anew"),
            );
        }
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

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::operations::doctor::Check;

    fn found(judge: impl FnOnce(&mut Checks)) -> Vec<(Cause, bool)> {
        let mut checks = Checks::default();
        judge(&mut checks);
        let report = checks.report(&[]);
        let findings = report.checks.iter().filter(|check| !matches!(check, Check::Ok { .. }));
        findings.map(|check| (check.cause(), matches!(check, Check::Error(_)))).collect()
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
        assert_eq!(of(json!({"message-ttl": 1})), [(Cause::BrokerPolicy, true)]);
        assert_eq!(of(json!({"dead-letter-exchange": "x"})), [(Cause::BrokerPolicy, false)]);
        assert_eq!(of(json!({"consumer-timeout": 60_000})), [(Cause::BrokerPolicy, true)]);
    }
}

//! The topology as a RabbitMQ definitions file, with users of least privilege; `definitions.json` in the repository is
//! one. The objects come from `topology.rs`. No I/O.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::{Argument, Topology};

/// Salted SHA-256 of the development password "publisher-dev", in RabbitMQ's form. Change it with
/// `rabbitmqctl change_password order-publisher …` before any other machine can reach the broker.
const PUBLISHER_PASSWORD_HASH: &str = "WhGQPKX4PD+FKbPcQYN/NOwblJOtFIi8CvF2/OE9WYZZb1/s";
/// The same for "worker-dev".
const WORKER_PASSWORD_HASH: &str = "J+QIvTT3PDzUsK2QLk5u0p52dsslWpdx11hAtwYyswc86/Pb";

impl Topology {
    /// The same objects as a RabbitMQ definitions file, with a virtual host, two users of least privilege and their
    /// rights. Importable with `rabbitmqctl import_definitions`.
    #[must_use]
    pub fn definitions(&self, vhost: &str) -> Value {
        let namespace = self.names.namespace();
        let object = |name: &str, arguments: &BTreeMap<&'static str, Argument>| json!({ "name": name, "vhost": vhost, "durable": true, "auto_delete": false, "arguments": arguments });
        let exchanges = self.exchanges.iter().map(|exchange| {
            let mut value = object(&exchange.name, &exchange.arguments);
            value["type"] = json!(exchange.kind);
            value["internal"] = json!(false);
            value
        });
        let queues = self.queues.iter().map(|queue| {
            let mut value = object(&queue.name, &queue.arguments);
            value["type"] = json!("quorum");
            value
        });
        let bindings = self.bindings.iter().map(|binding| {
            json!({
                "source": binding.exchange, "vhost": vhost, "destination": binding.destination.name(),
                "destination_type": binding.destination.kind(), "routing_key": binding.routing_key, "arguments": {}
            })
        });
        let mut definitions = json!({
            "vhosts": [{ "name": vhost }],
            "users": [
                user("order-publisher", PUBLISHER_PASSWORD_HASH),
                user("order-worker", WORKER_PASSWORD_HASH),
            ],
            "permissions": [
                // Write to the exchanges that accept alarms, and nothing else: it can neither consume nor bind.
                { "user": "order-publisher", "vhost": vhost, "configure": "^$",
                  "write": format!("^{namespace}\\.(delay|schedule|delayed)$"), "read": "^$" },
                // Configure, because comparing the arguments of what exists needs that right.
                { "user": "order-worker", "vhost": vhost, "configure": format!("^{namespace}\\."),
                  "write": format!("^{namespace}\\."), "read": format!("^{namespace}\\.") },
            ],
            "exchanges": exchanges.collect::<Vec<_>>(),
            "queues": queues.collect::<Vec<_>>(),
            "bindings": bindings.collect::<Vec<_>>(),
        });
        // Where any crate of the build enables serde_json's `preserve_order`, objects would keep the order of this file.
        definitions.sort_all_objects();
        definitions
    }
}

fn user(name: &str, password_hash: &str) -> Value {
    json!({ "name": name, "password_hash": password_hash, "hashing_algorithm": "rabbit_password_hashing_sha256", "tags": [] })
}

//! A running worker accepts what `docs/openapi.yaml` allows, refuses what it forbids, and answers only with
//! statuses that it names. The requests are generated from the description.

use order_timeout_testkit::page::{TOKEN, with_page};
use order_timeout_testkit::{RunningWorker, TestEnv};
use proptest::prelude::*;
use proptest::strategy::{Union, ValueTree};
use proptest::string::string_regex;
use proptest::test_runner::TestRunner;
use proptest::{collection, sample};
use regex::Regex;
use serde_json::{Map, Value, json};
use tempfile::NamedTempFile;
use url::form_urlencoded::{Serializer, byte_serialize};

use crate::api::{Answer, ask, park};

/// Valid requests of each operation.
const TRIES: usize = 24;
/// What a valid request may be answered with besides success: there is no such kind or page, or a state forbids it.
const REFUSED_BY_STATE: [u16; 2] = [404, 409];

fn list(schema: &Value, name: &str) -> Vec<Value> {
    schema[name].as_array().cloned().unwrap_or_default()
}

fn resolved(schema: &Value, api: &Value) -> Value {
    let name = schema["$ref"].as_str().and_then(|name| name.rsplit('/').next());
    name.map_or_else(|| schema.clone(), |name| api["components"]["schemas"][name].clone())
}

/// Values that the schema allows.
fn valid(schema: &Value, api: &Value) -> BoxedStrategy<Value> {
    let schema = resolved(schema, api);
    let size = |name: &str| schema[name].as_u64().map(|size| usize::try_from(size).unwrap());
    if schema["enum"].is_array() {
        return sample::select(list(&schema, "enum")).boxed();
    }
    if schema["oneOf"].is_array() {
        return Union::new(list(&schema, "oneOf").iter().map(|one| valid(one, api))).boxed();
    }
    match schema["type"].as_str().unwrap_or_else(|| panic!("no type: {schema}")) {
        "object" => {
            let (properties, required) = (schema["properties"].as_object().unwrap().clone(), list(&schema, "required"));
            let fields = properties.into_iter().map(|(name, schema)| (name, valid(&schema, api)));
            let (always, perhaps): (Vec<_>, Vec<_>) = fields.partition(|(name, _)| required.contains(&json!(name)));
            let least = size("minProperties").map_or(0, |size| size - always.len());
            let most = size("maxProperties").map_or(perhaps.len(), |size| size - always.len());
            let some = sample::subsequence(perhaps, least..=most);
            let chosen = some.prop_flat_map(move |some| {
                let of_name = |(name, value): (String, BoxedStrategy<Value>)| (Just(name), value);
                always.clone().into_iter().chain(some).map(of_name).collect::<Vec<_>>()
            });
            chosen.prop_map(|fields| fields.into_iter().collect::<Map<_, _>>().into()).boxed()
        }
        "array" => {
            let least = size("minItems").unwrap_or(0);
            collection::vec(valid(&schema["items"], api), least..=least + 4).prop_map(Value::from).boxed()
        }
        "string" => {
            let pattern = match schema["format"].as_str() {
                Some("uuid") => "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}",
                Some("date-time") => "20[0-9]{2}-0[1-9]-[12][0-9]T[01][0-9]:[0-5][0-9]:[0-5][0-9]Z",
                _ => schema["pattern"].as_str().unwrap_or(r"[^\u0000]{0,60}"),
            };
            let texts = string_regex(pattern.trim_matches(['^', '$'])).unwrap();
            texts.prop_filter("its length", move |text| is_text(text, &schema)).prop_map(Value::from).boxed()
        }
        "integer" => {
            let range = schema["minimum"].as_i64().unwrap_or(i64::MIN)..=schema["maximum"].as_i64().unwrap_or(i64::MAX);
            range.prop_map(Value::from).boxed()
        }
        "boolean" => any::<bool>().prop_map(Value::from).boxed(),
        "null" => Just(Value::Null).boxed(),
        other => panic!("{other}"),
    }
}

/// Values of the same type that the schema forbids, and values of others.
fn invalid(schema: &Value, api: &Value) -> Vec<Value> {
    let schema = resolved(schema, api);
    let mut found = vec![json!({ "a": 1 }), json!("no such"), json!("\0"), json!(1.5)];
    if schema["enum"].is_array() || schema["oneOf"].is_array() {
        return found;
    }
    found.push(Value::Null);
    match schema["type"].as_str().unwrap() {
        "string" => {
            let long = [201, 501].map(|length| "x".repeat(length));
            found.extend(
                ["", " ", "a\0", "\u{85}", "Ä !", "0"].map(Value::from).into_iter().chain(long.map(Value::from)),
            );
            found.retain(|one| !one.as_str().is_some_and(|text| is_text(text, &schema)));
        }
        "integer" => {
            found.extend(schema["minimum"].as_i64().map(|least| json!(least - 1)));
            found.extend(schema["maximum"].as_i64().map(|most| json!(most + 1)));
        }
        "array" => {
            let items = invalid(&schema["items"], api).into_iter().map(|item| json!([item]));
            found.extend(items.chain([json!([]), vec!["1"; 1_001].into()]));
        }
        _ => {}
    }
    found
}

fn is_text(text: &str, schema: &Value) -> bool {
    let length = text.chars().count() as u64;
    let is_format = match schema["format"].as_str() {
        Some("uuid") => text.len() == 36,
        Some("date-time") => text.starts_with("20"),
        _ => true,
    };
    let lengths = schema["minLength"].as_u64().unwrap_or(0)..=schema["maxLength"].as_u64().unwrap_or(u64::MAX);
    let is_pattern = |pattern: &str| Regex::new(pattern).unwrap().is_match(text);
    is_format && lengths.contains(&length) && schema["pattern"].as_str().is_none_or(is_pattern)
}

/// The parameters of an operation, and its body, as one object's schema.
fn schema_of(operation: &Value) -> Value {
    let parameters = list(operation, "parameters");
    let of = |one: &Value| (one["name"].as_str().unwrap().to_owned(), one["schema"].clone());
    let mut properties: Map<_, _> = parameters.iter().map(of).collect();
    let mut required: Vec<Value> =
        parameters.iter().filter(|one| one["required"] == true).map(|one| one["name"].clone()).collect();
    if operation["requestBody"].is_object() {
        properties.insert("body".into(), operation["requestBody"]["content"]["application/json"]["schema"].clone());
        required.push(json!("body"));
    }
    json!({ "type": "object", "properties": properties, "required": required })
}

/// The path with the values of its parameters, and the query.
fn target(path: &str, operation: &Value, request: &Value) -> String {
    let (mut path, mut query) = (path.to_owned(), Serializer::new(String::new()));
    for parameter in list(operation, "parameters") {
        let name = parameter["name"].as_str().unwrap();
        let Some(value) = request.get(name) else { continue };
        let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        if parameter["in"] == "path" {
            let encoded: String = byte_serialize(text.as_bytes()).collect();
            path = path.replace(&format!("{{{name}}}"), &encoded.replace('+', "%20"));
        } else {
            query.append_pair(name, &text);
        }
    }
    format!("{path}?{}", query.finish())
}

async fn send(worker: &RunningWorker, method: &str, target: &str, request: &Value) -> Answer {
    let authorization = format!("Bearer {TOKEN}");
    let headers = [("Authorization", authorization.as_str()), ("Content-Type", "application/json")];
    let body = request.get("body").map_or_else(String::new, Value::to_string);
    ask(worker.http.unwrap(), &method.to_uppercase(), target, &headers, &body).await
}

/// Requests that differ from a valid one in one parameter or field.
fn spoiled(request: &Value, schema: &Value, api: &Value, at: &str) -> Vec<(String, Value)> {
    let schema = resolved(schema, api);
    let mut found = Vec::new();
    for (name, field) in schema["properties"].as_object().unwrap() {
        let put = |value| {
            let mut spoiled = request.clone();
            spoiled[name] = value;
            (format!("{at}{name}"), spoiled)
        };
        if name == "body" {
            let bodies = spoiled(&request["body"], field, api, "body.").into_iter();
            found.extend(bodies.map(|(at, body)| (at, put(body).1)));
            continue;
        }
        // In a path or a query every value is a text, and an empty one is none.
        let as_text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        let is_sent = |value: &Value| {
            let is_string = resolved(field, api)["type"] == "string";
            !at.is_empty()
                || !(as_text(value).is_empty() || is_string && is_text(&as_text(value), &resolved(field, api)))
        };
        found.extend(invalid(field, api).into_iter().filter(is_sent).map(put));
        if at == "body." && list(&schema, "required").contains(&json!(name)) {
            let mut spoiled = request.clone();
            spoiled.as_object_mut().unwrap().remove(name);
            found.push((format!("without {name}"), spoiled));
        }
    }
    if at == "body." {
        let mut spoiled = request.clone();
        spoiled["unknown"] = json!(1);
        found.push(("unknown".to_owned(), spoiled));
    }
    found
}

#[test]
fn worker_does_what_its_description_says() {
    let file = NamedTempFile::new().unwrap();
    TestEnv::builder().settings(with_page(Some(&file))).run(async |env| {
        let worker = env.worker().await;
        park(&env, "close_failed", "17", b"{").await;
        let api = serde_json::to_value(order_timeout::http::openapi()).unwrap();
        let mut random = TestRunner::deterministic();
        for (path, methods) in api["paths"].as_object().unwrap() {
            for (method, operation) in methods.as_object().unwrap() {
                let schema = schema_of(operation);
                let check = async |request: &Value, spoiled: Option<&str>| {
                    let answer = send(&worker, method, &target(path, operation, request), request).await;
                    let sent = format!("{method} {path} {request}, spoiled: {spoiled:?}: {answer:?}");
                    let described = &operation["responses"][answer.status.to_string()];
                    assert!(!described.is_null(), "its answer is not described: {sent}");
                    let is_accepted = answer.status < 300 || REFUSED_BY_STATE.contains(&answer.status);
                    assert!(if spoiled.is_none() { is_accepted } else { answer.status == 400 }, "{sent}");
                    if answer.status >= 300 {
                        answer.problem();
                    }
                };
                for turn in 0..TRIES {
                    let request = valid(&schema, &api).new_tree(&mut random).unwrap().current();
                    check(&request, None).await;
                    if turn == 0 {
                        for (at, spoiled) in spoiled(&request, &schema, &api, "") {
                            check(&spoiled, Some(&at)).await;
                        }
                    }
                }
            }
        }
        worker.stop().await;
    });
}

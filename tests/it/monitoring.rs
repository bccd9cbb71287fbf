//! Prometheus' rules and Grafana's dashboard speak of what the worker measures: promtool runs the rules' own tests, a
//! real Prometheus evaluates every expression over a real worker, and each alert leads to a section about it.
//!
//! promtool and Prometheus are those of Debian's package `prometheus`; without it the tests that need them are skipped.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use order_timeout::Settings;
use order_timeout::http;
use order_timeout::observe::metrics::{Metrics, listed};
use order_timeout_testkit::figures::serve_http;
use order_timeout_testkit::payment_service::{PaymentService, wide_limits};
use order_timeout_testkit::skip::skipped;
use order_timeout_testkit::{TIMEOUT, TestEnv, wait_for};
use regex::Regex;
use serde_json::{Value, json};

use crate::health::PROCESS_METRICS;

const RULES: &str = "deploy/prometheus/rules.yml";
const RULE_TESTS: [&str; 2] = ["deploy/prometheus/rules.test.yml", "deploy/prometheus/rules.day.test.yml"];
const DASHBOARD: &str = "deploy/grafana/dashboards/order-timeout.json";
const TROUBLESHOOT: &str = "docs/operating/troubleshoot.md";
const NO_PROMTOOL: &str = "promtool is not installed; Debian's package prometheus has it";

fn path(of: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(of)
}

fn read(file: &str) -> String {
    std::fs::read_to_string(path(file)).unwrap_or_else(|error| panic!("{file}: {error}"))
}

fn yaml(file: &str) -> Value {
    serde_yaml_ng::from_str(&read(file)).unwrap_or_else(|error| panic!("{file}: {error}"))
}

fn list<'a>(value: &'a Value, key: &str) -> &'a [Value] {
    value[key].as_array().unwrap_or_else(|| panic!("no list {key} in {value}"))
}

fn text<'a>(value: &'a Value, key: &str) -> &'a str {
    value[key].as_str().unwrap_or_else(|| panic!("no text {key} in {value}"))
}

/// The rules with this key: `alert` or `record`.
fn rules(key: &str) -> Vec<Value> {
    let file = yaml(RULES);
    let all = list(&file, "groups").iter().flat_map(|group| list(group, "rules")).cloned();
    let found: Vec<Value> = all.filter(|rule| rule.get(key).is_some()).collect();
    assert!(!found.is_empty());
    found
}

fn names(key: &str) -> BTreeSet<String> {
    rules(key).iter().map(|rule| text(rule, key).to_owned()).collect()
}

/// The panels that show something.
fn panels() -> Vec<Value> {
    let dashboard: Value = serde_json::from_str(&read(DASHBOARD)).unwrap();
    list(&dashboard, "panels").iter().filter(|panel| panel["type"] != "row").cloned().collect()
}

/// Every expression of the dashboard, with the panel that has it.
fn dashboard_expressions() -> Vec<(String, String)> {
    let of_panel = |panel: Value| -> Vec<(String, String)> {
        let title = text(&panel, "title").to_owned();
        list(&panel, "targets").iter().map(|target| (title.clone(), text(target, "expr").to_owned())).collect()
    };
    panels().into_iter().flat_map(of_panel).collect()
}

/// An expression as Grafana sends it: with values for its variables.
fn filled_in(expression: &str) -> String {
    let values = [("$__rate_interval", "1m"), ("$__range", "1h"), ("$job", ".+"), ("$kind", ".*")];
    values.into_iter().fold(expression.to_owned(), |filled, (variable, value)| filled.replace(variable, value))
}

/// The metrics that an expression names: its words, without texts, labels, durations, functions and keywords.
fn metrics_in(expression: &str) -> BTreeSet<String> {
    let without = [r#""[^"]*""#, r"\{[^}]*\}", r"\[[^\]]*\]", r"\b(?:by|without|on|ignoring)\s*\([^)]*\)"];
    let rest = without
        .into_iter()
        .fold(expression.to_owned(), |rest, part| Regex::new(part).unwrap().replace_all(&rest, " ").into_owned());
    let word = Regex::new(r"\b[A-Za-z_][\w:]*\s*\(?").unwrap();
    let keywords = ["and", "or", "unless", "bool", "offset"];
    word.find_iter(&rest)
        .map(|found| found.as_str().trim_end())
        .filter(|found| !found.ends_with('(') && !keywords.contains(found))
        .map(str::to_owned)
        .collect()
}

#[test]
fn metric_names_are_found_in_expressions() {
    for (expression, expected) in [
        (r#"sum by (le) (rate(a_bucket{le="b", c=~"$d"}[$e])) > 0.5"#, vec!["a_bucket"]),
        ("absent(a) or min by (job, kind) (b) == 1", vec!["a", "b"]),
        ("60 * x:a:rate5m / on (job) b offset 5m", vec!["b", "x:a:rate5m"]),
        ("vector(0) and (a unless b)", vec!["a", "b"]),
    ] {
        let found: Vec<String> = metrics_in(expression).into_iter().collect();
        let expected: Vec<&str> = expected.into_iter().collect();
        assert_eq!(found, expected, "{expression}");
    }
}

#[test]
fn rules_and_dashboard_name_existing_metrics() {
    let recorded = names("record");
    let is_known = |name: &str| {
        let histogram = ["_bucket", "_sum", "_count"].into_iter().find_map(|end| name.strip_suffix(end));
        listed().chain(PROCESS_METRICS).any(|one| one.name == name)
            || listed().any(|one| one.kind == "histogram" && Some(one.name) == histogram)
            || recorded.contains(name)
            // The series of the alerts themselves, which Prometheus adds.
            || name == "ALERTS"
    };
    let of_rules = ["alert", "record"].into_iter().flat_map(|key| {
        rules(key).into_iter().map(move |rule| (text(&rule, key).to_owned(), text(&rule, "expr").to_owned()))
    });
    let mut used = BTreeSet::new();
    for (place, expression) in of_rules.chain(dashboard_expressions()) {
        let named = metrics_in(&expression);
        for name in &named {
            assert!(is_known(name), "{place} names {name}, which is not a metric: {expression}");
        }
        used.extend(named);
    }
    // What is measured and shown nowhere is measured for nothing.
    let shown = |one: &&&str| {
        let series = [(*one).to_string(), format!("{one}_bucket")];
        series.iter().any(|series| used.contains(series)) || recorded.iter().any(|rule| rule.contains(**one))
    };
    let ours: Vec<&str> = listed().map(|one| one.name).collect();
    let hidden: Vec<_> = ours
        .iter()
        .filter(|one| !shown(one) && !recorded.iter().any(|rule| rule.contains(one.trim_end_matches("_total"))))
        .collect();
    assert_eq!(hidden, Vec::<&&str>::new(), "{DASHBOARD} shows none of these");
    let variables: Value = serde_json::from_str(&read(DASHBOARD)).unwrap();
    let labelled = Regex::new(r"^label_values\((\w+)").unwrap();
    for variable in list(&variables["templating"], "list").iter().filter(|one| one["type"] == "query") {
        let query = text(variable, "definition");
        assert!(labelled.captures(query).is_some_and(|found| is_known(&found[1])), "{query} names no metric");
    }
}

#[test]
fn every_panel_can_be_read_alone() {
    let dashboard: Value = serde_json::from_str(&read(DASHBOARD)).unwrap();
    let mut ids = BTreeSet::new();
    let mut taken: BTreeMap<(u64, u64), String> = BTreeMap::new();
    for panel in list(&dashboard, "panels") {
        let title = text(panel, "title").to_owned();
        assert!(ids.insert(panel["id"].as_u64().unwrap()), "{title}: its id is another panel's");
        let side = |key: &str| panel["gridPos"][key].as_u64().unwrap();
        assert!(side("x") + side("w") <= 24, "{title} is wider than the page");
        for cell in
            (side("x")..side("x") + side("w")).flat_map(|x| (side("y")..side("y") + side("h")).map(move |y| (x, y)))
        {
            let other = taken.insert(cell, title.clone());
            assert_eq!(other, None, "{title} lies over another panel");
        }
        if panel["type"] == "row" {
            continue;
        }
        assert!(text(panel, "description").ends_with('.'), "{title} does not say what it shows");
        for target in list(panel, "targets") {
            // Any data source: the variable.
            assert_eq!(target["datasource"]["uid"], "${datasource}", "{title}");
        }
    }
    let rows: Vec<&str> = list(&dashboard, "panels")
        .iter()
        .filter(|panel| panel["type"] == "row")
        .map(|panel| text(panel, "title"))
        .collect();
    assert_eq!(rows.first(), Some(&"Is closing on time?"), "the first question comes first: {rows:?}");
}

#[test]
fn every_alert_links_to_its_section() {
    let document = read(TROUBLESHOOT);
    let sections = document.split("\n## ").find(|section| section.starts_with("Alerts\n")).expect("a section Alerts");
    let headings: BTreeSet<String> =
        sections.lines().filter_map(|line| line.strip_prefix("### ")).map(str::to_owned).collect();
    assert_eq!(headings, names("alert"), "the sections in {TROUBLESHOOT} (left) and the alerts in {RULES} (right)");
    for alert in rules("alert") {
        let name = text(&alert, "alert");
        let annotations = &alert["annotations"];
        let url = format!("{}/blob/main/{TROUBLESHOOT}#{}", env!("CARGO_PKG_REPOSITORY"), name.to_lowercase());
        assert_eq!(text(annotations, "runbook_url"), url, "{name}");
        for key in ["summary", "description"] {
            assert!(text(annotations, key).ends_with('.'), "{name}: {key} is a sentence");
        }
        let severity = text(&alert["labels"], "severity");
        assert!(["critical", "warning"].contains(&severity), "{name}");
        let row = format!("\n| `{name}` | {severity} | ");
        assert!(read("docs/operating/monitor.md").contains(&row), "docs/operating/monitor.md does not list {name}");
    }
}

#[test]
fn every_alert_fires_and_is_resolved() {
    let mut complete = BTreeSet::new();
    for case in RULE_TESTS.map(yaml).iter().flat_map(|file| list(file, "tests")) {
        let mut fired = BTreeSet::new();
        for check in list(case, "alert_rule_test") {
            let alert = text(check, "alertname").to_owned();
            let is_firing = !list(check, "exp_alerts").is_empty();
            // In the order of time, so an empty list behind a firing alert is its end.
            if !is_firing && fired.contains(&alert) {
                complete.insert(alert.clone());
            }
            if is_firing {
                fired.insert(alert);
            }
        }
    }
    assert_eq!(complete, names("alert"), "fires and is resolved in a test (left), alerts (right)");
    let files = RULE_TESTS.map(|file| path(file).display().to_string());
    let arguments: Vec<&str> = ["test", "rules"].into_iter().chain(files.iter().map(String::as_str)).collect();
    let Some((succeeded, said)) = promtool(&arguments, "") else {
        return skipped("monitoring::every_alert_fires_and_is_resolved", NO_PROMTOOL);
    };
    assert!(succeeded && said.matches("SUCCESS").count() == RULE_TESTS.len(), "promtool test rules: {said}");
}

#[test]
fn promtool_accepts_metrics() {
    let Some((succeeded, said)) = promtool(&["check", "metrics"], &Metrics::new().render().unwrap()) else {
        return skipped("monitoring::promtool_accepts_metrics", NO_PROMTOOL);
    };
    assert!(succeeded && said.is_empty(), "promtool check metrics: {said}");
}

#[test]
fn promtool_accepts_configuration() {
    // With the rules, which it names.
    let file = path("deploy/prometheus/prometheus.yml");
    let Some((succeeded, said)) = promtool(&["check", "config", file.to_str().unwrap()], "") else {
        return skipped("monitoring::promtool_accepts_configuration", NO_PROMTOOL);
    };
    let count = rules("alert").len() + rules("record").len();
    assert!(succeeded && said.contains(&format!("{count} rules found")), "promtool check config: {said}");
}

/// Whether promtool succeeds, and its output; `None` if it is not installed.
fn promtool(arguments: &[&str], input: &str) -> Option<(bool, String)> {
    let mut promtool = Command::new("promtool");
    promtool.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut running = promtool.spawn().ok()?;
    running.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    let output = running.wait_with_output().unwrap();
    let said = [output.stdout, output.stderr].concat();
    Some((output.status.success(), String::from_utf8_lossy(&said).into_owned()))
}

/// A Prometheus of the test's own, with the shipped configuration and rules. Killed when dropped.
struct Prometheus {
    process: Child,
    address: SocketAddr,
    folder: tempfile::TempDir,
}

impl Prometheus {
    /// Scrapes this worker every second, in place of the stack's. `None` if Prometheus is not installed.
    fn scraping(worker: SocketAddr) -> Option<Self> {
        let folder = tempfile::tempdir().unwrap();
        // Freed at once; that another program takes it in between is unlikely, and shows as a failed start.
        let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let mut configuration = yaml("deploy/prometheus/prometheus.yml");
        configuration["global"] = json!({"scrape_interval": "1s", "evaluation_interval": "1s"});
        configuration["rule_files"] = json!([path(RULES)]);
        let job = list(&configuration, "scrape_configs").iter().find(|job| job["job_name"] == "order-timeout").unwrap();
        assert_eq!(job["dns_sd_configs"][0]["names"], json!(["worker"]), "the service of the compose stack");
        configuration["scrape_configs"] =
            json!([{"job_name": "order-timeout", "static_configs": [{"targets": [worker.to_string()]}]}]);
        let file = folder.path().join("prometheus.yml");
        // Every JSON text is YAML.
        std::fs::write(&file, configuration.to_string()).unwrap();
        let log = std::fs::File::create(folder.path().join("log")).unwrap();
        let process = Command::new("prometheus")
            .arg(format!("--config.file={}", file.display()))
            .arg(format!("--storage.tsdb.path={}", folder.path().join("data").display()))
            .arg(format!("--web.listen-address={address}"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .ok()?;
        Some(Self { process, address, folder })
    }

    /// The answer of its API to this request; the error as it names it.
    async fn ask(&self, request: &str) -> Result<Value, String> {
        let path = format!("/api/v1/{request}");
        let (_, body) = http::get(self.address, &path, TIMEOUT).await.map_err(|error| error.to_string())?;
        let answer: Value = serde_json::from_str(&body).map_err(|error| format!("{error}: {body}"))?;
        if answer["status"] == "success" { Ok(answer["data"].clone()) } else { Err(answer.to_string()) }
    }

    /// How many series an expression has now.
    async fn series(&self, expression: &str) -> Result<usize, String> {
        let query: String =
            url::form_urlencoded::Serializer::new(String::new()).append_pair("query", expression).finish();
        Ok(list(&self.ask(&format!("query?{query}")).await?, "result").len())
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        // It may have ended by itself; its log tells why.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[test]
fn expressions_find_data_of_worker() {
    let service = PaymentService::start();
    let settings = |settings: &mut Settings| {
        serve_http(settings);
        service.join(settings, "card", wide_limits());
    };
    TestEnv::builder().settings(settings).run(async |env| {
        let worker = env.worker().await;
        let Some(prometheus) = Prometheus::scraping(worker.http.unwrap()) else {
            worker.stop().await;
            return skipped(
                "monitoring::expressions_find_data_of_worker",
                "prometheus is not installed; Debian's package prometheus has it",
            );
        };
        for order in env.orders(5, Duration::from_secs(2)).await {
            env.write_alarm(&order).await;
        }
        wait_for("the orders are closed", async || env.closed().await == 5).await;
        let began = std::time::Instant::now();
        wait_for("prometheus answers", async || {
            assert!(began.elapsed() < TIMEOUT - Duration::from_secs(2), "{}", prometheus.log());
            prometheus.series("vector(1)").await.is_ok()
        })
        .await;
        for (panel, expression) in dashboard_expressions() {
            let query = filled_in(&expression);
            // A syntax error does not pass with time. A list of what is wrong is empty here.
            let now = prometheus.series(&query).await.unwrap_or_else(|error| panic!("{panel}: {query}: {error}"));
            if now == 0 && !expression.ends_with("> 0") {
                let found = async || prometheus.series(&query).await.unwrap() > 0;
                wait_for(&format!("{panel}: no data for {query}"), found).await;
            }
        }
        let rules = prometheus.ask("rules").await.unwrap();
        let evaluated: Vec<&Value> = list(&rules, "groups").iter().flat_map(|group| list(group, "rules")).collect();
        assert_eq!(evaluated.len(), names("alert").len() + names("record").len());
        for rule in evaluated {
            assert_eq!(rule["health"], "ok", "{rule}");
            // This worker is healthy.
            assert!(rule["type"] == "recording" || rule["state"] == "inactive", "{rule}");
        }
        worker.stop().await;
    });
}

#[test]
fn collector_pipelines_name_their_parts() {
    let collector = yaml("deploy/otel/collector.yml");
    let defined = |kind: &str| -> BTreeSet<String> { collector[kind].as_object().unwrap().keys().cloned().collect() };
    let mut used: BTreeMap<&str, BTreeSet<String>> = BTreeMap::new();
    for (name, pipeline) in collector["service"]["pipelines"].as_object().unwrap() {
        for kind in ["receivers", "processors", "exporters"] {
            let parts = list(pipeline, kind).iter().map(|part| part.as_str().unwrap().to_owned());
            used.entry(kind).or_default().extend(parts);
        }
        assert_eq!(pipeline["processors"][0], "memory_limiter", "{name}: what refuses data comes first");
    }
    for kind in ["receivers", "processors", "exporters"] {
        assert_eq!(used[kind], defined(kind), "{kind} that are used (left) and defined (right)");
    }
}

#[test]
fn stack_mounts_what_configurations_name() {
    let stack = yaml("docker-compose.yml");
    let services = stack["services"].as_object().unwrap();
    let of_profile: BTreeSet<&str> = services
        .iter()
        .filter(|(_, service)| service["profiles"] == json!(["observability"]))
        .map(|(name, _)| name.as_str())
        .collect();
    assert_eq!(of_profile, BTreeSet::from(["grafana", "otel-collector", "prometheus"]));
    let mounted = |service: &str| -> BTreeMap<String, String> {
        let volumes = list(&services[service], "volumes").iter().filter(|volume| volume["type"] == "bind");
        volumes.map(|volume| (text(volume, "target").to_owned(), text(volume, "source").to_owned())).collect()
    };
    let prometheus = mounted("prometheus");
    for rules in list(&yaml("deploy/prometheus/prometheus.yml"), "rule_files") {
        assert!(prometheus.contains_key(&format!("/etc/prometheus/{}", rules.as_str().unwrap())));
    }
    let grafana = mounted("grafana");
    let dashboards = yaml("deploy/grafana/provisioning/dashboards/files.yml");
    let folder = text(&dashboards["providers"][0]["options"], "path");
    assert_eq!(grafana[folder], format!("./{}", Path::new(DASHBOARD).parent().unwrap().display()));
    let home = text(&services["grafana"]["environment"], "GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH");
    assert_eq!(home, format!("{folder}/{}", Path::new(DASHBOARD).file_name().unwrap().display()));
    let source = yaml("deploy/grafana/provisioning/datasources/prometheus.yml");
    assert_eq!(text(&source["datasources"][0], "url"), "http://prometheus:9090");
    let command = services["otel-collector"]["command"][0].as_str().unwrap();
    assert!(mounted("otel-collector").contains_key(command.trim_start_matches("--config=")), "{command}");
}

//! The manifests in deploy/kubernetes are valid by the schemas of Kubernetes, KEDA and the Prometheus operator, and agree
//! with the program, its image and its settings.
//!
//! No cluster is needed. The validators come from PyPI (scripts/validate-manifests); rendering needs kubectl. Without
//! these, the tests that need them are skipped.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use order_timeout::Settings;
use order_timeout::http::{LIVEZ, METRICS, READYZ};
use order_timeout_testkit::process::{bare, run};
use order_timeout_testkit::skip::skipped;
use regex::Regex;
use serde::Deserialize;
use serde_json::{Value, json};

const FOLDER: &str = "deploy/kubernetes";
/// What an operator applies.
const APPLIED: [&str; 4] = ["setup", "worker", "example/setup", "example/worker"];

fn path(of: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(of)
}

fn read(file: &Path) -> String {
    std::fs::read_to_string(file).unwrap_or_else(|error| panic!("{}: {error}", file.display()))
}

/// The one object in this file of deploy/kubernetes.
fn object(file: &str) -> Value {
    serde_yaml_ng::from_str(&read(&path(FOLDER).join(file))).unwrap_or_else(|error| panic!("{file}: {error}"))
}

fn text<'a>(value: &'a Value, key: &str) -> &'a str {
    value[key].as_str().unwrap_or_else(|| panic!("no text {key} in {value}"))
}

/// The files of deploy/kubernetes with this ending, by folder.
fn files(ending: &str) -> BTreeMap<PathBuf, BTreeSet<String>> {
    let mut found: BTreeMap<PathBuf, BTreeSet<String>> = BTreeMap::new();
    let mut folders = vec![path(FOLDER)];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).unwrap() {
            let entry = entry.unwrap().path();
            let name = entry.file_name().unwrap().to_str().unwrap().to_owned();
            if entry.is_dir() {
                folders.push(entry);
            } else if name.ends_with(ending) {
                found.entry(folder.clone()).or_default().insert(name);
            }
        }
    }
    assert!(found.len() > 1, "{found:?}");
    found
}

/// What `kubectl apply -k` would send; `None` without kubectl.
fn rendered(folder: &str) -> Option<String> {
    let output = Command::new("kubectl").arg("kustomize").arg(path(FOLDER).join(folder)).output().ok()?;
    assert!(output.status.success(), "kubectl kustomize {folder}: {}", String::from_utf8_lossy(&output.stderr));
    Some(String::from_utf8(output.stdout).unwrap())
}

fn objects(yaml: &str) -> Vec<Value> {
    serde_yaml_ng::Deserializer::from_str(yaml).map(|one| Value::deserialize(one).unwrap()).collect()
}

/// Manifests that a cluster would refuse: the file, what is replaced in it, and by what.
const BROKEN: [(&str, &str, &str); 9] = [
    ("worker/deployment.yml", "readinessProbe:", "readinesProbe:"),
    ("worker/deployment.yml", "replicas: 2", "replicas: two"),
    ("worker/deployment.yml", "kind: Deployment", "kind: Deploymnt"),
    ("worker/deployment.yml", "- name: worker\n", "- title: worker\n"),
    ("worker/disruption-budget.yml", "maxUnavailable: 1", "maxUnavailable: [1]"),
    ("network-policy/network-policy.yml", "podSelector:\n", "podSelecter:\n"),
    ("autoscaling/scaled-object.yml", "pollingInterval:", "polingInterval:"),
    ("monitoring/pod-monitor.yml", "podMetricsEndpoints:", "endpoints:"),
    ("monitoring/rules.yml", "for: 1m", "for: [1m]"),
];

#[test]
fn validator_accepts_manifests_and_refuses_broken() {
    const NAME: &str = "kubernetes::validator_accepts_manifests_and_refuses_broken";
    let folder = tempfile::tempdir().unwrap();
    let mut valid: Vec<PathBuf> = files(".yml")
        .into_iter()
        .flat_map(|(folder, names)| names.into_iter().map(move |name| folder.join(name)))
        .filter(|file| !file.ends_with("kustomization.yml"))
        .collect();
    for applied in APPLIED {
        if let Some(yaml) = rendered(applied) {
            let file = folder.path().join(format!("{}.yml", applied.replace('/', "-")));
            std::fs::write(&file, yaml).unwrap();
            valid.push(file);
        }
    }
    let broken: Vec<PathBuf> = BROKEN
        .iter()
        .enumerate()
        .map(|(number, (file, part, replacement))| {
            let text = read(&path(FOLDER).join(file));
            assert!(text.contains(part), "{file} has no {part}");
            let file = folder.path().join(format!("broken-{number}.yml"));
            std::fs::write(&file, text.replacen(part, replacement, 1)).unwrap();
            file
        })
        .collect();
    let output =
        Command::new(path("scripts/validate-manifests")).args(valid.iter().chain(&broken)).output().expect("bash");
    if output.status.code() == Some(2) {
        return skipped(NAME, String::from_utf8_lossy(&output.stderr).trim());
    }
    let said = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(1), "{said}{}", String::from_utf8_lossy(&output.stderr));
    let lines_about = |file: &Path, verdict: &str| {
        let start = format!("{verdict} {}: ", file.display());
        said.lines().filter(|line| line.starts_with(&start)).count()
    };
    for file in &valid {
        assert!(lines_about(file, "valid") > 0 && lines_about(file, "refused") == 0, "{}\n{said}", file.display());
    }
    for (file, what) in broken.iter().zip(BROKEN) {
        assert_eq!((lines_about(file, "refused"), lines_about(file, "valid")), (1, 0), "{what:?}\n{said}");
    }
}

#[test]
fn rendered_objects_find_one_another() {
    for applied in APPLIED {
        let Some(yaml) = rendered(applied) else {
            return skipped("kubernetes::rendered_objects_find_one_another", "kubectl is not installed");
        };
        let objects = objects(&yaml);
        let named = |kind: &str| objects.iter().find(|object| object["kind"] == kind).unwrap_or(&Value::Null);
        let settings = text(&named("ConfigMap")["metadata"], "name").to_owned();
        assert!(settings.starts_with("order-timeout-settings-"), "{settings} has no hash of its contents");
        let pod = match named("Job") {
            Value::Null => &named("Deployment")["spec"]["template"]["spec"],
            job => &job["spec"]["template"]["spec"],
        };
        assert_eq!(pod["volumes"][0]["configMap"]["name"], settings, "{applied}");
        let namespaces: BTreeSet<_> = objects.iter().map(|object| object["metadata"]["namespace"].as_str()).collect();
        let expected = if applied.starts_with("example") { Some("shop") } else { None };
        assert_eq!(namespaces, BTreeSet::from([expected]), "{applied}");
        let image = text(&pod["containers"][0], "image");
        assert_eq!(image.contains(':'), applied.starts_with("example"), "{applied}: {image}");
        // With KEDA the number of workers is not ours.
        if applied == "example/worker" {
            assert_eq!(
                named("ScaledObject")["spec"]["scaleTargetRef"]["name"],
                named("Deployment")["metadata"]["name"]
            );
            assert_eq!(named("Deployment")["spec"]["replicas"], Value::Null);
        }
    }
}

#[test]
fn every_file_is_in_its_kustomization() {
    for (folder, names) in files(".yml") {
        let kustomization: Value = serde_yaml_ng::from_str(&read(&folder.join("kustomization.yml"))).unwrap();
        let resources = kustomization["resources"].as_array().cloned().unwrap_or_default();
        for name in names.iter().filter(|name| *name != "kustomization.yml") {
            assert!(resources.contains(&json!(name)), "{} does not name {name}", folder.display());
        }
        let components = kustomization["components"].as_array().cloned().unwrap_or_default();
        for other in resources.iter().chain(&components).filter_map(Value::as_str) {
            assert!(folder.join(other).exists(), "{} names {other}, which is not there", folder.display());
        }
    }
}

#[test]
fn rules_object_is_generated() {
    let printed = Command::new(path("scripts/kubernetes-rules")).output().expect("bash");
    assert!(printed.status.success());
    let file = read(&path(FOLDER).join("monitoring/rules.yml"));
    assert_eq!(
        String::from_utf8_lossy(&printed.stdout),
        file,
        "make it with: scripts/kubernetes-rules >deploy/kubernetes/monitoring/rules.yml"
    );
    // The script only indents. That this changes no rule is for a parser to tell.
    let rules: Value = serde_yaml_ng::from_str(&read(&path("deploy/prometheus/rules.yml"))).unwrap();
    assert_eq!(object("monitoring/rules.yml")["spec"], rules);
}

/// The pods of the job and of the workers.
fn pods() -> [(&'static str, Value); 2] {
    ["setup/job.yml", "worker/deployment.yml"].map(|file| (file, object(file)["spec"]["template"].clone()))
}

#[test]
fn pods_have_least_privilege() {
    let dockerfile = read(&path("Dockerfile"));
    let user = Regex::new(r"(?m)^USER (\d+):(\d+)$").unwrap();
    let user = user.captures(&dockerfile).expect("a numeric user");
    for (file, pod) in pods() {
        let spec = &pod["spec"];
        assert_eq!(spec["automountServiceAccountToken"], json!(false), "{file}");
        assert_eq!(spec["serviceAccountName"], object("settings/service-account.yml")["metadata"]["name"], "{file}");
        let context = &spec["securityContext"];
        assert_eq!(context["runAsNonRoot"], json!(true), "{file}");
        assert_eq!(context["seccompProfile"]["type"], json!("RuntimeDefault"), "{file}");
        assert_eq!(context["runAsUser"].to_string(), user[1], "{file}: the user of the image");
        assert_eq!(context["fsGroup"].to_string(), user[2], "{file}: the group that reads the addresses");
        let [container] = spec["containers"].as_array().unwrap().as_slice() else { panic!("{file}: one container") };
        let expected = json!({
            "readOnlyRootFilesystem": true, "allowPrivilegeEscalation": false, "capabilities": {"drop": ["ALL"]},
        });
        assert_eq!(container["securityContext"], expected, "{file}");
        assert!(container["resources"]["limits"]["memory"].is_string(), "{file}");
        for mount in container["volumeMounts"].as_array().unwrap() {
            assert_eq!(mount["readOnly"], json!(true), "{file}");
        }
        let secret = &spec["volumes"][1]["secret"];
        assert_eq!(secret["defaultMode"], json!(0o440), "{file}");
    }
}

/// The settings in this file, with the files of the Secret in a folder of the test.
fn settings_of(file: &str) -> Settings {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
    write("amqp-url", "amqp://order-worker:secret@rabbitmq:5672/orders\n");
    write("database-url", "postgres://order_timeout:secret@postgres:5432/orders\n");
    let mounted = "/etc/order-timeout/addresses";
    let text = read(&path(FOLDER).join(file));
    assert_eq!(text.matches(mounted).count(), 2, "{file} names both addresses");
    write("settings.toml", &text.replace(mounted, folder.path().to_str().unwrap()));
    let file = folder.path().join("settings.toml");
    // As a worker reads it, with the addresses from their files.
    let (code, _, stderr) = run(bare().args(["--config", file.to_str().unwrap(), "config"]));
    assert_eq!((code, stderr.as_str()), (0, ""));
    // Without the environment, which names the servers of the tests.
    let settings = Settings::load_with_environment(Some(&file), Default::default(), &[]).unwrap();
    assert_eq!(Path::new(&settings.database.url_file), folder.path().join("database-url"));
    settings
}

#[test]
fn worker_accepts_settings_of_manifests() {
    for (folder, names) in files(".toml") {
        for name in names {
            let file = folder.join(name);
            let file = file.strip_prefix(path(FOLDER)).unwrap().to_str().unwrap().to_owned();
            let listen = settings_of(&file).http.listen.0.expect("the worker listens");
            assert!(listen.ip().is_unspecified(), "{file}: probes come from outside the pod, not to {listen}");
        }
    }
    for (file, pod) in pods() {
        let container = &pod["spec"]["containers"][0];
        let arguments: Vec<&str> = container["args"].as_array().unwrap().iter().filter_map(Value::as_str).collect();
        let command = if file.starts_with("setup") { "setup" } else { "worker" };
        assert_eq!(arguments, ["--config", "/etc/order-timeout/settings/settings.toml", command], "{file}");
        let mounts: BTreeMap<&str, &str> = container["volumeMounts"]
            .as_array()
            .unwrap()
            .iter()
            .map(|mount| (text(mount, "name"), text(mount, "mountPath")))
            .collect();
        let expected = BTreeMap::from([
            ("addresses", "/etc/order-timeout/addresses"),
            ("settings", "/etc/order-timeout/settings"),
        ]);
        assert_eq!(mounts, expected, "{file}");
    }
}

#[test]
fn probes_and_monitor_ask_served_pages() {
    let deployment = object("worker/deployment.yml");
    let container = &deployment["spec"]["template"]["spec"]["containers"][0];
    for (probe, page) in [("startupProbe", LIVEZ), ("livenessProbe", LIVEZ), ("readinessProbe", READYZ)] {
        assert_eq!(container[probe]["httpGet"], json!({"path": page, "port": "http"}), "{probe}");
    }
    let port = settings_of("settings/settings.toml").http.listen.0.unwrap().port();
    assert_eq!(container["ports"], json!([{"name": "http", "containerPort": port}]));
    let monitor = object("monitoring/pod-monitor.yml");
    let endpoint = &monitor["spec"]["podMetricsEndpoints"][0];
    assert_eq!((text(endpoint, "port"), text(endpoint, "path")), ("http", METRICS));
}

#[test]
fn grace_exceeds_worker_shutdown() {
    let deployment = object("worker/deployment.yml");
    let grace = deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"].as_u64().unwrap();
    for file in ["settings/settings.toml", "example/common/settings.toml"] {
        let shutdown = settings_of(file).worker.shutdown_grace;
        assert!(Duration::from_secs(grace) >= shutdown + Duration::from_secs(5), "{file}: {grace} s, {shutdown:?}");
    }
}

#[test]
fn selectors_match_pods() {
    let labels = |pod: &Value| pod["metadata"]["labels"].as_object().unwrap().clone();
    let [(_, setup), (_, worker)] = pods();
    let selects = |selector: &Value, pod: &Value| {
        let wanted = selector["matchLabels"].as_object().unwrap_or_else(|| panic!("no labels in {selector}"));
        wanted.iter().all(|(key, value)| labels(pod).get(key) == Some(value))
    };
    let deployment = object("worker/deployment.yml");
    let selectors = [
        deployment["spec"]["selector"].clone(),
        deployment["spec"]["template"]["spec"]["topologySpreadConstraints"][0]["labelSelector"].clone(),
        object("worker/disruption-budget.yml")["spec"]["selector"].clone(),
        object("monitoring/pod-monitor.yml")["spec"]["selector"].clone(),
    ];
    for selector in selectors {
        assert!(selects(&selector, &worker) && !selects(&selector, &setup), "{selector}: the workers alone");
    }
    let policy = &object("network-policy/network-policy.yml")["spec"]["podSelector"];
    assert!(selects(policy, &worker) && selects(policy, &setup), "{policy}: every pod of ours");
}

#[test]
fn autoscaling_watches_existing_queue() {
    let settings = settings_of("settings/settings.toml");
    let scaled = object("autoscaling/scaled-object.yml");
    let trigger = &scaled["spec"]["triggers"][0]["metadata"];
    let queue = text(trigger, "queueName").to_owned();
    assert!(settings.queue_names().contains(&queue), "{queue} is no queue of the default settings");
    let value: u32 = text(trigger, "value").parse().unwrap();
    // What one worker can hold; beyond it alarms stay in the broker and come late.
    assert!(value < u32::from(settings.worker.prefetch), "{value}");
    let authentication = object("autoscaling/trigger-authentication.yml");
    assert_eq!(scaled["spec"]["triggers"][0]["authenticationRef"]["name"], authentication["metadata"]["name"]);
}

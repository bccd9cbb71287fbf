//! `docker compose up` starts the supported servers with our definitions, reachable from this machine only, with the
//! users of least privilege, and an image that contains everything the crate embeds.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use order_timeout::Settings;
use order_timeout_testkit::skip::skipped;
use regex::Regex;

use crate::least_privilege::{PUBLISHER, VHOST, WORKER};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn read(path: &str) -> String {
    std::fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// A YAML file as blocks, found by their keys. Supports only the syntax of our compose files: two spaces per level,
/// comments on lines of their own, and `<<: *name` and `*name` for a block defined with `&name`.
struct Yaml {
    lines: Vec<String>,
}

impl Yaml {
    fn read(path: &str) -> Self {
        let text = read(path);
        let lines = text.lines().filter(|line| !line.trim().is_empty() && !line.trim_start().starts_with('#'));
        Self { lines: lines.map(str::to_owned).collect() }
    }

    /// The lines below these keys, without those they merge in.
    fn below(&self, keys: &[&str]) -> Vec<&str> {
        let mut lines: Vec<&str> = self.lines.iter().map(String::as_str).collect();
        for (depth, key) in keys.iter().enumerate() {
            let start = format!("{}{key}:", "  ".repeat(depth));
            let begins = |line: &&str| **line == start || line.starts_with(&format!("{start} "));
            let Some(at) = lines.iter().position(begins) else { return Vec::new() };
            let indent = "  ".repeat(depth + 1);
            lines = lines[at + 1..].iter().take_while(|line| line.starts_with(&indent)).copied().collect();
        }
        lines
    }

    /// The names one level below.
    fn keys(&self, keys: &[&str]) -> Vec<&str> {
        let indent = "  ".repeat(keys.len());
        let names = self.below(keys).into_iter().filter_map(|line| line.strip_prefix(&indent));
        names
            .filter(|rest| !rest.starts_with([' ', '-']))
            .filter_map(|rest| rest.split_once(':'))
            .map(|(key, _)| key)
            .collect()
    }

    /// All lines of a service, with those it merges in.
    fn service(&self, name: &str) -> Vec<&str> {
        let mut lines = self.below(&["services", name]);
        assert!(!lines.is_empty(), "there is no service {name}");
        let mut at = 0;
        while at < lines.len() {
            // `<<: *app`, `- *rabbitmq-conf`, `environment: *settings`
            if let Some((_, anchor)) = lines[at].split_once(" *") {
                let defined = format!("&{anchor}");
                let from = self
                    .lines
                    .iter()
                    .position(|line| line.ends_with(&defined))
                    .unwrap_or_else(|| panic!("no {defined}"));
                let depth = self.lines[from].len() - self.lines[from].trim_start().len();
                let more =
                    self.lines[from + 1..].iter().take_while(|line| line.len() - line.trim_start().len() > depth);
                lines.extend(more.map(String::as_str));
            }
            at += 1;
        }
        lines
    }

    /// The value after `key:` in a service.
    fn value(&self, service: &str, key: &str) -> Option<String> {
        let start = format!("{key}: ");
        let found =
            self.service(service).into_iter().find_map(|line| line.trim().strip_prefix(&start).map(str::to_owned));
        found.map(|value| with_defaults(value.trim_matches('"')))
    }

    /// The settings in a service's environment.
    fn settings(&self, service: &str) -> BTreeMap<String, String> {
        let is_ours = |line: &&str| line.starts_with("ORDER_TIMEOUT__");
        let lines = self.service(service).into_iter().map(str::trim).filter(is_ours);
        lines
            .filter_map(|line| line.split_once(": "))
            .map(|(key, value)| (key.to_owned(), with_defaults(value)))
            .collect()
    }
}

/// The value that compose uses if none of its variables is set: `${NAME:-default}`.
fn with_defaults(value: &str) -> String {
    Regex::new(r"\$\{\w+:-([^}]*)\}").unwrap().replace_all(value, "$1").into_owned()
}

/// The compose command of this machine. `config` needs no engine.
fn compose() -> Option<Vec<&'static str>> {
    let candidates = [vec!["docker", "compose"], vec!["docker-compose"]];
    candidates.into_iter().find(|command| {
        let mut command = run(command, &["version"]);
        command.stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok_and(|status| status.success())
    })
}

fn run(command: &[&str], arguments: &[&str]) -> Command {
    let mut process = Command::new(command[0]);
    process.args(&command[1..]).args(arguments).current_dir(root());
    process.env("ORDER_TIMEOUT_SERVICES_PASSWORD", "of-the-test");
    process
}

#[test]
fn superuser_has_no_public_password() {
    let services = read("deploy/services.yml");
    let password = Regex::new(r"(?m)^ +\w*PASS(?:WORD)?: (.+)$").unwrap();
    let given: Vec<_> = password.captures_iter(&services).map(|found| found[1].to_owned()).collect();
    assert_eq!(given.len(), 2, "{given:?}");
    for value in given {
        assert!(value.starts_with("${ORDER_TIMEOUT_SERVICES_PASSWORD:?"), "{value} is public, or a default");
    }
    // In the stack the programs use a role that is no superuser, and the superuser's password is removed.
    let databases = read("deploy/postgres/10-databases.sql");
    assert!(databases.contains("\nALTER ROLE CURRENT_USER PASSWORD NULL;\n") && !databases.contains("SUPERUSER"));
}

#[test]
fn compose_accepts_stack_with_every_profile() {
    let Some(compose) = compose() else {
        return skipped(
            "compose::compose_accepts_stack_with_every_profile",
            "neither docker compose nor docker-compose works here",
        );
    };
    let always = ["postgres", "rabbitmq", "setup", "worker"];
    let demo = ["shop"];
    let plugin = ["rabbitmq-plugin", "setup-plugin", "shop-plugin", "worker-plugin"];
    let observability = ["grafana", "otel-collector", "prometheus"];
    let mut checks: Vec<(Vec<&str>, Vec<&str>)> = vec![
        (vec![], always.to_vec()),
        (vec!["--profile", "demo"], [&always[..], &demo].concat()),
        (vec!["--profile", "plugin"], [&always[..], &plugin].concat()),
        (vec!["--profile", "observability"], [&always[..], &observability].concat()),
        (vec!["--profile", "demo", "--profile", "plugin"], [&always[..], &demo, &plugin].concat()),
    ];
    if root().join("deploy/services.yml").exists() {
        checks.push((vec!["-f", "deploy/services.yml"], vec!["postgres", "rabbitmq"]));
    }
    for (options, expected) in checks {
        // The plain servers do not start without a password: it has no default.
        if options.contains(&"deploy/services.yml") {
            let mut command = run(&compose, &[&options[..], &["config"]].concat());
            let output = command.env_remove("ORDER_TIMEOUT_SERVICES_PASSWORD").output().unwrap();
            let stderr = String::from_utf8_lossy(&output.stderr);
            assert!(
                !output.status.success() && stderr.contains("scripts/services"),
                "{compose:?} {options:?}: {stderr}"
            );
        }
        let output = run(&compose, &[&options[..], &["config"]].concat()).output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{compose:?} {options:?} config: {stderr}");
        // It would warn of a variable without a value or an ignored key.
        assert_eq!(stderr, "", "{compose:?} {options:?} config warns");
        let output = run(&compose, &[&options[..], &["config", "--services"]].concat()).output().unwrap();
        let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
        let services: BTreeSet<&str> = stdout.lines().collect();
        let expected: BTreeSet<&str> = expected.into_iter().collect();
        // docker-compose 1 lists the services of all profiles.
        assert!(services.is_superset(&expected), "{options:?}: {services:?} lacks some of {expected:?}");
        if compose[0] == "docker" {
            assert_eq!(services, expected, "{options:?}");
        }
    }
}

#[test]
fn stack_runs_supported_server_versions() {
    let stack = Yaml::read("docker-compose.yml");
    for (service, image) in
        [("rabbitmq", "rabbitmq:4.3"), ("rabbitmq-plugin", "rabbitmq:4.2"), ("postgres", "postgres:18")]
    {
        let found = stack.value(service, "image").unwrap();
        let rest = found.strip_prefix(image).unwrap_or_else(|| panic!("{service} is {found}, not {image}"));
        assert!(rest.is_empty() || rest.starts_with(['-', '.', '@']), "{service} is {found}, not {image}");
    }
    let ours: Vec<_> =
        stack.keys(&["services"]).into_iter().filter(|service| stack.value(service, "build").is_some()).collect();
    assert_eq!(ours, ["setup", "worker", "shop", "setup-plugin", "worker-plugin", "shop-plugin"]);
    for service in ours {
        assert_eq!(stack.value(service, "image").as_deref(), Some("order-timeout:local"), "{service}");
    }
}

#[test]
fn ports_are_published_on_localhost_only() {
    for path in ["docker-compose.yml", "deploy/services.yml"] {
        if !root().join(path).exists() {
            continue;
        }
        let stack = Yaml::read(path);
        let mut published = 0;
        for service in stack.keys(&["services"]) {
            for port in stack.below(&["services", service, "ports"]) {
                assert!(port.trim().starts_with("- \"127.0.0.1:"), "{path}, {service}: {port}");
                published += 1;
            }
            assert_eq!(stack.value(service, "network_mode"), None, "{path}, {service}");
        }
        // Counted in a second way, so that a port in another notation is not missed.
        let ports = [5672, 15672, 5432, 9090, 3000].map(|port| format!(":{port}\""));
        let all = stack.lines.iter().filter(|line| ports.iter().any(|port| line.contains(port))).count();
        assert!(published >= 2 && published == all, "{path}: {published} ports checked of {all}");
    }
}

#[test]
fn brokers_get_our_definitions_and_configuration() {
    let stack = Yaml::read("docker-compose.yml");
    let configuration = read("deploy/rabbitmq/rabbitmq.conf");
    let imported = configuration.lines().find_map(|line| line.strip_prefix("definitions.local.path = ")).unwrap();
    for service in ["rabbitmq", "rabbitmq-plugin"] {
        let lines: Vec<&str> = stack.service(service).into_iter().map(str::trim).collect();
        let mounted = |source: &str, target: &str| {
            let at = lines.iter().position(|line| *line == format!("source: {source}"));
            let at = at.unwrap_or_else(|| panic!("{service} does not mount {source}"));
            assert_eq!(lines[at + 1], format!("target: {target}"), "{service}, {source}");
            assert_eq!(lines[at + 2], "read_only: true", "{service}, {source}");
        };
        mounted("./definitions.json", imported);
        mounted("./deploy/rabbitmq/rabbitmq.conf", "/etc/rabbitmq/rabbitmq.conf");
        mounted("./deploy/rabbitmq/advanced.config", "/etc/rabbitmq/advanced.config");
    }
    let advanced = read("deploy/rabbitmq/advanced.config");
    for term in ["{dead_letter_worker_consumer_prefetch, 512}", "{dead_letter_worker_publisher_confirm_timeout, 5000}"]
    {
        assert!(advanced.contains(term), "{term} is not in {advanced}");
    }
}

#[test]
fn every_mounted_file_is_there() {
    // Relative to the compose file. Long syntax, and short.
    let sources = Regex::new(r"(?m)(?:source: |^\s*- )(\./[^:\s]+)").unwrap();
    for path in ["docker-compose.yml", "deploy/services.yml"] {
        if !root().join(path).exists() {
            continue;
        }
        let text = read(path);
        let from = root().join(path).parent().unwrap().to_path_buf();
        let found: Vec<&str> = sources.captures_iter(&text).map(|found| found.get(1).unwrap().as_str()).collect();
        assert!(!found.is_empty(), "{path} mounts nothing");
        for source in found {
            assert!(from.join(source).exists(), "{path} mounts {source}, which does not exist");
        }
    }
}

#[test]
fn stop_grace_exceeds_worker_shutdown() {
    let stack = Yaml::read("docker-compose.yml");
    for service in ["worker", "worker-plugin"] {
        let timeout = humantime::parse_duration(&stack.value(service, "stop_grace_period").unwrap()).unwrap();
        let settings = settings_of(&stack, service);
        let needed = settings.worker.shutdown_grace + std::time::Duration::from_secs(5);
        assert!(
            timeout >= needed,
            "{service}: killed after {timeout:?}, while it may take {:?}",
            settings.worker.shutdown_grace
        );
    }
}

#[test]
fn health_check_uses_worker_address() {
    let stack = Yaml::read("docker-compose.yml");
    for (service, waiting) in [("worker", "shop"), ("worker-plugin", "shop-plugin")] {
        let check = stack.value(service, "test").expect("a health check");
        assert_eq!(check, r#"["CMD", "order-timeout", "health"]"#, "{service}");
        let listen = settings_of(&stack, service).http.listen.0.expect("the worker listens");
        // Other containers connect to it; `health` uses the container's own address.
        assert!(listen.ip().is_unspecified() && listen.port() != 0, "{service} listens at {listen}");
        assert_eq!(stack.value(waiting, service).as_deref(), Some("{condition: service_healthy}"), "{waiting}");
    }
}

/// The settings of a service, as its program would load them.
fn settings_of(stack: &Yaml, service: &str) -> Settings {
    let environment = stack.settings(service).into_iter().collect();
    let loaded = Settings::load_with_environment(None, environment, &[]);
    let checked = loaded.and_then(|settings| settings.validate_database().map(|()| settings));
    checked.unwrap_or_else(|error| panic!("{service}: {error}"))
}

#[test]
fn every_address_names_existing_user() {
    let stack = Yaml::read("docker-compose.yml");
    let databases = read("deploy/postgres/10-databases.sql");
    let role = Regex::new(r"CREATE ROLE (\w+) LOGIN PASSWORD :'password'").unwrap().captures(&databases).unwrap();
    let password = Regex::new(r"\\set password '([^']+)'").unwrap().captures(&databases).unwrap();
    let account = format!("{}:{}", &role[1], &password[1]);
    let created = Regex::new(r"CREATE DATABASE (\w+) OWNER (\w+)").unwrap();
    let created: Vec<_> = created.captures_iter(&databases).map(|c| (c[1].to_owned(), c[2].to_owned())).collect();

    for (service, broker, database) in [
        ("setup", "rabbitmq", "orders"),
        ("worker", "rabbitmq", "orders"),
        ("shop", "rabbitmq", "orders"),
        ("setup-plugin", "rabbitmq-plugin", "orders_plugin"),
        ("worker-plugin", "rabbitmq-plugin", "orders_plugin"),
        ("shop-plugin", "rabbitmq-plugin", "orders_plugin"),
    ] {
        // The program accepts them too: no unknown key, no malformed address.
        let _ = settings_of(&stack, service);
        let environment = stack.settings(service);
        assert_eq!(
            environment["ORDER_TIMEOUT__AMQP__URL"],
            format!("amqp://{WORKER}@{broker}:5672/{VHOST}"),
            "{service}"
        );
        let address = format!("postgres://{account}@postgres:5432/{database}");
        assert_eq!(environment["ORDER_TIMEOUT__DATABASE__URL"], address, "{service}");
        assert!(created.contains(&(database.to_owned(), role[1].to_owned())), "{database} is not created: {created:?}");
        assert_eq!(
            environment.contains_key("ORDER_TIMEOUT__DELAY__STRATEGY"),
            service.ends_with("-plugin"),
            "{service}"
        );
    }
    for (service, broker) in [("shop", "rabbitmq"), ("shop-plugin", "rabbitmq-plugin")] {
        let address = format!("amqp://{PUBLISHER}@{broker}:5672/{VHOST}");
        assert_eq!(stack.value(service, "SHOP_PUBLISHER_AMQP_URL"), Some(address), "{service}");
    }
    // The checks above missed no other address.
    let text = with_defaults(&stack.lines.join("\n"));
    let users = Regex::new(r"\w+://([^@\s]+)@").unwrap();
    let users: BTreeSet<String> = users.captures_iter(&text).map(|found| found[1].to_owned()).collect();
    assert_eq!(users, BTreeSet::from([PUBLISHER.to_owned(), WORKER.to_owned(), account]));
    // Postgres gets the same password as the programs.
    let given = stack.value("postgres", "ORDER_DATABASE_PASSWORD");
    assert_eq!(given.as_deref(), Some(&password[1]));
}

/// The files that the crate embeds: (the source file that names it, the embedded file).
fn embedded() -> Vec<(PathBuf, PathBuf)> {
    let included = Regex::new(r#"include_(?:str|bytes)!\("([^"]+)"\)"#).unwrap();
    let mut found = vec![(root().join("build.rs"), root().join("migrations"))];
    let mut directories = vec![root().join("src"), root().join("examples")];
    while let Some(directory) = directories.pop() {
        for entry in std::fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                directories.push(path);
                continue;
            }
            let text = std::fs::read_to_string(&path).unwrap();
            let from = path.parent().unwrap();
            found.extend(included.captures_iter(&text).map(|c| (path.clone(), from.join(&c[1]))));
        }
    }
    found
}

/// Whether a pattern of .dockerignore excludes this path (relative to the root).
fn excludes(pattern: &str, path: &str) -> bool {
    let pattern = regex::escape(pattern.trim_matches('/')).replace(r"\*\*/", "(?:.*/)?").replace(r"\*", "[^/]*");
    Regex::new(&format!("^{pattern}(?:/.*)?$")).unwrap().is_match(path)
}

#[test]
fn image_contains_every_embedded_file() {
    let embedded = embedded();
    assert!(embedded.len() >= 4, "the defaults, the definitions, a statement and the migrations: {embedded:?}");
    let dockerfile = read("Dockerfile");
    let builder =
        dockerfile.split("\nFROM ").find(|stage| stage.lines().next().unwrap().ends_with(" AS builder")).unwrap();
    let copied: Vec<&str> = builder
        .lines()
        .filter_map(|line| line.strip_prefix("COPY "))
        .flat_map(|line| line.split_whitespace().rev().skip(1))
        .filter(|word| !word.starts_with("--"))
        .collect();
    let ignored = read(".dockerignore");
    let ignored: Vec<&str> =
        ignored.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#')).collect();
    for (source, path) in embedded {
        let path = path
            .canonicalize()
            .unwrap_or_else(|error| panic!("{} embeds {}: {error}", source.display(), path.display()));
        let path = path.strip_prefix(root()).expect("inside the repository").to_str().unwrap().to_owned();
        let is_copied = |from: &&str| *from == "." || Path::new(&path).starts_with(from.trim_end_matches('/'));
        assert!(
            copied.iter().any(is_copied),
            "{} embeds {path}, but the Dockerfile copies only {copied:?}",
            source.display()
        );
        let mut excluded_by = None;
        for pattern in &ignored {
            match pattern.strip_prefix('!') {
                Some(included) if excludes(included, &path) => excluded_by = None,
                None if excludes(pattern, &path) => excluded_by = Some(*pattern),
                _ => {}
            }
        }
        assert_eq!(excluded_by, None, "{} embeds {path}, but .dockerignore excludes it", source.display());
    }
}

#[test]
fn image_is_built_from_existing_targets() {
    let dockerfile = read("Dockerfile");
    let manifest: toml::Table = read("Cargo.toml").parse().unwrap();
    let touched = Regex::new(r"touch ([^&\\]+)").unwrap();
    let touched: Vec<&str> =
        touched.captures(&dockerfile).unwrap().get(1).unwrap().as_str().split_whitespace().collect();
    let programs = Regex::new(r"--bin ([\w-]+)").unwrap();
    let programs: Vec<String> = programs.captures_iter(&dockerfile).map(|c| format!("name = {:?}\n", &c[1])).collect();
    let manifests = ["Cargo.toml", "crates/demo/Cargo.toml", "crates/tools/Cargo.toml"].map(read).concat();
    assert!(programs.len() == 3 && programs.iter().all(|name| manifests.contains(name)), "{programs:?}");
    assert!(touched.contains(&"src/lib.rs"));
    for path in touched {
        // One pattern stands for the libraries of every crate.
        let is_there = match path.split_once('*') {
            Some(("crates/", rest)) => root().join("crates/core").join(rest.trim_start_matches('/')).is_file(),
            _ => root().join(path).is_file(),
        };
        assert!(is_there, "the Dockerfile names {path}, which does not exist");
    }
    // A builder older than the crate's `rust-version` cannot compile it.
    let version = |text: &str| text.split('.').map(|part| part.parse().unwrap()).collect::<Vec<u32>>();
    let builder = Regex::new(r"(?m)^FROM rust:([\d.]+)").unwrap();
    let builder = version(&builder.captures(&dockerfile).expect("a builder with its version")[1]);
    let needed = version(manifest["workspace"]["package"]["rust-version"].as_str().unwrap());
    assert!(builder >= needed, "the Dockerfile builds with {builder:?}, but the crate needs {needed:?}");
}

#[test]
fn dockerignore_patterns_are_understood() {
    for (pattern, path, expected) in [
        ("target", "target/debug/x", true),
        ("target", "src/target", false),
        (".env.*", ".env.local", true),
        (".env.*", ".env", false),
        ("**/*.rs.bk", "src/cli/mod.rs.bk", true),
        ("**/*.rs.bk", "x.rs.bk", true),
        ("deploy", "deployment.md", false),
        ("*.md", "docs/x.md", false),
    ] {
        assert_eq!(excludes(pattern, path), expected, "{pattern} {path}");
    }
}

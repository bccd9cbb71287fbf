//! The code matches docs/ARCHITECTURE.md: modules keep their boundaries, files state their purpose, every setting is
//! documented, and every reference resolves.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use order_timeout::Settings;
use order_timeout::config::DEFAULTS;
use regex::Regex;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Every text file of the repository as (path from the root, contents), by path.
fn files() -> BTreeMap<String, String> {
    let mut files = BTreeMap::new();
    let mut directories = vec![root().to_path_buf()];
    while let Some(directory) = directories.pop() {
        for entry in std::fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            let name = path.strip_prefix(root()).unwrap().to_str().unwrap().to_owned();
            if path.is_dir() {
                // Build output, or git's own files.
                if !["target", ".git"].contains(&name.as_str()) {
                    directories.push(path);
                }
            } else if let Ok(text) = std::fs::read_to_string(&path) {
                files.insert(name, text);
            }
        }
    }
    assert!(files.contains_key("src/lib.rs"));
    files
}

/// The files below these folders with this ending.
fn sources(folders: &[&str], ending: &str) -> BTreeMap<String, String> {
    let is_below = |path: &String| folders.iter().any(|folder| path.starts_with(&format!("{folder}/")));
    let found: BTreeMap<_, _> =
        files().into_iter().filter(|(path, _)| is_below(path) && path.ends_with(ending)).collect();
    assert!(!found.is_empty());
    found
}

/// Rust without its comments. Cuts a line at `//` even inside a string, so the rest of a line with a URL is not
/// checked.
fn code(text: &str) -> String {
    text.lines().map(|line| line.split("//").next().unwrap_or("")).collect::<Vec<_>>().join("\n")
}

/// The paths of the files in src/ (without "src/") and crates/ with code that matches a pattern. Without the test kit:
/// boundaries are for what is published.
fn users_of(pattern: &str) -> BTreeSet<String> {
    let pattern = Regex::new(pattern).unwrap();
    let users = sources(&["src", "crates"], ".rs")
        .into_iter()
        .filter(|(path, _)| !path.contains("/examples/") && !path.starts_with(&format!("{TESTKIT}/")))
        .filter(|(_, text)| pattern.is_match(&code(text)));
    users.map(|(path, _)| path.trim_start_matches("src/").to_owned()).collect()
}

fn set(names: &[&str]) -> BTreeSet<String> {
    names.iter().map(|name| (*name).to_owned()).collect()
}

/// Modules whose decisions and arithmetic must be testable without a server and without waiting; the whole of
/// order-timeout-core is too.
const PURE: [&str; 5] =
    ["mapping/ids.rs", "mapping/mod.rs", "mapping/predicate.rs", "mapping/quote.rs", "mapping/render.rs"];

/// What the tests share.
const TESTKIT: &str = "crates/testkit";

#[test]
fn testkit_stays_out_of_published_crates() {
    let files = files();
    let manifest = |path: &str| files[path].parse::<toml::Table>().unwrap();
    let testkit = manifest(&format!("{TESTKIT}/Cargo.toml"));
    assert_eq!(testkit["package"]["publish"].as_bool(), Some(false));
    let name = testkit["package"]["name"].as_str().unwrap();
    let users: Vec<_> =
        files.iter().filter(|(path, text)| path.ends_with("Cargo.toml") && text.contains(name)).collect();
    let paths: BTreeSet<_> = users.iter().map(|(path, _)| path.to_string()).collect();
    assert_eq!(paths, set(&["Cargo.toml", &format!("{TESTKIT}/Cargo.toml")]));
    let root = manifest("Cargo.toml");
    assert!(!root["dependencies"].as_table().unwrap().contains_key(name));
    // Cargo leaves a dev-dependency without a version out of a published manifest.
    assert!(!root["dev-dependencies"][name].as_table().unwrap().contains_key("version"));
}

#[test]
fn every_rust_file_states_its_purpose() {
    for (path, text) in sources(&["src", "crates", "tests", "examples", "benches", "scripts"], ".rs") {
        let first = text.lines().next().unwrap_or_default();
        assert!(
            first.len() > "//! x".len() && first.starts_with("//! "),
            "{path} opens with {first:?}; say with //! what it is for"
        );
    }
}

#[test]
fn other_files_open_with_comment() {
    let mut checked = 0;
    for (path, text) in files() {
        let comment = match path.rsplit(['.', '/']).next().unwrap() {
            "sql" => "-- ",
            "yml" | "conf" | "Dockerfile" => "# ",
            "config" | "enabled_plugins" => "%% ",
            _ if path.starts_with("config/") => "# ",
            _ if text.starts_with("#!") => "# ",
            _ => continue,
        };
        let first = text.lines().find(|line| !line.starts_with("#!")).unwrap_or_default();
        assert!(first.starts_with(comment), "{path} opens with {first:?}; say with {comment:?} what it is for");
        checked += 1;
    }
    assert!(checked > 12, "only {checked} files looked at");
}

#[test]
fn lapin_stays_in_its_modules() {
    let users = users_of(r"\blapin::|\buse lapin\b");
    let outside: BTreeSet<_> = users.into_iter().filter(|path| !path.starts_with("crates/amqp/")).collect();
    assert_eq!(outside, set(&["deliver/mod.rs"]), "only these may speak AMQP; see docs/ARCHITECTURE.md, \"The map\"");
}

#[test]
fn frames_are_parsed_in_crate_amqp_alone() {
    let users = users_of(r"\bamq_protocol::");
    assert_eq!(
        users,
        set(&["crates/amqp/src/connect.rs", "crates/amqp/src/nesting.rs"]),
        "see docs/ARCHITECTURE.md, \"The map\""
    );
}

#[test]
fn sqlx_stays_in_its_modules() {
    let modules = [
        "config/validate.rs",
        "crates/client/src/postgres.rs",
        "crates/client/src/postgres/payments.rs",
        "crates/client/src/testing.rs",
        "effects/close.rs",
        "effects/closing/by_hand.rs",
        "effects/closing/close_claimed.rs",
        "effects/closing/outcomes.rs",
        "effects/closing/postpone.rs",
        "effects/closing/resume.rs",
        "effects/closing/settle_paid.rs",
        "effects/brake.rs",
        "effects/closing_watch.rs",
        "effects/due_count.rs",
        "effects/sweep.rs",
        "observe/inspect/plan.rs",
        "observe/inspect/registration.rs",
        "observe/inspect/schema.rs",
        "operations/close_orders.rs",
        "operations/doctor/server.rs",
        "operations/late_payments.rs",
        "operations/move_deadlines.rs",
        "operations/order_story.rs",
        "operations/orders_table.rs",
        "operations/pause_closing.rs",
        "operations/adopt/dry_close.rs",
        "operations/adopt/dry_payment.rs",
        "operations/adopt/propose.rs",
        "operations/audit/read.rs",
        "operations/close_rate.rs",
        "operations/explain.rs",
        "operations/orders_table/due.rs",
        "operations/parked.rs",
        "operations/recent_closes.rs",
        "operations/reminders.rs",
        "operations/status/parts.rs",
        "operations/unresolved.rs",
        "outbox/alarm_relay.rs",
        "outbox/destination.rs",
        "outbox/event_relay.rs",
        "outbox/relay.rs",
        "outbox/reminders.rs",
        "outbox/trace_contexts.rs",
        "outbox/traced.rs",
        "runtime/kind_worker.rs",
    ];
    let users = users_of(r"\bsqlx::|\buse sqlx\b");
    let outside: BTreeSet<_> = users.into_iter().filter(|path| !path.starts_with("postgres/")).collect();
    assert_eq!(outside, set(&modules), "only these may speak SQL; see docs/ARCHITECTURE.md, \"The map\"");
}

#[test]
fn measuring_stays_out_of_business_modules() {
    let used_in = |pattern: &str, modules: &[&str]| assert_eq!(users_of(pattern), set(modules), "{pattern}");
    used_in(r"\bprometheus::", &["observe/metrics.rs"]);
    let speak_http =
        users_of(r"\bhyper(?:_util)?::").into_iter().filter(|path| !path.starts_with("crates/providers/src/"));
    assert_eq!(speak_http.collect::<BTreeSet<_>>(), set(&["http/client.rs", "http/mod.rs"]));
    let outside = |pattern: &str| {
        let users = users_of(pattern).into_iter().filter(|path| !path.starts_with("http/"));
        users.collect::<BTreeSet<_>>()
    };
    assert_eq!(outside(r"\baxum::|\bmaud::"), set(&[]), "only src/http/ speaks HTTP");
    // The composition root counts what the steps report; steps count nothing themselves.
    used_in(
        r"\bcrate::observe::metrics\b",
        &["http/mod.rs", "http/probes.rs", "runtime/outboxes.rs", "observe/recorder.rs", "observe/served_kinds.rs"],
    );
    // The pages print it.
    assert_eq!(
        outside(r"\bcrate::observe::health\b"),
        set(&["runtime/event_loop.rs", "observe/recorder.rs", "runtime/supervisor.rs"])
    );
    assert_eq!(
        outside(r"\bcrate::http\b"),
        set(&[
            "cli/audit.rs",
            "cli/health.rs",
            "operations/doctor/management.rs",
            "runtime/mod.rs",
            "observe/recorder.rs"
        ])
    );
}

#[test]
fn settings_use_clients_only_for_addresses() {
    let text = code(&files()["src/config/validate.rs"]);
    let used: BTreeSet<_> = Regex::new(r"\b(?:lapin|sqlx)::[\w:]+")
        .unwrap()
        .find_iter(&text)
        .map(|found| found.as_str().to_owned())
        .collect();
    assert_eq!(used, set(&["sqlx::postgres::PgConnectOptions"]), "no I/O after loading");
}

#[test]
fn pure_modules_do_no_io() {
    let forbidden = users_of(
        r"\b(?:lapin|sqlx|tokio|tokio_util|tracing)::|\bstd::(?:fs|io|env|process|thread)\b|\b(?:Tcp|Udp|Unix)(?:Stream|Socket|Listener)\b|\basync\b|\.await\b|\be?print(?:ln)?!",
    );
    let is_pure = |module: &&String| PURE.contains(&module.as_str()) || module.starts_with("crates/core/");
    let impure: Vec<_> = forbidden.iter().filter(is_pure).collect();
    assert_eq!(impure, Vec::<&String>::new(), "these modules do no I/O; see docs/ARCHITECTURE.md, \"Invariants\"");
    let reads_a_clock = users_of(r"\bInstant::now\b");
    let takes_time_as_argument = |module: &&String| is_pure(module) && module.as_str() != "crates/core/src/clock.rs";
    assert_eq!(reads_a_clock.iter().find(takes_time_as_argument), None, "it is told what time it is");
    for module in PURE {
        assert!(root().join("src").join(module).is_file(), "src/{module} is no more");
    }
    let manifest: toml::Table = files()["crates/core/Cargo.toml"].parse().unwrap();
    for (crate_name, _) in manifest["dependencies"].as_table().unwrap() {
        assert!(!["tokio", "lapin", "sqlx", "tracing"].contains(&crate_name.as_str()), "core depends on {crate_name}");
    }
}

#[test]
fn only_publishers_read_local_wall_clock() {
    assert_eq!(
        users_of(r"\bSystemTime::now\b|\bnow_utc\b|\bnow_local\b"),
        set(&["crates/core/src/order.rs"]),
        "one door to the local clock"
    );
    assert_eq!(
        users_of(r"\bnow_by_local_clock\b"),
        set(&[
            "crates/core/src/order.rs",
            "crates/client/src/publisher.rs",
            // For signatures and dates of HTTP.
            "crates/providers/src/local_clock.rs",
            "crates/providers/tests/providers/rows.rs",
            "operations/parked.rs",
            "cli/schedule_check.rs",
            "observe/recorder.rs"
        ]),
        "the worker goes by the database's clock: its own may be wrong, and would close orders early"
    );
}

#[test]
fn steps_do_not_import_one_another() {
    let steps = [
        "deliver/",
        "effects/close.rs",
        "effects/closing/",
        "effects/park.rs",
        "effects/rearm.rs",
        "effects/sweep.rs",
        "outbox/alarm_relay.rs",
        "outbox/event_relay.rs",
    ];
    let module = |step: &str| step.trim_end_matches(".rs").trim_end_matches('/').replace('/', "::");
    // `crate::effects::close::…`, and the first names inside `crate::effects::{…}`.
    let group = Regex::new(r"\bcrate::(\w+)::\{([^;]*)\};").unwrap();
    let names = Regex::new(r"(?:^|,)\s*(\w+)").unwrap();
    let mut looked_at = BTreeSet::new();
    for (path, text) in sources(&["src"], ".rs") {
        let Some(own) = steps.iter().find(|step| path.trim_start_matches("src/").starts_with(**step)) else { continue };
        let text = code(&text);
        let grouped: Vec<String> = group
            .captures_iter(&text)
            .flat_map(|found| {
                let (folder, list) = (found[1].to_owned(), outermost(&found[2]));
                names.captures_iter(&list).map(|name| format!("{folder}::{}", &name[1])).collect::<Vec<_>>()
            })
            .collect();
        for other in steps.iter().filter(|step| step != &own) {
            let other = module(other);
            let (_, name) = other.rsplit_once("::").unwrap_or(("", &other));
            assert!(
                !text.contains(&format!("crate::{other}"))
                    && !grouped.contains(&other)
                    && !text.contains(&format!("super::{name}::")),
                "{path} uses {other}: steps do not import one another, runtime/ joins them"
            );
        }
        looked_at.insert(*own);
    }
    assert_eq!(looked_at, steps.into_iter().collect(), "a step has moved");
}

/// A list without the parts in inner braces.
fn outermost(list: &str) -> String {
    let mut depth = 0;
    list.chars()
        .filter(|c| {
            depth += i32::from(*c == '{') - i32::from(*c == '}');
            depth == 0
        })
        .collect()
}

#[test]
fn import_lists_are_read_without_inner_lists() {
    assert_eq!(outermost("alarm::{DeliveredAlarm, DeadLetter}, close, order::{self}"), "alarm::}, close, order::}");
}

/// Every key of a table that holds a value rather than a section.
fn leaf_keys(table: &toml::Table) -> BTreeSet<String> {
    let mut keys = BTreeSet::new();
    for (key, value) in table {
        match value {
            toml::Value::Table(inner) => keys.extend(leaf_keys(inner).into_iter().map(|rest| format!("{key}.{rest}"))),
            _ => drop(keys.insert(key.clone())),
        }
    }
    keys
}

/// The defaults of all files. A section may be in several, a key in one.
fn defaults() -> toml::Table {
    let mut all = toml::Table::new();
    for text in DEFAULTS {
        for (section, value) in text.parse::<toml::Table>().unwrap() {
            match (all.get_mut(&section), value) {
                (Some(toml::Value::Table(known)), toml::Value::Table(more)) => {
                    for (key, value) in more {
                        assert!(known.insert(key.clone(), value).is_none(), "{section}.{key} is in two files");
                    }
                }
                (None, value) => drop(all.insert(section, value)),
                _ => panic!("{section} is in two files"),
            }
        }
    }
    all
}

/// Each reader has to hold them in the head.
#[test]
fn documented_settings_are_at_most_forty() {
    let documented: toml::Table = DEFAULTS[0].parse().unwrap();
    let keys = leaf_keys(&documented);
    assert!(keys.len() <= 40, "{} settings: {keys:?}", keys.len());
}

#[test]
fn settings_and_defaults_match() {
    let keys = leaf_keys(&defaults());
    assert!(keys.contains("namespace") && keys.contains("worker.hold_max"), "{keys:?}");

    // The keys as the program defines them: the fields of Settings and of its sections.
    let files = files();
    let sections = ["src/config.rs", "crates/amqp/src/settings.rs", "crates/core/src/delay/settings.rs"];
    let text = sections.map(|path| code(&files[path])).join("\n");
    let structure = Regex::new(r"(?s)pub struct (\w*Settings) \{(.*?)\n\}").unwrap();
    let field = Regex::new(r"pub (?:r#)?(\w+): ([\w<>]+)").unwrap();
    let structures: BTreeMap<String, Vec<(String, String)>> = structure
        .captures_iter(&text)
        .map(|found| {
            (found[1].to_owned(), field.captures_iter(&found[2]).map(|f| (f[1].to_owned(), f[2].to_owned())).collect())
        })
        .collect();
    let mut fields = BTreeSet::new();
    for (name, kind) in &structures["Settings"] {
        match structures.get(kind) {
            Some(section) => fields.extend(section.iter().map(|(inner, _)| format!("{name}.{inner}"))),
            None => drop(fields.insert(name.clone())),
        }
    }
    // Its keys are in the shop's files: config/default.toml shows them in a comment.
    assert!(fields.remove("kinds") && fields.remove("providers"));
    assert_eq!(fields, keys, "the settings in the code (left) and in config (right)");
}

#[test]
fn only_config_default_toml_has_defaults() {
    let defaults = defaults();
    for key in leaf_keys(&defaults) {
        let mut without = defaults.clone();
        let name = match key.split_once('.') {
            Some((section, name)) => {
                without[section].as_table_mut().unwrap().remove(name).unwrap();
                name
            }
            None => {
                without.remove(&key).unwrap();
                &key
            }
        };
        let fault =
            toml::from_str::<Settings>(&without.to_string()).map(drop).expect_err(&format!("{key} can be left out"));
        assert!(fault.to_string().contains(&format!("missing field `{name}`")), "{key}: {fault}");
    }
}

#[test]
fn every_default_is_explained_directly_above() {
    let lines: Vec<&str> = DEFAULTS.iter().flat_map(|text| text.lines()).collect();
    let key = Regex::new(r"^(\w+) = ").unwrap();
    let mut explained = 0;
    for (at, line) in lines.iter().enumerate() {
        if let Some(found) = key.captures(line) {
            assert!(at > 0 && lines[at - 1].starts_with("# "), "config does not say above {} what it is", &found[1]);
            explained += 1;
        }
    }
    assert_eq!(explained, leaf_keys(&defaults()).len());
}

#[test]
fn migrations_have_telling_names_in_order() {
    let name = Regex::new(r"^migrations/(\d{14})_([a-z]+(?:_[a-z]+)*)\.sql$").unwrap();
    let says_nothing =
        Regex::new(r"^(?:update|change|alter|fix|misc|migration|schema|tables?|new|initial|init)(?:_|$)").unwrap();
    let mut versions = Vec::new();
    let mut names = BTreeSet::new();
    for path in sources(&["migrations"], ".sql").into_keys() {
        let found =
            name.captures(&path).unwrap_or_else(|| panic!("{path} is not YYYYMMDDhhmmss_what_the_schema_has_then.sql"));
        assert!(
            found[2].len() >= 6 && !says_nothing.is_match(&found[2]),
            "{path} does not say what the schema has then"
        );
        versions.push(found[1].parse::<u64>().unwrap());
        assert!(names.insert(found[2].to_owned()), "{path} is named like another");
    }
    assert!(versions.is_sorted_by(|a, b| a < b), "{versions:?}");
}

#[test]
fn tables_and_functions_stand_once() {
    let defined = Regex::new(r"(?m)^\s*CREATE (?:OR REPLACE )?(?:UNLOGGED )?(FUNCTION|TABLE|VIEW) (\w+)").unwrap();
    let mut seen = BTreeSet::new();
    let mut files = sources(&["migrations", "sql"], ".sql");
    // A schema of its own, which only databases for tests have, and which is created once.
    assert!(files.remove("sql/clock_for_tests.sql").is_some());
    for (path, text) in files {
        for found in defined.captures_iter(&text) {
            assert!(seen.insert(found[2].to_owned()), "{path} defines {} again", &found[2]);
            let is_function = &found[1] != "TABLE";
            assert_eq!(path.starts_with("sql/functions/"), is_function, "{path} defines {}", &found[2]);
        }
        let alters = path.starts_with("migrations/") && text.contains("ALTER ");
        assert!(!alters, "{path} alters a table: before the first release its CREATE says the end state");
    }
    assert!(seen.len() > 30, "{seen:?}");
}

#[test]
fn no_unfinished_work_markers() {
    // Concatenated, so that this file does not contain them.
    let words = [["TO", "DO"], ["FIX", "ME"], ["todo", "!("], ["unimplemented", "!("], ["dbg", "!("]]
        .map(|parts| parts.concat());
    for (path, text) in files() {
        for (number, line) in text.lines().enumerate() {
            for word in &words {
                assert!(!line.contains(word), "{path}:{}: {word}", number + 1);
            }
        }
    }
}

/// A heading's anchor as GitHub writes it.
fn anchor(heading: &str) -> String {
    let kept = heading.to_lowercase().chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c)).collect::<String>();
    kept.replace(' ', "-")
}

fn headings(markdown: &str) -> Vec<&str> {
    markdown.lines().filter(|line| line.starts_with('#')).map(|line| line.trim_start_matches('#').trim()).collect()
}

#[test]
fn document_links_resolve() {
    let files = files();
    let link = Regex::new(r"\]\(([^)\s]+)\)").unwrap();
    let mut followed = 0;
    for (path, text) in files.iter().filter(|(path, _)| path.ends_with(".md")) {
        for found in link.captures_iter(text) {
            let target = &found[1];
            if target.starts_with("http") {
                continue;
            }
            let (file, section) = target.split_once('#').unwrap_or((target, ""));
            let there =
                if file.is_empty() { root().join(path) } else { root().join(path).parent().unwrap().join(file) };
            assert!(there.exists(), "{path} links to {target}, which is not there");
            if !section.is_empty() {
                let document = std::fs::read_to_string(&there).unwrap();
                assert!(
                    headings(&document).into_iter().any(|heading| anchor(heading) == section),
                    "{path} links to {target}: no such heading"
                );
            }
            followed += 1;
        }
    }
    assert!(followed > 0 || !files.contains_key("README.md"), "the README links to nothing");
}

#[test]
fn guarantees_name_existing_tests() {
    let document = &files()["docs/guarantees.md"];
    let guarantees = document.split("\n## ").find(|section| section.starts_with("What it guarantees")).unwrap();
    let name = Regex::new(r"`(\w+)::(\w+)`").unwrap();
    for guarantee in guarantees.split("\n- ").skip(1) {
        let named: Vec<_> = name.captures_iter(guarantee).collect();
        assert!(!named.is_empty(), "docs/guarantees.md names no test: {guarantee}");
        for test in named {
            let text = &files()[&format!("tests/it/{}.rs", &test[1])];
            let defined = format!("#[test]\nfn {}(", &test[2]);
            assert!(
                text.contains(&defined),
                "docs/guarantees.md names {}::{}, which is not a test",
                &test[1],
                &test[2]
            );
        }
    }
}

#[test]
fn mentioned_files_exist() {
    let files = files();
    // From the root, in any file: `scripts/services`, docs/WIRE.md, src/effects/.
    let from_root = Regex::new(
        r"(?m)(?:^|[\s`(\x22\[])((?:docs|src|crates|tests|examples|benches|scripts|config|migrations|sql|deploy)/[\w./-]*\w)",
    )
    .unwrap();
    // In documents, in backticks, by its last parts: `engine/tests.rs`.
    let by_name = Regex::new(r"`([\w./-]+\.(?:rs|sql|toml|md|yml|conf|config))`").unwrap();
    for (path, text) in &files {
        // Tests mention nonexistent files on purpose.
        if path.starts_with("tests/") || path == "Cargo.lock" {
            continue;
        }
        for found in from_root.captures_iter(text) {
            // Plugins are downloaded on request; and "not `that/path.rs`" says that a file does not exist.
            let is_absent = found[1].ends_with(".ez") || is_denied(text, found.get(1).unwrap().start());
            assert!(is_absent || root().join(&found[1]).exists(), "{path} speaks of {}, which is not there", &found[1]);
        }
        if path.ends_with(".md") || path.ends_with(".rs") {
            for found in by_name.captures_iter(text) {
                let ending = format!("/{}", found[1].trim_start_matches("../"));
                let is_there = is_denied(text, found.get(1).unwrap().start())
                    || files.keys().any(|other| format!("/{other}").ends_with(&ending));
                assert!(is_there, "{path} speaks of {}, which is not there", &found[1]);
            }
        }
    }
}

/// Whether the words before this position negate what follows.
fn is_denied(text: &str, at: usize) -> bool {
    text[..at].trim_end_matches('`').to_lowercase().ends_with("not ")
}

#[test]
fn mentioned_sections_exist() {
    let files = files();
    // docs/ARCHITECTURE.md, "The map"
    let mention = Regex::new(r#"\b((?:docs/(?:[\w-]+/)*)?[\w-]+\.md), "([^"]+)""#).unwrap();
    let wrapped = Regex::new(r"\n[ \t]*(?://[/!]?|#|--|%%)?[ \t]*").unwrap();
    for (path, text) in files.iter().filter(|(path, _)| !path.starts_with("tests/")) {
        let text = wrapped.replace_all(text, " ");
        for found in mention.captures_iter(&text) {
            let Some(document) = files.get(&found[1]) else {
                panic!("{path} speaks of {}, which is not there", &found[1])
            };
            assert!(
                headings(document).contains(&&found[2]),
                "{path} speaks of {}, {:?}: no such heading",
                &found[1],
                &found[2]
            );
        }
    }
}

/// Words that docs/STYLE.md bans, as a pattern each. What a reader of a standard text would not expect in its place.
const BANNED_WORDS: [&str; 11] = [
    r"who(?:m|so)?ever",
    r"(?:some|any|no|every)body(?:'s|s|es)?",
    r"(?:some|any|every)one(?:'s)?",
    r"he|him|his|himself",
    r"mend(?:s|ed|ing)?",
    r"for ever",
    r"by way of",
    r"in vain",
    r"errands?",
    r"desks?",
    r"patience",
];

#[test]
fn banned_words_are_absent() {
    let banned = Regex::new(&format!(r"(?i)\b(?:{})\b", BANNED_WORDS.join("|"))).unwrap();
    let is_text = |path: &str| [".rs", ".md", ".sql", ".toml"].iter().any(|ending| path.ends_with(ending));
    let names_them = |path: &str| ["docs/STYLE.md", "tests/it/tidy.rs"].contains(&path);
    let mut found = Vec::new();
    for (path, text) in files() {
        if !is_text(&path) || names_them(&path) {
            continue;
        }
        for (number, line) in text.lines().enumerate() {
            // A name is words as well.
            let words = line.replace('_', " ");
            // An account of every Linux, and the former name of a setting.
            let words = ["`nobody`", "\"nobody\"", "away patience", "AWAY PATIENCE"]
                .into_iter()
                .fold(words, |words, name| words.replace(name, ""));
            found.extend(banned.find_iter(&words).map(|word| format!("{path}:{}: {}", number + 1, word.as_str())));
        }
    }
    assert_eq!(found, Vec::<String>::new(), "docs/STYLE.md has the words to use instead");
}

/// The longest that a test's name may be, in words.
const LONGEST_TEST_NAME: usize = 9;

#[test]
fn test_names_are_short() {
    let test = Regex::new(r"#\[(?:tokio::)?test[^\]]*\]\s*(?:#\[[^\n]*\]\s*)*(?:async )?fn (\w+)").unwrap();
    let property = Regex::new(r"(?m)^\s+fn (\w+)\([^{;]*\bin\b[^{;]*\)\s*\{").unwrap();
    let mut seen = 0;
    for (path, text) in sources(&["src", "crates", "tests", "examples", "benches"], ".rs") {
        for found in test.captures_iter(&text).chain(property.captures_iter(&text)) {
            let words = found[1].split('_').count();
            assert!(words <= LONGEST_TEST_NAME, "{path}: {} has {words} words", &found[1]);
            seen += 1;
        }
    }
    assert!(seen > 500, "only {seen} tests found");
}

/// A stranger reads the first document to its end, or not at all.
#[test]
fn readme_is_short() {
    let lines = files()["README.md"].lines().count();
    assert!(lines <= 150, "README.md has {lines} lines; docs/guide has room");
}

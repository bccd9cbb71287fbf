//! The command line states in one sentence what is wrong and how to fix it, never prints passwords, and exits with a code
//! for scripts: 0 done, 1 failed, 2 wrong usage or settings.

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use clap::CommandFactory;
use lapin::BasicProperties;
use lapin::options::BasicGetOptions;
use order_timeout::Settings;
use order_timeout::cli::Cli;
use order_timeout::postgres::{self, Database};
use order_timeout_amqp::topology::DUE_KEY;
use order_timeout_core::message::Alarm;
use order_timeout_testkit::figures;
use order_timeout_testkit::linux::{self, Signal};
use order_timeout_testkit::process::{WorkerProcess, bare, call_with, order_timeout, run};
use order_timeout_testkit::proxy::Proxy;
use order_timeout_testkit::{Order, TIMEOUT, TestEnv, wait_for, wait_promised, with_parts};
use secrecy::{ExposeSecret, SecretString};
use serde_json::{Value, json};
use sqlx::{AssertSqlSafe, Executor};
use uuid::Uuid;

/// A password that equals no other text, so that it is found wherever it leaks.
const PASSWORD: &str = "sesame-4711";
/// The port of an obsolete service (tcpmux), on which no process listens.
const UNUSED_PORT: u16 = 1;

/// Runs a command with the environment's settings, without blocking the test's runtime.
async fn call(env: &TestEnv, arguments: &[&str]) -> (i32, String, String) {
    call_with(&env.settings, arguments).await
}

/// The sentence on standard error: one line, without repetition.
fn sentence(stderr: &str) -> &str {
    let line = stderr.strip_suffix('\n').expect("a line");
    assert!(!line.contains('\n'), "more than one line: {stderr}");
    let sentence = line.strip_prefix("order-timeout: ").unwrap_or_else(|| panic!("not ours: {stderr}"));
    let characters: Vec<char> = sentence.chars().collect();
    for piece in characters.windows(60) {
        let piece: String = piece.iter().collect();
        assert_eq!(sentence.matches(&piece).count(), 1, "repeats {piece:?}: {sentence}");
    }
    sentence
}

/// Asserts that the command fails with this code, and prints one sentence with all these parts and nothing else.
fn assert_fails(command: &mut Command, code: i32, parts: &[&str]) {
    let (found, stdout, stderr) = run(command);
    assert!(!format!("{stdout}{stderr}").contains(PASSWORD), "{command:?} prints the password: {stdout}{stderr}");
    assert_eq!((found, stdout.as_str()), (code, ""), "{command:?}: {stderr}");
    let sentence = sentence(&stderr);
    for part in parts {
        assert!(sentence.contains(part), "{command:?}: {sentence:?} lacks {part:?}");
    }
}

async fn assert_call_fails(settings: &Settings, arguments: &[&str], parts: &[&str]) {
    let mut command = order_timeout(settings);
    // The worker also logs to standard error; this is about its final sentence.
    command.args(["--set", "log.filter=off"]).args(arguments);
    let parts: Vec<String> = parts.iter().map(|part| (*part).to_owned()).collect();
    let checked = tokio::task::spawn_blocking(move || {
        assert_fails(&mut command, 1, &parts.iter().map(String::as_str).collect::<Vec<_>>());
    });
    if let Err(error) = checked.await {
        std::panic::resume_unwind(error.into_panic());
    }
}

fn user_of(url: &SecretString) -> String {
    let authority = url.expose_secret().split_once("://").unwrap().1;
    authority.split_once('@').map_or("guest", |(user, _)| user.split(':').next().unwrap()).to_owned()
}

/// A settings file that is deleted when dropped.
fn settings_file(contents: &str) -> tempfile::NamedTempFile {
    let file = tempfile::Builder::new().prefix("shop-").suffix(".toml").tempfile().unwrap();
    std::fs::write(file.path(), contents).unwrap();
    file
}

#[test]
fn names_wrong_setting_and_its_origin() {
    for (setting, parts) in [
        ("delay.leed=3s", &["delay.leed", "--set", "did you mean delay.lead?"][..]),
        ("delay=3s", &["delay", "--set"]),
        ("delay.lead=3", &["delay.lead", "--set", "\"3\"", "duration"]),
        ("delay.lead=3 parsecs", &["delay.lead", "--set", "3 parsecs"]),
        ("delay.lanes=30m,1h parsecs", &["delay.lanes", "--set", "1h parsecs"]),
        ("delay.strategy=magic", &["delay.strategy", "--set", "magic"]),
        ("log.format=xml", &["log.format", "--set", "xml"]),
        ("worker.closers=many", &["worker.closers", "--set", "many"]),
        ("worker.closers=0", &["worker.closers", "--set", "between 1 and 32"]),
        ("worker.hold_max=6s", &["worker.hold_max", "--set", "delay.lead"]),
        ("namespace=a.b", &["namespace", "--set", "a.b"]),
        ("nonsense", &["--set", "1 of 1", "KEY=VALUE"]),
        ("=3", &["--set", "1 of 1", "KEY=VALUE"]),
        (&format!("postgres://shop:{PASSWORD}@host/shop"), &["--set", "1 of 1", "KEY=VALUE"]),
        (&format!("postgres://shop:{PASSWORD}@host/shop?sslmode=require"), &["--set", "1 of 1", "KEY=VALUE"]),
        (&format!("namespace=amqp://shop:{PASSWORD}@host"), &["namespace", "--set", "an address"]),
        (&format!("delay.lead=amqp://shop:{PASSWORD}@host"), &["delay.lead", "--set", "an address"]),
        (&format!("delay.lanes=amqp://shop:{PASSWORD}@host"), &["delay.lanes", "--set", "an address"]),
        (&format!("worker.closers=amqp://shop:{PASSWORD}@host"), &["worker.closers", "--set", "an address"]),
        (&format!("log.format=amqp://shop:{PASSWORD}@host"), &["log.format", "--set", "an address"]),
        (&format!("amqp.url=http://shop:{PASSWORD}@host"), &["amqp.url", "--set", "amqp://"]),
        (&format!("amqp.url=amqp://shop:{PASSWORD}@host:port/"), &["amqp.url", "--set", "amqp://"]),
    ] {
        assert_fails(bare().args(["--set", setting, "topology"]), 2, parts);
        // An option may come before or after the command.
        assert_fails(bare().args(["topology", "--set", setting]), 2, parts);
    }
}

#[test]
fn names_wrong_environment_setting_and_its_origin() {
    for (variable, value, parts) in [
        ("ORDER_TIMEOUT__DELAY__LEED", "3s", &["delay.leed", "environment", "did you mean delay.lead?"][..]),
        ("ORDER_TIMEOUT__DELAY__LEAD", "3", &["delay.lead", "environment", "duration"]),
        ("ORDER_TIMEOUT__DELAY__LANES", "30m,soon", &["delay.lanes", "environment", "soon"]),
        (
            "ORDER_TIMEOUT_DATABASE__URL",
            "postgres://h/d",
            &["environment", "did you mean ORDER_TIMEOUT__DATABASE__URL?"],
        ),
        ("ORDER_TIMEOUT__WORKER__CLOSERS", "0", &["worker.closers", "environment", "between 1 and 32"]),
        ("ORDER_TIMEOUT__AMQP__URL", &format!("shop:{PASSWORD}@host"), &["amqp.url", "environment", "amqp://"]),
    ] {
        assert_fails(bare().env(variable, value).arg("topology"), 2, parts);
    }
}

/// The arguments of the commands that need the database.
fn commands_with_a_database() -> Vec<Vec<&'static str>> {
    let commands =
        ["setup", "worker", "status", "explain 1", "close 1", "parked list", "parked retry --all", "parked drop --all"];
    commands.iter().map(|command| command.split(' ').collect()).collect()
}

#[test]
fn only_database_commands_reject_invalid_address() {
    for address in [format!("mysql://shop:{PASSWORD}@host/shop"), format!("postgres://shop:{PASSWORD}@host:port/shop")]
    {
        for command in commands_with_a_database() {
            for variable in ["ORDER_TIMEOUT__DATABASE__URL", "DATABASE_URL"] {
                let parts = ["database.url", "environment", "postgres://"];
                assert_fails(bare().env(variable, &address).args(&command), 2, &parts);
            }
            let setting = format!("database.url={address}");
            assert_fails(bare().args(["--set", &setting]).args(&command), 2, &["database.url", "--set", "postgres://"]);
        }
        let (code, _, stderr) = run(bare().env("DATABASE_URL", &address).arg("topology"));
        assert_eq!((code, stderr.as_str()), (0, ""));
    }
}

#[test]
fn can_schedule_with_foreign_database_address() {
    TestEnv::builder().run(async |env| {
        let mut command = order_timeout(&env.settings);
        command.env_remove("ORDER_TIMEOUT__DATABASE__URL").env("DATABASE_URL", "mysql://shop@host/shop");
        command.args(["schedule", "01939f6e-7a3c-7c11-9d1a-6b1f0e2d3c4b", "--in", "60s"]);
        let (code, _, stderr) = tokio::task::spawn_blocking(move || run(&mut command)).await.unwrap();
        assert_eq!((code, stderr.as_str()), (0, ""));
    });
}

#[test]
fn names_wrong_setting_and_its_file() {
    for (contents, parts) in [
        ("[delay]\nleed = \"3s\"\n", &["delay.leed", "did you mean delay.lead?"][..]),
        ("[delay]\nlead = \"3\"\n", &["delay.lead", "write a number and its unit, such as 3s"]),
        ("[log]\nformat = \"xml\"\n", &["log.format", "\"xml\" is none of its words"]),
        ("[delay]\nlead = 3\n", &["delay.lead", "duration"]),
        ("[delay]\nrings = [{ unit = \"5s\", slotz = 20 }]\n", &["delay.rings[0]", "slotz"]),
        ("[delay]\nrings = [{ unit = \"5 parsecs\", slots = 20 }]\n", &["delay.rings[0].unit", "5 parsecs"]),
        ("[worker]\nclosers = 0\n", &["worker.closers", "between 1 and 32"]),
        (&format!("[amqp]\nurl = \"http://shop:{PASSWORD}@host\"\n"), &["amqp.url", "amqp://"]),
        (&format!("[database]\nurl = [\"postgres://shop:{PASSWORD}@host/shop\"]\n"), &["database.url"]),
        // Not TOML, and the wrong line contains the password.
        (&format!("[amqp]\nurl = \"amqp://shop:{PASSWORD}@host/shop\n"), &["TOML", "line 2"]),
        (&format!("[amqp]\nurl = amqp://shop:{PASSWORD}@host/shop\n"), &["TOML", "line 2"]),
    ] {
        let file = settings_file(contents);
        let origin = format!("(from {})", file.path().display());
        let parts: Vec<&str> = parts.iter().copied().chain([origin.as_str()]).collect();
        assert_fails(bare().arg("--config").arg(file.path()).arg("topology"), 2, &parts);
    }
}

#[test]
fn names_unreadable_settings_file_as_typed() {
    let not_text = settings_file("");
    std::fs::write(not_text.path(), b"\xff").unwrap();
    let (directory, not_text) = (env!("CARGO_TARGET_TMPDIR"), not_text.path().to_str().unwrap());
    for path in ["/nowhere/shop.toml", "nowhere/./shop.toml", "/tmp/../nowhere.toml", directory, not_text] {
        let named = format!("the file {path} cannot be read");
        assert_fails(bare().args(["--config", path, "topology"]), 2, &[&named, "--config"]);
    }
}

#[test]
fn ignores_environment_that_is_not_text() {
    use std::os::unix::ffi::OsStrExt;
    let not_text = std::ffi::OsStr::from_bytes(b"\xff");
    let (code, stdout, stderr) = run(bare().env("FOREIGN_VARIABLE", not_text).arg("topology"));
    assert_eq!((code, stderr.as_str()), (0, ""));
    assert_eq!(stdout, run(bare().arg("topology")).1);
}

#[test]
fn environment_and_set_are_equivalent() {
    for (key, variable, value) in [
        ("namespace", "ORDER_TIMEOUT__NAMESPACE", "007"),
        ("namespace", "ORDER_TIMEOUT__NAMESPACE", "1e3"),
        ("namespace", "ORDER_TIMEOUT__NAMESPACE", "true"),
        ("delay.lanes", "ORDER_TIMEOUT__DELAY__LANES", "15m, 7200s"),
        ("delay.lane_shards", "ORDER_TIMEOUT__DELAY__LANE_SHARDS", "2"),
    ] {
        let (code, from_environment, stderr) = run(bare().env(variable, value).arg("topology"));
        assert_eq!((code, stderr.as_str()), (0, ""));
        let (_, from_set, _) = run(bare().args(["--set", &format!("{key}={value}"), "topology"]));
        assert_ne!(from_set, run(bare().arg("topology")).1, "{key} = {value} makes a difference");
        assert!(from_environment == from_set, "{key} = {value} is something else in the environment");
    }
}

#[test]
fn wrong_usage_exits_with_2_naming_help() {
    let when = ["schedule", "order-1"];
    for (arguments, part) in [
        (&["frobnicate"][..], "frobnicate"),
        (&["--frobnicate", "topology"], "--frobnicate"),
        (&["schedule", "--in", "30m"], "<ID>"),
        (&["deadline", "order-1"], "--in <DURATION>|--deadline <TIME>"),
        (&[&when[..], &["--in", "30m", "--deadline", "2026-11-20T10:30:00Z"]].concat(), "cannot be used with"),
        // The error names the missing unit.
        (&[&when[..], &["--in", "5"]].concat(), "time unit needed, for example 5sec"),
        (&[&when[..], &["--in=-5s"]].concat(), "write a number and its unit, such as 90s"),
        (&[&when[..], &["--in", "-5s"]].concat(), "a deadline must be in the future; write a number and its unit"),
        (&["worker", "--port", "9000"], "--set http.listen=127.0.0.1:9395"),
        (&["schedule", "order-1", "order-1", "--in", "5s"], "unexpected argument"),
        (&["deadline", "--in", "5s"], "<ID|--where <SQL>>"),
        (&[&when[..], &["--deadline", "tomorrow"]].concat(), "2026-11-20T10:30:00Z"),
        (&[&when[..], &["--deadline", "2026-11-20T10:30:00"]].concat(), "offset"),
        (&["close"], "<ID>..."),
        (&["deadline", "--where", "true", "--in", "5s"], "--why <TEXT>"),
        (&["deadline", "1", "--in", "5s", "--yes"], "--where <SQL>"),
        (&["parked", "drop"], "--all"),
        (&["parked", "drop", "--all", "--reason", "too_far"], "cannot be used with"),
        (&["parked", "retry", "not-an-id"], "not-an-id"),
        (&["parked", "drop", "123"], "give an id as `parked list` shows it"),
        (&["parked", "list", "--limit", "0"], "--limit"),
    ] {
        let (code, stdout, stderr) = run(bare().args(arguments));
        assert_eq!((code, stdout.as_str()), (2, ""), "{arguments:?}: {stderr}");
        for part in [part, "try '--help'"] {
            assert!(stderr.contains(part), "{arguments:?}: {stderr:?} lacks {part:?}");
        }
    }
    // Without a command it prints the help.
    let (code, stdout, stderr) = run(&mut bare());
    assert_eq!((code, stdout.as_str()), (2, ""));
    assert!(stderr.contains("Usage: order-timeout") && stderr.contains("worker"), "{stderr}");
}

#[test]
fn settings_count_on_both_sides_of_subcommand() {
    let mut program = bare();
    let (code, stdout, stderr) = run(program.args(["--set", "namespace=kept", "topology", "--set=delay.lanes=7m"]));
    assert_eq!(code, 0, "{stderr}");
    assert!(stdout.contains("kept.delay.7m.0"), "{stdout}");
}

#[test]
fn address_in_arguments_is_not_repeated() {
    let address = format!("postgres://shop:{PASSWORD}@host/shop");
    let (after_in, after_deadline) = (format!("--in={address}"), format!("--deadline={address}"));
    for arguments in [
        &[address.as_str()][..],
        &["worker", &address],
        &["worker", &format!("--{address}")],
        &[&format!("--{address}"), "worker"],
        &["--config", &address, "worker"],
        &["parked", &address],
        &["parked", "drop", &address],
        &["parked", "list", "--limit", &address],
        &["schedule", "1", "--in", &address],
        &["schedule", "1", &after_in],
        &["schedule", "1", &after_deadline],
        &["topology", "--vhost", &address, &address],
        &["topology", &format!("--yes={address}")],
    ] {
        let (code, stdout, stderr) = run(bare().args(arguments));
        assert_eq!((code, stdout.as_str()), (2, ""), "{arguments:?}: {stderr}");
        assert!(!stderr.is_empty() && !stderr.contains("sesame"), "{arguments:?}: {stderr}");
    }
}

#[test]
fn every_command_and_argument_has_help() {
    fn check(command: &clap::Command, path: &[&str]) -> usize {
        let (code, stdout, stderr) = run(bare().args(path).arg("--help"));
        assert_eq!((code, stderr.as_str()), (0, ""), "{path:?} --help");
        for argument in command.get_arguments() {
            // As the help writes it: `--in <DURATION>`, or `<ID>` without a name before it.
            let value = argument.get_value_names().map_or("", |names| names[0].as_str());
            let named = argument.get_long().map_or_else(|| value.to_owned(), |long| format!("--{long}"));
            let mentions = |line: &&str| {
                let line = line.trim_start();
                line.trim_start_matches(['<', '[']).starts_with(&named)
                    || line.get(4..).is_some_and(|rest| rest.starts_with(&named))
            };
            let line =
                stdout.lines().find(mentions).unwrap_or_else(|| panic!("{path:?} --help lacks {named}: {stdout}"));
            let explained = line.trim().split("  ").filter(|part| !part.is_empty()).count() >= 2;
            assert!(explained, "{path:?} --help does not explain {named}: {line:?}");
        }
        let mut checked = 1;
        for subcommand in command.get_subcommands().filter(|subcommand| subcommand.get_name() != "help") {
            let about = subcommand.get_about().map(ToString::to_string).unwrap_or_default();
            assert!(
                !about.is_empty() && stdout.contains(&about),
                "{path:?} --help does not say what {} does",
                subcommand.get_name()
            );
            checked += check(subcommand, &[path, &[subcommand.get_name()]].concat());
        }
        checked
    }
    // Built, so that it has the global arguments.
    let mut cli = Cli::command();
    cli.build();
    // The program, setup, worker, health, schedule, status, doctor, explain, forecast, deadline, close, pause,
    // resume, topology, config, sql, adopt, audit, completions, man, parked with its three, late with its
    // two, closing with its three, provider and testing with their one.
    assert_eq!(check(&cli, &[]), 35);
}

#[test]
fn names_unusable_broker_without_password() {
    TestEnv::builder().run(async |env| {
        let order = env.order(Duration::from_secs(60)).await;
        let id = order.id.to_string();
        let schedule = ["schedule", &id, "--in", "60s"];
        let retry = ["parked", "retry", "--all", "--yes"];
        let good = &env.settings.amqp.url;
        let name = user_of(good);
        let with = |url: SecretString| {
            let mut settings = env.settings.clone();
            settings.amqp.url = url;
            settings
        };

        let wrong_password = with(with_parts(good, Some(&format!("{name}:{PASSWORD}")), None, None));
        let unknown_user = with(with_parts(good, Some(&format!("unknown:{PASSWORD}")), None, None));
        for arguments in [&schedule[..], &retry, &["setup"], &["worker"]] {
            assert_call_fails(&wrong_password, arguments, &["refuses user", &name, "password", "amqp.url"]).await;
            assert_call_fails(&unknown_user, arguments, &["refuses user", "\"unknown\"", "amqp.url"]).await;
        }

        let missing_vhost = with(with_parts(good, None, None, Some("no-such-vhost")));
        for arguments in [&schedule[..], &retry, &["setup"], &["worker"]] {
            assert_call_fails(&missing_vhost, arguments, &["no-such-vhost", &name, "create the virtual host"]).await;
        }

        // A worker would wait for the broker; all other commands give up.
        let user = format!("shop:{PASSWORD}");
        let address = format!("127.0.0.1:{UNUSED_PORT}");
        let nothing_there = with(with_parts(good, Some(&user), Some(&address), None));
        let no_such_host = with(with_parts(good, Some(&user), Some("no-such-host.invalid:5672"), None));
        for arguments in [&schedule[..], &retry, &["setup"]] {
            assert_call_fails(&nothing_there, arguments, &["broker", &address, "is it running there?"]).await;
            assert_call_fails(&no_such_host, arguments, &["broker", "no-such-host.invalid", "is it running there?"])
                .await;
        }
        assert_eq!(env.status(&order).await, "unpaid");
    });
}

#[test]
fn distinguishes_missing_queues_from_unreachable_broker() {
    TestEnv::builder().run(async |env| {
        let mut settings = env.settings.clone();
        settings.namespace = format!("{}-other", settings.namespace);
        let id = Uuid::now_v7().to_string();
        let arguments = ["schedule", &id, "--in", "30m"];
        assert_call_fails(
            &settings,
            &arguments,
            &[&format!("{}.schedule", settings.namespace), "order-timeout setup", "namespace"],
        )
        .await;
    });
}

#[test]
fn names_unusable_database_without_password() {
    TestEnv::builder().run(async |env| {
        let good = &env.settings.database.url;
        let with = |url: SecretString| {
            let mut settings = env.settings.clone();
            settings.database.url = url;
            settings
        };
        let user = format!("unknown:{PASSWORD}");
        let unknown_user = with(with_parts(good, Some(&user), None, None));
        let missing = with(env.settings.database.url_of("no_such_database"));
        let address = format!("127.0.0.1:{UNUSED_PORT}");
        let nothing_there = with(with_parts(good, Some(&user), Some(&address), None));
        let no_such_host = with(with_parts(good, Some(&user), Some("no-such-host.invalid:5432"), None));
        let id = Uuid::now_v7().to_string();
        for arguments in [&["setup"][..], &["worker"], &["close", &id], &["parked", "list"]] {
            assert_call_fails(&unknown_user, arguments, &["database", "refuses", "\"unknown\"", "database.url"]).await;
            assert_call_fails(&missing, arguments, &["no_such_database", "does not exist", "createdb", "database.url"])
                .await;
            assert_call_fails(&nothing_there, arguments, &["database", &address, "is it running there?"]).await;
            assert_call_fails(&no_such_host, arguments, &["database", "no-such-host.invalid", "is it running there?"])
                .await;
        }
    });
}

#[test]
fn failing_worker_logs_error_once_without_password() {
    TestEnv::builder().run(async |env| {
        let good = &env.settings.amqp.url;
        let user = format!("{}:{PASSWORD}", user_of(good));
        for url in
            [with_parts(good, Some(&user), None, None), with_parts(good, Some(&user), None, Some("no-such-vhost"))]
        {
            let mut settings = env.settings.clone();
            settings.amqp.url = url;
            let (code, stdout, stderr) = call_with(&settings, &["--set", "log.filter=trace", "worker"]).await;
            assert_eq!((code, stdout.as_str()), (1, ""), "{stderr}");
            assert!(!stderr.contains(PASSWORD), "{stderr}");
            let ours: Vec<&str> = stderr.lines().filter(|line| line.starts_with("order-timeout: ")).collect();
            assert!(matches!(ours.as_slice(), [one] if one.contains("broker")), "{ours:?} in {stderr}");
        }
    });
}

#[test]
fn names_missing_migrations() {
    TestEnv::builder().run(async |env| {
        let id = Uuid::now_v7().to_string();
        env.pool
            .execute("DELETE FROM order_timeout_migrations WHERE description = 'outboxes and parked alarms'")
            .await
            .unwrap();
        assert_call_fails(
            &env.settings,
            &["worker"],
            &["1 migration", "outboxes and parked alarms", "order-timeout setup"],
        )
        .await;
        env.pool.execute("DROP SCHEMA public CASCADE; CREATE SCHEMA public").await.unwrap();
        let count = format!("{} migration", migration_files());
        assert_call_fails(&env.settings, &["worker"], &[&count, "order-timeout setup"]).await;
        for arguments in [&["close", &id][..], &["parked", "list"], &["parked", "drop", "--all", "--yes"]] {
            assert_call_fails(&env.settings, arguments, &["order-timeout setup"]).await;
        }
    });
}

#[test]
fn database_error_omits_its_source_location() {
    TestEnv::builder().run(async |env| {
        env.pool.execute("ALTER TABLE parked_alarms DROP COLUMN parked_at").await.unwrap();
        for arguments in [
            &["parked", "list"][..],
            &["parked", "drop", "--all"],
            &["parked", "drop", "--all", "--yes"],
            &["parked", "retry", "--all", "--yes"],
        ] {
            // The exact text: sqlx would add a line number of Postgres' source code.
            let whole = "column \"parked_at\" does not exist (SQLSTATE 42703); fix the database";
            assert_call_fails(&env.settings, arguments, &["parked alarms", whole]).await;
        }
    });
}

fn migration_files() -> usize {
    let directory = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("migrations");
    let names = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name());
    names.filter(|name| name.to_str().unwrap().ends_with(".sql")).count()
}

#[test]
fn setup_is_idempotent() {
    TestEnv::builder().run(async |env| {
        let topology = env.settings.topology();
        // As at the first setup: no tables, and one queue is missing.
        env.pool.execute("DROP SCHEMA public CASCADE; CREATE SCHEMA public").await.unwrap();
        let lost = &topology.queues.last().unwrap().name;
        env.channel().queue_delete(lost.as_str().into(), Default::default()).await.unwrap();

        let mut seen = Vec::new();
        for _ in 0..2 {
            let (code, stdout, stderr) = call(&env, &["setup", "--json"]).await;
            assert_eq!((code, stderr.as_str()), (0, ""));
            let mut report: Value = serde_json::from_str(&stdout).unwrap();
            seen.push(report["migrations_applied"].take());
            let counts = json!({
                "migrations_applied": null,
                "exchanges": topology.exchanges.len(),
                "queues": topology.queues.len(),
                "bindings": topology.bindings.len(),
            });
            assert_eq!(report, counts);
            let database = Database::connect(&env.settings.database, 1).await.unwrap();
            postgres::require_migrated(&database).await.unwrap();
            assert_eq!(env.depth(lost).await, 0, "the queue is there");
        }
        assert_eq!(seen[0].as_array().unwrap().len(), migration_files(), "all of them at first: {seen:?}");
        assert_eq!(seen[1], json!([]), "none of them again");

        let (code, stdout, stderr) = call(&env, &["setup"]).await;
        assert_eq!((code, stderr.as_str()), (0, ""));
        assert!(stdout.starts_with("database: ") && stdout.contains(": up to date\n"), "{stdout}");
        let counts = format!("{} queues and {} bindings; any that", topology.queues.len(), topology.bindings.len());
        assert!(stdout.contains(&counts) && stdout.contains("AMQP does not say which"), "{stdout}");
    });
}

#[test]
fn printed_setup_is_what_setup_does() {
    TestEnv::builder().run(async |env| {
        env.pool.execute("DROP SCHEMA public CASCADE; CREATE SCHEMA public").await.unwrap();
        let (code, stdout, stderr) = call(&env, &["setup", "--check"]).await;
        assert_eq!((code, stderr.as_str()), (1, ""));
        assert_eq!(stdout.matches("the migration ").count(), migration_files(), "{stdout}");
        assert!(stdout.contains("--print-sql"), "{stdout}");
        let (code, script, stderr) = call(&env, &["setup", "--print-sql"]).await;
        assert_eq!((code, stderr.as_str()), (0, ""));
        assert!(call(&env, &["setup", "--check"]).await.1.contains("the migration "), "nothing was run");

        let mut transaction = env.pool.begin().await.unwrap();
        transaction.execute(AssertSqlSafe(script)).await.unwrap();
        transaction.commit().await.unwrap();
        let clean = (0, "database and broker are as this version sets them up\n".to_owned(), String::new());
        assert_eq!(call(&env, &["setup", "--check"]).await, clean);
        let (code, stdout, _) = call(&env, &["setup", "--json"]).await;
        assert!(code == 0 && stdout.contains(r#""migrations_applied":[]"#), "{stdout}");

        env.pool.execute("ALTER FUNCTION release_excess(text, text, bigint) RESET search_path").await.unwrap();
        let lost = env.settings.topology().queues.last().unwrap().name.clone();
        env.channel().queue_delete(lost.as_str().into(), Default::default()).await.unwrap();
        for _ in 0..2 {
            let (code, stdout, _) = call(&env, &["setup", "--check"]).await;
            assert_eq!(code, 1);
            for part in ["the function release_excess(", "is not as this version creates it", &lost] {
                assert!(stdout.contains(part), "{stdout:?} lacks {part:?}");
            }
        }
        call(&env, &["setup"]).await;
        assert_eq!(call(&env, &["setup", "--check"]).await, clean);
    });
}

#[test]
fn schedule_reports_the_published_alarm() {
    TestEnv::builder().run(async |env| {
        let inbox = env.names().schedule();
        let id = Uuid::now_v7().to_string();
        let (code, stdout, stderr) =
            call(&env, &["schedule", &id, "--deadline", "2030-01-02T03:04:05.678+01:00", "--json"]).await;
        assert!(code == 0 && sentence(&stderr).contains("no such order"), "{stderr}");
        let expected = json!({ "order_id": id, "deadline": "2030-01-02T02:04:05.678Z" });
        assert_eq!(serde_json::from_str::<Value>(&stdout).unwrap(), expected);
        wait_for("the alarm in the inbox", async || env.depth(&inbox).await == 1).await;
        let got =
            env.channel().basic_get(inbox.as_str().into(), BasicGetOptions { no_ack: true }).await.unwrap().unwrap();
        assert_eq!(serde_json::from_slice::<Value>(&got.delivery.data).unwrap(), expected, "it reports what it sent");

        let before = env.order(Duration::from_secs(90)).await.deadline;
        let (code, stdout, stderr) = call(&env, &["schedule", &id, "--in", "90s"]).await;
        assert!(code == 0 && sentence(&stderr).contains("no such order"), "{stderr}");
        let (_, reported) = stdout.trim_end().split_once(" at ").unwrap_or_else(|| panic!("{stdout}"));
        let reported = order_timeout_core::message::read_rfc3339(reported).unwrap();
        let drift = reported.since(before).max(before.since(reported));
        assert!(drift < Duration::from_secs(10), "{drift:?} from 90 s ahead");
        wait_for("the second alarm", async || env.depth(&inbox).await == 1).await;
    });
}

/// The remarks of `schedule` on standard error about an alarm that it has sent.
async fn remarks(settings: &Settings, id: &str, when: &[&str]) -> String {
    let (code, stdout, stderr) = call_with(settings, &[&["schedule", id], when].concat()).await;
    assert!(code == 0 && stdout.starts_with("scheduled: order "), "{stdout}{stderr}");
    stderr
}

/// The same, once the row was compared: the command waits two seconds for the database, and a machine may stall for longer.
async fn compared(settings: &Settings, id: &str, when: &[&str]) -> String {
    let began = Instant::now();
    loop {
        let said = remarks(settings, id, when).await;
        if !said.contains("not compared") || began.elapsed() > TIMEOUT {
            return said;
        }
    }
}

#[test]
fn schedule_reports_differing_row() {
    TestEnv::builder().run(async |env| {
        let (order, paid) = (env.order(Duration::from_secs(1_800)).await, env.order(Duration::from_secs(60)).await);
        assert!(env.pay(&paid).await);
        let (id, deadline) = (order.id.to_string(), order_timeout_core::message::write_rfc3339(order.deadline));
        let settings = &env.settings;
        assert_eq!(compared(settings, &id, &["--deadline", &deadline]).await, "");
        let other = compared(settings, &id, &["--in", "5s"]).await;
        assert!(sentence(&other).contains(&deadline) && other.contains("when the row says"), "{other}");
        assert!(compared(settings, &paid.id.to_string(), &["--in", "60s"]).await.contains("the order is paid"));
        let unknown = Uuid::now_v7().to_string();
        assert!(compared(settings, &unknown, &["--in", "60s"]).await.contains("no such order"));
        let late = compared(settings, &unknown, &["--deadline", "2020-01-01T00:00:00Z"]).await;
        assert!(late.contains("2020-01-01T00:00:00.000Z has passed"), "{late}");

        // The alarm is sent even if the database is unavailable.
        let mut unreachable = settings.clone();
        unreachable.database.url = format!("postgres://u:{PASSWORD}@127.0.0.1:{UNUSED_PORT}/d").into();
        let unread = remarks(&unreachable, &id, &["--in", "5s"]).await;
        assert!(sentence(&unread).contains("not compared") && !unread.contains(PASSWORD), "{unread}");
        let mut command = order_timeout(settings);
        command.env_remove("ORDER_TIMEOUT__DATABASE__URL").args(["schedule", &unknown, "--in", "60s"]);
        let (code, _, stderr) = tokio::task::block_in_place(|| run(&mut command));
        assert_eq!((code, stderr.as_str()), (0, ""));
        // The ids of the shop's own table need not be UUIDs.
        let mut own = settings.clone();
        (own.orders.close_sql, own.orders.overdue_sql) = ("a".into(), "b".into());
        assert_eq!(remarks(&own, "17", &["--in", "60s"]).await, "");
    });
}

#[test]
fn schedule_opens_database_once() {
    TestEnv::builder().run(async |env| {
        let (id, unknown) = (env.order(Duration::from_secs(60)).await.id.to_string(), Uuid::now_v7().to_string());
        for arguments in
            [&[id.as_str()][..], &[&unknown, "--in", "60s"], &[&unknown, "--deadline", "2030-01-02T03:04:05Z"]]
        {
            let network = Proxy::before(&env.settings.database.url).await;
            let mut settings = env.settings.clone();
            settings.database.url = network.address(&settings.database.url);
            let (code, _, stderr) = call_with(&settings, &[&["schedule"], arguments].concat()).await;
            assert_eq!((code, stderr.is_empty()), (0, arguments.len() == 1), "{stderr}");
            // To compare sessions takes two, and the pool opens its own.
            assert_eq!(network.accepted(), 3, "{arguments:?}");
        }
    });
}

#[test]
fn failing_worker_names_no_page() {
    TestEnv::builder().settings(figures::serve_http).run(async |env| {
        let mut settings = env.settings.clone();
        settings.amqp.url = with_parts(&settings.amqp.url, None, None, Some("no-such-vhost"));
        let mut command = order_timeout(&settings);
        command.env("ORDER_TIMEOUT__LOG__FILTER", "info").arg("worker");
        let (code, _, stderr) = tokio::task::spawn_blocking(move || run(&mut command)).await.unwrap();
        assert!(code == 1 && stderr.contains("no-such-vhost"), "{stderr}");
        assert!(!stderr.contains("health and metrics at"), "{stderr}");
    });
}

#[test]
fn schedule_refuses_with_reason() {
    TestEnv::builder().run(async |env| {
        let (long_id, id) = ("x".repeat(5_000), Uuid::now_v7().to_string());
        for (arguments, part) in [
            (["", "--in", "30m"], "order id is empty"),
            ([&long_id, "--in", "30m"], "order id"),
            (["not-an-id", "--in", "30m"], "is no UUID"),
            ([&id, "--in", "11years"], "delay.max_delay"),
            ([&id, "--deadline", "9999-12-31T23:59:59Z"], "delay.max_delay"),
        ] {
            let arguments = [&["schedule"][..], &arguments].concat();
            let (code, _, stderr) = call(&env, &arguments).await;
            assert_eq!(code, 2, "{arguments:?}: {stderr}");
            for part in ["not scheduled", part] {
                assert!(sentence(&stderr).contains(part), "{arguments:?}: {stderr}");
            }
        }
        assert_eq!(env.depth(&env.names().schedule()).await, 0);
    });
}

/// What the command line and the settings alone show to be wrong, beside what clap refuses.
#[test]
fn usage_errors_exit_with_2() {
    TestEnv::builder().run(async |env| {
        let id = Uuid::now_v7().to_string();
        let own = ["orders.close_sql=a", "orders.overdue_sql=b"];
        let kind = ["--kind", "nope"];
        let cases: &[(&[&str], &[&str], &str)] = &[
            (&[], &["explain", ""], "order id is empty"),
            (&[], &["explain", "a\tb"], "control character"),
            (&[], &["close", ""], "order id is empty"),
            (&[], &["deadline", "", "--in", "5m"], "order id is empty"),
            (&[], &["closing", "retry", ""], "order id is empty"),
            (&[], &["closing", "settle", &id, "--as", "closed"], "--why"),
            (&[], &["closing", "settle", &id, "--as", "closed", "--reference", "a", "--why", "b"], "--as paid"),
            (&[], &["schedule", "not-an-id", "--in", "5m"], "is no UUID"),
            (&[], &["deadline", &id, "--in", "100years"], "delay.max_delay"),
            (&[], &["deadline", &id, "--in", "+100years"], "delay.max_delay"),
            (&[], &["deadline", &id, "--in", "+0s"], "moves no deadline"),
            (&[], &["forecast", "--orders", "--limit", "0"], "1..=1000"),
            (&[], &["forecast", "--limit", "1"], "--orders"),
            (&[], &["forecast", "--orders", "--after", "nowhere"], "end of a page"),
            (&[], &["forecast", "--orders", "--from", "2030-01-01T00:00:00Z", "--until", "2029-01-01T00:00:00Z"], ""),
            (&[], &["forecast", "--next", "1s"], ""),
            (&[], &["health"], "http.listen"),
            (&["delay.strategy=database"], &["schedule", &id, "--in", "5m"], "no broker"),
            (&["delay.strategy=database"], &["topology"], "no broker"),
            (&own, &["deadline", "--where", "true", "--in", "5m", "--why", "x"], "default orders table"),
            (&own, &["deadline", "1", "--in", "+5m"], "with a sign"),
            (&own, &["schedule", "1"], "--in 30m"),
            (&[], &["pause", "--why", "x", kind[0], kind[1]], "nope"),
            (&[], &["resume", kind[0], kind[1]], "nope"),
            (&[], &["explain", "1", kind[0], kind[1]], "nope"),
            (&[], &["forecast", "--orders", kind[0], kind[1]], "nope"),
            (&[], &["forecast", kind[0], kind[1]], "nope"),
            (&[], &["close", "1", kind[0], kind[1]], "nope"),
            (&[], &["deadline", "1", "--in", "5m", kind[0], kind[1]], "nope"),
            (&[], &["schedule", "1", "--in", "5m", kind[0], kind[1]], "nope"),
            (&[], &["sql", kind[0], kind[1]], "nope"),
            (&[], &["adopt", "--check", kind[0], kind[1]], "nope"),
            (&[], &["audit", kind[0], kind[1]], "nope"),
            (&[], &["adopt", "--accept-backlog", kind[0], kind[1]], "nope"),
        ];
        for (settings, arguments, part) in cases {
            let settings = settings.iter().flat_map(|setting| ["--set", setting]);
            let arguments: Vec<&str> = settings.chain(arguments.iter().copied()).collect();
            let (code, _, stderr) = call(&env, &arguments).await;
            assert!(code == 2 && stderr.contains(part), "{arguments:?}: {code} {stderr}");
        }
    });
}

/// Runs `close --json`, and returns its exit code and its lines as (order id, outcome).
async fn close(env: &TestEnv, ids: &[&str]) -> (i32, Vec<(String, String)>) {
    let (code, stdout, stderr) = call(env, &[&["close", "--json"], ids].concat()).await;
    assert_eq!(stderr, "", "{ids:?}");
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let lines = stdout.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    (code, lines.map(|line| (text(&line["order_id"]), text(&line["outcome"]))).collect())
}

#[test]
fn close_closes_only_overdue_orders() {
    TestEnv::builder().without_broker().run(async |env| {
        let overdue = env.order(Duration::ZERO).await;
        let paid = env.order(Duration::ZERO).await;
        let not_due = env.order(Duration::from_secs(3_600)).await;
        assert!(env.pay(&paid).await);
        let id = |order: &Order| order.id.to_string();
        let outcome_of = |order: &str, outcome: &str| (order.to_owned(), outcome.to_owned());

        assert_eq!(close(&env, &[&id(&overdue)]).await, (0, vec![outcome_of(&id(&overdue), "closed")]));
        assert_eq!(env.count("SELECT count(*) FROM orders WHERE closed_by = 'manual'").await, 1);
        assert_eq!(env.count("SELECT count(*) FROM order_events WHERE event = 'closed' AND by = 'manual'").await, 1);
        assert_eq!(env.count("SELECT count(*) FROM event_outbox").await, 1, "its event will be sent");
        assert_eq!(close(&env, &[&id(&overdue)]).await, (0, vec![outcome_of(&id(&overdue), "already_closed")]));
        assert_eq!(close(&env, &[&id(&paid)]).await, (0, vec![outcome_of(&id(&paid), "paid")]));

        let unknown = Uuid::now_v7().to_string();
        assert_eq!(close(&env, &[&id(&not_due)]).await, (1, vec![outcome_of(&id(&not_due), "not_due")]));
        assert_eq!(close(&env, &[&unknown]).await, (1, vec![outcome_of(&unknown, "unknown")]));
        assert_eq!(
            close(&env, &["'; DROP TABLE orders; --"]).await,
            (1, vec![outcome_of("'; DROP TABLE orders; --", "malformed")])
        );
        assert_eq!(env.status(&not_due).await, "unpaid");
        assert_eq!(env.status(&paid).await, "paid");

        // Several at once: each has an outcome, in the order of the arguments, and those that can be closed are
        // closed.
        let another = env.order(Duration::ZERO).await;
        let asked = [&unknown, &id(&another), &id(&not_due)];
        let (code, answers) = close(&env, &asked.map(String::as_str)).await;
        assert_eq!(
            (code, answers),
            (1, vec![outcome_of(asked[0], "unknown"), outcome_of(asked[1], "closed"), outcome_of(asked[2], "not_due")])
        );
        assert_eq!(env.closed().await, 2);

        // As text.
        let (code, stdout, stderr) = call(&env, &["close", &id(&not_due)]).await;
        assert_eq!((code, stdout, stderr), (1, format!("{}: not_due\n", not_due.id), String::new()));
        env.assert_ledger().await;
    });
}

#[test]
fn topology_prints_definitions_json() {
    let kept =
        std::fs::read_to_string(std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("definitions.json")).unwrap();
    let (code, stdout, stderr) = run(bare().arg("topology"));
    assert_eq!((code, stderr.as_str()), (0, ""));
    assert!(
        stdout.trim_end() == kept.trim_end(),
        "definitions.json is out of date; run `order-timeout topology > definitions.json`"
    );

    let (code, stdout, stderr) = run(bare().args(["topology", "--vhost", "shop", "--set", "namespace=refunds"]));
    assert_eq!((code, stderr.as_str()), (0, ""));
    let renamed =
        kept.replace("order.", "refunds.").replace("order\\\\.", "refunds\\\\.").replace("\"orders\"", "\"shop\"");
    assert_eq!(serde_json::from_str::<Value>(&stdout).unwrap(), serde_json::from_str::<Value>(&renamed).unwrap());
}

#[test]
fn plugin_topology_has_no_delay_queues() {
    let (code, stdout, stderr) = run(bare().args(["topology", "--set", "delay.strategy=delayed-exchange"]));
    assert_eq!((code, stderr.as_str()), (0, ""));
    let definitions: Value = serde_json::from_str(&stdout).unwrap();
    let names = |what: &str| {
        let mut names: Vec<&str> =
            definitions[what].as_array().unwrap().iter().map(|o| o["name"].as_str().unwrap()).collect();
        names.sort_unstable();
        names
    };
    assert_eq!(names("exchanges"), ["order.delayed", "order.due", "order.events", "order.parked", "order.schedule"]);
    assert_eq!(names("queues"), ["order.parked", "order.schedule", "order.timeout"]);
    let delayed = definitions["exchanges"].as_array().unwrap().iter().find(|e| e["name"] == "order.delayed").unwrap();
    assert_eq!(delayed["type"], "x-delayed-message");
    assert_eq!(delayed["arguments"], json!({ "x-delayed-type": "direct" }));
    let bound = |b: &&Value| b["source"] == "order.delayed" && b["destination"] == "order.timeout";
    assert_eq!(definitions["bindings"].as_array().unwrap().iter().filter(bound).count(), 1);
}

#[test]
fn closed_stdout_is_no_crash() {
    let mut child = bare().arg("topology").stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // As `order-timeout topology | head -1` does.
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(!stderr.contains("panicked"), "{stderr}");
}

/// Waits until both queues have a consumer: then the worker is running.
async fn wait_for_consumers(env: &TestEnv) {
    for queue in [env.names().timeout(), env.names().schedule()] {
        wait_for("a consumer", async || consumers(env, &queue).await > 0).await;
    }
}

async fn consumers(env: &TestEnv, queue: &str) -> u32 {
    let channel = env.broker().create_channel().await.unwrap();
    let options = lapin::options::QueueDeclareOptions { passive: true, ..Default::default() };
    channel.queue_declare(queue.into(), options, Default::default()).await.unwrap().consumer_count()
}

#[test]
fn sigterm_returns_held_alarms() {
    let far_enough = Duration::from_secs(60);
    TestEnv::builder().settings(|settings| settings.worker.hold_max = Duration::from_secs(120)).run(async move |env| {
        let worker = WorkerProcess::start(&env.settings);
        wait_for_consumers(&env).await;
        let (soon, later) = (env.order(Duration::from_secs(1)).await, env.order(far_enough).await);
        // As if the delays of both had just ended.
        for order in [&later, &soon] {
            let body = Alarm::new(order.order_id(), order.deadline).to_bytes();
            let properties = BasicProperties::default().with_delivery_mode(2);
            env.publish_raw(&env.names().due(), DUE_KEY, &body, properties).await;
        }
        wait_for("the first order's close", async || env.status(&soon).await == "closed").await;
        let timeout = env.names().timeout();
        wait_for("the worker holding the other alarm", async || env.depth(&timeout).await == 0).await;

        let code = tokio::task::spawn_blocking(|| worker.terminate(TIMEOUT)).await.unwrap();
        assert_eq!(code, 0, "drained within its grace");
        wait_for("the alarm back in the broker", async || env.depth(&timeout).await == 1).await;
        assert_eq!(env.status(&later).await, "unpaid");
        assert_eq!(
            env.count("SELECT count(*) FROM event_outbox WHERE sent_at IS NULL").await,
            0,
            "the close was announced"
        );
        env.assert_ledger().await;
    });
}

#[test]
fn worker_waiting_for_broker_can_be_stopped() {
    TestEnv::builder().run(async |env| {
            let mut settings = env.settings.clone();
            settings.amqp.url = with_parts(&settings.amqp.url, None, Some(&format!("127.0.0.1:{UNUSED_PORT}")), None);
            let worker = WorkerProcess::start(&settings);
            // It handles signals before it opens its first connection.
            let connected = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'order-timeout'";
            wait_for("the worker at the database", async || env.count(connected).await > 0).await;
            let code = tokio::task::spawn_blocking(|| worker.terminate(TIMEOUT)).await.unwrap();
            assert_eq!(code, 0);
        });
}

#[test]
fn second_stop_signal_ends_worker_at_once() {
    TestEnv::builder()
        .settings(|settings| {
            settings.worker.shutdown_grace = Duration::from_secs(300);
            settings.database.statement_timeout = Duration::from_secs(300);
            settings.database.lock_timeout = Duration::from_secs(299);
        })
        .run(async |env| {
            let worker = LoggedWorker::start(&env.settings);
            wait_for("the worker's start", async || worker.has_logged("worker started")).await;
            // While the table is locked, parking a message that is no alarm never finishes.
            let mut lock = env.pool.begin().await.unwrap();
            sqlx::query("LOCK TABLE parked_alarms").execute(&mut *lock).await.unwrap();
            env.publish_raw(&env.names().due(), DUE_KEY, b"no alarm", BasicProperties::default()).await;
            let waiting = "SELECT count(*) FROM pg_locks WHERE relation = 'parked_alarms'::regclass AND NOT granted";
            wait_for("parking that waits for the lock", async || env.count(waiting).await == 1).await;

            worker.signal(Signal::TERM);
            wait_for("the draining", async || worker.has_logged("stopping: accepting nothing new")).await;
            assert_eq!(worker.exit_code(), None, "there is something left to finish");
            worker.signal(Signal::INT);
            wait_promised(Duration::from_secs(20), "the exit", async || worker.exit_code().is_some()).await;
            assert_eq!(worker.exit_code(), Some(1));
            let log = worker.log();
            let last = log.lines().last().unwrap();
            assert!(last.starts_with("order-timeout: ") && last.contains("second signal"), "{log}");
            lock.rollback().await.unwrap();
            // It is not parked, and not lost.
            wait_for("the message back in its queue", async || env.depth(&env.names().timeout()).await == 1).await;
        });
}

/// A worker with a log that the test reads. Killed when dropped.
struct LoggedWorker {
    child: std::sync::Mutex<Child>,
    stderr: tempfile::NamedTempFile,
}

impl LoggedWorker {
    fn start(settings: &Settings) -> Self {
        let stderr = tempfile::NamedTempFile::new().unwrap();
        let mut command = order_timeout(settings);
        command.args(["--set", "log.filter=order_timeout=info", "worker"]);
        let child = command.stdout(Stdio::null()).stderr(stderr.reopen().unwrap()).spawn().unwrap();
        Self { child: child.into(), stderr }
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.stderr.path()).unwrap()
    }

    fn has_logged(&self, text: &str) -> bool {
        self.log().contains(text)
    }

    fn exit_code(&self) -> Option<i32> {
        self.child.lock().unwrap().try_wait().unwrap().map(|status| status.code().unwrap_or(-1))
    }

    fn signal(&self, signal: Signal) {
        linux::signal(self.child.lock().unwrap().id(), signal).unwrap();
    }
}

impl Drop for LoggedWorker {
    fn drop(&mut self) {
        // It has ended already, unless the test has failed.
        if let Ok(child) = self.child.get_mut() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

#[test]
fn setup_reports_exhausted_connections() {
    TestEnv::builder().settings(|settings| settings.amqp.connect_timeout = Duration::from_secs(2)).run(async |env| {
        let network = Proxy::before(&env.settings.amqp.url).await;
        network.admit(1);
        let mut settings = env.settings.clone();
        settings.amqp.url = network.address(&settings.amqp.url);
        let (code, stdout, stderr) = call_with(&settings, &["setup"]).await;
        assert_eq!((code, stdout.as_str()), (1, ""), "{stderr}");
        for part in ["bindings are declared", "takes no further one", "out of file descriptors", "LimitNOFILE"] {
            assert!(stderr.contains(part), "{stderr:?} lacks {part:?}");
        }
    });
}

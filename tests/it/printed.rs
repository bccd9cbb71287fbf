//! What commands print for people and shells: settings with their origins, completions, the manual page, the version; and a
//! deadline that is read from the order's row.

use std::time::Duration;

use clap::CommandFactory;
use order_timeout::cli::Cli;
use order_timeout_core::message::write_rfc3339;
use order_timeout_testkit::TestEnv;
use order_timeout_testkit::process::{bare, call_with, run};
use serde_json::Value;

const PASSWORD: &str = "sesame-4711";

fn printed(arguments: &[&str]) -> String {
    let (code, stdout, stderr) = run(bare().args(arguments));
    assert_eq!((code, stderr.as_str()), (0, ""), "{arguments:?}");
    stdout
}

#[test]
fn config_names_origins_and_hides_passwords() {
    let file = tempfile::Builder::new().suffix(".toml").tempfile().unwrap();
    std::fs::write(file.path(), "[delay]\nlanes = [\"15m\", \"24h\"]\n").unwrap();
    let path = file.path().to_str().unwrap();
    let url = format!("amqp://user:{PASSWORD}@rabbit.example/orders");
    let mut command = bare();
    command.env("ORDER_TIMEOUT__AMQP__URL", &url).args(["--config", path, "--set", "delay.lead=3s", "config"]);
    let (code, stdout, stderr) = run(&mut command);
    assert_eq!((code, stderr.as_str()), (0, ""));
    assert!(!stdout.contains(PASSWORD), "{stdout}");
    let origin = |setting: &str| {
        let line =
            stdout.lines().find(|line| line.starts_with(setting)).unwrap_or_else(|| panic!("{setting}: {stdout}"));
        line.split_once(" # ").unwrap().1.to_owned()
    };
    assert_eq!(origin("delay.lead = \"3s\" "), "--set");
    assert_eq!(origin("delay.lanes = [\"15m\", \"24h\"] "), path);
    assert_eq!(origin("amqp.url = <redacted, server rabbit.example:5672"), "the environment");
    assert_eq!(origin("namespace = \"order\" "), "default");

    let lines = run(command.arg("--json")).1;
    let settings: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!(settings.iter().any(|setting| setting["key"] == "delay.lead" && setting["origin"] == "--set"), "{lines}");
    assert_eq!(settings.len(), stdout.lines().count());
}

#[test]
fn wrong_settings_are_refused_by_config() {
    let (code, stdout, stderr) = run(bare().args(["config", "--set", "delay.lead=soon"]));
    assert_eq!((code, stdout.as_str()), (2, ""));
    assert!(stderr.contains("delay.lead"), "{stderr}");
}

#[test]
fn completions_and_manual_cover_every_command() {
    let (bash, page) = (printed(&["completions", "bash"]), printed(&["man"]));
    for command in Cli::command().get_subcommands() {
        assert!(bash.contains(command.get_name()), "bash does not complete {}", command.get_name());
        assert!(page.contains(command.get_name()), "the manual lacks {}", command.get_name());
    }
    // Nothing of the deployment is needed for either.
    let (code, ..) = run(bare().env("ORDER_TIMEOUT__AMQP__URL", "nonsense").args(["completions", "zsh"]));
    assert_eq!(code, 0);
}

/// A shell, and a program that prints what the shell itself completes: `$1` is the printed script, `$2` a word to wait for, and
/// the rest is typed.
const SHELLS: [(&str, &str); 3] = [
    (
        "bash",
        r#"source "$1"; shift 2
           COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
           completer=$(complete -p order-timeout); completer=${completer#*-F }; completer=${completer%% *}
           "$completer" "$1" "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
           printf '%s\n' "${COMPREPLY[@]}""#,
    ),
    (
        "zsh",
        r#"zmodload zsh/zpty
           zpty shell 'TERM=dumb exec zsh -f -i'
           zpty -w shell "autoload -Uz compinit; compinit -u -D; source $1; print rea''dy"
           zpty -r shell said '*ready*'
           zpty -n -w shell "${*[3,-1]}"$'\t'
           zpty -r shell said "*$2*"
           print -r -- "$said""#,
    ),
    ("fish", r#"source $argv[2]; complete -C (string join ' ' -- $argv[4..-1])"#),
];

#[test]
fn shells_complete_subcommands_and_options() {
    for (shell, program) in SHELLS {
        if std::process::Command::new(shell).arg("--version").output().is_err() {
            let why = format!("{shell} is not installed");
            order_timeout_testkit::skip::skipped("shells_complete_subcommands_and_options", &why);
            continue;
        }
        let script = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(script.path(), printed(&["completions", shell])).unwrap();
        for (words, offered) in [
            (&["order-timeout", "pa"][..], "parked"),
            (&["order-timeout", "parked", ""], "retry"),
            (&["order-timeout", "parked", "retry", "--"], "--reason"),
            (&["order-timeout", "deadline", "--"], "--resume"),
        ] {
            // A shell that does not offer the word waits for it forever.
            let mut typed = std::process::Command::new("timeout");
            typed.args(["30", shell, "-c", program, shell]).arg(script.path()).arg(&offered[1..]).args(words);
            let (code, stdout, stderr) = run(&mut typed);
            let is_offered = stdout.split_whitespace().any(|word| word == offered);
            assert!(is_offered, "{shell} {words:?}: {code} {stdout}{stderr}");
        }
    }
}

#[test]
fn version_begins_with_the_crates() {
    let version = printed(&["--version"]);
    assert!(version.starts_with(concat!("order-timeout ", env!("CARGO_PKG_VERSION"))), "{version}");
}

#[test]
fn schedule_takes_deadline_from_row() {
    TestEnv::builder().run(async |env| {
        let order = env.order(Duration::from_secs(1_800)).await;
        let id = order.id.to_string();
        let (code, stdout, stderr) = call_with(&env.settings, &["schedule", "--json", &id]).await;
        assert_eq!((code, stderr.as_str()), (0, ""));
        let scheduled: Value = serde_json::from_str(&stdout).unwrap();
        assert_eq!(scheduled["deadline"], write_rfc3339(order.deadline));

        let unknown = uuid::Uuid::now_v7().to_string();
        let mut own = env.settings.clone();
        (own.orders.close_sql, own.orders.overdue_sql) = ("a".into(), "b".into());
        for (settings, id, part) in
            [(&env.settings, unknown.as_str(), "there is no order"), (&own, "17", "your own statements")]
        {
            let (code, stdout, stderr) = call_with(settings, &["schedule", id]).await;
            assert_eq!((code, stdout.as_str()), (if id == "17" { 2 } else { 1 }, ""), "{id}");
            assert!(stderr.contains(part) && stderr.contains("--in 30m"), "{stderr}");
        }
    });
}

/// docs/LISTENING.md links to all the listeners that tests/examples runs, and its snippet is what one of them does.
#[test]
fn listening_shows_listener_programs() {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    let document = include_str!("../../docs/LISTENING.md");
    for file in [
        "examples/listeners/python/listen.py",
        "examples/listeners/python/receive.py",
        "examples/listeners/node/listen.mjs",
        "examples/listeners/java/Listen.java",
        "crates/client/examples/listen.rs",
    ] {
        assert!(root.join(file).exists() && document.contains(&format!("](../{file})")), "no link to {file}");
    }
    let program = include_str!("../../examples/listeners/python/listen.py");
    let snippet = document.split("```python\n").nth(1).unwrap().split("```").next().unwrap();
    for line in snippet.lines().filter(|line| line.starts_with("from ") || line.trim_start().starts_with("with ")) {
        let line = line.split("    #").next().unwrap().trim();
        assert!(program.contains(line), "listen.py does it otherwise than docs/LISTENING.md: {line}");
    }
}

/// README calls the alternatives what the measurements say.
#[test]
fn readme_agrees_with_measured_alternatives() {
    let (readme, figures) =
        (include_str!("../../README.md"), include_str!("../../docs/decisions/0053-when-the-broker-is-worth-it.md"));
    for words in ["look-ahead poller", "a tenth of a second"] {
        assert!(readme.contains(words) && figures.contains(words), "{words}");
    }
    assert!(readme.contains("0053-when-the-broker-is-worth-it.md"));
}

#[test]
fn quick_start_sets_no_lanes() {
    let quick_start = include_str!("../../docs/guide/quick-start.md");
    let commands: Vec<&str> = quick_start.split("```").skip(1).step_by(2).collect();
    assert!(commands.len() > 2 && commands.iter().all(|block| !block.contains("LANES")), "{commands:?}");
    let (before, lanes) = quick_start.split_once("DELAY__LANES").expect("how to set them");
    assert!(before.contains("Optional") && !lanes.contains("DELAY__LANES"));
}

//! A secret comes from a file, and is never shown: not in a log at any level, not in an error, not in an answer.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use order_timeout::http::{LIVEZ, METRICS, READYZ};
use order_timeout::worker::Worker;
use order_timeout::{Publisher, Settings};
use secrecy::ExposeSecret;
use sqlx::AssertSqlSafe;
use uuid::Uuid;

use crate::support::away::COMING_BACK;
use crate::support::figures::{get, serve_http};
use crate::support::private::Private;
use crate::support::process::{WorkerProcess, bare, order_timeout, run};
use crate::support::proxy::Proxy;
use crate::support::{RunningWorker, TIMEOUT, TestEnv, wait_for, wait_within, with_env, with_parts};

/// A password, its beginning a word that nothing else contains.
struct Secret {
    word: String,
    password: String,
}

impl Secret {
    fn new() -> Self {
        let word = format!("hunter{}", Uuid::now_v7().simple());
        // So that it is another in an address than in itself.
        Self { password: format!("{word}/ä+%"), word }
    }

    /// As it stands in an address.
    fn encoded(&self) -> String {
        self.password.replace('%', "%25").replace('/', "%2F").replace('ä', "%C3%A4").replace('+', "%2B")
    }

    /// The word as it is (percent-encoding leaves it so), in base64 wherever it begins, in hexadecimal, and as a list of
    /// bytes.
    fn forms(&self) -> Vec<String> {
        let bytes = self.word.as_bytes();
        let hexadecimal: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        let list: Vec<String> = bytes.iter().map(u8::to_string).collect();
        let in_base64 = (0..3).map(|before| {
            let shifted = [&b"xxx"[..before], bytes].concat();
            let text = base64(&shifted);
            // Without the groups that hold something else besides.
            text[if before == 0 { 0 } else { 4 }..text.len() / 4 * 4 - 4].to_owned()
        });
        [self.word.clone(), hexadecimal.to_uppercase(), hexadecimal, list.join(", ")]
            .into_iter()
            .chain(in_base64)
            .collect()
    }

    fn assert_not_in(&self, what: &str, said: &str) {
        for form in self.forms() {
            let place = said.find(&form).map(|at| &said[said[..at].rfind('\n').map_or(0, |end| end + 1)..at]);
            assert!(place.is_none(), "{what} gives the password away as {form:?} behind {place:?}");
        }
    }
}

fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    bytes
        .chunks(3)
        .flat_map(|group| {
            let number =
                group.iter().fold(0, |number, byte| number << 8 | usize::from(*byte)) << (8 * (3 - group.len()));
            (0..4).map(move |digit| char::from(DIGITS[number >> (18 - 6 * digit) & 63]))
        })
        .collect()
}

#[test]
fn the_forms_are_those_of_the_word() {
    let secret = Secret { word: "Many hands make light work".into(), password: String::new() };
    assert_eq!(base64(b"Many hands "), "TWFueSBoYW5kcyAA");
    for said in [
        "x TWFueSBoYW5kcyBtYWtlIGxpZ2h0IHdvcmsu",
        "IE1hbnkgaGFuZHMgbWFrZSBsaWdodCB3b3JrLg==",
        "ICBNYW55IGhhbmRzIG1ha2UgbGlnaHQgd29yay4=",
    ] {
        let found = secret.forms().iter().any(|form| said.contains(form.as_str()));
        assert!(found, "{said} in {:?}", secret.forms());
    }
}

/// Every command with everything logged, where all is well and where something is wrong.
#[test]
fn no_password_is_ever_shown() {
    let secret = Secret::new();
    let broker = Private::broker(&[]);
    broker.ctl(&["add_user", "shop", &secret.password]);
    broker.ctl(&["set_permissions", "-p", "/", "shop", ".*", ".*", ".*"]);
    let user = format!("shop:{}", secret.encoded());
    let address = with_parts(&broker.url.clone().into(), Some(&user), None, None);
    with_env(
        |settings| settings.amqp.url = address,
        async move |env| {
            let role = format!("shop_{}", env.settings.namespace);
            let create = format!("CREATE ROLE {role} LOGIN SUPERUSER PASSWORD '{}'", secret.password);
            sqlx::query(AssertSqlSafe(create)).execute(&env.pool).await.unwrap();
            let user = format!("{role}:{}", secret.encoded());
            let mut settings = env.settings.clone();
            settings.database.url = with_parts(&settings.database.url, Some(&user), None, None);
            let (of_the_test, pool) = (env.clone(), env.pool.clone());
            let outcome = tokio::spawn(async move {
                where_all_is_well(&secret, &settings, &of_the_test).await;
                what_is_printed_for_debugging(&secret, &settings).await;
                what_a_worker_shows(&secret, &settings).await;
                where_something_is_wrong(&secret, &settings).await;
            });
            let outcome = outcome.await;
            sqlx::query(AssertSqlSafe(format!("DROP ROLE {role}"))).execute(&pool).await.unwrap();
            if let Err(error) = outcome {
                std::panic::resume_unwind(error.into_panic());
            }
        },
    );
}

/// Everything that our filters and formats let through.
fn loudest(settings: &Settings, format: &str) -> Command {
    let mut command = order_timeout(settings);
    command.env("RUST_LOG", "trace").env("RUST_BACKTRACE", "full");
    command.args(["--set", "log.filter=trace", "--set", &format!("log.format={format}")]);
    command
}

/// Runs it and looks for the secret; returns what it said.
async fn say(secret: &Secret, mut command: Command, code: i32) -> String {
    let (what, (found, stdout, stderr)) = tokio::task::spawn_blocking(move || {
        let said = run(&mut command);
        (format!("{:?}", command.get_args().collect::<Vec<_>>()), said)
    })
    .await
    .unwrap();
    let said = format!("{stdout}{stderr}");
    secret.assert_not_in(&what, &said);
    assert_eq!(found, code, "{what}: {said}");
    said
}

async fn where_all_is_well(secret: &Secret, settings: &Settings, env: &TestEnv) {
    let (held, closed) = (env.order(Duration::from_secs(6)).await, env.order(Duration::ZERO).await);
    let (held_id, closed_id) = (held.id.to_string(), closed.id.to_string());
    for format in ["human", "json"] {
        for arguments in [
            &["setup"][..],
            &["setup", "--json"],
            &["schedule", "--order-id", &held_id, "--in", "6s"],
            &["schedule", "--order-id", &held_id, "--in", "6s", "--json"],
            &["deadline", "--order-id", &held_id, "--in", "6s"],
            &["deadline", "--order-id", &held_id, "--in", "6s", "--json"],
            &["topology"],
            &["close", &closed_id, "--json"],
            &["parked", "list"],
            &["parked", "list", "--json"],
            &["parked", "retry", "--all", "--yes", "--json"],
            &["parked", "drop", "--all", "--yes", "--json"],
        ] {
            let mut command = loudest(settings, format);
            command.args(arguments);
            say(secret, command, 0).await;
        }
    }
    let mut logs = Vec::new();
    for format in ["human", "json"] {
        logs.push(what_a_worker_logs(secret, settings, env, format).await);
    }
    let said = logs.concat();
    // Otherwise it proves nothing.
    assert!(said.contains("worker started") && said.contains("\"level\":\"DEBUG\""), "{said}");
    assert!(
        !said.contains("TRACE lapin") && !said.contains("\"level\":\"TRACE\",\"fields\":{\"message\":\"send_frame"),
        "{said}"
    );
}

/// Starts a worker, lets it close an order, and stops it.
async fn what_a_worker_logs(secret: &Secret, settings: &Settings, env: &TestEnv, format: &str) -> String {
    let log = tempfile::NamedTempFile::new().unwrap();
    let mut command = loudest(settings, format);
    command.arg("worker").stdout(log.reopen().unwrap()).stderr(log.reopen().unwrap()).stdin(Stdio::null());
    let worker = WorkerProcess::of(&mut command);
    let order = env.order(Duration::from_secs(1)).await;
    env.deliver([&order]).await;
    wait_for("the close", async || env.status(&order).await == "closed").await;
    let ended = tokio::task::spawn_blocking(move || worker.terminate(TIMEOUT)).await.unwrap();
    assert_eq!(ended, 0);
    let said = String::from_utf8_lossy(&std::fs::read(log.path()).unwrap()).into_owned();
    secret.assert_not_in("the worker", &said);
    said
}

/// As `dbg!` and an `unwrap` print it in whatever program embeds the library.
async fn what_is_printed_for_debugging(secret: &Secret, settings: &Settings) {
    let worker = Worker::start(settings.clone()).await.unwrap();
    let publisher = Publisher::connect(settings).await.unwrap();
    for (what, said) in [("Settings", format!("{settings:?}")), ("Publisher", format!("{publisher:?}"))] {
        secret.assert_not_in(what, &said);
    }
    secret.assert_not_in("Worker", &format!("{worker:?}"));
}

/// Its pages, and the command that asks for them, while it is told by one server after the other why it is refused.
async fn what_a_worker_shows(secret: &Secret, settings: &Settings) {
    let (to_broker, to_database) =
        (Proxy::before(&settings.amqp.url).await, Proxy::before(&settings.database.url).await);
    let mut settings = settings.clone();
    serve_http(&mut settings);
    settings.amqp.url = to_broker.address(&settings.amqp.url);
    settings.database.url = to_database.address(&settings.database.url);
    let worker = RunningWorker::start(settings.clone()).await;
    to_broker.cut();
    to_database.cut();
    let lines = async || get(&worker, READYZ).await.1.lines().count();
    wait_for("both servers missed", async || lines().await == 2).await;
    for page in [LIVEZ, READYZ, METRICS] {
        secret.assert_not_in(page, &get(&worker, page).await.1);
    }
    let listen = format!("http.listen={}", worker.http.expect("it is shown"));
    for (arguments, code) in [(&["health"][..], 1), (&["health", "--live"], 0)] {
        let mut command = loudest(&settings, "human");
        command.args(["--set", &listen]).args(arguments);
        say(secret, command, code).await;
    }
    to_broker.restore();
    to_database.restore();
    wait_within(COMING_BACK, "ready again", async || get(&worker, READYZ).await.0 == 200).await;
    worker.stop().await;
}

/// The binary with addresses that lead nowhere, in the sections that this key is not of: should it take a wrong setting
/// after all, it reaches no server of somebody else's.
fn with_nobody_there(key: &str) -> Command {
    let mut command = bare();
    for (section, variable, address) in [
        ("amqp", "ORDER_TIMEOUT__AMQP__URL", "amqp://127.0.0.1:1"),
        ("database", "ORDER_TIMEOUT__DATABASE__URL", "postgres://127.0.0.1:1/none"),
    ] {
        if !key.starts_with(section) {
            command.env(variable, address);
        }
    }
    command
}

async fn where_something_is_wrong(secret: &Secret, settings: &Settings) {
    let amqp = |user: &str, place: Option<&str>| {
        let mut settings = settings.clone();
        settings.amqp.url = with_parts(&settings.amqp.url, Some(user), place, None);
        settings
    };
    let user = format!("shop:{}", secret.encoded());
    let schedule = &["schedule", "--order-id", "1", "--in", "6s"][..];
    let nobody_there = Some("127.0.0.1:1");
    let (wrong_password, no_broker) = (amqp(&format!("{user}x"), None), amqp(&user, nobody_there));
    let mut no_database = settings.clone();
    let role = format!("nobody:{}", secret.encoded());
    no_database.database.url = with_parts(&no_database.database.url, Some(&role), nobody_there, None);
    let mut nobody = no_database.clone();
    nobody.database.url = with_parts(&settings.database.url, Some(&role), None, None);
    for (settings, commands) in [
        (wrong_password, [&["setup"][..], &["worker"], schedule]),
        (no_broker, [&["setup"], &["parked", "retry", "--all", "--yes"], schedule]),
        (no_database, [&["setup"], &["worker"], &["parked", "list", "--json"]]),
        (nobody, [&["setup"], &["worker"], &["close", "1"]]),
    ] {
        for arguments in commands {
            let mut command = loudest(&settings, "human");
            command.args(arguments);
            say(secret, command, 1).await;
        }
    }

    let word = secret.encoded();
    for (key, address) in [
        ("amqp.url", format!("amqp://shop:{word}@host:port/")),
        ("amqp.url", format!("amqps:/shop:{word}@host")),
        // Pieces of it would be host, virtual host and database.
        ("amqp.url", format!("amqp://shop:a@{word}/b@host/")),
        ("amqp.url", format!("amqps://shop:a@{word}?b@host/")),
        ("database.url", format!("postgres://shop:a@{word}#b@host/shop")),
        ("database.url", format!("postgres://shop:a@b/{word}@host/shop")),
        ("amqp.ca_file", format!("amqp://shop:{word}@host")),
        ("amqp.url_file", format!("amqp://shop:{word}@host")),
        ("database.url", format!("postgres://shop:{word}@host:port/shop")),
        ("database.url", format!("postgres://shop@host/shop?passwd={word}")),
        ("database.url", format!("postgres://shop:{word}@host/shop?sslmode=nonsense")),
        ("database.url_file", format!("postgres://shop:{word}@host/shop")),
        ("namespace", format!("amqp://shop:{word}@host")),
    ] {
        for command in ["setup", "worker"] {
            let mut wrong = with_nobody_there(key);
            wrong.args(["--set", &format!("{key}={address}"), command]);
            say(secret, wrong, 2).await;
        }
    }
    let file = |contents: &str| {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), contents).unwrap();
        file
    };
    for contents in
        [format!("http://shop:{word}@host"), format!("amqp://h\nsecond:{word}\n"), format!("[amqp]\nurl = {word}")]
    {
        let held = file(&contents);
        for arguments in [
            ["--set", &format!("amqp.url_file={}", held.path().display())],
            ["--config", held.path().to_str().unwrap()],
        ] {
            let mut wrong = with_nobody_there("amqp.url");
            wrong.args(arguments).arg("worker");
            say(secret, wrong, 2).await;
        }
    }
}

#[test]
fn every_address_can_come_from_a_file() {
    with_env(
        |_| {},
        async |env| {
            let folder = tempfile::tempdir().unwrap();
            let file = |name: &str, contents: &str| {
                std::fs::write(folder.path().join(name), contents).unwrap();
                folder.path().join(name).display().to_string()
            };
            // With the newline that `echo` writes, and without.
            let amqp = file("amqp", &format!("{}\n", env.settings.amqp.url.expose_secret()));
            let database = file("database", env.settings.database.url.expose_secret());
            let order = env.order(Duration::from_secs(60)).await.id.to_string();
            for arguments in [&["setup"][..], &["parked", "list"], &["schedule", "--order-id", &order, "--in", "60s"]] {
                let mut command = order_timeout(&env.settings);
                command.env_remove("ORDER_TIMEOUT__AMQP__URL").env_remove("ORDER_TIMEOUT__DATABASE__URL");
                command.env("ORDER_TIMEOUT__AMQP__URL_FILE", &amqp).env("ORDER_TIMEOUT__DATABASE__URL_FILE", &database);
                // Somebody else's, where we have a name of our own.
                command.env("DATABASE_URL", "mysql://shop@host/shop").args(arguments);
                let (code, stdout, stderr) = tokio::task::spawn_blocking(move || run(&mut command)).await.unwrap();
                assert_eq!(code, 0, "{arguments:?}: {stdout}{stderr}");
            }
            // The library reads the same settings.
            let overrides = [format!("amqp.url_file={amqp}")];
            let mut settings = Settings::load_with_environment(None, Default::default(), &overrides).unwrap();
            settings.namespace = env.settings.namespace.clone();
            settings.delay = env.settings.delay.clone();
            let publisher = order_timeout::Publisher::connect(&settings).await.unwrap();
            publisher.schedule("1", std::time::SystemTime::now() + Duration::from_secs(60)).await.unwrap();
        },
    );
}

#[test]
fn a_secrets_file_that_is_none_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, contents: &[u8]| {
        std::fs::write(folder.path().join(name), contents).unwrap();
        folder.path().join(name).display().to_string()
    };
    let check = |environment: &[(&str, &str)], parts: &[&str]| {
        let (code, stdout, stderr) = run(bare().envs(environment.iter().copied()).arg("worker"));
        assert_eq!((code, stdout.as_str(), stderr.lines().count()), (2, "", 1), "{stderr}");
        for part in parts {
            assert!(stderr.contains(part), "{stderr:?} lacks {part:?}");
        }
    };
    let (amqp, database) = ("ORDER_TIMEOUT__AMQP__URL_FILE", "ORDER_TIMEOUT__DATABASE__URL_FILE");
    for (path, part) in [
        (folder.path().join("missing").display().to_string(), "cannot be read"),
        (folder.path().display().to_string(), "cannot be read"),
        (file("not-text", b"\xff\xfe"), "cannot be read"),
        (file("empty", b""), "is empty"),
        (file("newline", b"\r\n\n"), "is empty"),
        (file("two", b"amqp://h\namqp://h\n"), "more than one line"),
    ] {
        check(&[(amqp, &path)], &["amqp.url_file", "environment", &path, part]);
        check(&[(database, &path)], &["database.url_file", "environment", &path, part]);
    }
    let wrong = file("wrong", b"http://h\n");
    check(&[(amqp, &wrong)], &["amqp.url", &format!("the file {wrong}"), "amqp://"]);
    let good = file("good", b"amqp://h");
    let both = [(amqp, good.as_str()), ("ORDER_TIMEOUT__AMQP__URL", "amqp://h")];
    check(&both, &["amqp.url_file", "amqp.url (from the environment)", "drop one of the two"]);
    assert!(Path::new(&good).exists());
}

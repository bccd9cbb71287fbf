//! Secrets come from files and are never shown: not in a log at any level, not in an error, not on a page.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use order_timeout::Settings;
use order_timeout::http::{LIVEZ, METRICS, READYZ};
use order_timeout::runtime::Worker;
use order_timeout_testkit::figures::{get, serve_http};
use order_timeout_testkit::private::Private;
use order_timeout_testkit::process::{WorkerProcess, bare, order_timeout, run};
use order_timeout_testkit::proxy::Proxy;
use order_timeout_testkit::{RunningWorker, TIMEOUT, TestEnv, wait_for, with_parts};
use secrecy::ExposeSecret;
use sqlx::AssertSqlSafe;
use uuid::Uuid;

/// A password that begins with a word found nowhere else.
struct Secret {
    word: String,
    password: String,
}

impl Secret {
    fn new() -> Self {
        let word = format!("hunter{}", Uuid::now_v7().simple());
        // Its URL encoding differs from the plain password.
        Self { password: format!("{word}/ä+%"), word }
    }

    /// As encoded in a URL.
    fn encoded(&self) -> String {
        self.password.replace('%', "%25").replace('/', "%2F").replace('ä', "%C3%A4").replace('+', "%2B")
    }

    /// The word as it is (percent-encoding does not change it), in base64 at each of the three alignments, in
    /// hexadecimal, and as a list of bytes.
    fn forms(&self) -> Vec<String> {
        let bytes = self.word.as_bytes();
        let hexadecimal: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        let list: Vec<String> = bytes.iter().map(u8::to_string).collect();
        let in_base64 = (0..3).map(|before| {
            let shifted = [&b"xxx"[..before], bytes].concat();
            let text = base64(&shifted);
            // Without the groups that mix in other bytes.
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
            assert!(place.is_none(), "{what} reveals the password as {form:?} after {place:?}");
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
fn secret_is_recognised_in_every_encoding() {
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

/// Runs every command with everything logged, both when all is well and when something fails.
#[test]
fn no_password_is_ever_shown() {
    let secret = Secret::new();
    let broker = Private::broker(&[]);
    broker.ctl(&["add_user", "shop", &secret.password]);
    broker.ctl(&["set_permissions", "-p", "/", "shop", ".*", ".*", ".*"]);
    let user = format!("shop:{}", secret.encoded());
    let address = with_parts(&broker.url.clone().into(), Some(&user), None, None);
    TestEnv::builder().settings(|settings| settings.amqp.url = address).run(async move |env| {
        let role = format!("shop_{}", env.settings.namespace);
        let create = format!("CREATE ROLE {role} LOGIN SUPERUSER PASSWORD '{}'", secret.password);
        sqlx::query(AssertSqlSafe(create)).execute(&env.pool).await.unwrap();
        let user = format!("{role}:{}", secret.encoded());
        let mut settings = env.settings.clone();
        settings.database.url = with_parts(&settings.database.url, Some(&user), None, None);
        let (of_the_test, pool) = (env.clone(), env.pool.clone());
        let outcome = tokio::spawn(async move {
            run_all_successfully(&secret, &settings, &of_the_test).await;
            debug_output(&secret, &settings).await;
            pages_and_health_command(&secret, &settings).await;
            run_with_failures(&secret, &settings).await;
        });
        let outcome = outcome.await;
        sqlx::query(AssertSqlSafe(format!("DROP ROLE {role}"))).execute(&pool).await.unwrap();
        if let Err(error) = outcome {
            std::panic::resume_unwind(error.into_panic());
        }
    });
}

/// The most verbose output that our filters and formats allow.
fn most_verbose(settings: &Settings, format: &str) -> Command {
    let mut command = order_timeout(settings);
    command.env("RUST_LOG", "trace").env("RUST_BACKTRACE", "full");
    command.args(["--set", "log.filter=trace", "--set", &format!("log.format={format}")]);
    command
}

/// Runs the command, checks its output for the secret, and returns the output.
async fn output_of(secret: &Secret, mut command: Command, code: i32) -> String {
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

async fn run_all_successfully(secret: &Secret, settings: &Settings, env: &TestEnv) {
    let (held, closed) = (env.order(Duration::from_secs(6)).await, env.order(Duration::ZERO).await);
    let (held_id, closed_id) = (held.id.to_string(), closed.id.to_string());
    for format in ["human", "json"] {
        for arguments in [
            &["setup"][..],
            &["setup", "--json"],
            &["schedule", &held_id, "--in", "6s"],
            &["schedule", &held_id, "--in", "6s", "--json"],
            &["deadline", &held_id, "--in", "6s"],
            &["deadline", &held_id, "--in", "6s", "--json"],
            &["topology"],
            &["close", &closed_id, "--json"],
            &["parked", "list"],
            &["parked", "list", "--json"],
            &["parked", "retry", "--all", "--yes", "--json"],
            &["parked", "drop", "--all", "--yes", "--json"],
        ] {
            let mut command = most_verbose(settings, format);
            command.args(arguments);
            output_of(secret, command, 0).await;
        }
    }
    let mut logs = Vec::new();
    for format in ["human", "json"] {
        logs.push(worker_log(secret, settings, env, format).await);
    }
    let said = logs.concat();
    // Otherwise the test proves nothing.
    assert!(said.contains("worker started") && said.contains("\"level\":\"DEBUG\""), "{said}");
    assert!(
        !said.contains("TRACE lapin") && !said.contains("\"level\":\"TRACE\",\"fields\":{\"message\":\"send_frame"),
        "{said}"
    );
}

/// Starts a worker, lets it close an order, and stops it.
async fn worker_log(secret: &Secret, settings: &Settings, env: &TestEnv, format: &str) -> String {
    let log = tempfile::NamedTempFile::new().unwrap();
    let mut command = most_verbose(settings, format);
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

/// As `dbg!` and `unwrap` print it in a program that embeds the library.
async fn debug_output(secret: &Secret, settings: &Settings) {
    let worker = Worker::start(settings.clone()).await.unwrap();
    let publisher = settings.publisher().connect().await.unwrap();
    for (what, said) in [("Settings", format!("{settings:?}")), ("Publisher", format!("{publisher:?}"))] {
        secret.assert_not_in(what, &said);
    }
    secret.assert_not_in("Worker", &format!("{worker:?}"));
}

/// The worker's pages and the health command, while both servers are unreachable.
async fn pages_and_health_command(secret: &Secret, settings: &Settings) {
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
    wait_for("the report of both lost servers", async || lines().await == 2).await;
    for page in [LIVEZ, READYZ, METRICS] {
        secret.assert_not_in(page, &get(&worker, page).await.1);
    }
    let listen = format!("http.listen={}", worker.http.expect("it is shown"));
    for (arguments, code) in [(&["health"][..], 1), (&["health", "--live"], 0)] {
        let mut command = most_verbose(&settings, "human");
        command.args(["--set", &listen]).args(arguments);
        output_of(secret, command, code).await;
    }
    to_broker.restore();
    to_database.restore();
    wait_for("ready again", async || get(&worker, READYZ).await.0 == 200).await;
    worker.stop().await;
}

/// The binary with unreachable addresses in all sections other than this key's: should it accept a wrong setting, it
/// still reaches no real server.
fn with_unreachable_servers(key: &str) -> Command {
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

async fn run_with_failures(secret: &Secret, settings: &Settings) {
    let amqp = |user: &str, place: Option<&str>| {
        let mut settings = settings.clone();
        settings.amqp.url = with_parts(&settings.amqp.url, Some(user), place, None);
        settings
    };
    let user = format!("shop:{}", secret.encoded());
    let schedule = &["schedule", "01939f6e-7a3c-7c11-9d1a-6b1f0e2d3c4c", "--in", "6s"][..];
    let unreachable = Some("127.0.0.1:1");
    let (wrong_password, no_broker) = (amqp(&format!("{user}x"), None), amqp(&user, unreachable));
    let mut no_database = settings.clone();
    let role = format!("unknown:{}", secret.encoded());
    no_database.database.url = with_parts(&no_database.database.url, Some(&role), unreachable, None);
    let mut unknown_role = no_database.clone();
    unknown_role.database.url = with_parts(&settings.database.url, Some(&role), None, None);
    for (settings, commands) in [
        (wrong_password, [&["setup"][..], &["worker"], schedule]),
        (no_broker, [&["setup"], &["parked", "retry", "--all", "--yes"], schedule]),
        (no_database, [&["setup"], &["worker"], &["parked", "list", "--json"]]),
        (unknown_role, [&["setup"], &["worker"], &["close", "01939f6e-7a3c-7c11-9d1a-6b1f0e2d3c4c"]]),
    ] {
        for arguments in commands {
            let mut command = most_verbose(&settings, "human");
            command.args(arguments);
            output_of(secret, command, 1).await;
        }
    }

    let word = secret.encoded();
    for (key, address) in [
        ("amqp.url", format!("amqp://shop:{word}@host:port/")),
        ("amqp.url", format!("amqps:/shop:{word}@host")),
        // Parts of it would be parsed as host, virtual host and database.
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
            let mut wrong = with_unreachable_servers(key);
            wrong.args(["--set", &format!("{key}={address}"), command]);
            output_of(secret, wrong, 2).await;
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
            let mut wrong = with_unreachable_servers("amqp.url");
            wrong.args(arguments).arg("worker");
            output_of(secret, wrong, 2).await;
        }
    }
}

#[test]
fn addresses_can_come_from_files() {
    TestEnv::builder().run(async |env| {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str, contents: &str| {
            std::fs::write(folder.path().join(name), contents).unwrap();
            folder.path().join(name).display().to_string()
        };
        // With the newline that `echo` writes, and without.
        let amqp = file("amqp", &format!("{}\n", env.settings.amqp.url.expose_secret()));
        let database = file("database", env.settings.database.url.expose_secret());
        let order = env.order(Duration::from_secs(60)).await.id.to_string();
        for arguments in [&["setup"][..], &["parked", "list"], &["schedule", &order, "--in", "60s"]] {
            let mut command = order_timeout(&env.settings);
            command.env_remove("ORDER_TIMEOUT__AMQP__URL").env_remove("ORDER_TIMEOUT__DATABASE__URL");
            command.env("ORDER_TIMEOUT__AMQP__URL_FILE", &amqp).env("ORDER_TIMEOUT__DATABASE__URL_FILE", &database);
            // A common variable of other programs, which must be ignored in favour of our own.
            command.env("DATABASE_URL", "mysql://shop@host/shop").args(arguments);
            let (code, stdout, stderr) = tokio::task::spawn_blocking(move || run(&mut command)).await.unwrap();
            assert_eq!(code, 0, "{arguments:?}: {stdout}{stderr}");
        }
        // The library reads the same settings.
        let overrides = [format!("amqp.url_file={amqp}")];
        let mut settings = Settings::load_with_environment(None, Default::default(), &overrides).unwrap();
        settings.namespace = env.settings.namespace.clone();
        settings.delay = env.settings.delay.clone();
        let publisher = settings.publisher().connect().await.unwrap();
        publisher.schedule("1", std::time::SystemTime::now() + Duration::from_secs(60)).await.unwrap();
    });
}

#[test]
fn invalid_secrets_file_is_named() {
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

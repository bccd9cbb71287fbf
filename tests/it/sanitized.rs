//! Text from outside controls no terminal and reorders no line, in the log, on a page or on the command line.

use std::fs::File;
use std::time::Duration;

use order_timeout::config::{Listen, LogFormat};
use order_timeout::http::{self, READYZ};
use order_timeout::sanitize::is_hidden;
use order_timeout_testkit::process::{WorkerProcess, call_with, order_timeout};
use order_timeout_testkit::{TIMEOUT, TestEnv, wait_for};
use sqlx::AssertSqlSafe;

/// A trigger that refuses every close with an escape sequence, a change of direction and the order's id.
async fn refuse_with_hidden_characters(env: &TestEnv, sqlstate: &str) {
    let trigger = format!(
        "CREATE OR REPLACE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
             RAISE E'\\x1b[31m\\u202E%\\n\\u2028second \\u009b line', NEW.id USING ERRCODE = '{sqlstate}'; END $$;
         DROP TRIGGER IF EXISTS refuse ON orders;
         CREATE TRIGGER refuse BEFORE UPDATE ON orders FOR EACH ROW EXECUTE FUNCTION refuse()"
    );
    sqlx::raw_sql(AssertSqlSafe(trigger)).execute(&env.pool).await.unwrap();
}

fn assert_visible(text: &str) {
    let hidden = text.chars().find(|character| *character != '\n' && is_hidden(*character));
    assert_eq!(hidden, None, "{text:?}");
}

/// An error's text where it may be shown in full.
const SHOWN: &str = r"\u001b[31m\u202e";

#[test]
fn trigger_text_is_escaped_everywhere() {
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let adjust = move |settings: &mut order_timeout::Settings| {
        settings.http.listen = Listen(Some(free));
        settings.sweep.grace = Duration::ZERO;
    };
    TestEnv::builder().settings(adjust).run(async move |env| {
        for format in [LogFormat::Human, LogFormat::Json] {
            let order = env.order(Duration::ZERO).await;
            let id = order.id.to_string();
            refuse_with_hidden_characters(&env, "25006").await;

            for arguments in [&["close", &id][..], &["close", "--json", &id]] {
                let (code, stdout, stderr) = call_with(&env.settings, arguments).await;
                assert_eq!((code, stderr.as_str(), stdout.lines().count()), (1, "", 1), "{stdout}");
                assert_visible(&stdout);
                let text = if arguments.len() == 3 { r"\u202e" } else { SHOWN };
                assert!(stdout.contains(text) && stdout.contains("second"), "{stdout}");
            }

            let log = tempfile::NamedTempFile::new().unwrap();
            let mut command = order_timeout(&env.settings);
            let word = if format == LogFormat::Json { "json" } else { "human" };
            command.env("ORDER_TIMEOUT__LOG__FORMAT", word).env("ORDER_TIMEOUT__LOG__FILTER", "info");
            let worker = WorkerProcess::of(command.arg("worker").stderr(File::create(log.path()).unwrap()));
            let shown =
                async || http::get(free, READYZ, TIMEOUT).await.map_or_else(|_| String::new(), |(_, text)| text);
            wait_for("a page that says so", async || shown().await.contains("(SQLSTATE 25006)")).await;
            let page = shown().await;
            assert_visible(&page);
            assert!(page.contains("read-only transaction") && !page.contains(&id) && !page.contains("31m"), "{page}");
            let said = async || {
                let text = std::fs::read_to_string(log.path()).unwrap();
                text.contains(&id) && text.contains("(SQLSTATE 25006)")
            };
            wait_for("a log that says so", said).await;
            assert_eq!(worker.terminate(TIMEOUT), 0);
            let log = std::fs::read_to_string(log.path()).unwrap();
            assert_visible(&log);
            assert!(log.contains(r"\u202e"), "{log}");
            sqlx::query("DROP TRIGGER refuse ON orders").execute(&env.pool).await.unwrap();
            let (code, stdout, _) = call_with(&env.settings, &["close", &id]).await;
            assert_eq!(code, 0, "{stdout}");
        }
    });
}

#[test]
fn parked_text_is_escaped_in_table() {
    TestEnv::builder().without_broker().run(async |env| {
        sqlx::query(
            "INSERT INTO parked_alarms (id, reason, detail, order_id, body)
                 VALUES (gen_random_uuid(), 'unreadable', E'\\x1b[2J\\u202Edetail\\nsecond line', E'17\\u200b', '{}')",
        )
        .execute(&env.pool)
        .await
        .unwrap();
        for arguments in [&["parked", "list"][..], &["parked", "list", "--json"]] {
            let (code, stdout, stderr) = call_with(&env.settings, arguments).await;
            assert_eq!((code, stderr.as_str()), (0, ""));
            assert_visible(&stdout);
            assert!(stdout.contains(r"\u200b") && stdout.contains(r"\u202edetail"), "{stdout}");
        }
        let (_, stdout, _) = call_with(&env.settings, &["parked", "list"]).await;
        assert_eq!(stdout.lines().count(), 2, "{stdout}");
    });
}

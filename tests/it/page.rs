//! The page: what it says about a real worker, that it changes nothing for visitors who may not, and that a browser is
//! told to take nothing from elsewhere.

use std::time::Duration;

use order_timeout_testkit::figures::serve_http;
use order_timeout_testkit::page::{TOKEN, with_page};
use order_timeout_testkit::proxy::Proxy;
use order_timeout_testkit::{RunningWorker, TestEnv, wait_for};
use tempfile::NamedTempFile;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::api::{Answer, ask, park};

const SECOND: Duration = Duration::from_secs(1);

async fn get(worker: &RunningWorker, path: &str) -> Answer {
    ask(worker.http.unwrap(), "GET", path, &[], "").await
}

/// A form of the page, as a browser with this cookie sends it.
pub async fn submit(worker: &RunningWorker, path: &str, origin: &str, cookie: &str, form: &str) -> Answer {
    let headers = [("Origin", origin), ("Cookie", cookie), ("Content-Type", "application/x-www-form-urlencoded")];
    ask(worker.http.unwrap(), "POST", path, &headers, form).await
}

pub fn origin(worker: &RunningWorker) -> String {
    format!("http://{}", worker.http.unwrap())
}

/// The cookie of a login.
pub async fn log_in(worker: &RunningWorker) -> String {
    let form = format!("who=night+%3Cshift%3E&token={TOKEN}");
    let answer = submit(worker, "/login", &origin(worker), "", &form).await;
    assert_eq!((answer.status, answer.header("location")), (303, Some("/parked")), "{answer:?}");
    let cookie = answer.header("set-cookie").unwrap();
    for part in ["; Path=/", "; HttpOnly", "; SameSite=Strict"] {
        assert!(cookie.contains(part), "{cookie}");
    }
    cookie.split(';').next().unwrap().to_owned()
}

#[test]
fn status_tells_whether_orders_close() {
    TestEnv::builder().settings(with_page(None)).run(async |env| {
        let worker = env.worker().await;
        wait_for("the verdict", async || get(&worker, "/").await.body.contains("Orders are closed on time.")).await;
        env.orders(3, 90 * SECOND).await;
        env.order(Duration::ZERO).await;
        park(&env, "close_failed", "17", b"{").await;
        for part in ["<strong>3</strong>", "1 order.", "/parked?reason=close_failed", "Read-only", "consumer session"] {
            wait_for(part, async || get(&worker, "/").await.body.contains(part)).await;
        }
        worker.stop().await;

        let late = RunningWorker::start(env.settings.clone()).await;
        let mut locker = env.pool.begin().await.unwrap();
        sqlx::query("LOCK TABLE order_events").execute(&mut *locker).await.unwrap();
        env.orders(2, Duration::ZERO).await;
        let is_late = async || get(&late, "/").await.body.contains("Orders are late: 2 orders are overdue");
        wait_for("the verdict", is_late).await;
        locker.rollback().await.unwrap();
        late.stop().await;
    });
}

#[test]
fn what_waits_is_counted_on_every_page() {
    TestEnv::builder().settings(with_page(None)).run(async |env| {
        let worker = env.worker().await;
        let order = env.order(Duration::ZERO).await;
        let link = format!("href=\"/orders/{}\"", order.id);
        wait_for("the last closes", async || get(&worker, "/").await.body.contains(&link)).await;
        let closed = get(&worker, "/").await.body;
        for part in ["by all workers", " s ago", "Orders are closed on time.", "more worker", "process "] {
            assert_eq!(closed.contains(part), part != "more worker", "{part}: {closed}");
        }
        for number in 0..8 {
            park(&env, "close_failed", &number.to_string(), b"{").await;
        }
        let verdict = "Orders are closed on time, but something waits for a person.";
        wait_for("the verdict", async || get(&worker, "/").await.body.contains(verdict)).await;
        let first = get(&worker, "/").await.body;
        let place = |part: &str| first.find(part).unwrap_or_else(|| panic!("no {part}: {first}"));
        assert!(place("8 parked alarms</a>") < place("close_failed, the oldest for"), "by reason");
        assert!(place("close_failed, the oldest for") < place("id=\"due-order\""), "above the plots");
        for path in ["/", "/forecast", "/parked", "/pauses", "/orders/17", "/login"] {
            let page = get(&worker, path).await.body;
            assert!(page.contains("Parked alarms <span class=\"count\">8</span>"), "{path}: {page}");
            assert!(!page.contains("Late money <span"), "{path}: {page}");
        }
        worker.stop().await;
    });
}

#[test]
fn status_is_shown_without_database() {
    TestEnv::builder().settings(with_page(None)).run(async |env| {
        let to_database = Proxy::before(&env.settings.database.url).await;
        let mut settings = env.settings.clone();
        settings.database.url = to_database.address(&settings.database.url);
        let worker = RunningWorker::start(settings).await;
        wait_for("the verdict", async || get(&worker, "/").await.body.contains("closed on time.")).await;
        to_database.cut();
        let unknown = "It is not known whether orders are closed on time.";
        wait_for("the verdict", async || get(&worker, "/").await.body.contains(unknown)).await;
        let remedy = "No order is closed until then and none is lost";
        assert!(get(&worker, "/").await.body.contains(remedy), "what to do");
        assert_eq!(get(&worker, "/livez").await.body, "alive\n");
        to_database.restore();
        wait_for("the verdict", async || get(&worker, "/").await.body.contains("closed on time.")).await;
        worker.stop().await;
    });
}

#[test]
fn open_page_gets_new_sections() {
    TestEnv::builder().settings(with_page(None)).run(async |env| {
        let worker = env.worker().await;
        let mut stream = TcpStream::connect(worker.http.unwrap()).await.unwrap();
        stream.write_all(b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n").await.unwrap();
        let mut received = String::new();
        let mut wait_for_text = async |text: &str| {
            let read = async {
                while !received.contains(text) {
                    let mut part = vec![0; 65_536];
                    let length = stream.read(&mut part).await.unwrap();
                    assert!(length > 0, "the stream ended: {received}");
                    received.push_str(&String::from_utf8_lossy(&part[..length]));
                }
            };
            tokio::time::timeout(20 * SECOND, read).await.unwrap_or_else(|_| panic!("no {text} came"));
        };
        wait_for_text("text/event-stream").await;
        wait_for_text("event: sections").await;
        park(&env, "close_failed", "17", b"{").await;
        // Longer than any other request may last.
        wait_for_text("/parked?reason=close_failed").await;
        worker.stop().await;
    });
}

#[test]
fn browsers_take_nothing_from_elsewhere() {
    TestEnv::builder().settings(with_page(None)).run(async |env| {
        let worker = env.worker().await;
        for path in [
            "/",
            "/forecast",
            "/parked",
            "/late",
            "/unresolved",
            "/pauses",
            "/orders/17",
            "/login",
            "/nothing",
            "/assets/page.css",
            "/api/v1/status",
        ] {
            let answer = get(&worker, path).await;
            let policy = answer.header("content-security-policy").unwrap();
            assert!(policy.starts_with("default-src 'none'") && policy.contains("frame-ancestors 'none'"), "{policy}");
            assert!(!policy.contains("unsafe") && !policy.contains("http"), "{policy}");
            for (name, value) in [
                ("x-content-type-options", "nosniff"),
                ("referrer-policy", "same-origin"),
                ("cache-control", "no-store"),
                ("x-frame-options", "DENY"),
            ] {
                assert_eq!(answer.header(name), Some(value), "{path}");
            }
            // What the policy would refuse.
            for refused in ["<style", " style=", " onclick=", "<script>", "src=\"http", "href=\"http"] {
                assert!(!answer.body.contains(refused), "{path} has {refused}");
            }
        }
        assert_eq!(get(&worker, "/readyz").await.header("content-security-policy"), None, "as before");
        worker.stop().await;
    });
}

#[test]
fn foreign_text_never_becomes_markup() {
    let file = NamedTempFile::new().unwrap();
    TestEnv::builder().settings(with_page(Some(&file))).run(async |env| {
        let worker = env.worker().await;
        let attack = "\"><script>alert(1)</script>\u{202e}";
        let insert = "INSERT INTO parked_alarms (reason, detail, order_id, body) VALUES ('unreadable', $1, $1, '')";
        sqlx::query(insert).bind(attack).execute(&env.pool).await.unwrap();
        let cookie = log_in(&worker).await;
        let encoded: String = url::form_urlencoded::byte_serialize(attack.as_bytes()).collect();
        for path in [
            "/parked".to_owned(),
            format!("/forecast?text={encoded}"),
            format!("/orders/{}", encoded.replace('+', "%20")),
        ] {
            let answer = ask(worker.http.unwrap(), "GET", &path, &[("Cookie", &cookie)], "").await;
            assert!(
                answer.body.contains("&lt;script&gt;alert(1)") && answer.body.contains("\\u202e"),
                "{path}: {answer:?}"
            );
            assert!(!answer.body.contains("<script>") && !answer.body.contains('\u{202e}'), "{path}");
            assert!(answer.body.contains("night &lt;shift&gt;"), "{path}");
        }
        worker.stop().await;
    });
}

#[test]
fn order_is_found_with_its_story() {
    TestEnv::builder().settings(with_page(None)).run(async |env| {
        let worker = env.worker().await;
        let order = env.order(3_600 * SECOND).await;
        let found = get(&worker, &format!("/orders?id=+{}+", order.id)).await;
        assert_eq!(found.header("location").unwrap(), format!("/orders/{}", order.id));
        let story = get(&worker, found.header("location").unwrap()).await;
        for part in [
            "It is unpaid; its deadline is",
            "Why it is open",
            "What to do",
            "<span>now</span>",
            "the table that says so",
        ] {
            assert!(story.body.contains(part), "lacks {part}: {}", story.body);
        }
        let none = get(&worker, "/orders/17").await;
        assert!(none.status == 404 && none.body.contains("There is no such order."), "{none:?}");
        let listed = get(&worker, &format!("/forecast?text={}", order.id)).await;
        assert!(listed.body.contains(&format!("href=\"/orders/{}\"", order.id)), "{listed:?}");
        worker.stop().await;
    });
}

#[test]
fn changes_need_login_and_own_form() {
    let file = NamedTempFile::new().unwrap();
    TestEnv::builder().settings(with_page(Some(&file))).run(async |env| {
        let worker = env.worker().await;
        let order = env.order(SECOND).await;
        let (id, kept) = (
            park(&env, "close_failed", &order.id.to_string(), &order.body()).await,
            park(&env, "unreadable", "17", b"{").await,
        );
        let form = format!("id={id}&id={kept}&why=rule+7");
        let own = origin(&worker);
        let cookie = log_in(&worker).await;
        let page = ask(worker.http.unwrap(), "GET", "/parked", &[("Cookie", &cookie)], "").await;
        assert!(page.body.contains("formaction=\"/parked/retry\"") && page.body.contains(&id.to_string()), "{page:?}");

        assert_eq!(submit(&worker, "/parked/drop", &own, "", &form).await.status, 401, "no cookie");
        assert_eq!(submit(&worker, "/parked/drop", &own, "order_timeout_session=guess", &form).await.status, 401);
        for foreign in ["http://evil.example", "null", "http://127.0.0.1"] {
            assert_eq!(submit(&worker, "/parked/drop", foreign, &cookie, &form).await.status, 403, "{foreign}");
            assert_eq!(submit(&worker, "/logout", foreign, &cookie, "").await.status, 403, "{foreign}");
            assert_eq!(submit(&worker, "/login", foreign, "", &format!("who=a&token={TOKEN}")).await.status, 403);
        }
        assert_eq!(submit(&worker, "/parked/drop", &own, &cookie, "why=rule+7").await.status, 400, "none was chosen");
        assert_eq!(submit(&worker, "/parked/drop", &own, &cookie, &format!("id={id}&why=+")).await.status, 400);
        assert_eq!(env.count("SELECT count(*) FROM parked_alarms").await, 2, "nothing was changed");

        let retried = submit(&worker, "/parked/retry", &own, &cookie, &form).await;
        assert_eq!(retried.header("location"), Some("/parked?sent=1&kept=1"), "{retried:?}");
        let dropped = submit(&worker, "/parked/drop", &own, &cookie, &form).await;
        assert_eq!(dropped.header("location"), Some("/parked?dropped=1"), "{dropped:?}");
        wait_for("the close", async || env.status(&order).await == "closed").await;
        let who: Vec<String> = sqlx::query_scalar("SELECT DISTINCT who || ': ' || why FROM operator_actions")
            .fetch_all(&env.pool)
            .await
            .unwrap();
        assert_eq!(who, ["night <shift>: rule 7"]);

        assert_eq!(submit(&worker, "/logout", &own, &cookie, "").await.status, 303);
        assert_eq!(submit(&worker, "/parked/drop", &own, &cookie, &form).await.status, 401, "the session has ended");
        worker.stop().await;
    });
}

#[test]
fn login_leads_back_to_own_pages_only() {
    let file = NamedTempFile::new().unwrap();
    TestEnv::builder().settings(with_page(Some(&file))).run(async |env| {
        let worker = env.worker().await;
        assert!(get(&worker, "/pauses").await.body.contains("href=\"/login?to=/pauses\""));
        for (to, page) in [
            ("/", "/"),
            ("/pauses", "/pauses"),
            ("/parked?reason=close_failed", "/parked?reason=close_failed"),
            ("/parked?reason=https://elsewhere.example", "/parked"),
            ("//elsewhere.example", "/parked"),
            ("https://elsewhere.example/pauses", "/parked"),
        ] {
            let encoded: String = url::form_urlencoded::byte_serialize(to.as_bytes()).collect();
            let login = get(&worker, &format!("/login?to={encoded}")).await.body;
            assert!(login.contains(&format!("name=\"to\" value=\"{page}\"")), "{to}: {login}");
            let form = format!("who=a&token={TOKEN}&to={encoded}");
            let answer = submit(&worker, "/login", &origin(&worker), "", &form).await;
            assert_eq!((answer.status, answer.header("location")), (303, Some(page)), "{to}");
        }
        worker.stop().await;
    });
}

#[test]
fn odd_addresses_are_answered_with_pages() {
    TestEnv::builder().settings(with_page(None)).run(async |env| {
        let worker = env.worker().await;
        for (method, path, status, part) in [
            ("GET", "/parked/retry", 405, "go to the page with the form"),
            ("PUT", "/", 405, "PUT is not possible here"),
            ("GET", "/orders/%ff", 400, "percent-encode the id"),
            ("GET", "/forecast?text=%00", 400, "NUL character"),
            ("GET", "/unresolved?after=%00", 400, "control character"),
            ("GET", "/nothing", 404, "there is no such page"),
        ] {
            let answer = ask(worker.http.unwrap(), method, path, &[], "").await;
            assert_eq!(answer.status, status, "{path}: {answer:?}");
            assert!(answer.body.contains(part) && answer.body.contains("<h1>"), "{path}: {answer:?}");
        }
        worker.stop().await;
    });
}

#[test]
fn all_alarms_of_reason_are_retried() {
    let file = NamedTempFile::new().unwrap();
    TestEnv::builder().settings(with_page(Some(&file))).run(async |env| {
        let worker = env.worker().await;
        for _ in 0..3 {
            let order = env.order(3_600 * SECOND).await;
            park(&env, "close_failed", &order.id.to_string(), &order.body()).await;
        }
        park(&env, "unreadable", "17", b"{").await;
        let cookie = log_in(&worker).await;
        let headers = [("Cookie", cookie.as_str())];
        let page = ask(worker.http.unwrap(), "GET", "/parked?reason=close_failed", &headers, "").await;
        assert!(page.body.contains("name=\"reason\" value=\"close_failed\""), "{page:?}");
        let own = origin(&worker);
        let retried = submit(&worker, "/parked/retry", &own, &cookie, "why=rule+7&reason=close_failed").await;
        assert_eq!(retried.header("location"), Some("/parked?sent=3&kept=0"), "{retried:?}");
        assert_eq!(env.count("SELECT count(*) FROM parked_alarms").await, 1);
        worker.stop().await;
    });
}

#[test]
fn wrong_logins_lock_nothing() {
    let file = NamedTempFile::new().unwrap();
    TestEnv::builder().settings(with_page(Some(&file))).run(async |env| {
        let worker = env.worker().await;
        let own = origin(&worker);
        for _ in 0..12 {
            let refused = submit(&worker, "/login", &own, "", "who=a&token=guess").await;
            assert!(refused.status == 401 && refused.header("set-cookie").is_none(), "{refused:?}");
            assert!(refused.body.contains("the token is wrong") && !refused.body.contains("guess"), "{refused:?}");
        }
        log_in(&worker).await;
        worker.stop().await;
    });
}

#[test]
fn worker_with_bad_token_does_not_start() {
    let file = NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "short\n").unwrap();
    let path = file.path().to_str().unwrap().to_owned();
    TestEnv::builder().settings(serve_http).run(async move |env| {
        let mut settings = env.settings.clone();
        (settings.http.page, settings.http.token_file) = (true, path);
        let fault = order_timeout::Worker::start(settings).await.map(drop).unwrap_err().to_string();
        assert!(fault.starts_with("http.token_file: ") && fault.contains("openssl rand -hex 32"), "{fault}");
    });
}

#[test]
fn open_pages_do_not_starve_probes() {
    TestEnv::builder().settings(with_page(None)).run(async |env| {
        let worker = env.worker().await;
        let mut streams = Vec::new();
        for _ in 0..300 {
            let mut stream = TcpStream::connect(worker.http.unwrap()).await.unwrap();
            stream.write_all(b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n").await.unwrap();
            streams.push(stream);
        }
        for _ in 0..5 {
            let probe = order_timeout::http::get(worker.http.unwrap(), "/livez", SECOND).await;
            assert_eq!(probe.expect("an answer within a second"), (200, "alive\n".into()));
        }
        worker.stop().await;
    });
}

//! The API answers as `docs/openapi.yaml` says, changes nothing without the token, and records who changed what and why.
//! Its errors name the fix.

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use order_timeout::Settings;
use order_timeout_testkit::figures::serve_http;
use order_timeout_testkit::page::{TOKEN, with_page};
use order_timeout_testkit::{RunningWorker, TIMEOUT, TestEnv, wait_for};
use serde_json::{Value, json};
use tempfile::NamedTempFile;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use uuid::Uuid;

const SECOND: Duration = Duration::from_secs(1);

/// What a server answered.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    /// The head as text, with its names in lower case.
    pub head: String,
    pub body: String,
}

impl Answer {
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|fault| panic!("{fault}: {self:?}"))
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        self.head.lines().find_map(|line| line.strip_prefix(&format!("{name}: ")))
    }

    /// The detail of an error.
    pub fn problem(&self) -> String {
        assert_eq!(self.header("content-type"), Some("application/problem+json"), "{self:?}");
        assert_eq!(self.json()["status"], self.status);
        self.json()["detail"].as_str().unwrap().to_owned()
    }
}

/// One request on a connection of its own, as bytes.
pub async fn ask(to: SocketAddr, method: &str, path: &str, headers: &[(&str, &str)], body: &str) -> Answer {
    let given: String = headers.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
    let host = if headers.iter().any(|(name, _)| *name == "Host") { String::new() } else { format!("Host: {to}\r\n") };
    let length = body.len();
    let request = format!("{method} {path} HTTP/1.1\r\n{host}{given}Content-Length: {length}\r\n\r\n{body}");
    let exchange = async {
        let mut stream = TcpStream::connect(to).await.unwrap();
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).await.unwrap();
        String::from_utf8(answer).unwrap()
    };
    let answer = tokio::time::timeout(TIMEOUT, exchange).await.expect("an answer in time");
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no head: {answer}"));
    let (status, fields) = head.split_once("\r\n").unwrap();
    let lower = |line: &str| line.split_once(": ").map(|(name, value)| format!("{}: {value}", name.to_lowercase()));
    let head = fields.lines().filter_map(lower).collect::<Vec<_>>().join("\n");
    let chunked = head.contains("transfer-encoding: chunked");
    assert!(!chunked, "answers have a length: {head}");
    Answer { status: status.split(' ').nth(1).unwrap().parse().unwrap(), head, body: body.to_owned() }
}

pub async fn get(worker: &RunningWorker, path: &str) -> Answer {
    ask(worker.http.unwrap(), "GET", path, &[], "").await
}

pub async fn post(worker: &RunningWorker, path: &str, token: &str, body: &Value) -> Answer {
    let headers = [("Authorization", &format!("Bearer {token}")[..]), ("Content-Type", "application/json")];
    ask(worker.http.unwrap(), "POST", path, &headers, &body.to_string()).await
}

pub async fn park(env: &TestEnv, reason: &str, order_id: &str, body: &[u8]) -> Uuid {
    let insert =
        "INSERT INTO parked_alarms (reason, detail, order_id, body) VALUES ($1, 'for the test', $2, $3) RETURNING id";
    sqlx::query_scalar(insert).bind(reason).bind(order_id).bind(body).fetch_one(&env.pool).await.unwrap()
}

#[test]
fn description_matches_routes_and_types() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/openapi.yaml");
    let generated = "# The API below /api/v1, for clients: generated from src/http/api/ by the test api::description_matches_routes_and_types\n\
                     # with UPDATE_OPENAPI=1, and compared with it by the same test.\n"
        .to_owned()
        + &order_timeout::http::openapi().to_yaml().unwrap();
    if std::env::var_os("UPDATE_OPENAPI").is_some() {
        std::fs::write(&path, &generated).unwrap();
    }
    let kept = std::fs::read_to_string(&path).unwrap();
    assert!(kept == generated, "docs/openapi.yaml differs from src/http/api/; write it with UPDATE_OPENAPI=1");
}

/// Every property of an object is described.
fn assert_described(value: &Value, schema: &Value, schemas: &Value, at: &str) {
    let schema = match schema["$ref"].as_str() {
        Some(name) => &schemas[name.rsplit('/').next().unwrap()],
        None => schema,
    };
    if let Some(parts) = schema["allOf"].as_array().or_else(|| schema["oneOf"].as_array()) {
        let Value::Object(fields) = value else { return };
        let described = |name: &String| {
            parts.iter().any(|part| {
                let part = part["$ref"].as_str().map_or(part, |name| &schemas[name.rsplit('/').next().unwrap()]);
                part["properties"].get(name).is_some()
            })
        };
        assert!(fields.keys().all(described), "{at}: {value} against {schema}");
        return;
    }
    match value {
        Value::Object(fields) => {
            for (name, value) in fields {
                let described = &schema["properties"][name];
                assert!(!described.is_null(), "{at}.{name} is not described: {schema}");
                assert_described(value, described, schemas, &format!("{at}.{name}"));
            }
            for name in schema["required"].as_array().into_iter().flatten() {
                assert!(fields.contains_key(name.as_str().unwrap()), "{at} lacks {name}: {value}");
            }
        }
        Value::Array(items) => {
            items.iter().for_each(|item| assert_described(item, &schema["items"], schemas, &format!("{at}[]")));
        }
        _ => {}
    }
}

#[test]
fn answers_match_their_description() {
    TestEnv::builder().settings(with_page(None)).run(async |env| {
        let worker = env.worker().await;
        let (order, early) = (env.order(Duration::ZERO).await, env.order(3_600 * SECOND).await);
        env.write_alarm(&early).await;
        park(&env, "close_failed", &early.id.to_string(), b"{").await;
        wait_for("the close", async || env.closed().await == 1).await;
        let api = serde_json::to_value(order_timeout::http::openapi()).unwrap();
        let mut asked = 0;
        for (path, operations) in api["paths"].as_object().unwrap() {
            let Some(schema) = operations["get"]["responses"]["200"]["content"]["application/json"].get("schema")
            else {
                continue;
            };
            for id in [order.id, early.id] {
                let answer = get(&worker, &path.replace("{order_id}", &id.to_string())).await;
                assert_eq!(
                    (answer.status, answer.header("content-type")),
                    (200, Some("application/json")),
                    "{path}: {answer:?}"
                );
                assert_described(&answer.json(), schema, &api["components"]["schemas"], path);
            }
            asked += 1;
        }
        assert_eq!(asked, 8);
        worker.stop().await;
    });
}

#[test]
fn api_answers_like_commands() {
    TestEnv::builder().settings(with_page(None)).run(async |env| {
        let worker = env.worker().await;
        let order = env.order(90 * SECOND).await;
        let status = get(&worker, "/api/v1/status").await.json();
        assert_eq!(status["kinds"][0]["overdue"]["orders"], 0);
        let told = get(&worker, &format!("/api/v1/orders/{}", order.id)).await.json();
        assert!(told["open"]["because"].as_str().unwrap().contains("its deadline is in 1m"), "{told}");
        let none = get(&worker, &format!("/api/v1/orders/{}", Uuid::now_v7())).await;
        assert_eq!((none.status, &none.json()["exists"]), (200, &json!(false)));
        let listed = get(&worker, "/api/v1/forecast/orders?limit=1").await.json();
        assert_eq!(listed["orders"][0]["order_id"], order.id.to_string());
        let next = listed["next"].as_str().unwrap();
        let next = get(&worker, &format!("/api/v1/forecast/orders?limit=1&after={next}")).await.json();
        assert_eq!(next["orders"], json!([]));
        assert_eq!(get(&worker, "/api/v1/forecast?next=10m").await.json()["total"]["orders"], 1);
        worker.stop().await;
    });
}

#[test]
fn errors_name_the_fix() {
    TestEnv::builder().settings(with_page(None)).run(async |env| {
        let worker = env.worker().await;
        for (path, status, fix) in [
            ("/api/v1/forecast/orders?limit=0", 400, "ask for 1 to 1000"),
            ("/api/v1/forecast/orders?limit=many", 400, "lists the parameters"),
            ("/api/v1/forecast/orders?colour=red", 400, "unknown field"),
            ("/api/v1/forecast/orders?from=yesterday", 400, "RFC 3339"),
            ("/api/v1/forecast/orders?until=", 400, "RFC 3339"),
            ("/api/v1/forecast/orders?text=%00", 400, "NUL character"),
            ("/api/v1/unresolved?after=%00", 400, "control character"),
            ("/api/v1/forecast?next=5", 400, "such as 30m or 6h"),
            ("/api/v1/forecast?next=9d", 400, "ask for 1m to 7d"),
            ("/api/v1/parked?reason=bored", 400, "give one of"),
            ("/api/v1/parked?after=01939f6e-7a3c-7c11-9d1a-6b1f0e2d3c4b", 404, "list from the beginning"),
            ("/api/v1/forecast/orders?after=17", 404, "`next` of the page before"),
            ("/api/v1/forecast/orders?until=2020-01-01T00:00:00Z", 409, "give a later end"),
            ("/api/v1/forecast/orders?kind=nope", 404, "give one of order"),
            ("/api/v1/orders/%0a", 400, "control character"),
            ("/api/v1/nothing", 404, "docs/openapi.yaml"),
            ("/api/v1/parked/drop", 405, "docs/openapi.yaml"),
        ] {
            let answer = get(&worker, path).await;
            assert_eq!(answer.status, status, "{path}: {answer:?}");
            assert!(answer.problem().contains(fix), "{path}: {answer:?}");
        }
        let hidden = get(&worker, "/api/v1/forecast/orders?from=%E2%80%AE%3Cscript%3E").await;
        assert!(hidden.problem().contains("\\u202e"), "{hidden:?}");
        worker.stop().await;
    });
}

#[test]
fn changes_need_token_and_reason() {
    let file = NamedTempFile::new().unwrap();
    TestEnv::builder().settings(with_page(Some(&file))).run(async |env| {
        let worker = env.worker().await;
        let order = env.order(SECOND).await;
        let (id, other) = (
            park(&env, "close_failed", &order.id.to_string(), &order.body()).await,
            park(&env, "unreadable", "17", b"{").await,
        );
        let change = json!({ "ids": [id], "who": "night shift", "why": "rule <7> was wrong" });
        for token in ["", "wrong", &TOKEN[1..]] {
            let answer = post(&worker, "/api/v1/parked/retry", token, &change).await;
            assert_eq!((answer.status, answer.header("www-authenticate")), (401, Some("Bearer")), "{answer:?}");
            assert!(answer.problem().contains("http.token_file"), "{answer:?}");
        }
        for (bad, fix) in [
            (json!({ "ids": [id], "all": true, "who": "a", "why": "b" }), "exactly one of"),
            (json!({ "ids": [], "who": "a", "why": "b" }), "give 1 to 1000"),
            (json!({ "ids": null, "all": true, "who": "a", "why": "b" }), "invalid type: null"),
            (json!({ "reason": "unreadable", "all": false, "who": "a", "why": "b" }), "it must be true"),
            (json!({ "all": true, "who": " ", "why": "b" }), "who: it is empty"),
            (json!({ "all": true, "who": "a" }), "missing field `why`"),
            (json!({ "reason": "bored", "who": "a", "why": "b" }), "give one of"),
        ] {
            let answer = post(&worker, "/api/v1/parked/drop", TOKEN, &bad).await;
            assert!(answer.status == 400 && answer.problem().contains(fix), "{bad}: {answer:?}");
        }
        assert_eq!(env.count("SELECT count(*) FROM parked_alarms").await, 2, "nothing was changed");

        assert_eq!(
            post(&worker, "/api/v1/parked/retry", TOKEN, &change).await.json(),
            json!({ "retried": 1, "kept": [] })
        );
        let all = json!({ "all": true, "who": "day shift", "why": "all read" });
        let kept = post(&worker, "/api/v1/parked/retry", TOKEN, &all).await.json();
        assert_eq!((&kept["retried"], &kept["kept"][0]["id"]), (&json!(0), &json!(other)));
        assert_eq!(post(&worker, "/api/v1/parked/drop", TOKEN, &all).await.json(), json!({ "dropped": 1 }));
        wait_for("the close", async || env.status(&order).await == "closed").await;
        worker.stop().await;
        let recorded: Vec<(String, String, String)> =
            sqlx::query_as("SELECT action, who, why FROM operator_actions ORDER BY id")
                .fetch_all(&env.pool)
                .await
                .unwrap();
        let recorded: Vec<_> = recorded.iter().map(|(a, who, why)| (a.as_str(), who.as_str(), why.as_str())).collect();
        let expected =
            [("parked_retried", "night shift", "rule <7> was wrong"), ("parked_dropped", "day shift", "all read")];
        assert_eq!(recorded, expected);
        env.assert_ledger().await;
    });
}

/// A limit would lock out those who have the token, and share an address with a client that has not.
#[test]
fn wrong_tokens_lock_nothing() {
    let file = NamedTempFile::new().unwrap();
    TestEnv::builder().settings(with_page(Some(&file))).run(async |env| {
        let worker = env.worker().await;
        let change = json!({ "all": true, "who": "a", "why": "b" });
        for token in ["wrong", ""].repeat(15) {
            assert_eq!(post(&worker, "/api/v1/parked/drop", token, &change).await.status, 401);
        }
        // The scheme in any case.
        let authorization = format!("bearer {TOKEN}");
        let headers = [("Content-Type", "application/json"), ("Authorization", authorization.as_str())];
        let answer = ask(worker.http.unwrap(), "POST", "/api/v1/parked/drop", &headers, &change.to_string()).await;
        assert_eq!(answer.json(), json!({ "dropped": 0 }));
        worker.stop().await;
    });
}

#[test]
fn other_hosts_read_nothing() {
    let hosts = |settings: &mut Settings| settings.http.hosts = vec!["ops.example".to_owned().try_into().unwrap()];
    TestEnv::builder().settings(with_page(None)).settings(hosts).run(async |env| {
        let worker = env.worker().await;
        let to = worker.http.unwrap();
        let status = async |path: &str, headers: &[(&str, &str)]| ask(to, "GET", path, headers, "").await.status;
        for path in
            ["/", "/parked", "/live", "/orders/17", "/nothing", "/assets/page.css", "/api/v1/status", "/api/v1/no"]
        {
            for host in ["evil.example", "evil.example:9394", "127.0.0.1.evil.example", "192.0.2.7", ""] {
                let answer = ask(to, "GET", path, &[("Host", host)], "").await;
                assert_eq!(answer.status, 421, "{path} {host}: {answer:?}");
                assert!(answer.problem().contains("add the name to http.hosts"), "{answer:?}");
            }
        }
        for host in ["127.0.0.1", "LOCALHOST:80", "localhost.", "[::1]:9394", "ops.example", "OPS.example.:443"] {
            assert_eq!(status("/api/v1/status", &[("Host", host)]).await, 200, "{host}");
        }
        // What a proxy adds decides nothing.
        let forwarded = |host| [("Host", host), ("X-Forwarded-Host", "localhost"), ("Forwarded", "host=localhost")];
        assert_eq!(status("/api/v1/status", &forwarded("evil.example")).await, 421);
        assert_eq!(status("http://evil.example/api/v1/status", &[("Host", "localhost")]).await, 421);
        assert_eq!(status("http://localhost/api/v1/status", &[("Host", "localhost")]).await, 200);
        assert_eq!(status("/api/v1/status", &[("Host", "localhost"), ("Host", "evil.example")]).await, 421);
        // By the address of a pod, or the name of a service.
        for path in ["/livez", "/readyz", "/closingz", "/metrics"] {
            wait_for(path, async || status(path, &[("Host", "order-timeout.shop.svc:9394")]).await == 200).await;
        }
        worker.stop().await;
    });
}

/// What is stored is data, and comes back as it was; its bytes show nothing hidden.
#[test]
fn hidden_characters_are_escaped_in_json() {
    let file = NamedTempFile::new().unwrap();
    TestEnv::builder().settings(with_page(Some(&file))).run(async |env| {
        let worker = env.worker().await;
        let odd = "night\u{202e} \u{7f}\u{200b}shift";
        park(&env, "unreadable", odd, format!("{{{odd}").as_bytes()).await;
        let pause = json!({ "who": odd, "why": odd });
        assert_eq!(post(&worker, "/api/v1/pauses", TOKEN, &pause).await.status, 200);
        for (path, places) in [
            ("/api/v1/parked", &["/rows/0/order_id", "/rows/0/body"][..]),
            ("/api/v1/pauses", &["/lasting/0/paused_by", "/lasting/0/reason"]),
            ("/api/v1/status", &["/paused/0/paused_by"]),
        ] {
            let answer = get(&worker, path).await;
            let is_hidden = |character: char| character != '\n' && order_timeout::sanitize::is_hidden(character);
            assert!(
                answer.body.contains("night\\u202e \\u007f\\u200bshift") && !answer.body.contains(is_hidden),
                "{answer:?}"
            );
            let json = answer.json();
            let told =
                |place: &&str| json.pointer(place).and_then(Value::as_str).is_some_and(|text| text.ends_with(odd));
            assert!(places.iter().all(told), "{json}");
        }
        worker.stop().await;
    });
}

/// A client that sends the head of a request for a change, and keeps its body.
#[test]
fn denied_requests_need_no_body() {
    let file = NamedTempFile::new().unwrap();
    TestEnv::builder().settings(with_page(Some(&file))).run(async |env| {
        let worker = env.worker().await;
        for (path, content_type) in [
            ("/api/v1/parked/retry", "application/json"),
            ("/api/v1/pauses", "application/json"),
            ("/parked/retry", "application/x-www-form-urlencoded"),
            ("/pauses", "application/x-www-form-urlencoded"),
        ] {
            let head = format!(
                "POST {path} HTTP/1.1\r\nHost: localhost\r\nOrigin: http://localhost\r\nContent-Type: {content_type}\r\n\
                 Content-Length: 60000\r\n\r\n"
            );
            let exchange = async {
                let mut stream = TcpStream::connect(worker.http.unwrap()).await.unwrap();
                stream.write_all(head.as_bytes()).await.unwrap();
                let mut begin = [0; 12];
                stream.read_exact(&mut begin).await.unwrap();
                String::from_utf8_lossy(&begin).into_owned()
            };
            // The listener itself would end the connection after 30 s.
            let begin = tokio::time::timeout(20 * SECOND, exchange).await;
            assert_eq!(begin.expect("an answer without the body"), "HTTP/1.1 401", "{path}");
        }
        worker.stop().await;
    });
}

#[test]
fn api_is_off_unless_asked_for() {
    TestEnv::builder().settings(serve_http).run(async |env| {
        let worker = env.worker().await;
        for path in ["/", "/api/v1/status", "/parked"] {
            let answer = get(&worker, path).await;
            assert_eq!(
                (answer.status, answer.body.as_str()),
                (404, "there are /livez, /readyz, /closingz and /metrics\n"),
                "{path}"
            );
        }
        let answer = ask(worker.http.unwrap(), "POST", "/api/v1/parked/drop", &[], "{}").await;
        assert_eq!((answer.status, answer.body.as_str()), (405, "only GET and HEAD are supported\n"));
        worker.stop().await;
    });
}

#[test]
fn nothing_changes_without_token_file() {
    TestEnv::builder().settings(with_page(None)).run(async |env| {
        let worker = env.worker().await;
        park(&env, "unreadable", "17", b"{").await;
        let answer = post(&worker, "/api/v1/parked/drop", TOKEN, &json!({ "all": true, "who": "a", "why": "b" })).await;
        assert_eq!(answer.status, 403);
        assert!(answer.problem().contains("http.token_file"), "{answer:?}");
        assert_eq!(env.count("SELECT count(*) FROM parked_alarms").await, 1);
        worker.stop().await;
    });
}

#[test]
fn late_money_is_settled_once() {
    let file = NamedTempFile::new().unwrap();
    TestEnv::builder().settings(with_page(Some(&file))).run(async |env| {
        let worker = env.worker().await;
        let orders = env.orders(2, Duration::ZERO).await;
        wait_for("the closes", async || env.closed().await == 2).await;
        sqlx::raw_sql("UPDATE orders SET amount_minor = 500, currency = 'EUR'").execute(&env.pool).await.unwrap();
        for (order, reference) in orders.iter().zip(["pi_1", "pi_2"]) {
            sqlx::query("SELECT payment_received($1, 'stripe', $2, 500, 'EUR')")
                .bind(order.id.to_string())
                .bind(reference)
                .execute(&env.pool)
                .await
                .unwrap();
        }
        let listed = get(&worker, "/api/v1/late-payments?limit=1").await.json();
        assert_eq!((&listed["rows"][0]["reason"], &listed["next"]), (&json!("closed"), &json!("1")), "{listed}");
        let open = get(&worker, "/api/v1/status").await.json()["late_money"].clone();
        assert_eq!(open, json!([{ "payments": 2, "currency": "EUR", "amount_minor": 1_000 }]));
        let by = json!({ "who": "day shift", "why": "the customer waits" });
        let refund = json!({ "ids": [1, 7], "who": "day shift", "why": "closed for good" });
        for (path, body) in [("/api/v1/late-payments/refund-due", &refund), ("/api/v1/late-payments/2/reopen", &by)] {
            assert_eq!(post(&worker, path, "wrong", body).await.status, 401, "{path}");
            let nameless = json!({ "ids": [1], "who": "", "why": "" });
            assert_ne!(post(&worker, path, TOKEN, &nameless).await.status, 200, "{path}");
        }
        let settled = post(&worker, "/api/v1/late-payments/refund-due", TOKEN, &refund).await.json();
        assert_eq!(settled, json!({ "settled": [1], "not_open": [7] }));
        let reopened = post(&worker, "/api/v1/late-payments/2/reopen", TOKEN, &by).await.json();
        assert_eq!(reopened["order_id"], orders[1].id.to_string(), "{reopened}");
        let again = post(&worker, "/api/v1/late-payments/2/reopen", TOKEN, &by).await;
        assert!(again.status == 409 && again.problem().contains("only a closed order"), "{again:?}");
        assert_eq!(get(&worker, "/api/v1/late-payments").await.json(), json!({ "rows": [] }));
        assert_eq!(env.status(&orders[1]).await, "paid");
        worker.stop().await;
    });
}

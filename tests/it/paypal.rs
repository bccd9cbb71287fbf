//! The whole path of orders that are paid with PayPal, from the settings as docs/PROVIDERS.md prints them: against a server
//! that answers as PayPal's documents say.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use order_timeout::config::Settings;
use order_timeout_core::kind::Kind;
use order_timeout_testkit::process::call_with;
use order_timeout_testkit::{Order, TestEnv, wait_for};
use serde_json::{Value, json};
use tempfile::NamedTempFile;

use crate::providers::adjust;

/// What PayPal knows: its orders by id, and what it was asked, as method and path.
#[derive(Default)]
struct PayPal {
    orders: HashMap<String, Value>,
    asked: Vec<String>,
}

impl PayPal {
    fn answer(&mut self, request: &str, authorization: &str) -> (u16, Value) {
        self.asked.push(request.to_owned());
        let not_found = json!({"name": "RESOURCE_NOT_FOUND", "details": [{"issue": "INVALID_RESOURCE_ID"}]});
        match request.split_once(' ').unwrap() {
            // `client:secret`
            ("POST", "/v1/oauth2/token") if authorization == "Basic Y2xpZW50OnNlY3JldA==" => {
                (200, json!({"access_token": "A21AAF", "token_type": "Bearer", "expires_in": 31_668}))
            }
            ("GET", path) if authorization == "Bearer A21AAF" => {
                let order = path.strip_prefix("/v2/checkout/orders/").and_then(|id| self.orders.get(id));
                order.map_or((404, not_found), |order| (200, order.clone()))
            }
            _ => (401, json!({"error": "invalid_client"})),
        }
    }

    fn times_asked(&self, id: &str) -> usize {
        self.asked.iter().filter(|request| request.ends_with(id)).count()
    }
}

fn serve(stream: TcpStream, paypal: &Mutex<PayPal>) -> std::io::Result<()> {
    let mut reader = BufReader::new(stream.try_clone()?);
    let (mut first, mut authorization, mut length) = (String::new(), String::new(), 0);
    reader.read_line(&mut first)?;
    loop {
        let mut line = String::new();
        reader.read_line(&mut line)?;
        let Some((name, value)) = line.trim_end().split_once(": ") else { break };
        match name.to_ascii_lowercase().as_str() {
            "authorization" => authorization = value.to_owned(),
            "content-length" => length = value.parse().unwrap(),
            _ => {}
        }
    }
    reader.read_exact(&mut vec![0; length])?;
    let request = first.rsplit_once(' ').map_or("", |(request, _)| request);
    let (status, body) = paypal.lock().unwrap().answer(request, &authorization);
    let body = body.to_string();
    write!(&stream, "HTTP/1.1 {status} X\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{body}", body.len())
}

/// Its address; it runs until the test's process ends.
fn start(paypal: Arc<Mutex<PayPal>>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    std::thread::spawn(move || listener.incoming().flatten().for_each(|stream| drop(serve(stream, &paypal))));
    url
}

/// The settings that the document prints, with the key's file and the address of the test.
fn documented(url: &str, secret: &NamedTempFile) -> Settings {
    let document = include_str!("../../docs/PROVIDERS.md");
    let printed = document.split("```toml\n").find(|block| block.contains("kind = \"paypal\"")).unwrap();
    let printed = printed.split("```").next().unwrap();
    let id = printed.lines().find(|line| line.starts_with("client_id")).unwrap();
    let toml =
        printed.replace(id, "client_id = \"client\"").replace("/run/secrets/paypal", secret.path().to_str().unwrap());
    let file = tempfile::Builder::new().suffix(".toml").tempfile().unwrap();
    std::fs::write(file.path(), format!("{toml}\nurl = \"{url}\"\n[kinds.order]\nproviders = [\"paypal\"]\n")).unwrap();
    Settings::load_with_environment(Some(file.path()), Default::default(), &[]).unwrap()
}

fn order(id: &str, status: &str, payments: &Value) -> Value {
    json!({"id": id, "status": status, "intent": "CAPTURE", "purchase_units": [{"payments": payments}]})
}

fn payment(status: &str) -> Value {
    json!([{"id": "0VF52814937998046", "status": status, "amount": {"value": "19.99", "currency_code": "EUR"}}])
}

async fn begin(env: &TestEnv, order: &Order, reference: &str, age: &str) {
    let sql = "INSERT INTO payment_attempts (provider, reference, order_id, amount_minor, currency, created_at)
               VALUES ('paypal', $1, $2, 1999, 'EUR', now() - $3::interval)";
    let query = sqlx::query(sql).bind(reference).bind(order.id.to_string()).bind(age);
    query.execute(&env.pool).await.unwrap();
}

#[test]
fn paypal_decides_each_order_as_documented() {
    let secret = NamedTempFile::new().unwrap();
    std::fs::write(secret.path(), "secret\n").unwrap();
    let paypal = Arc::new(Mutex::new(PayPal::default()));
    let documented = documented(&start(paypal.clone()), &secret);
    let knows = paypal.clone();
    let know = move |order: Value| knows.lock().unwrap().orders.insert(order["id"].as_str().unwrap().to_owned(), order);
    know(order("CAPTURED", "COMPLETED", &json!({"captures": payment("COMPLETED")})));
    know(order("AUTHORISED", "COMPLETED", &json!({"authorizations": payment("CREATED")})));
    know(order("ABANDONED", "CREATED", &json!({})));
    know(order("ECHECK", "COMPLETED", &json!({"captures": payment("PENDING")})));
    TestEnv::builder()
        .settings(move |settings| {
            adjust(settings);
            settings.closing.in_progress_wait = Duration::from_millis(50);
            settings.providers = documented.providers;
            settings.kinds.insert(Kind::ORDER, documented.kinds[&Kind::ORDER].clone());
        })
        .run(async move |env| {
            let mut orders = HashMap::new();
            for (reference, age) in [
                ("CAPTURED", "1 h"),
                ("AUTHORISED", "1 h"),
                ("ABANDONED", "1 h"),
                ("ECHECK", "1 h"),
                ("FORGOTTEN", "4 h"),
                ("OTHERACCOUNT", "1 h"),
            ] {
                let order = env.order(Duration::ZERO).await;
                begin(&env, &order, reference, age).await;
                orders.insert(reference, order);
            }
            let worker = env.worker().await;
            let settled = "SELECT count(*) FROM orders WHERE status IN ('paid', 'closed')";
            wait_for("what PayPal has decided", async || env.count(settled).await == 4).await;
            let unresolved = "SELECT count(*) FROM close_attempts WHERE unresolved_reason = 'no_answer'";
            wait_for("the wrong account", async || env.count(unresolved).await == 1).await;
            for (reference, status) in [
                ("CAPTURED", "paid"),
                ("AUTHORISED", "paid"),
                ("ABANDONED", "closed"),
                ("FORGOTTEN", "closed"),
                ("OTHERACCOUNT", "closing"),
            ] {
                assert_eq!(env.status(&orders[reference]).await, status, "{reference}");
            }
            // More rounds than make an order unresolved.
            wait_for("the bank", async || paypal.lock().unwrap().times_asked("ECHECK") > 5).await;
            assert_eq!((env.status(&orders["ECHECK"]).await.as_str(), env.count(unresolved).await), ("closing", 1));
            know(order("ECHECK", "COMPLETED", &json!({"captures": payment("COMPLETED")})));
            wait_for("its money", async || env.count(settled).await == 5).await;
            worker.stop().await;
            assert_eq!(paypal.lock().unwrap().times_asked("/v1/oauth2/token"), 1);
            env.assert_ledger().await;
        });
}

/// Also how a shop finds a wrong key, account or address before the first deadline.
#[test]
fn provider_ask_says_what_is_wrong() {
    let (secret, wrong) = (NamedTempFile::new().unwrap(), NamedTempFile::new().unwrap());
    std::fs::write(secret.path(), "secret\n").unwrap();
    std::fs::write(wrong.path(), "of another mode\n".replace(' ', "")).unwrap();
    let paypal = Arc::new(Mutex::new(PayPal::default()));
    let url = start(paypal.clone());
    let captured = order("CAPTURED", "COMPLETED", &json!({"captures": payment("COMPLETED")}));
    paypal.lock().unwrap().orders.insert("CAPTURED".to_owned(), captured);
    TestEnv::builder().run(async move |env| {
        let ask = async |reference: &str, more: &[&str]| {
            let file = secret.path().to_str().unwrap();
            let set = [
                "providers.paypal.kind=paypal".to_owned(),
                "providers.paypal.client_id=client".to_owned(),
                "providers.paypal.shop_captures_only_open_orders=true".to_owned(),
                format!("providers.paypal.client_secret_file={file}"),
                format!("providers.paypal.url={url}"),
            ];
            let mut arguments = vec!["provider", "ask", "paypal", reference];
            set.iter().for_each(|one| arguments.extend(["--set", one]));
            arguments.extend(more);
            call_with(&env.settings, &arguments).await
        };
        let (code, text, _) = ask("CAPTURED", &[]).await;
        assert!(code == 0 && text.contains("asked about CAPTURED: paid 1999 EUR") && text.contains(&url), "{text}");
        let (code, text, _) = ask("CAPTURED", &["--json"]).await;
        let said: Value = serde_json::from_str(&text).unwrap();
        assert_eq!((code, &said["answer"], &said["amount_minor"]), (0, &json!("paid"), &json!(1_999)));
        let (code, text, _) = ask("OTHER", &[]).await;
        assert!(code == 0 && text.contains("the key is one of another account"), "{text}");
        let wrong = format!("providers.paypal.client_secret_file={}", wrong.path().display());
        let (code, text, _) = ask("CAPTURED", &["--set", &wrong]).await;
        assert!(code == 1 && text.contains("HTTP 401") && text.contains("providers.paypal"), "{text}");
        let (code, text, _) = ask("CAPTURED", &["--set", "providers.paypal.url=http://127.0.0.1:1"]).await;
        assert!(code == 1 && text.contains("no connection") && text.contains("a wrong address"), "{text}");
        let (code, _, said) = call_with(&env.settings, &["provider", "ask", "stripe", "pi_1"]).await;
        assert!(code == 2 && said.contains("there is no provider"), "{said}");
        assert!(paypal.lock().unwrap().asked.iter().all(|asked| !asked.starts_with("POST /v2")), "read only");
    });
}

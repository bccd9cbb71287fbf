//! Every documented answer of every provider, played by a real server: each row of the tables means what it says, and
//! whatever has no row is unknown.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

use order_timeout_core::order::Timestamp;
use order_timeout_core::payment::{Answer, Money};
use order_timeout_providers::table::{Call, Field, Is, Meaning, NotKnown, Row, Table};
use order_timeout_providers::tables;
use serde_json::{Value, json};

use crate::server::{Reply, Seen, Server, with_headers};
use crate::setup::{Setup, euros, sign, why, yuan};

/// A reference as the provider forms it.
pub fn reference(kind: &str, resource: &str) -> &'static str {
    match (kind, resource) {
        ("stripe", "payment intent") => "pi_3MtwBwLkdIwHu7ix28a3tqPa",
        ("stripe", _) => "cs_test_a1Ae6ClgOkjygKwrf9B3L6IT",
        ("paypal", _) => "5O190127TN364715T",
        ("adyen", _) => "PL61C53A8B97E6915A",
        _ => "T20261125-100001",
    }
}

/// A successful answer of this resource, without what its rows are about.
pub fn template(kind: &str, resource: &str) -> Value {
    let id = reference(kind, resource);
    match (kind, resource) {
        ("http", _) => json!({"reference": id, "amount_minor": 1999, "currency": "EUR"}),
        ("stripe", "payment intent") => json!({
            "id": id, "object": "payment_intent", "amount": 1999, "amount_received": 1999, "amount_capturable": 0,
            "currency": "eur", "latest_charge": {"amount_refunded": 0},
        }),
        ("stripe", _) => json!({
            "id": id, "object": "checkout.session", "amount_total": 1999, "currency": "eur", "payment_status": "unpaid",
            "payment_intent": {"amount": 1999, "latest_charge": {"amount_refunded": 0}},
        }),
        ("wechat", _) => json!({
            "out_trade_no": id, "mchid": "1900000001", "amount": {"total": 1999, "currency": "CNY"},
        }),
        ("alipay", _) => json!({"out_trade_no": id, "total_amount": "19.99", "msg": "Success"}),
        ("paypal", "order") => json!({"id": id, "intent": "CAPTURE", "purchase_units": [{"amount": {}}]}),
        ("paypal", _) => json!({}),
        ("adyen", _) => json!({"id": id, "amount": {"value": 1999, "currency": "EUR"}, "merchantAccount": "Shop"}),
        other => panic!("{other:?}"),
    }
}

fn money(kind: &str) -> Money {
    if ["wechat", "alipay"].contains(&kind) { yuan(1_999) } else { euros(1_999) }
}

/// The body that a row describes.
pub fn body(kind: &str, row: &Row) -> Value {
    let mut body = if row.http_status == 200 { template(kind, row.resource) } else { json!({"message": "x"}) };
    // What the provider's module puts into the answer itself.
    let is_sent = |field: &&Field| !field.pointer.starts_with("/shop_") && field.pointer != "/partly_funded";
    if !row.fields.iter().all(|field| is_sent(&field)) && kind == "stripe" {
        let intent = if row.resource == "payment intent" { "" } else { "/payment_intent" };
        set(&mut body, &format!("{intent}/next_action/display_bank_transfer_instructions/amount_remaining"), json!(1));
    }
    for Field { pointer, is } in row.fields.iter().filter(is_sent) {
        let value = match is {
            Is::Text(text) => json!(text),
            Is::True => json!(true),
            Is::Positive => json!(1),
            Is::Zero => json!(0),
            Is::Missing => Value::Null,
            Is::Given if body.pointer(pointer).is_some() => continue,
            Is::Given => json!("2026-11-25 10:00:00"),
        };
        if *is != Is::Missing || body.pointer(pointer).is_some() {
            set(&mut body, pointer, value);
        }
    }
    for list in ["captures", "authorizations"] {
        if let Some(payment) = body.pointer_mut(&format!("/purchase_units/0/payments/{list}/0")) {
            payment["amount"] = json!({"value": "19.99", "currency_code": "EUR"});
            payment["id"] = json!("0VF52814937998046");
        }
    }
    body
}

/// Sets a value at a pointer, and makes what leads to it.
fn set(value: &mut Value, pointer: &str, new: Value) {
    let mut at = value;
    for step in pointer.trim_start_matches('/').split('/') {
        at = match step.parse::<usize>() {
            Ok(index) => {
                if !at.is_array() {
                    *at = json!([]);
                }
                let list = at.as_array_mut().unwrap();
                while list.len() <= index {
                    list.push(json!({}));
                }
                &mut list[index]
            }
            Err(_) => &mut at[step],
        };
    }
    *at = new;
}

/// An answer as the provider sends it, signed if it signs its answers.
pub fn answer(kind: &str, seen: &Seen, status: u16, body: &Value) -> Reply {
    let text = if status == 204 { String::new() } else { body.to_string() };
    match kind {
        "wechat" => signed_as_wechat("theirs", "PUB_KEY_ID_01", now_s(), status, &text),
        "alipay" => signed_as_alipay("theirs", seen, &text),
        _ => with_headers(status, &[("content-type", "application/json")], &text),
    }
}

pub fn now_s() -> u64 {
    u64::try_from(Timestamp::now_by_local_clock().unix_micros() / 1_000_000).unwrap()
}

pub fn signed_as_wechat(key: &str, serial: &str, timestamp: u64, status: u16, body: &str) -> Reply {
    let (nonce, timestamp) = ("5K8264ILTKCH16CQ2502SI8ZNMTM67VS", timestamp.to_string());
    let signature = sign(key, format!("{timestamp}\n{nonce}\n{body}\n").as_bytes());
    let headers = [
        ("Wechatpay-Timestamp", timestamp.as_str()),
        ("Wechatpay-Nonce", nonce),
        ("Wechatpay-Serial", serial),
        ("Wechatpay-Signature", &signature),
    ];
    with_headers(status, &headers, body)
}

pub fn signed_as_alipay(key: &str, seen: &Seen, node: &str) -> Reply {
    let name = if seen.body.contains("alipay.trade.query") { "query" } else { "close" };
    let signature = sign(key, node.as_bytes());
    with_headers(200, &[], &format!("{{\"alipay_trade_{name}_response\":{node},\"sign\":\"{signature}\"}}"))
}

/// Whether the request only asks.
pub fn is_ask(kind: &str, seen: &Seen) -> bool {
    match kind {
        "http" => seen.path.ends_with("/ask"),
        "alipay" => seen.body.contains("alipay.trade.query"),
        _ => seen.method == "GET",
    }
}

/// The token that PayPal gives.
pub fn paypal_token() -> Reply {
    with_headers(200, &[], &json!({"access_token": "A21AAF", "token_type": "Bearer", "expires_in": 31_668}).to_string())
}

/// An order of PayPal whose authorization is pending.
fn pending_order() -> Value {
    let mut order = template("paypal", "order");
    order["status"] = json!("COMPLETED");
    set(&mut order, "/purchase_units/0/payments/authorizations/0/status", json!("PENDING"));
    order["purchase_units"][0]["payments"]["authorizations"][0]["id"] = json!("0VF52814937998046");
    order
}

fn paid_row(table: &'static Table, resource: &str) -> &'static Row {
    let resource = if resource == "authorization" { "order" } else { resource };
    table
        .rows
        .iter()
        .find(|row| row.meaning == Meaning::Paid && (resource.is_empty() || row.resource == resource))
        .unwrap()
}

/// A provider's side that answers a call as a row says, and a question after a refused cancel with "paid".
fn plays(table: &'static Table, row: &'static Row) -> impl Fn(&Seen) -> Reply + Send + Sync {
    let (asked, kind) = (Mutex::new(0), table.kind);
    move |seen| {
        if seen.path.starts_with("/v1/oauth2") {
            return paypal_token();
        }
        let mut asked = asked.lock().unwrap();
        *asked += u32::from(is_ask(kind, seen));
        let paid = paid_row(table, row.resource);
        let is_void = row.resource == "authorization";
        match *asked {
            1 if is_void && is_ask(kind, seen) => answer(kind, seen, 200, &pending_order()),
            // The question after a refused cancel.
            count if count > u32::from(is_void) && row.meaning == Meaning::AskAgain => {
                answer(kind, seen, 200, &body(kind, paid))
            }
            _ => answer(kind, seen, row.http_status, &body(kind, row)),
        }
    }
}

async fn holds(table: &'static Table, row: &'static Row, call: Call) {
    let kind = table.kind;
    let server = Server::start(plays(table, row)).await;
    let promised = row.fields.iter().any(|field| field.pointer.starts_with("/shop_"));
    let more = if promised { "shop_captures_only_open_orders = true" } else { "" };
    let setup = Setup::new(kind, &server.url(), more);
    let reference = reference(kind, if kind == "paypal" { "order" } else { row.resource });
    let said = match call {
        Call::Ask => setup.ask(reference).await,
        Call::Cancel => setup.cancel(reference).await,
    };
    let context = format!("{kind}, {call:?}, {row:?}");
    let expected = match row.meaning {
        Meaning::Paid | Meaning::AskAgain => Answer::Paid { money: Some(money(kind)) },
        Meaning::Open => Answer::Open,
        Meaning::InProgress => Answer::InProgress,
        Meaning::Pending => Answer::Pending,
        Meaning::Closed => Answer::Closed,
        Meaning::Refunded => Answer::Refunded,
        Meaning::NotKnown => match table.not_known {
            NotKnown::NotBegun => Answer::Absent,
            NotKnown::Forgotten { after } => Answer::Forgotten { after },
            NotKnown::OtherAccount => {
                assert!(why(&said).contains("another mode or account"), "{context}: {said:?}");
                return;
            }
        },
        Meaning::Unknown(reason) => {
            let why = why(&said);
            let is_expected = matches!(row.http_status, 429 | 500..) || why.contains(reason);
            assert!(is_expected, "{context}: {why}");
            return;
        }
    };
    assert_eq!(said, expected, "{context}");
}

fn table_of(kind: &str) -> &'static Table {
    tables().into_iter().find(|table| table.kind == kind).unwrap()
}

async fn every_row_holds(kind: &'static str) {
    let mut played = 0;
    for row in table_of(kind).rows {
        for call in row.calls {
            holds(table_of(kind), row, *call).await;
            played += 1;
        }
    }
    assert!(played >= 7, "only {played} answers of {kind}");
}

#[tokio::test]
async fn every_row_of_http_holds() {
    every_row_holds("http").await;
}

#[tokio::test]
async fn every_row_of_stripe_holds() {
    every_row_holds("stripe").await;
}

#[tokio::test]
async fn every_row_of_wechat_holds() {
    every_row_holds("wechat").await;
}

#[tokio::test]
async fn every_row_of_alipay_holds() {
    every_row_holds("alipay").await;
}

#[tokio::test]
async fn every_row_of_paypal_holds() {
    every_row_holds("paypal").await;
}

#[tokio::test]
async fn every_row_of_adyen_holds() {
    every_row_holds("adyen").await;
}

/// A row below another that holds whenever it does would never decide.
#[test]
fn no_row_hides_another() {
    for Table { kind, rows, .. } in tables() {
        for (at, row) in rows.iter().enumerate() {
            for earlier in &rows[..at] {
                let is_same_question = earlier.resource == row.resource
                    && earlier.http_status == row.http_status
                    && earlier.calls.iter().any(|call| row.calls.contains(call));
                let hides = is_same_question && earlier.fields.iter().all(|field| row.fields.contains(field));
                assert!(!hides, "{kind}: {earlier:?} hides {row:?}");
            }
        }
    }
}

#[test]
fn every_row_names_its_source() {
    for Table { kind, rows, .. } in tables() {
        assert!(rows.iter().all(|row| row.source.len() > 20), "{kind}");
        // What "no such order" proves is said by the table.
        assert!(rows.iter().all(|row| row.http_status != 404 || row.meaning != Meaning::Closed), "{kind}");
        assert!(rows.iter().any(|row| row.meaning == Meaning::NotKnown), "{kind}");
    }
}

/// The first successful row of a kind, with one change.
async fn says(kind: &'static str, change: impl Fn(&mut u16, &mut Value)) -> Answer {
    let row = paid_row(table_of(kind), table_of(kind).rows[0].resource);
    let (mut status, mut body) = (200, body(kind, row));
    change(&mut status, &mut body);
    let said = Arc::new((status, body));
    let server = Server::start(move |seen| {
        if seen.path.starts_with("/v1/oauth2") { paypal_token() } else { answer(kind, seen, said.0, &said.1) }
    })
    .await;
    Setup::new(kind, &server.url(), "").ask(reference(kind, row.resource)).await
}

const KINDS: [&str; 6] = ["http", "stripe", "wechat", "alipay", "paypal", "adyen"];

fn state_field(kind: &str) -> &'static str {
    match kind {
        "http" => "state",
        "wechat" => "trade_state",
        "alipay" => "trade_status",
        _ => "status",
    }
}

/// The pointers to all values in a body.
fn pointers(value: &Value, at: &str, found: &mut Vec<String>) {
    let mut inner = |key: String, value: &Value| {
        found.push(format!("{at}/{key}"));
        pointers(value, &format!("{at}/{key}"), found);
    };
    match value {
        Value::Object(fields) => fields.iter().for_each(|(key, value)| inner(key.clone(), value)),
        Value::Array(list) => list.iter().enumerate().for_each(|(index, value)| inner(index.to_string(), value)),
        _ => {}
    }
}

/// Every value of a "paid" answer replaced by others: whatever a provider's bug makes of it, it closes nothing.
#[tokio::test]
async fn malformed_answers_close_nothing() {
    let others =
        [json!(null), json!(true), json!(0), json!(-1), json!(1e99), json!(""), json!("x"), json!([]), json!({})];
    for kind in KINDS {
        let row = paid_row(table_of(kind), table_of(kind).rows[0].resource);
        let (paid, mut found) = (body(kind, row), Vec::new());
        pointers(&paid, "", &mut found);
        let mut bodies = Vec::new();
        for pointer in &found {
            for other in &others {
                let mut body = paid.clone();
                *body.pointer_mut(pointer).unwrap() = other.clone();
                bodies.push(body);
            }
        }
        let (count, left) = (bodies.len(), Mutex::new(bodies.clone().into_iter()));
        let server = Server::start(move |seen| match seen.path.as_str() {
            "/v1/oauth2/token" => paypal_token(),
            _ => answer(kind, seen, 200, &left.lock().unwrap().next().unwrap()),
        })
        .await;
        let more = format!("[{kind}.limits]\nrequests_per_s = 10000\nfailures_to_open = 1000");
        let setup = Setup::new(kind, &server.url(), &more);
        for body in bodies {
            let said = setup.ask(reference(kind, row.resource)).await;
            let is_safe = matches!(said, Answer::Unknown(_) | Answer::Paid { .. });
            let is_refund =
                said == Answer::Refunded && body.pointer("/latest_charge/amount_refunded") == Some(&json!(1e99));
            assert!(is_safe || is_refund, "{kind}: {body} is {said:?}");
        }
        assert!(count > 30, "only {count} answers of {kind}");
    }
}

#[tokio::test]
async fn states_without_row_are_unknown() {
    for kind in KINDS {
        for state in [json!("on_hold"), json!("PAID "), json!(null), json!(1), json!(["paid"]), json!({})] {
            let said = says(kind, |_, body| body[state_field(kind)] = state.clone()).await;
            assert!(why(&said).contains("documented answers"), "{kind}, {state}: {said:?}");
        }
    }
}

#[tokio::test]
async fn statuses_without_row_are_unknown() {
    for kind in KINDS.into_iter().filter(|kind| *kind != "alipay") {
        for status in [201, 203, 206, 402, 405, 410, 418, 451] {
            let said = says(kind, |http_status, _| *http_status = status).await;
            assert!(why(&said).contains(&status.to_string()), "{kind}, {status}: {said:?}");
        }
    }
}

#[tokio::test]
async fn refused_keys_name_their_settings() {
    for kind in ["http", "paypal", "adyen"] {
        for status in [401, 403] {
            let said = says(kind, |http_status, _| *http_status = status).await;
            assert!(why(&said).contains(&format!("providers.{kind}")), "{said:?}");
        }
    }
}

#[tokio::test]
async fn answers_about_other_payments_are_unknown() {
    for kind in KINDS {
        let field = match kind {
            "http" => "reference",
            "wechat" | "alipay" => "out_trade_no",
            _ => "id",
        };
        let said = says(kind, |_, body| body[field] = json!("T20261125-100002")).await;
        assert!(why(&said).contains("another payment"), "{kind}: {said:?}");
        let said = says(kind, |_, body| drop(body.as_object_mut().unwrap().remove(field))).await;
        why(&said);
    }
    let said = says("wechat", |_, body| body["mchid"] = json!("1900000002")).await;
    assert!(why(&said).contains("another payment"), "{said:?}");
}

#[tokio::test]
async fn amounts_that_cannot_be_read_are_unknown() {
    for (kind, pointer) in [
        ("http", "/amount_minor"),
        ("stripe", "/amount_received"),
        ("wechat", "/amount/total"),
        ("alipay", "/total_amount"),
        ("paypal", "/purchase_units/0/payments/captures/0/amount/value"),
        ("adyen", "/amount/value"),
        ("http", "/currency"),
        ("stripe", "/currency"),
        ("wechat", "/amount/currency"),
        ("paypal", "/purchase_units/0/payments/captures/0/amount/currency_code"),
        ("adyen", "/amount/currency"),
    ] {
        for value in [json!("much"), json!(-1), json!("-1"), json!(1.5e300), json!(null), json!([])] {
            if (kind, pointer, &value) == ("wechat", "/amount/currency", &json!(null)) {
                continue; // Optional: CNY.
            }
            let said = says(kind, |_, body| set(body, pointer, value.clone())).await;
            assert!(why(&said).contains("not the JSON"), "{kind}, {pointer}, {value}: {said:?}");
        }
    }
}

#[tokio::test]
async fn money_is_what_answer_says() {
    let said = says("stripe", |_, body| body["amount_received"] = json!(999)).await;
    assert_eq!(said, Answer::Paid { money: Some(euros(999)) });
    let said = says("alipay", |_, body| body["total_amount"] = json!(88.88)).await;
    assert_eq!(said, Answer::Paid { money: Some(yuan(8_888)) });
    let said = says("wechat", |_, body| drop(body.as_object_mut().unwrap().remove("amount"))).await;
    assert_eq!(said, Answer::Paid { money: None });
}

/// The shop promises nothing of an order that PayPal captures itself.
#[tokio::test]
async fn paypal_captures_some_orders_itself() {
    let mut order = template("paypal", "order");
    (order["status"], order["processing_instruction"]) =
        (json!("CREATED"), json!("ORDER_COMPLETE_ON_PAYMENT_APPROVAL"));
    let server = Server::start(move |seen| match seen.path.as_str() {
        "/v1/oauth2/token" => paypal_token(),
        _ => answer("paypal", seen, 200, &order),
    })
    .await;
    let setup = Setup::new("paypal", &server.url(), "shop_captures_only_open_orders = true");
    assert_eq!(setup.cancel(reference("paypal", "order")).await, Answer::Open);
}

#[tokio::test]
async fn several_captures_are_left_to_people() {
    let capture = json!({"status": "COMPLETED", "amount": {"value": "10.00", "currency_code": "EUR"}});
    let said = says("paypal", |_, body| {
        body["purchase_units"][0]["payments"]["captures"] = json!([capture, capture]);
    })
    .await;
    assert!(why(&said).contains("several purchase units"), "{said:?}");
}

/// What was captured, and what is still held: the rest of a partial capture that is not the last one.
#[tokio::test]
async fn stripe_adds_what_is_held() {
    let said = says("stripe", |_, body| {
        body["status"] = json!("requires_capture");
        (body["amount_received"], body["amount_capturable"]) = (json!(500), json!(1_499));
    })
    .await;
    assert_eq!(said, Answer::Paid { money: Some(euros(1_999)) });
}

/// Of two values for one key, which one the provider means cannot be known.
#[tokio::test]
async fn doubled_keys_are_no_answer() {
    for kind in KINDS {
        let row = paid_row(table_of(kind), table_of(kind).rows[0].resource);
        let text = body(kind, row).to_string();
        let doubled = text.replacen('{', &format!("{{\"{}\":\"none\",", state_field(kind)), 1);
        let server = Server::start(move |seen| match (kind, seen.path.as_str()) {
            (_, "/v1/oauth2/token") => paypal_token(),
            ("wechat", _) => signed_as_wechat("theirs", "PUB_KEY_ID_01", now_s(), 200, &doubled),
            ("alipay", _) => signed_as_alipay("theirs", seen, &doubled),
            _ => with_headers(200, &[], &doubled),
        })
        .await;
        let said = Setup::new(kind, &server.url(), "").ask(reference(kind, row.resource)).await;
        assert!(why(&said).contains("not the JSON"), "{kind}: {said:?}");
    }
}

#[tokio::test]
async fn keys_are_tried_without_payment() {
    for table in tables() {
        let kind = table.kind;
        let right = table.rows.iter().find(|row| row.meaning == Meaning::NotKnown).unwrap();
        let says = plays(table, right);
        let server = Server::start(move |seen| match kind {
            "http" => answer(kind, seen, 200, &json!({"reference": seen.json()["reference"], "state": "absent"})),
            "alipay" => answer(kind, seen, 200, &json!({"code": "40004", "sub_code": "ACQ.TRADE_NOT_EXIST"})),
            _ => says(seen),
        })
        .await;
        assert_eq!(Setup::new(kind, &server.url(), "").provider.try_keys().await, Ok(()), "{kind}");
        assert!(server.seen().iter().all(|seen| seen.path.starts_with("/v1/oauth2") || is_ask(kind, seen)), "{kind}");
        let server = Server::start(|_| with_headers(401, &[], "{}")).await;
        let why = Setup::new(kind, &server.url(), "").provider.try_keys().await.unwrap_err();
        assert!(why.contains("HTTP 401") || kind == "alipay", "{kind}: {why}");
        drop(server);
        let gone = Setup::new(kind, "http://127.0.0.1:1", "").provider.try_keys().await.unwrap_err();
        assert!(gone.contains("no connection"), "{kind}: {gone}");
    }
}

#[tokio::test]
async fn wechat_has_another_path_elsewhere() {
    let table = table_of("wechat");
    for (global, path) in [("false", "/v3/pay/transactions/"), ("true", "/v3/global/transactions/")] {
        let server = Server::start(plays(table, &table.rows[0])).await;
        Setup::new("wechat", &server.url(), &format!("global = {global}")).ask(reference("wechat", "")).await;
        assert!(server.seen()[0].path.starts_with(path), "{:?}", server.seen());
    }
}

#[tokio::test]
async fn references_of_another_form_are_unknown() {
    let server = Server::start(|_| Reply::Hang).await;
    for (kind, reference) in [("stripe", "ch_1"), ("stripe", ""), ("adyen", "CS1"), ("wechat", ".."), ("paypal", ".")] {
        let setup = Setup::new(kind, &server.url(), "");
        why(&setup.ask(reference).await);
        why(&setup.cancel(reference).await);
    }
    let setup = Setup::new("stripe", &server.url(), "");
    let of_another = crate::setup::attempt("paypal", "pi_1");
    assert!(why(&setup.provider.ask(&of_another).await).contains("another provider"));
    assert!(server.seen().iter().all(|seen| seen.path.starts_with("/v1/oauth2")), "{:?}", server.seen());
}

#[tokio::test]
async fn calls_may_be_repeated() {
    for table in tables() {
        let (kind, mut rows) = (table.kind, table.rows.iter());
        let row = rows.find(|row| row.meaning == Meaning::Closed && row.calls.contains(&Call::Cancel)).unwrap();
        let server = Server::start(plays(table, row)).await;
        let setup = Setup::new(kind, &server.url(), "");
        let reference = reference(kind, row.resource);
        for _ in 0..3 {
            assert_eq!(setup.cancel(reference).await, Answer::Closed, "{kind}");
        }
        let keys: BTreeSet<_> = server.seen().iter().map(|seen| seen.header("idempotency-key").to_owned()).collect();
        assert_eq!(keys.len(), if kind == "stripe" { 3 } else { 1 }, "{kind}: a replayed refusal would last for a day");
    }
}

#[tokio::test]
async fn paypal_asks_once_for_token() {
    let order = Arc::new(body("paypal", paid_row(table_of("paypal"), "order")));
    let server = Server::start(move |seen| match seen.path.as_str() {
        "/v1/oauth2/token" => paypal_token(),
        _ => answer("paypal", seen, 200, &order),
    })
    .await;
    let setup = Setup::new("paypal", &server.url(), "");
    let attempt = setup.attempt(reference("paypal", "order"));
    let calls = (0..20).map(|_| setup.provider.ask(&attempt));
    let answers = futures_util::future::join_all(calls).await;
    assert!(answers.iter().all(|answer| *answer == Answer::Paid { money: Some(euros(1_999)) }), "{answers:?}");
    let seen = server.seen();
    let tokens: Vec<_> = seen.iter().filter(|seen| seen.path == "/v1/oauth2/token").collect();
    assert_eq!((tokens.len(), seen.len()), (1, 21));
    // `client:secret-of-paypal-app`
    assert_eq!(tokens[0].header("authorization"), "Basic Y2xpZW50OnNlY3JldC1vZi1wYXlwYWwtYXBw");
    assert_eq!(tokens[0].body, "grant_type=client_credentials");
    assert_eq!(seen[20].header("authorization"), "Bearer A21AAF");
}

#[tokio::test]
async fn paypal_replaces_revoked_token() {
    let order = body("paypal", paid_row(table_of("paypal"), "order"));
    let given = Mutex::new(0);
    let server = Server::start(move |seen| {
        let mut given = given.lock().unwrap();
        if seen.path == "/v1/oauth2/token" {
            *given += 1;
            let token = json!({"access_token": format!("T{given}"), "expires_in": 31_668});
            return answer("paypal", seen, 200, &token);
        }
        let status = if seen.header("authorization") == "Bearer T1" { 401 } else { 200 };
        answer("paypal", seen, status, &order)
    })
    .await;
    let setup = Setup::new("paypal", &server.url(), "");
    let reference = reference("paypal", "order");
    assert!(why(&setup.ask(reference).await).contains("HTTP 401"));
    assert_eq!(setup.ask(reference).await, Answer::Paid { money: Some(euros(1_999)) });
}

#[tokio::test]
async fn stripe_requests_are_as_documented() {
    let table = table_of("stripe");
    let row = table.rows.iter().find(|row| row.meaning == Meaning::Closed && row.resource == "payment intent").unwrap();
    let server = Server::start(plays(table, row)).await;
    let setup = Setup::new("stripe", &server.url(), "account = \"acct_1ABC\"");
    let reference = reference("stripe", "payment intent");
    setup.ask(reference).await;
    setup.cancel(reference).await;
    let seen = server.seen();
    assert_eq!((seen[0].method.as_str(), seen[1].method.as_str()), ("GET", "POST"));
    assert_eq!(seen[0].path, format!("/v1/payment_intents/{reference}?expand%5B%5D=latest_charge"));
    assert_eq!(seen[1].path, format!("/v1/payment_intents/{reference}/cancel"));
    assert_eq!(seen[1].body, "expand%5B%5D=latest_charge");
    for seen in seen {
        assert_eq!(seen.header("stripe-version"), "2025-03-31.basil");
        assert_eq!(seen.header("stripe-account"), "acct_1ABC");
        assert_eq!(seen.header("authorization"), "Bearer sk_test_51SecretOfStripe");
        assert!(seen.header("user-agent").starts_with("order-timeout/"));
    }
}

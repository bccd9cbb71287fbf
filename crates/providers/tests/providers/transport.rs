//! What networks and servers do besides answering: every such call is unknown, ends in time, and says why in a sentence
//! without a secret.

use std::time::Duration;

use order_timeout_core::payment::Answer;
use order_timeout_providers::Providers;
use serde_json::json;

use crate::server::{Identity, Reply, Server, json, with_headers};
use crate::setup::{Setup, euros, settings, why};

const LIMITS: &str = "[http.limits]\ntimeout = \"30s\"\nrequests_per_s = 10000";

/// For servers that never answer.
const HURRIED: &str = "[http.limits]\ntimeout = \"400ms\"\nrequests_per_s = 10000";

fn paid() -> serde_json::Value {
    json!({"reference": "att-1", "state": "paid", "amount_minor": 1999, "currency": "EUR"})
}

fn paid_answer() -> Answer {
    Answer::Paid { money: Some(euros(1_999)) }
}

/// What a provider is told by a server that sends this.
async fn told(reply: Reply) -> Answer {
    told_within(LIMITS, reply).await
}

async fn told_within(limits: &str, reply: Reply) -> Answer {
    let server = Server::start(move |_| reply.clone()).await;
    Setup::new("http", &server.url(), limits).ask("att-1").await
}

#[tokio::test]
async fn anything_but_documented_json_is_unknown() {
    for body in [
        "",
        "<html><body>paid</body></html>",
        "paid",
        "null",
        "[]",
        "\"paid\"",
        "{\"reference\":\"att-1\",\"state\":\"pai",
        "{\"reference\":\"att-1\",\"state\":\"paid\"}",
        "{\"state\":\"paid\",\"amount_minor\":1999,\"currency\":\"EUR\"}",
        "{\"reference\":\"att-1\",\"state\":\"closed\"} {\"state\":\"paid\"}",
    ] {
        let said = told(with_headers(200, &[("content-type", "text/html")], body)).await;
        let why = why(&said);
        assert!(why.contains("not the JSON") || why.contains("documented answers"), "{body}: {why}");
    }
    let deep = "[".repeat(100_000);
    assert!(why(&told(with_headers(200, &[], &deep)).await).contains("not the JSON"));
}

#[tokio::test]
async fn half_answers_are_unknown() {
    let body = paid().to_string();
    let longer = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{body}", body.len() + 1);
    let chunked = format!("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n{:x}\r\n{body}\r\n", body.len());
    for bytes in [longer.as_str(), &chunked, "HTTP/1.1 200 OK\r\ncontent-le", "HTTP/1.1 200", "", "nonsense\r\n\r\n"] {
        let said = told(Reply::Raw(bytes.into())).await;
        assert!(why(&said).contains("connection broke"), "{bytes}: {said:?}");
        why(&told(Reply::Reset(bytes.into())).await);
    }
}

#[tokio::test]
async fn hanging_servers_are_given_up() {
    assert!(why(&told_within(HURRIED, Reply::Hang).await).contains("within 0.4 s"));
    // An answer that trickles: its head comes at once, its body never.
    let head = b"HTTP/1.1 200 OK\r\ncontent-length: 80\r\n\r\n{".to_vec();
    let trickle = Reply::Then(head, Box::new(Reply::Hang));
    assert!(why(&told_within(HURRIED, trickle).await).contains("within 0.4 s"));
}

#[tokio::test]
async fn long_answers_are_not_read() {
    let long = format!("{{\"padding\":\"{}\"}}", "x".repeat(2_000_000));
    assert!(why(&told(with_headers(200, &[], &long)).await).contains("longer than"));
    let chunk = format!("10000\r\n{}\r\n", "x".repeat(0x10000));
    let chunked = format!("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n{}", chunk.repeat(40));
    assert!(why(&told(Reply::Raw(chunked.into())).await).contains("longer than"));
}

#[tokio::test]
async fn redirects_are_never_followed() {
    let elsewhere = Server::start(|_| json(200, &paid())).await;
    for status in [301, 302, 303, 307, 308] {
        let location = format!("{}/ask", elsewhere.url());
        let said = told(with_headers(status, &[("location", &location)], "")).await;
        assert!(why(&said).contains("redirects"), "{said:?}");
    }
    assert!(elsewhere.seen().is_empty());
}

#[tokio::test]
async fn retry_after_is_passed_on() {
    let date = "Sun, 06 Nov 1994 08:49:37 GMT";
    for (status, headers, seconds) in [
        (429, vec![("retry-after", "7")], Some(7)),
        (503, vec![("retry-after", "120")], Some(120)),
        (429, vec![("retry-after", "Sun, 06 Nov 1994 08:49:57 GMT"), ("date", date)], Some(20)),
        (429, vec![("retry-after", "soon")], None),
        (429, vec![], None),
        (500, vec![], None),
    ] {
        let said = told(with_headers(status, &headers, "")).await;
        let Answer::Unknown(unknown) = &said else { panic!("{said:?}") };
        assert_eq!(unknown.retry_after, seconds.map(Duration::from_secs), "{status} {headers:?}");
        assert!(why(&said).contains(&format!("HTTP {status}")), "{said:?}");
    }
}

#[tokio::test]
async fn unreachable_servers_are_unknown() {
    let closed = {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        format!("http://localhost:{}", listener.local_addr().unwrap().port())
    };
    for url in [closed.as_str(), "https://localhost:1", "https://nowhere.invalid"] {
        let said = Setup::new("http", url, HURRIED).ask("att-1").await;
        let why = why(&said);
        assert!(why.contains("no connection could be opened") || why.contains("within 0.4 s"), "{url}: {why}");
    }
}

#[tokio::test]
async fn closed_idle_connection_costs_nothing() {
    let body = paid().to_string();
    let keeps_alive = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{body}", body.len());
    // The server answers as if the connection stayed open, and closes it.
    let server = Server::start(move |_| Reply::Raw(keeps_alive.clone().into())).await;
    let setup = Setup::new("http", &server.url(), LIMITS);
    for _ in 0..5 {
        assert_eq!(setup.ask("att-1").await, paid_answer());
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(server.seen().len(), 5);
}

async fn told_over_tls(identity: Identity, ca: Option<&str>) -> Answer {
    let folder = tempfile::tempdir().unwrap();
    let mut more = String::new();
    if let Some(ca) = ca {
        let path = folder.path().join("ca.pem");
        std::fs::write(&path, ca).unwrap();
        more = format!("ca_file = {:?}\n", path.to_str().unwrap());
    }
    let server = Server::start_tls(identity, |_| json(200, &paid())).await;
    Setup::new("http", &server.url(), &format!("{more}{LIMITS}")).ask("att-1").await
}

#[tokio::test]
async fn trusted_server_is_asked_over_tls() {
    let identity = Identity::new(&["localhost"], |_| {});
    let ca = identity.ca.clone();
    assert_eq!(told_over_tls(identity, Some(&ca)).await, paid_answer());
}

#[tokio::test]
async fn untrusted_servers_are_unknown() {
    let other_ca = Identity::new(&["localhost"], |_| {}).ca;
    let said = told_over_tls(Identity::new(&["localhost"], |_| {}), Some(&other_ca)).await;
    assert!(why(&said).contains("invalid peer certificate"), "{said:?}");
    let said = told_over_tls(Identity::new(&["localhost"], |_| {}), None).await;
    assert!(why(&said).contains("UnknownIssuer"), "{said:?}");
    let elsewhere = Identity::new(&["payments.example.com"], |_| {});
    let ca = elsewhere.ca.clone();
    assert!(why(&told_over_tls(elsewhere, Some(&ca)).await).contains("not valid for name"));
    let expired = Identity::new(&["localhost"], |own| {
        own.not_before = rcgen::date_time_ymd(2020, 1, 1);
        own.not_after = rcgen::date_time_ymd(2021, 1, 1);
    });
    let ca = expired.ca.clone();
    assert!(why(&told_over_tls(expired, Some(&ca)).await).contains("expired"));
}

#[test]
fn unusable_files_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let nonsense = folder.path().join("nonsense.pem");
    std::fs::write(&nonsense, "-----BEGIN NONSENSE-----").unwrap();
    let empty = folder.path().join("empty");
    std::fs::write(&empty, "\n").unwrap();
    let two_lines = folder.path().join("two");
    std::fs::write(&two_lines, "a\nb").unwrap();
    for (kind, key, path, expected) in [
        (
            "stripe",
            "secret_key_file",
            "/nowhere/key",
            "providers.stripe.secret_key_file: names \"/nowhere/key\", which cannot be read",
        ),
        ("stripe", "secret_key_file", empty.to_str().unwrap(), "which is empty"),
        ("stripe", "secret_key_file", two_lines.to_str().unwrap(), "not one line of visible ASCII"),
        ("stripe", "ca_file", nonsense.to_str().unwrap(), "providers.stripe.ca_file: names"),
        ("wechat", "private_key_file", nonsense.to_str().unwrap(), "holds no RSA private key"),
        ("alipay", "alipay_public_key_file", nonsense.to_str().unwrap(), "neither a public key"),
        ("http", "hmac_key_file", two_lines.to_str().unwrap(), "fewer than 32 characters"),
    ] {
        let toml = settings(folder.path(), kind, "https://example.com", "");
        let mut settings = toml;
        let own = settings.0.get_mut(kind).unwrap();
        use order_timeout_providers::ProviderSettings::{Alipay, Http, Stripe, Wechat};
        match (own, key) {
            (Stripe(own), "secret_key_file") => own.secret_key_file = path.into(),
            (Stripe(own), _) => own.ca_file = Some(path.into()),
            (Wechat(own), _) => own.private_key_file = path.into(),
            (Alipay(own), _) => own.alipay_public_key_file = path.into(),
            (Http(own), _) => own.hmac_key_file = Some(path.into()),
            other => panic!("{other:?}"),
        }
        let why = Providers::new(&settings).map(drop).unwrap_err().to_string();
        assert!(why.contains(expected) && why.contains(key) && !why.contains("NONSENSE"), "{why}");
    }
}

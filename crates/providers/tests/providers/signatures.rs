//! Signatures both ways: the server verifies ours, and an answer of which one byte was changed decides nothing.

use std::collections::BTreeMap;

use order_timeout_core::payment::Answer;
use order_timeout_providers::Providers;
use rcgen::{CertificateParams, KeyPair, PKCS_RSA_SHA256, SerialNumber};
use ring::hmac;
use serde_json::{Value, json};

use crate::rows::{is_ask, now_s, reference, signed_as_alipay, signed_as_wechat, template};
use crate::server::{Reply, Seen, Server, json, with_headers};
use crate::setup::{HMAC_KEY, Setup, euros, fixture, is_ours, settings, sign, why, yuan};

/// Without limits that would refuse the many calls of a test.
fn unlimited(kind: &str) -> String {
    format!("[{kind}.limits]\nrequests_per_s = 10000\nfailures_to_open = 1000")
}

#[tokio::test]
async fn requests_to_own_service_are_signed() {
    let server = Server::start(|_| {
        json(200, &json!({"reference": "T20261125-100001", "state": "paid", "amount_minor": 1999, "currency": "EUR"}))
    })
    .await;
    let setup = Setup::new("http", &format!("{}/payments/", server.url()), "");
    let reference = reference("http", "");
    assert_eq!(setup.ask(reference).await, Answer::Paid { money: Some(euros(1_999)) });
    setup.cancel(reference).await;
    for (seen, path) in server.seen().iter().zip(["/payments/ask", "/payments/cancel"]) {
        assert_eq!((seen.method.as_str(), seen.path.as_str()), ("POST", path));
        assert_eq!(seen.json(), json!({"reference": reference, "amount_minor": 1999, "currency": "EUR"}));
        assert_eq!(seen.header("authorization"), "Bearer bearer-token-of-own-service");
        let timestamp = seen.header("order-timeout-timestamp");
        assert!(timestamp.parse::<u64>().unwrap().abs_diff(now_s()) < 60);
        let signed = format!("{timestamp}\nPOST\n{path}\n{}", seen.body);
        let signature = seen.header("order-timeout-signature").strip_prefix("v1=").unwrap();
        let bytes: Vec<u8> =
            (0..32).map(|at| u8::from_str_radix(&signature[2 * at..2 * at + 2], 16).unwrap()).collect();
        let key = hmac::Key::new(hmac::HMAC_SHA256, HMAC_KEY.as_bytes());
        hmac::verify(&key, signed.as_bytes(), &bytes).unwrap();
        assert!(hmac::verify(&key, signed.replace('T', "U").as_bytes(), &bytes).is_err());
    }
}

fn wechat_paid() -> String {
    let mut body = template("wechat", "");
    body["trade_state"] = json!("SUCCESS");
    body.to_string()
}

/// The fields of the header `Authorization`.
fn wechat_authorization(seen: &Seen) -> BTreeMap<String, String> {
    let fields = seen.header("authorization").strip_prefix("WECHATPAY2-SHA256-RSA2048 ").unwrap();
    let fields = fields.split("\",").map(|field| field.trim_end_matches('"').split_once("=\"").unwrap());
    fields.map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
}

#[tokio::test]
async fn wechat_requests_are_signed() {
    let server = Server::start(|seen| match seen.method.as_str() {
        "GET" => signed_as_wechat("theirs", "PUB_KEY_ID_01", now_s(), 200, &wechat_paid()),
        _ => signed_as_wechat("theirs", "PUB_KEY_ID_01", now_s(), 204, ""),
    })
    .await;
    let setup = Setup::new("wechat", &server.url(), "");
    assert_eq!(setup.ask(reference("wechat", "")).await, Answer::Paid { money: Some(yuan(1_999)) });
    assert_eq!(setup.cancel(reference("wechat", "")).await, Answer::Closed);
    let seen = server.seen();
    let path = "/v3/pay/transactions/out-trade-no/T20261125-100001";
    assert_eq!(seen[0].path, format!("{path}?mchid=1900000001"));
    assert_eq!(
        (seen[1].path.as_str(), seen[1].body.as_str()),
        (&*format!("{path}/close"), "{\"mchid\":\"1900000001\"}")
    );
    let mut nonces = Vec::new();
    for seen in seen {
        let fields = wechat_authorization(&seen);
        let names = ["mchid", "nonce_str", "serial_no", "signature", "timestamp"];
        assert!(fields.keys().map(String::as_str).eq(names), "{fields:?}");
        assert_eq!((fields["mchid"].as_str(), fields["serial_no"].as_str()), ("1900000001", "5157F09EFDC096DE"));
        let Seen { method, path, body, .. } = &seen;
        let signed = format!("{method}\n{path}\n{}\n{}\n{body}\n", fields["timestamp"], fields["nonce_str"]);
        assert!(is_ours(signed.as_bytes(), &fields["signature"]));
        assert!(!is_ours(signed.replace("1900000001", "1900000002").as_bytes(), &fields["signature"]));
        assert_eq!(seen.header("wechatpay-serial"), "PUB_KEY_ID_01");
        nonces.push(fields["nonce_str"].clone());
    }
    assert_ne!(nonces[0], nonces[1]);
}

/// The answers to many asks, of a server that sends one reply after another.
async fn each_is(kind: &'static str, replies: Vec<Reply>, expected: &str) {
    let count = replies.len();
    let next = std::sync::Mutex::new(replies.into_iter());
    let server = Server::start(move |_| next.lock().unwrap().next().unwrap()).await;
    let setup = Setup::new(kind, &server.url(), &unlimited(kind));
    for at in 0..count {
        let said = setup.ask(reference(kind, "")).await;
        let why = why(&said);
        assert!(why.contains(expected) || why.contains("not the JSON"), "{at}: {why}");
    }
}

/// One byte after another changed, so that it is still text of the same length.
fn broken(text: &str) -> impl Iterator<Item = String> + '_ {
    (0..text.len()).map(|at| {
        let mut bytes = text.as_bytes().to_vec();
        bytes[at] = if bytes[at] == b'1' { b'2' } else { b'1' };
        String::from_utf8(bytes).unwrap()
    })
}

fn wechat_reply(timestamp: &str, nonce: &str, serial: &str, signature: &str, body: &str) -> Reply {
    let headers = [
        ("Wechatpay-Timestamp", timestamp),
        ("Wechatpay-Nonce", nonce),
        ("Wechatpay-Serial", serial),
        ("Wechatpay-Signature", signature),
    ];
    with_headers(200, &headers, body)
}

#[tokio::test]
async fn wechat_answer_with_broken_byte_is_unknown() {
    let (body, nonce, timestamp) = (wechat_paid(), "5K8264ILTKCH16CQ2502SI8ZNMTM67VS", now_s().to_string());
    let signature = sign("theirs", format!("{timestamp}\n{nonce}\n{body}\n").as_bytes());
    let mut replies: Vec<_> =
        broken(&body).map(|body| wechat_reply(&timestamp, nonce, "PUB_KEY_ID_01", &signature, &body)).collect();
    replies.extend(
        broken(&signature)
            .take(340)
            .map(|signature| wechat_reply(&timestamp, nonce, "PUB_KEY_ID_01", &signature, &body)),
    );
    replies.extend(broken(nonce).map(|nonce| wechat_reply(&timestamp, &nonce, "PUB_KEY_ID_01", &signature, &body)));
    let later = (now_s() + 1).to_string();
    replies.push(wechat_reply(&later, nonce, "PUB_KEY_ID_01", &signature, &body));
    // A broken body may say another state or another reference before its signature is looked at; it never decides.
    let count = replies.len();
    let next = std::sync::Mutex::new(replies.into_iter());
    let server = Server::start(move |_| next.lock().unwrap().next().unwrap()).await;
    let setup = Setup::new("wechat", &server.url(), &unlimited("wechat"));
    let mut refused = 0;
    for _ in 0..count {
        let said = setup.ask(reference("wechat", "")).await;
        refused += u32::from(why(&said).contains("signature does not match"));
    }
    assert!(refused > 380, "{refused} of {count} by their signature");
}

#[tokio::test]
async fn wechat_answers_must_be_signed() {
    let body = wechat_paid();
    each_is("wechat", vec![with_headers(200, &[], &body)], "not signed").await;
    each_is("wechat", vec![signed_as_wechat("other", "PUB_KEY_ID_01", now_s(), 200, &body)], "does not match").await;
    each_is("wechat", vec![signed_as_wechat("theirs", "PUB_KEY_ID_02", now_s(), 200, &body)], "does not name").await;
    // A close that nothing proves.
    let server = Server::start(|_| with_headers(204, &[], "")).await;
    let setup = Setup::new("wechat", &server.url(), "");
    assert!(why(&setup.cancel(reference("wechat", "")).await).contains("not signed"));
    let server = Server::start(|_| json(400, &json!({"code": "ORDER_CLOSED"}))).await;
    let setup = Setup::new("wechat", &server.url(), "");
    assert!(why(&setup.cancel(reference("wechat", "")).await).contains("not signed"));
    // A refused request is not signed, and its reason helps.
    let server = Server::start(|_| json(401, &json!({"code": "SIGN_ERROR"}))).await;
    let setup = Setup::new("wechat", &server.url(), "");
    assert!(why(&setup.ask(reference("wechat", "")).await).contains("private_key_file"));
}

#[tokio::test]
async fn wechat_answers_of_other_times_are_unknown() {
    let body = wechat_paid();
    let replies = [now_s() - 310, now_s() + 310, now_s() - 86_400, 0]
        .map(|timestamp| signed_as_wechat("theirs", "PUB_KEY_ID_01", timestamp, 200, &body));
    each_is("wechat", replies.into(), "set the clock of this machine right").await;
    let server = Server::start(move |_| signed_as_wechat("theirs", "PUB_KEY_ID_01", now_s() - 280, 200, &body)).await;
    let said = Setup::new("wechat", &server.url(), "").ask(reference("wechat", "")).await;
    assert_eq!(said, Answer::Paid { money: Some(yuan(1_999)) });
}

#[tokio::test]
async fn wechat_certificates_are_known_by_serial() {
    let folder = tempfile::tempdir().unwrap();
    let pem = std::fs::read_to_string(fixture("theirs.key.pem")).unwrap();
    let key = KeyPair::from_pkcs8_pem_and_sign_algo(&pem, &PKCS_RSA_SHA256).unwrap();
    let mut certificate = CertificateParams::new(vec!["wechat".to_owned()]).unwrap();
    // With its highest bit set, so that DER writes a zero byte before it.
    certificate.serial_number = Some(SerialNumber::from(vec![0xF1, 0x57, 0x00, 0x9E]));
    let path = folder.path().join("platform.pem");
    std::fs::write(&path, certificate.self_signed(&key).unwrap().pem()).unwrap();
    let server = Server::start(|_| signed_as_wechat("theirs", "F157009E", now_s(), 200, &wechat_paid())).await;
    let platform_keys = |id: &str| format!("platform_keys = [{{ file = {:?}{id} }}]", path.to_str().unwrap());
    let setup = Setup::new("wechat", &server.url(), &platform_keys(""));
    assert_eq!(setup.ask(reference("wechat", "")).await, Answer::Paid { money: Some(yuan(1_999)) });
    let with_id = settings(folder.path(), "wechat", &server.url(), &platform_keys(", id = \"F157009E\""));
    let why = Providers::new(&with_id).map(drop).unwrap_err().to_string();
    assert!(why.starts_with("providers.wechat.platform_keys[0].id: is given for a certificate"), "{why}");
    let key = format!("platform_keys = [{{ file = {:?} }}]", fixture("theirs.public.pem").to_str().unwrap());
    let without_id = settings(folder.path(), "wechat", &server.url(), &key);
    let why = Providers::new(&without_id).map(drop).unwrap_err().to_string();
    assert!(why.starts_with("providers.wechat.platform_keys[0].id: is missing"), "{why}");
}

fn alipay_paid() -> String {
    let mut body = template("alipay", "");
    body["code"] = json!("10000");
    body["trade_status"] = json!("TRADE_SUCCESS");
    body.to_string()
}

#[tokio::test]
async fn alipay_requests_are_signed() {
    let server = Server::start(|seen| {
        let node = if is_ask("alipay", seen) { alipay_paid() } else { "{\"code\":\"10000\"}".to_owned() };
        signed_as_alipay("theirs", seen, &node)
    })
    .await;
    let setup = Setup::new("alipay", &format!("{}/gateway.do", server.url()), "");
    assert_eq!(setup.ask(reference("alipay", "")).await, Answer::Paid { money: Some(yuan(1_999)) });
    assert_eq!(setup.cancel(reference("alipay", "")).await, Answer::Closed);
    for (seen, method) in server.seen().iter().zip(["alipay.trade.query", "alipay.trade.close"]) {
        assert_eq!(seen.path, "/gateway.do?charset=utf-8");
        let parameters: BTreeMap<String, String> =
            url::form_urlencoded::parse(seen.body.as_bytes()).into_owned().collect();
        let (signature, mut signed) = (parameters["sign"].clone(), parameters.clone());
        signed.remove("sign");
        let signed: Vec<_> = signed.iter().map(|(name, value)| format!("{name}={value}")).collect();
        assert!(is_ours(signed.join("&").as_bytes(), &signature));
        assert!(!is_ours(signed.join("&").replace("utf-8", "utf-9").as_bytes(), &signature));
        assert_eq!((parameters["method"].as_str(), parameters["app_id"].as_str()), (method, "2014072300007148"));
        assert_eq!(parameters["biz_content"], "{\"out_trade_no\":\"T20261125-100001\"}");
        assert_eq!(parameters["timestamp"].len(), "2026-11-25 10:00:00".len());
    }
}

#[tokio::test]
async fn alipay_answer_with_broken_byte_is_unknown() {
    let node = alipay_paid();
    let signature = sign("theirs", node.as_bytes());
    let reply = |node: &str, signature: &str| {
        with_headers(200, &[], &format!("{{\"alipay_trade_query_response\":{node},\"sign\":\"{signature}\"}}"))
    };
    let mut replies: Vec<_> = broken(&node).map(|node| reply(&node, &signature)).collect();
    replies.extend(broken(&signature).take(340).map(|signature| reply(&node, &signature)));
    // The same meaning in other bytes.
    replies.push(reply(&node.replace(':', ": "), &signature));
    let count = replies.len();
    let next = std::sync::Mutex::new(replies.into_iter());
    let server = Server::start(move |_| next.lock().unwrap().next().unwrap()).await;
    let setup = Setup::new("alipay", &server.url(), &unlimited("alipay"));
    let mut refused = 0;
    for _ in 0..count {
        let said = setup.ask(reference("alipay", "")).await;
        refused += u32::from(why(&said).contains("signature does not match"));
    }
    assert!(refused > 350, "{refused} of {count} by their signature");
}

#[tokio::test]
async fn alipay_signature_covers_raw_text() {
    // Spaces, an escaped slash and Chinese in another order than a printer would choose, and a signature with escapes.
    let node = "{ \"trade_status\":\"TRADE_SUCCESS\" ,\"msg\":\"\\u6210\\u529f\\/成功\",\"total_amount\":\"19.990\", \"code\":\"10000\",\n \"out_trade_no\":\"T20261125-100001\" }";
    let signature = sign("theirs", node.as_bytes()).replace('/', "\\/");
    let text = format!("{{\"sign\":\"{signature}\", \"alipay_trade_query_response\" : {node} }}");
    let server = Server::start(move |_| with_headers(200, &[], &text)).await;
    let said = Setup::new("alipay", &server.url(), "").ask(reference("alipay", "")).await;
    assert_eq!(said, Answer::Paid { money: Some(yuan(1_999)) });
}

#[tokio::test]
async fn alipay_answers_must_be_signed() {
    let node = alipay_paid();
    let unsigned = with_headers(200, &[], &format!("{{\"alipay_trade_query_response\":{node}}}"));
    each_is("alipay", vec![unsigned], "not signed").await;
    let signature = sign("other", node.as_bytes());
    let by_other = format!("{{\"alipay_trade_query_response\":{node},\"sign\":\"{signature}\"}}");
    each_is("alipay", vec![with_headers(200, &[], &by_other)], "does not match").await;
    // An error of the gateway is not signed, and its reason helps.
    let error = json!({"error_response": {"code": "40002", "sub_code": "isv.invalid-signature"}});
    each_is("alipay", vec![json(200, &error)], "check app_id, the keys").await;
    let nothing: Value = json!({"sign": "x"});
    each_is("alipay", vec![json(200, &nothing)], "not the JSON").await;
}

#[tokio::test]
async fn alipay_keys_are_read_without_heading() {
    let folder = tempfile::tempdir().unwrap();
    let bare = |name: &str| {
        let pem = std::fs::read_to_string(fixture(name)).unwrap();
        let path = folder.path().join(name);
        std::fs::write(&path, pem.lines().filter(|line| !line.starts_with("-----")).collect::<String>()).unwrap();
        path
    };
    let server = Server::start(|seen| signed_as_alipay("theirs", seen, &alipay_paid())).await;
    let mut settings = settings(folder.path(), "alipay", &server.url(), "");
    let Some(order_timeout_providers::ProviderSettings::Alipay(own)) = settings.0.get_mut("alipay") else { panic!() };
    (own.private_key_file, own.alipay_public_key_file) = (bare("ours.key.pem"), bare("theirs.public.pem"));
    let providers = Providers::new(&settings).unwrap();
    let attempt = crate::setup::attempt("alipay", reference("alipay", ""));
    let said = providers.get("alipay").unwrap().ask(&attempt).await;
    assert_eq!(said, Answer::Paid { money: Some(yuan(1_999)) });
}

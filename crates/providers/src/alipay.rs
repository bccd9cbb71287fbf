//! Alipay: `alipay.trade.query` and `alipay.trade.close` by `out_trade_no`, with keys (RSA2). Read on 2026-11-27 in
//! docs.open.alipay.com.
//!
//! No answer decides anything unless the signature over its raw text was verified.

use std::collections::{BTreeMap, HashMap};

use hyper::Method;
use order_timeout_core::InvalidSetting;
use order_timeout_core::payment::{Attempt, Money};
use serde_json::value::RawValue;
use serde_json::{Value, json};
use time::OffsetDateTime;
use time::format_description::BorrowedFormatItem;
use time::macros::{format_description, offset};
use url::form_urlencoded;

use crate::call_error::CallError;
use crate::client::{Client, Outgoing, Reply, accept_json, form_body};
use crate::protocol::Protocol;
use crate::rsa::{Signer, Verifier};
use crate::settings::AlipaySettings;
use crate::table::{
    ASK, BOTH, CANCEL, Call, Field, Is, Meaning, NotKnown, Row, Said, Table, Verdict, decide, field, text,
};
use crate::{local_clock, money, strict_json};

const QUERY: &str = "docs.open.alipay.com/api_1/alipay.trade.query, `trade_status`";
const QUERY_ERRORS: &str = "docs.open.alipay.com/api_1/alipay.trade.query, error codes";
const CLOSE: &str = "docs.open.alipay.com/api_1/alipay.trade.close";
const CLOSE_ERRORS: &str = "docs.open.alipay.com/api_1/alipay.trade.close, error codes";
const GATEWAY: &str = "docs.open.alipay.com/common/105806, error codes of the gateway";

const FAILED: &str = "it failed";
const OUR_REQUEST: &str = "it refuses the request as malformed; check app_id, the keys and the attempt's reference";
const OUR_RIGHTS: &str = "it refuses this application; check app_id, the keys and the application's rights";

const fn ok(calls: &'static [Call], fields: &'static [Field], meaning: Meaning, source: &'static str) -> Row {
    Row { calls, resource: "", http_status: 200, fields, meaning, source }
}

const CODE: &str = "/code";
const SUB_CODE: &str = "/sub_code";
const STATUS: &str = "/trade_status";
const SUCCESS: Field = text(CODE, "10000");
const REFUSED: Field = text(CODE, "40004");

/// The HTTP status is always 200; `code` and `sub_code` say the rest.
const ROWS: &[Row] = &[
    ok(ASK, &[SUCCESS, text(STATUS, "TRADE_SUCCESS")], Meaning::Paid, QUERY),
    ok(ASK, &[SUCCESS, text(STATUS, "TRADE_FINISHED")], Meaning::Paid, QUERY),
    ok(ASK, &[SUCCESS, text(STATUS, "WAIT_BUYER_PAY")], Meaning::Open, QUERY),
    // One status for "closed unpaid" and for "refunded in full after it was paid": only the latter has a time of payment.
    // Where it is missing after a refund, the order closes, and the customer has the money.
    ok(ASK, &[SUCCESS, text(STATUS, "TRADE_CLOSED"), field("/send_pay_date", Is::Given)], Meaning::Refunded, QUERY),
    ok(ASK, &[SUCCESS, text(STATUS, "TRADE_CLOSED"), field("/send_pay_date", Is::Missing)], Meaning::Closed, QUERY),
    ok(CANCEL, &[SUCCESS], Meaning::Closed, CLOSE),
    ok(BOTH, &[REFUSED, text(SUB_CODE, "ACQ.TRADE_NOT_EXIST")], Meaning::NotKnown, QUERY_ERRORS),
    ok(CANCEL, &[REFUSED, text(SUB_CODE, "ACQ.TRADE_STATUS_ERROR")], Meaning::AskAgain, CLOSE_ERRORS),
    ok(CANCEL, &[REFUSED, text(SUB_CODE, "ACQ.REASON_TRADE_STATUS_INVALID")], Meaning::AskAgain, CLOSE_ERRORS),
    ok(CANCEL, &[REFUSED, text(SUB_CODE, "ACQ.REASON_ILLEGAL_STATUS")], Meaning::AskAgain, CLOSE_ERRORS),
    ok(BOTH, &[REFUSED, text(SUB_CODE, "ACQ.SYSTEM_ERROR")], Meaning::Unknown(FAILED), QUERY_ERRORS),
    ok(BOTH, &[REFUSED, text(SUB_CODE, "ACQ.INVALID_PARAMETER")], Meaning::Unknown(OUR_REQUEST), QUERY_ERRORS),
    ok(BOTH, &[text(CODE, "20000")], Meaning::Unknown(FAILED), GATEWAY),
    ok(BOTH, &[text(CODE, "20001")], Meaning::Unknown(OUR_RIGHTS), GATEWAY),
    ok(BOTH, &[text(CODE, "40001")], Meaning::Unknown(OUR_REQUEST), GATEWAY),
    ok(BOTH, &[text(CODE, "40002")], Meaning::Unknown(OUR_REQUEST), GATEWAY),
    ok(BOTH, &[text(CODE, "40006")], Meaning::Unknown(OUR_RIGHTS), GATEWAY),
];

/// The shop gives the number: Alipay knows it when the customer has opened the payment.
pub(crate) const TABLE: Table = Table { kind: "alipay", not_known: NotKnown::NotBegun, rows: ROWS };

/// Alipay's times are in China's time zone.
const TIMESTAMP: &[BorrowedFormatItem<'_>] = format_description!("[year]-[month]-[day] [hour]:[minute]:[second]");

/// The client of one application.
pub(crate) struct Alipay {
    client: Client,
    app_id: String,
    signer: Signer,
    alipay_key: Verifier,
}

impl Alipay {
    pub(crate) fn new(section: &str, settings: &AlipaySettings) -> Result<Self, InvalidSetting> {
        Ok(Self {
            client: Client::new(section, &settings.url, settings.ca_file.as_deref(), &settings.limits)?,
            app_id: settings.app_id.clone(),
            signer: Signer::read(section, "private_key_file", &settings.private_key_file)?,
            alipay_key: Verifier::read(section, "alipay_public_key_file", &settings.alipay_public_key_file)?,
        })
    }

    /// `docs.open.alipay.com/291/106118`: the parameters in the order of their names, joined, and signed.
    fn outgoing(&self, call: Call, reference: &str) -> Result<Outgoing, CallError> {
        let now = OffsetDateTime::from(local_clock::now()).to_offset(offset!(+8));
        let timestamp = now.format(TIMESTAMP).map_err(|_| CallError::NotSent("the clock of this machine is wrong"))?;
        let content = json!({ "out_trade_no": reference }).to_string();
        let mut parameters = BTreeMap::from([
            ("app_id", self.app_id.as_str()),
            ("biz_content", &content),
            ("charset", "utf-8"),
            ("format", "JSON"),
            ("method", method(call)),
            ("sign_type", "RSA2"),
            ("timestamp", &timestamp),
            ("version", "1.0"),
        ]);
        let signed: Vec<_> = parameters.iter().map(|(name, value)| format!("{name}={value}")).collect();
        let signature = self.signer.sign(signed.join("&").as_bytes())?;
        parameters.insert("sign", &signature);
        let body = form_urlencoded::Serializer::new(String::new()).extend_pairs(parameters).finish();
        Ok(Outgoing {
            method: Method::POST,
            // The gateway reads the character set before it reads the body.
            path_and_query: "?charset=utf-8".to_owned(),
            headers: vec![accept_json(), form_body()],
            body: body.into_bytes(),
        })
    }

    fn verdict(&self, call: Call, reference: &str, reply: &Reply) -> Result<Verdict, CallError> {
        let status = reply.status;
        let unreadable = || CallError::Unreadable { status };
        // The signature covers the text of the node as it was sent: parsing and printing it again would change it.
        strict_json::parse(&reply.body).map_err(|_| unreadable())?;
        let nodes: HashMap<String, &RawValue> = serde_json::from_slice(&reply.body).map_err(|_| unreadable())?;
        let node_name = format!("{}_response", method(call).replace('.', "_"));
        let node = nodes.get(node_name.as_str()).or_else(|| nodes.get("error_response")).ok_or_else(unreadable)?;
        let body = strict_json::parse(node.get().as_bytes()).map_err(|_| unreadable())?;
        let said = Said { call, resource: "", http_status: status, body: &body };
        let verdict = decide(&TABLE, said, self.client.section(), || paid(&body).map(Some).ok_or_else(unreadable))?;
        // A refused request may be unsigned, and decides nothing: `decide` has returned its reason.
        let signature = nodes.get("sign").and_then(|raw| serde_json::from_str::<String>(raw.get()).ok());
        let Some(signature) = signature else { return Err(CallError::Untrusted("it is not signed".into())) };
        let verified = self.alipay_key.verify(node.get().as_bytes(), &signature);
        verified.map_err(|error| CallError::Untrusted(error.to_string()))?;
        match body["out_trade_no"].as_str() {
            Some(number) if number == reference => Ok(verdict),
            Some(_) => Err(CallError::OtherPayment),
            // Optional in the answer to a close, and in an error.
            None if call == Call::Cancel || body["code"] != "10000" => Ok(verdict),
            None => Err(unreadable()),
        }
    }
}

fn method(call: Call) -> &'static str {
    match call {
        Call::Ask => "alipay.trade.query",
        Call::Cancel => "alipay.trade.close",
    }
}

/// What the customer ordered, not what was received after discounts. `trans_currency` is given where it is not CNY.
fn paid(body: &Value) -> Option<Money> {
    let currency = if body["trans_currency"].is_null() { "CNY" } else { body["trans_currency"].as_str()? };
    match &body["total_amount"] {
        Value::String(amount) => money::from_decimal(amount, currency),
        // Newer documents show a number. Its text is as it was sent only for what has few digits.
        Value::Number(amount) => money::from_decimal(&amount.to_string(), currency),
        _ => None,
    }
}

impl Protocol for Alipay {
    const NO_PAYMENT: &'static str = "order-timeout-asks-0000000000000";

    async fn call(&self, call: Call, attempt: &Attempt) -> Result<Verdict, CallError> {
        let reply = self.client.send(self.outgoing(call, &attempt.reference)?).await?;
        self.verdict(call, &attempt.reference, &reply)
    }
}

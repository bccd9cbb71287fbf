//! What the description in `docs/openapi.yaml` says beyond the types of this folder: the texts that the code accepts, and
//! the errors that every operation can answer.
//!
//! Describes only. What is refused is decided where a request is read; a test sends what the description allows and forbids.

use std::borrow::Cow;

use order_timeout_core::alarm::ParkReason;
use order_timeout_core::message::read_rfc3339;
use order_timeout_core::order::{OrderId, Timestamp};
use serde::de::Error;
use serde::{Deserialize, Deserializer};
use serde_json::Number;
use utoipa::openapi::path::{Operation, Parameter};
use utoipa::openapi::schema::{ObjectBuilder, Type};
use utoipa::openapi::{Content, OpenApi, Ref, RefOr, Response, Schema};
use utoipa::{PartialSchema, ToSchema};
use uuid::Uuid;

use super::Problem;
use crate::operations::{name_or_reason, plain_text};

/// An order's id: at most 200 bytes of UTF-8 without a control character.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(value_type = String, pattern = r"^([ -~]{1,200}|[^\u0000-\u001f\u007f-\u009f]{1,50})$")]
pub(super) struct OrderIdText(pub OrderId);

impl From<OrderIdText> for OrderId {
    fn from(OrderIdText(id): OrderIdText) -> Self {
        id
    }
}

/// A parked alarm's id.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(value_type = String, format = Uuid)]
pub(super) struct AlarmId(Uuid);

impl From<AlarmId> for Uuid {
    fn from(AlarmId(id): AlarmId) -> Self {
        id
    }
}

/// A name or a reason, for the record: not only spaces.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(try_from = "String")]
#[schema(min_length = 1, max_length = 500, pattern = r"^[^\u0000]*[^\s\u0000][^\u0000]*$")]
pub(super) struct NameOrReason(pub String);

impl TryFrom<String> for NameOrReason {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        name_or_reason(&text).map(Self)
    }
}

/// A text that a database can keep.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(try_from = "String")]
#[schema(max_length = 200, pattern = r"^[^\u0000]*$")]
pub(super) struct PlainText(pub String);

impl TryFrom<String> for PlainText {
    type Error = &'static str;

    fn try_from(text: String) -> Result<Self, &'static str> {
        plain_text(&text).map(Self)
    }
}

impl From<PlainText> for String {
    fn from(PlainText(text): PlainText) -> Self {
        text
    }
}

/// A kind of deadlines.
#[derive(ToSchema)]
#[schema(pattern = "^[a-z][a-z0-9_]{0,39}$")]
#[expect(dead_code, reason = "only its description is used")]
pub(super) struct KindName(String);

/// Why an alarm is parked.
#[derive(Debug, Deserialize)]
#[serde(try_from = "String")]
pub(super) struct ParkedReason(pub String);

impl TryFrom<String> for ParkedReason {
    type Error = String;

    fn try_from(word: String) -> Result<Self, String> {
        match ParkReason::WORDS.contains(&word.as_str()) {
            true => Ok(Self(word)),
            false => Err(format!("{word} is no reason; give one of {}", ParkReason::WORDS.join(", "))),
        }
    }
}

impl From<ParkedReason> for String {
    fn from(ParkedReason(word): ParkedReason) -> Self {
        word
    }
}

impl PartialSchema for ParkedReason {
    fn schema() -> RefOr<Schema> {
        ObjectBuilder::new().schema_type(Type::String).enum_values(Some(ParkReason::WORDS)).into()
    }
}

impl ToSchema for ParkedReason {
    fn name() -> Cow<'static, str> {
        "ParkedReason".into()
    }
}

/// Rows on a page of a list: 1 to 1000.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(try_from = "i64")]
pub(super) struct PageSize(pub i64);

impl Default for PageSize {
    fn default() -> Self {
        Self(100)
    }
}

impl TryFrom<i64> for PageSize {
    type Error = String;

    fn try_from(rows: i64) -> Result<Self, String> {
        let fits = (1..=1_000).contains(&rows);
        fits.then_some(Self(rows)).ok_or_else(|| format!("{rows} rows do not fit on a page; ask for 1 to 1000"))
    }
}

/// `true`, and nothing else.
pub(super) struct Yes;

impl PartialSchema for Yes {
    fn schema() -> RefOr<Schema> {
        ObjectBuilder::new().schema_type(Type::Boolean).enum_values(Some([true])).into()
    }
}

impl ToSchema for Yes {}

/// A field that may be left out and is not `null`.
///
/// # Errors
/// The deserializer's.
pub(super) fn given<'de, T: Deserialize<'de>, D: Deserializer<'de>>(deserializer: D) -> Result<Option<T>, D::Error> {
    T::deserialize(deserializer).map(Some)
}

/// Whole numbers, also written as 255.0: JSON Schema calls that an integer.
///
/// # Errors
/// The deserializer's.
pub(super) fn integers<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<i64>, D::Error> {
    const BEYOND: f64 = 9_223_372_036_854_775_808.0;
    let whole = |number: f64| (number.fract() == 0.0 && number.abs() < BEYOND).then_some(number as i64);
    let read = |number: &Number| number.as_i64().or_else(|| number.as_f64().and_then(whole));
    let given = Vec::<Number>::deserialize(deserializer)?;
    let read = |number| read(number).ok_or_else(|| Error::custom(format!("{number} is no whole number of 64 bits")));
    given.iter().map(read).collect()
}

/// A time with its offset, RFC 3339.
///
/// # Errors
/// The deserializer's.
pub(super) fn time<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Timestamp>, D::Error> {
    let text = String::deserialize(deserializer)?;
    let fault = || {
        Error::custom(format!(
            "{text} is not a time; write an RFC 3339 time with its offset, such as 2026-11-20T10:30:00Z"
        ))
    };
    read_rfc3339(&text).map(Some).ok_or_else(fault)
}

/// A flag that may be left out and is not `false`.
///
/// # Errors
/// The deserializer's.
pub(super) fn yes<'de, D: Deserializer<'de>>(deserializer: D) -> Result<bool, D::Error> {
    let is_yes = bool::deserialize(deserializer)?;
    is_yes.then_some(true).ok_or_else(|| Error::custom("it must be true, or be left out"))
}

/// Adds the errors that every operation can answer.
pub(super) fn add_errors(api: &mut OpenApi) {
    for item in api.paths.paths.values_mut() {
        for (operation, is_change) in [(&mut item.get, false), (&mut item.post, true)] {
            let Some(operation) = operation else { continue };
            let is_kind = |parameter: &RefOr<Parameter>| matches!(parameter, RefOr::T(one) if one.name == "kind");
            if operation.parameters.iter().flatten().any(is_kind) {
                add(operation, "404", "there is no such kind, or no such page of it");
            }
            if is_change || operation.parameters.is_some() {
                add(operation, "400", "the request does not fit this description");
            }
            if is_change {
                add(operation, "401", "the token is missing or wrong");
                add(operation, "403", "there is no token, so nothing can be changed");
                add(operation, "413", "the body is larger than 1 MiB");
                add(operation, "415", "the body is not `application/json`");
            }
            add(operation, "421", "`Host` is no name of this worker");
            add(operation, "503", "the database or the broker cannot be used");
        }
    }
}

fn add(operation: &mut Operation, status: &str, why: &str) {
    let mut response = Response::new(why);
    let body = Content::new(Some(Ref::from_schema_name(Problem::name())));
    response.content.insert("application/problem+json".to_owned(), body.into());
    operation.responses.responses.insert(status.to_owned(), response.into());
}

//! The documented answers of a provider, as data: the code decides by these rows, the tests play each of them, and write them
//! into `docs/PROVIDERS.md`.
//!
//! Does no I/O. An answer without a row is an error, never a guess.

use std::time::Duration;

use order_timeout_core::payment::{Answer, Money};
use serde_json::Value;

use crate::call_error::CallError;

/// The documented answers of one kind of provider.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Table {
    /// The kind, as in the settings.
    pub kind: &'static str,
    /// What it proves that the provider knows no such attempt.
    pub not_known: NotKnown,
    /// The answers. The first row that holds decides.
    pub rows: &'static [Row],
}

/// What it proves that a provider does not know an attempt, for rows that mean [`Meaning::NotKnown`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NotKnown {
    /// The shop gives the number, so the customer has not begun to pay: [`Answer::Absent`].
    NotBegun,
    /// The provider gave the number and never forgets it, so the key is one of another mode or account: no answer.
    OtherAccount,
    /// The provider gave the number, and forgets what was not paid: [`Answer::Forgotten`].
    Forgotten {
        /// No attempt is forgotten earlier than so long after it was begun.
        after: Duration,
    },
}

/// Which call an answer belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Call {
    /// [`Provider::ask`](crate::Provider::ask).
    Ask,
    /// [`Provider::cancel`](crate::Provider::cancel).
    Cancel,
}

/// One documented answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Row {
    /// The calls that have this answer.
    pub calls: &'static [Call],
    /// What was asked for, where a provider has several resources, such as a payment intent and a checkout session; empty
    /// for all.
    pub resource: &'static str,
    /// The status of the HTTP answer.
    pub http_status: u16,
    /// What the answer says; all must hold. The first row of the table that holds decides.
    pub fields: &'static [Field],
    /// What it means.
    pub meaning: Meaning,
    /// Where the provider documents it.
    pub source: &'static str,
}

/// One field of a JSON answer, by its pointer (RFC 6901), such as `/latest_charge/amount_refunded`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Field {
    /// The pointer.
    pub pointer: &'static str,
    /// What its value must be.
    pub is: Is,
}

/// What the value of a field must be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Is {
    /// This text.
    Text(&'static str),
    /// `true`.
    True,
    /// A number greater than zero.
    Positive,
    /// The number zero.
    Zero,
    /// Null, or no such field.
    Missing,
    /// Anything but null.
    Given,
}

/// What an answer means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Meaning {
    /// [`Answer::Paid`], with the amount in the answer.
    Paid,
    /// [`Answer::Open`].
    Open,
    /// [`Answer::InProgress`].
    InProgress,
    /// [`Answer::Pending`].
    Pending,
    /// [`Answer::Closed`].
    Closed,
    /// [`Answer::Refunded`].
    Refunded,
    /// The provider knows no such attempt; the table's [`NotKnown`] says what that proves.
    NotKnown,
    /// [`Answer::Unknown`], with the reason as a sentence about the provider.
    Unknown(&'static str),
    /// The provider refuses to cancel because of the state of the payment. The state is asked for, and is the answer.
    AskAgain,
}

/// For [`Row::calls`].
pub(crate) const ASK: &[Call] = &[Call::Ask];
/// For [`Row::calls`].
pub(crate) const CANCEL: &[Call] = &[Call::Cancel];
/// For [`Row::calls`].
pub(crate) const BOTH: &[Call] = &[Call::Ask, Call::Cancel];

/// A field with this text.
pub(crate) const fn text(pointer: &'static str, text: &'static str) -> Field {
    Field { pointer, is: Is::Text(text) }
}

/// A field that is so.
pub(crate) const fn field(pointer: &'static str, is: Is) -> Field {
    Field { pointer, is }
}

/// What follows from an answer.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    Answer(Answer),
    AskAgain,
}

/// An HTTP answer that is looked up.
#[derive(Clone, Copy)]
pub(crate) struct Said<'a> {
    pub(crate) call: Call,
    pub(crate) resource: &'static str,
    pub(crate) http_status: u16,
    /// `Value::Null` for an answer without a body.
    pub(crate) body: &'a Value,
}

/// Looks an answer up and says what it means. `money` reads the amount in it, `Ok(None)` where it documents none;
/// `section` is the provider's, for a refusal of the keys.
///
/// # Errors
/// [`CallError`] for an answer without a row, and for rows that mean [`Meaning::Unknown`].
pub(crate) fn decide(
    table: &Table,
    said: Said<'_>,
    section: &str,
    money: impl FnOnce() -> Result<Option<Money>, CallError>,
) -> Result<Verdict, CallError> {
    let Some(row) = table.rows.iter().find(|row| row.holds(said)) else {
        return Err(undocumented(table.rows, said, section));
    };
    Ok(Verdict::Answer(match row.meaning {
        Meaning::Paid => Answer::Paid { money: money()? },
        Meaning::Open => Answer::Open,
        Meaning::InProgress => Answer::InProgress,
        Meaning::Pending => Answer::Pending,
        Meaning::Closed => Answer::Closed,
        Meaning::Refunded => Answer::Refunded,
        Meaning::NotKnown => match table.not_known {
            NotKnown::NotBegun => Answer::Absent,
            NotKnown::OtherAccount => return Err(CallError::NotKnown(section.to_owned())),
            NotKnown::Forgotten { after } => Answer::Forgotten { after },
        },
        Meaning::Unknown(why) => return Err(CallError::Undecided(why)),
        Meaning::AskAgain => return Ok(Verdict::AskAgain),
    }))
}

fn undocumented(rows: &[Row], said: Said<'_>, section: &str) -> CallError {
    let status = said.http_status;
    if matches!(status, 401 | 403) {
        return CallError::Refused { status, section: section.to_owned() };
    }
    let mut words = Vec::new();
    for field in rows.iter().filter(|row| row.is_for(said)).flat_map(|row| row.fields) {
        let name = name(field.pointer);
        if let Some(value) = said.body.pointer(field.pointer).and_then(shown)
            && !words.iter().any(|(known, _)| *known == name)
        {
            words.push((name, value));
        }
    }
    let words: Vec<_> = words.into_iter().map(|(name, value)| format!("{name} {value}")).collect();
    let said = if words.is_empty() { "without a known field".to_owned() } else { words.join(", ") };
    CallError::Undocumented { status, said }
}

/// A value that may be shown: a short word, as states and error codes are.
fn shown(value: &Value) -> Option<String> {
    const LONGEST_WORD_BYTES: usize = 60;
    match value {
        Value::String(text) => {
            let is_word = text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_.-".contains(&byte));
            Some(if is_word && text.len() <= LONGEST_WORD_BYTES { text.clone() } else { "of another form".into() })
        }
        Value::Bool(_) | Value::Number(_) => Some(value.to_string()),
        _ => None,
    }
}

/// `/latest_charge/amount_refunded` as `latest_charge.amount_refunded`.
fn name(pointer: &str) -> String {
    pointer.trim_start_matches('/').replace('/', ".")
}

impl Row {
    fn is_for(&self, said: Said<'_>) -> bool {
        self.calls.contains(&said.call) && (self.resource.is_empty() || self.resource == said.resource)
    }

    fn holds(&self, said: Said<'_>) -> bool {
        self.is_for(said)
            && self.http_status == said.http_status
            && self.fields.iter().all(|field| field.holds(said.body))
    }
}

impl Field {
    fn holds(&self, body: &Value) -> bool {
        let value = body.pointer(self.pointer).filter(|value| !value.is_null());
        match (self.is, value) {
            (Is::Text(text), Some(value)) => value.as_str() == Some(text),
            (Is::True, Some(value)) => value.as_bool() == Some(true),
            (Is::Positive, Some(value)) => value.as_f64().is_some_and(|number| number > 0.0),
            (Is::Zero, Some(value)) => value.as_i64() == Some(0),
            (Is::Missing, value) => value.is_none(),
            (Is::Given, value) => value.is_some(),
            (Is::Text(_) | Is::True | Is::Positive | Is::Zero, None) => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const ROWS: &[Row] = &[
        Row {
            calls: ASK,
            resource: "",
            http_status: 200,
            fields: &[text("/status", "paid"), field("/charge/refunded", Is::Positive)],
            meaning: Meaning::Refunded,
            source: "",
        },
        Row {
            calls: ASK,
            resource: "",
            http_status: 200,
            fields: &[text("/status", "paid")],
            meaning: Meaning::Paid,
            source: "",
        },
        Row {
            calls: ASK,
            resource: "",
            http_status: 404,
            fields: &[text("/status", "none")],
            meaning: Meaning::NotKnown,
            source: "",
        },
    ];
    const TABLE: Table = Table { kind: "x", not_known: NotKnown::OtherAccount, rows: ROWS };

    fn decided(call: Call, http_status: u16, body: &Value) -> Result<Verdict, CallError> {
        decide(&TABLE, Said { call, resource: "", http_status, body }, "providers.x", || Ok(None))
    }

    #[test]
    fn first_row_that_holds_decides() {
        let refunded = json!({"status": "paid", "charge": {"refunded": 1}});
        assert_eq!(decided(Call::Ask, 200, &refunded), Ok(Verdict::Answer(Answer::Refunded)));
        let paid = json!({"status": "paid", "charge": null});
        assert_eq!(decided(Call::Ask, 200, &paid), Ok(Verdict::Answer(Answer::Paid { money: None })));
    }

    #[test]
    fn not_known_proves_what_table_says() {
        let body = json!({"status": "none"});
        let said = Said { call: Call::Ask, resource: "", http_status: 404, body: &body };
        let decided = |not_known| decide(&Table { not_known, ..TABLE }, said, "providers.x", || Ok(None));
        let after = Duration::from_secs(3_600);
        assert_eq!(decided(NotKnown::NotBegun), Ok(Verdict::Answer(Answer::Absent)));
        assert_eq!(decided(NotKnown::Forgotten { after }), Ok(Verdict::Answer(Answer::Forgotten { after })));
        let why = decided(NotKnown::OtherAccount).unwrap_err().to_string();
        assert!(why.contains("another mode or account") && why.contains("providers.x"), "{why}");
    }

    #[test]
    fn other_answers_are_undocumented() {
        let paid = json!({"status": "paid"});
        for (call, status, body) in [
            (Call::Cancel, 200, paid.clone()),
            (Call::Ask, 201, paid),
            (Call::Ask, 200, json!({"status": "PAID"})),
            (Call::Ask, 200, json!({"status": ["paid"]})),
            (Call::Ask, 200, Value::Null),
        ] {
            let fault = decided(call, status, &body).unwrap_err();
            assert!(matches!(fault, CallError::Undocumented { .. }), "{body}: {fault}");
        }
    }

    #[test]
    fn errors_show_words_alone() {
        let show = |status: &str| decided(Call::Ask, 200, &json!({"status": status})).unwrap_err().to_string();
        assert!(show("on_hold").contains("status on_hold"));
        let secret = show("card 4242 4242 of Ada");
        assert!(!secret.contains("4242") && secret.contains("of another form"), "{secret}");
        let refused = decided(Call::Ask, 401, &Value::Null).unwrap_err().to_string();
        assert!(refused.contains("providers.x"), "{refused}");
    }
}

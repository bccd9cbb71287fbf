//! The rows that a request for a change chooses, and who asks for it.
//!
//! Reads and checks; changes nothing.

use serde::Deserialize;
use serde::de::DeserializeOwned;
use utoipa::ToSchema;
use uuid::Uuid;

use super::Problem;
use super::described::{NameOrReason, Yes, given, yes};
use crate::postgres::Operator;
use crate::postgres::selection::Selection;

/// Rows that one request can choose.
const MOST_IDS: usize = 1_000;

/// A change of rows: exactly one of `ids`, `reason` and `all`.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, bound = "Id: DeserializeOwned, Reason: DeserializeOwned")]
#[schema(min_properties = 3, max_properties = 3)]
pub(super) struct Change<Id, Reason> {
    /// These.
    #[serde(default, deserialize_with = "given")]
    #[schema(nullable = false, min_items = 1, max_items = 1000)]
    ids: Option<Vec<Id>>,
    /// All that are there for this reason.
    #[serde(default, deserialize_with = "given")]
    #[schema(nullable = false)]
    reason: Option<Reason>,
    /// All of them.
    #[serde(default, deserialize_with = "yes")]
    #[schema(value_type = Yes)]
    all: bool,
    /// The operator's name, for the record.
    who: NameOrReason,
    /// Why, for the record.
    why: NameOrReason,
}

impl<Id, Reason: Into<String>> Change<Id, Reason> {
    pub fn checked<Key: From<Id>>(self) -> Result<(Selection<Key>, Operator), Problem> {
        let selection = match (self.ids, self.reason, self.all) {
            (Some(ids), None, false) => Selection::Ids(not_too_many(ids)?.into_iter().map(Key::from).collect()),
            (None, Some(reason), false) => Selection::Reason(reason.into()),
            (None, None, true) => Selection::All,
            _ => return Err(Problem::bad_request("give exactly one of ids, reason and all")),
        };
        Ok((selection, operator(self.who, self.why)))
    }
}

/// The chosen rows: at least one.
pub(super) fn not_too_many<Id>(ids: Vec<Id>) -> Result<Vec<Id>, Problem> {
    match ids.len() {
        1..=MOST_IDS => Ok(ids),
        count => Err(Problem::bad_request(format!("ids has {count}; give 1 to {MOST_IDS}"))),
    }
}

/// The operator of a change, with a run of its own.
pub(super) fn operator(NameOrReason(who): NameOrReason, NameOrReason(why): NameOrReason) -> Operator {
    Operator { who, why: Some(why), run: Uuid::now_v7() }
}

/// The operator of a change that a form asks for.
pub(in crate::http) fn operator_of_form(who: String, why: String) -> Result<Operator, Problem> {
    let checked = |name: &str, text: String| {
        NameOrReason::try_from(text).map_err(|why| Problem::bad_request(format!("{name}: {why}")))
    };
    Ok(operator(checked("who", who)?, checked("why", why)?))
}

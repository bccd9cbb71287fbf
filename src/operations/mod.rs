//! Use cases of operators: each once, typed and serialisable. The command line, the API and the page call them.
//!
//! Formats nothing for a terminal or a page.

pub mod adopt;
pub mod audit;
pub mod close_orders;
pub mod close_rate;
pub mod doctor;
pub mod dry_run;
pub mod explain;
pub mod first_backlog;
pub mod forecast;
pub mod late_payments;
pub mod move_deadlines;
pub mod open_cause;
pub mod order_story;
pub mod orders_statements;
pub mod orders_table;
pub mod paced;
pub mod parked;
pub mod pause_closing;
pub mod preview;
pub mod recent_closes;
pub mod reminders;
pub mod status;
pub mod unresolved;

use serde::Serialize;

/// A page of a list.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, utoipa::ToSchema)]
pub struct Page<Row> {
    /// In the list's order.
    pub rows: Vec<Row>,
    /// The parameter `after` of the next page; absent at the end.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub next: Option<String>,
}

impl<Row> Page<Row> {
    /// Rows of which at most `limit` were asked for. A page that is full may be followed by an empty one.
    fn of(rows: Vec<Row>, limit: i64, place: impl Fn(&Row) -> String) -> Self {
        let is_full = i64::try_from(rows.len()).is_ok_and(|shown| shown >= limit);
        let next = rows.last().filter(|_| is_full).map(place);
        Self { rows, next }
    }
}

/// Something that an answer leaves out, because it cannot be known. It is never shown as zero.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, utoipa::ToSchema)]
pub struct NotKnown {
    /// A word or two.
    pub what: &'static str,
    /// One sentence.
    pub why: String,
}

/// The longest that an operator's name or reason may be, in characters.
const MOST_CHARACTERS: usize = 500;

/// An operator's name or reason, without white space around it.
///
/// # Errors
/// One sentence, if it is empty or too long.
pub fn name_or_reason(text: &str) -> Result<String, String> {
    let text = text.trim();
    match text.chars().count() {
        0 => Err("it is empty; write a word or a sentence".into()),
        length if length > MOST_CHARACTERS => {
            Err(format!("it has {length} characters; write at most {MOST_CHARACTERS}"))
        }
        // The only character that a Postgres text cannot hold.
        _ if text.contains('\0') => Err("it contains a NUL character; leave that out".into()),
        _ => Ok(text.to_owned()),
    }
}

/// A text that a database can keep.
///
/// # Errors
/// One sentence, if it is too long or has a character that Postgres does not keep.
pub fn plain_text(text: &str) -> Result<String, &'static str> {
    let fits = text.chars().count() <= 200 && !text.contains('\0');
    fits.then(|| text.to_owned()).ok_or("it is longer than 200 characters or contains a NUL character")
}

/// The answer, or `None` and an entry in the list of what is not known.
fn known<T>(what: &'static str, answer: Result<T, String>, not_known: &mut Vec<NotKnown>) -> Option<T> {
    answer.map_err(|why| not_known.push(NotKnown { what, why })).ok()
}

//! What every form that changes something needs: a login, a request from the page itself, chosen rows, and a reason.
//!
//! Decides whether a change may be asked for; changes nothing itself.

use std::str::FromStr;
use std::sync::Arc;

use axum::Form;
use axum::extract::{FromRequest, FromRequestParts, Request};
use axum::http::request::Parts;
use axum::http::{StatusCode, Uri};
use axum::response::{IntoResponse, Redirect, Response};
use maud::{Markup, html};
use serde::de::DeserializeOwned;
use url::form_urlencoded::{self, Serializer};

use super::super::api::Problem;
use super::super::api::change::operator_of_form;
use super::super::site::{Shared, is_from_this_site};
use super::failed;
use super::layout::{Visitor, login_path, table};
use crate::operations::Page;
use crate::postgres::Operator;

/// A form with several fields of one name.
pub(super) type Fields = Vec<(String, String)>;

/// A request that a form of this page has sent. Decided before the form is read.
#[derive(Debug)]
pub(super) struct FromOwnForm(pub Visitor);

impl FromRequestParts<Arc<Shared>> for FromOwnForm {
    type Rejection = Response;

    async fn from_request_parts(parts: &mut Parts, shared: &Arc<Shared>) -> Result<Self, Response> {
        let Ok(visitor) = Visitor::from_request_parts(parts, shared).await;
        if !is_from_this_site(&parts.headers) {
            let why = "the request is not from this page; use its form, or the API with the token";
            return Err(failed(&visitor, &Problem::new(StatusCode::FORBIDDEN, why)));
        }
        Ok(Self(visitor))
    }
}

/// The same from a visitor who has logged in, and so may ask for a change. Decided before the form is read.
#[derive(Debug)]
pub(super) struct Permitted {
    /// With a login.
    pub visitor: Visitor,
    /// The name of the login.
    pub who: String,
}

impl FromRequestParts<Arc<Shared>> for Permitted {
    type Rejection = Response;

    async fn from_request_parts(parts: &mut Parts, shared: &Arc<Shared>) -> Result<Self, Response> {
        let FromOwnForm(visitor) = FromOwnForm::from_request_parts(parts, shared).await?;
        let Some(who) = visitor.session.as_ref().map(|session| session.who.clone()) else {
            let why = "log in first; the session may have ended";
            return Err(failed(&visitor, &Problem::new(StatusCode::UNAUTHORIZED, why)));
        };
        Ok(Self { visitor, who })
    }
}

/// A form's fields, or those of an address. What is wrong with them is told as a page.
#[derive(Debug)]
pub(super) struct Filled<T>(pub T);

impl<T: DeserializeOwned> FromRequest<Arc<Shared>> for Filled<T> {
    type Rejection = Response;

    async fn from_request(request: Request, shared: &Arc<Shared>) -> Result<Self, Response> {
        let (mut parts, body) = request.into_parts();
        let Ok(visitor) = Visitor::from_request_parts(&mut parts, shared).await;
        parts.uri = without_empty(&parts.uri);
        match Form::from_request(Request::from_parts(parts, body), shared).await {
            Ok(Form(fields)) => Ok(Self(fields)),
            Err(fault) => {
                let why = format!("the form is incomplete; fill it in again ({})", fault.body_text());
                Err(failed(&visitor, &Problem::new(fault.status(), why)))
            }
        }
    }
}

/// The address without fields that were left empty: they are as good as none.
fn without_empty(uri: &Uri) -> Uri {
    let Some(query) = uri.query() else { return uri.clone() };
    let filled = form_urlencoded::parse(query.as_bytes()).filter(|(_, text)| !text.is_empty());
    let query = Serializer::new(String::new()).extend_pairs(filled).finish();
    format!("{}?{query}", uri.path()).parse().unwrap_or_else(|_| uri.clone())
}

/// The text in the field of this name; empty if there is none.
pub(super) fn field(fields: &Fields, name: &str) -> String {
    let found = fields.iter().find(|(of, _)| of == name);
    found.map(|(_, text)| text.clone()).unwrap_or_default()
}

/// The rows that a form has chosen, and its operator.
pub(super) fn chosen<Id: FromStr>(who: String, fields: &Fields) -> Result<(Vec<Id>, Operator), Problem> {
    let ids: Result<Vec<Id>, _> = fields.iter().filter(|(name, _)| name == "id").map(|(_, id)| id.parse()).collect();
    let ids = ids.map_err(|_| Problem::bad_request("one of the chosen rows has no valid id; load the page again"))?;
    if ids.is_empty() {
        return Err(Problem::bad_request("nothing was chosen; check the box before at least one row"));
    }
    Ok((ids, operator_of_form(who, field(fields, "why"))?))
}

/// The page that follows: where to go on, or what is wrong.
pub(super) fn answer(visitor: &Visitor, done: Result<String, Problem>) -> Response {
    match done {
        Ok(next) => Redirect::to(&next).into_response(),
        Err(problem) => failed(visitor, &problem),
    }
}

/// A list whose rows can be chosen for a change.
pub(super) struct ChoiceList<'a, Row> {
    /// Its address, also of its next page.
    pub path: &'a str,
    /// What it has, in the plural, and one of its rows.
    pub name: &'a str,
    pub row: &'a str,
    /// The key of a row.
    pub id: fn(&Row) -> String,
    /// Its columns: a name, which stands before the cell on a narrow screen, whether it has numbers, and the cell.
    pub columns: Vec<(&'a str, bool, Cell<'a, Row>)>,
    /// A button for each change.
    pub buttons: Markup,
    /// What one can do there after logging in, and the command that does the same.
    pub change: (&'a str, &'a str),
}

/// Renders a cell.
pub(super) type Cell<'a, Row> = Box<dyn Fn(&Row) -> Markup + 'a>;

impl<Row> ChoiceList<'_, Row> {
    /// The table, as a form for a visitor who has logged in, and a link to the next page.
    pub fn render(&self, page: &Page<Row>, visitor: &Visitor) -> Markup {
        let next = page.next.as_ref().map(|next| {
            let begin = if self.path.contains('?') { "&" } else { "?" };
            format!("{}{begin}{}", self.path, Serializer::new(String::new()).append_pair("after", next).finish())
        });
        html! {
            @if page.rows.is_empty() {
                p { "None." }
            } @else if visitor.session.is_some() {
                form method="post" {
                    (self.table(&page.rows, true))
                    div.change {
                        label for="why" { "Why" }
                        input #why name="why" required maxlength="500" autocomplete="off";
                        (self.buttons)
                    }
                }
            } @else {
                (self.table(&page.rows, false))
                (how_to_change(visitor, self.path, self.change.0, self.change.1))
            }
            @if let Some(next) = next { p { a href=(next) { "Next page" } } }
        }
    }

    fn table(&self, rows: &[Row], is_choosable: bool) -> Markup {
        let chosen = is_choosable.then_some(("chosen", false));
        let columns = self.columns.iter().map(|(name, is_number, _)| (*name, *is_number));
        let heads: Vec<_> = chosen.into_iter().chain(columns).collect();
        let rows = html! {
            @for row in rows { tr {
                @if is_choosable {
                    @let id = (self.id)(row);
                    td data-name="chosen" {
                        input type="checkbox" name="id" value=(id) aria-label=(format!("choose {} {id}", self.row));
                    }
                }
                @for (name, is_number, cell) in &self.columns {
                    td class=[is_number.then_some("number")] data-name=(name) { (cell(row)) }
                }
            } }
        };
        table(self.name, "cards", &heads, &rows)
    }
}

/// On a page that cannot change anything now: how it can. `command` does the same.
pub(super) fn how_to_change(visitor: &Visitor, page: &str, what: &str, command: &str) -> Markup {
    html! {
        @if visitor.is_writable { p { a href=(login_path(page)) { "Log in" } " to " (what) "." } }
        @else { p { "This page changes nothing, because http.token_file is not set. " code { (command) } " does." } }
    }
}

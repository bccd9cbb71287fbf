//! What every form that changes something needs: a login, a request from the page itself, chosen rows, and a reason.
//!
//! Decides whether a change may be asked for; changes nothing itself.

use std::fmt::Display;
use std::str::FromStr;
use std::sync::Arc;

use axum::Form;
use axum::extract::{FromRequest, FromRequestParts, Request};
use axum::http::StatusCode;
use axum::http::request::Parts;
use axum::response::{IntoResponse, Redirect, Response};
use maud::{Markup, html};
use serde::de::DeserializeOwned;

use super::super::api::Problem;
use super::super::site::{Shared, is_from_this_site};
use super::failed;
use super::layout::{Visitor, login_path};

/// A form with several fields of one name.
pub(super) type Fields = Vec<(String, String)>;

/// What a form asks for.
#[derive(Debug)]
pub(super) struct Asked<Id> {
    /// The chosen rows: at least one.
    pub ids: Vec<Id>,
    /// The name of the login.
    pub who: String,
    /// As it was typed, unchecked.
    pub why: String,
}

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

/// A form's fields. What is wrong with them is told as a page.
#[derive(Debug)]
pub(super) struct Filled<T>(pub T);

impl<T: DeserializeOwned> FromRequest<Arc<Shared>> for Filled<T> {
    type Rejection = Response;

    async fn from_request(request: Request, shared: &Arc<Shared>) -> Result<Self, Response> {
        let (mut parts, body) = request.into_parts();
        let Ok(visitor) = Visitor::from_request_parts(&mut parts, shared).await;
        match Form::from_request(Request::from_parts(parts, body), shared).await {
            Ok(Form(fields)) => Ok(Self(fields)),
            Err(fault) => {
                let why = format!("the form is incomplete; fill it in again ({})", fault.body_text());
                Err(failed(&visitor, &Problem::new(fault.status(), why)))
            }
        }
    }
}

/// The text in the field of this name; empty if there is none.
pub(super) fn field(fields: &Fields, name: &str) -> String {
    let found = fields.iter().find(|(of, _)| of == name);
    found.map(|(_, text)| text.clone()).unwrap_or_default()
}

/// What a form with rows to choose asks for.
pub(super) fn asked<Id: FromStr>(who: String, fields: &Fields) -> Result<Asked<Id>, Problem> {
    let ids: Result<Vec<Id>, _> = fields.iter().filter(|(name, _)| name == "id").map(|(_, id)| id.parse()).collect();
    let ids = ids.map_err(|_| Problem::bad_request("one of the chosen rows has no valid id; load the page again"))?;
    if ids.is_empty() {
        return Err(Problem::bad_request("nothing was chosen; check the box before at least one row"));
    }
    Ok(Asked { ids, who, why: field(fields, "why") })
}

/// The page that follows: where to go on, or what is wrong.
pub(super) fn answer(visitor: &Visitor, done: Result<String, Problem>) -> Response {
    match done {
        Ok(next) => Redirect::to(&next).into_response(),
        Err(problem) => failed(visitor, &problem),
    }
}

/// The form around a table of rows that can be chosen, with the reason and a button for each change.
pub(super) fn form(table: &Markup, buttons: &Markup) -> Markup {
    html! {
        form method="post" {
            (table)
            div.change {
                label for="why" { "Why" }
                input #why name="why" required maxlength="500" autocomplete="off";
                (buttons)
            }
        }
    }
}

/// The first cell of a row that can be chosen.
pub(super) fn choice(id: impl Display, what: &str) -> Markup {
    html! {
        td data-name="chosen" { input type="checkbox" name="id" value=(id) aria-label=(format!("choose {what} {id}")); }
    }
}

/// On a page that cannot change anything now: how it can. `command` does the same.
pub(super) fn how_to_change(visitor: &Visitor, page: &str, what: &str, command: &str) -> Markup {
    html! {
        @if visitor.is_writable { p { a href=(login_path(page)) { "Log in" } " to " (what) "." } }
        @else { p { "This page changes nothing, because http.token_file is not set. " code { (command) } " does." } }
    }
}

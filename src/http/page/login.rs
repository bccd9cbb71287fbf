//! Logging in with the token, and out again.
//!
//! A login is a cookie that only this site sends back.

use std::sync::Arc;
use std::time::Instant;

use axum::Extension;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use axum::http::header::SET_COOKIE;
use axum::http::{HeaderMap, HeaderValue, StatusCode};
use axum::response::{IntoResponse, Redirect, Response};
use maud::{Markup, html};
use serde::Deserialize;
use tracing::info;

use super::super::Peer;
use super::super::api::Problem;
use super::super::site::{COOKIE, Denied, LONGEST_SESSION, Shared, check};
use super::changes::{Filled, FromOwnForm};
use super::failed;
use super::layout::{Layout, Visitor, page_at, session_key};
use super::words::shown;
use crate::operations::name_or_reason;

/// The page to come back to.
#[derive(Debug, Default, Deserialize)]
pub(super) struct LoginFor {
    #[serde(default)]
    to: String,
}

pub(super) async fn page(visitor: Visitor, from: Result<Query<LoginFor>, QueryRejection>) -> Response {
    let Query(LoginFor { to }) = from.unwrap_or_default();
    Layout::new("Log in", &visitor).render(form(&visitor, page_at(&to), None)).into_response()
}

fn form(visitor: &Visitor, to: &str, fault: Option<&str>) -> Markup {
    html! {
        h1 { "Log in" }
        @if visitor.is_writable {
            p { "Logging in allows to retry and drop parked alarms, to settle late money, to have payment providers asked again, and to pause and resume closing. Each change is recorded with your name and your reason." }
            @if let Some(fault) = fault { p.bad role="alert" { (shown(fault)) } }
            form.filter method="post" action="/login" {
                input type="hidden" name="to" value=(to);
                div { label for="who" { "Your name" } input #who name="who" required maxlength="500" autocomplete="username"; }
                div {
                    label for="token" { "Token (http.token_file)" }
                    input #token name="token" type="password" required autocomplete="current-password";
                }
                button { "Log in" }
            }
        } @else {
            p { "This page changes nothing, because http.token_file is not set." }
        }
    }
}

#[derive(Debug, Deserialize)]
pub(super) struct Given {
    who: String,
    token: String,
    #[serde(default)]
    to: String,
}

pub(super) async fn begin(
    State(shared): State<Arc<Shared>>,
    FromOwnForm(visitor): FromOwnForm,
    Extension(Peer(peer)): Extension<Peer>,
    headers: HeaderMap,
    Filled(Given { who, token, to }): Filled<Given>,
) -> Response {
    if let Err(denied) = check(&shared, &token, peer.ip()) {
        return refused(&visitor, page_at(&to), denied);
    }
    let who = match name_or_reason(&who) {
        Ok(who) => who,
        Err(why) => return failed(&visitor, &Problem::bad_request(format!("your name: {why}"))),
    };
    let Some(key) = shared.sessions.begin(who.clone(), Instant::now()) else {
        return failed(&visitor, &Problem::unavailable("the system has no random numbers; try again"));
    };
    info!(who, %peer, "logged in over HTTP");
    // Behind a proxy that speaks TLS the browser must not send it without.
    let secure = if headers.get("x-forwarded-proto").is_some_and(|proto| proto == "https") { "; Secure" } else { "" };
    let age_s = LONGEST_SESSION.as_secs();
    let cookie = format!("{COOKIE}={key}; Path=/; HttpOnly; SameSite=Strict; Max-Age={age_s}{secure}");
    with_cookie(page_at(&to), &cookie)
}

/// To this page of ours.
fn with_cookie(page: &str, cookie: &str) -> Response {
    let mut response = Redirect::to(page).into_response();
    let cookie = HeaderValue::from_str(cookie).expect("a cookie of our own is visible ASCII");
    response.headers_mut().insert(SET_COOKIE, cookie);
    response
}

fn refused(visitor: &Visitor, to: &str, denied: Denied) -> Response {
    let (status, fault) = match denied {
        Denied::ReadOnly => (StatusCode::FORBIDDEN, denied.to_string()),
        Denied::WrongToken => (StatusCode::UNAUTHORIZED, "the token is wrong".to_owned()),
    };
    let page = Layout::new("Log in", visitor).render(form(visitor, to, Some(&fault)));
    (status, page).into_response()
}

pub(super) async fn end(State(shared): State<Arc<Shared>>, _: FromOwnForm, headers: HeaderMap) -> Response {
    if let Some(key) = session_key(&headers) {
        shared.sessions.end(key);
    }
    with_cookie("/parked", &format!("{COOKIE}=; Path=/; HttpOnly; SameSite=Strict; Max-Age=0"))
}

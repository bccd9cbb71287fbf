//! Whether a request may change something: by the token in its header, for programs, or by a login's cookie, for the
//! page. The number of tries is not limited: a token is too long to be guessed, and a limit by address would lock out
//! those who have it and share a proxy with a client that has not.
//!
//! Decides; answers nothing itself.

use std::net::IpAddr;

use axum::http::HeaderMap;
use axum::http::header::AUTHORIZATION;
use tracing::warn;

use super::Shared;

/// Why a change is not allowed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(in crate::http) enum Denied {
    /// There is no token that could allow it.
    #[error("this worker changes nothing over HTTP; name a file with a token in http.token_file to allow it")]
    ReadOnly,
    /// No token, or a wrong one.
    #[error("the token is missing or wrong; send the one in http.token_file as `Authorization: Bearer TOKEN`")]
    WrongToken,
}

/// Whether the request has the token.
pub(in crate::http) fn authorize(shared: &Shared, headers: &HeaderMap, from: IpAddr) -> Result<(), Denied> {
    let given = headers.get(AUTHORIZATION).and_then(|value| value.to_str().ok());
    let token = given.and_then(|value| value.split_once(' '));
    // RFC 9110: the scheme's case does not matter.
    let token = token.filter(|(scheme, _)| scheme.eq_ignore_ascii_case("Bearer")).map(|(_, token)| token);
    check(shared, token.unwrap_or_default(), from)
}

/// Whether this is the token.
pub(in crate::http) fn check(shared: &Shared, given: &str, from: IpAddr) -> Result<(), Denied> {
    if !shared.is_writable() {
        return Err(Denied::ReadOnly);
    }
    if shared.is_token(given) {
        return Ok(());
    }
    if !given.is_empty() && shared.may_log_wrong_token() {
        warn!(%from, "a wrong token was given over HTTP; it changes nothing; said once a minute at most");
    }
    Err(Denied::WrongToken)
}

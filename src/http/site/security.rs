//! The headers of every answer of the API and the page, which names they are served under, and whether a request for a
//! change is from the page itself.
//!
//! Adds and reads headers only.

use std::sync::Arc;
use std::time::Duration;

use axum::Extension;
use axum::extract::{Request, State};
use axum::http::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, HOST, HeaderName, ORIGIN, REFERRER_POLICY, X_CONTENT_TYPE_OPTIONS,
    X_FRAME_OPTIONS,
};
use axum::http::{HeaderMap, HeaderValue, StatusCode};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use super::super::Attended;
use super::super::api::Problem;
use super::{Shared, hosts};

/// A page may wait for a connection and several statements.
const LONGEST_ANSWER: Duration = Duration::from_secs(30);

/// Nothing from elsewhere, no script or style in the page's own text, and in no frame.
pub(in crate::http) const PAGE_POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'";
/// Data is not shown as a page.
pub(in crate::http) const API_POLICY: &str = "default-src 'none'; frame-ancestors 'none'";

const OPENER_POLICY: HeaderName = HeaderName::from_static("cross-origin-opener-policy");
const RESOURCE_POLICY: HeaderName = HeaderName::from_static("cross-origin-resource-policy");

/// Marks each answer with the headers, of which one is this policy.
pub(in crate::http) async fn mark(
    State((shared, policy)): State<(Arc<Shared>, &'static str)>,
    attended: Extension<Arc<Attended>>,
    request: Request,
    next: Next,
) -> Response {
    attended.extend(LONGEST_ANSWER);
    let mut response = match hosts::check(&shared.settings.http, request.uri(), request.headers()) {
        Ok(()) => next.run(request).await,
        Err(why) => Problem::new(StatusCode::MISDIRECTED_REQUEST, why.to_string()).into_response(),
    };
    for (name, value) in [
        (CONTENT_SECURITY_POLICY, policy),
        (X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (X_FRAME_OPTIONS, "DENY"),
        // Without a referrer for itself, a browser sends forms with `Origin: null`.
        (REFERRER_POLICY, "same-origin"),
        (CACHE_CONTROL, "no-store"),
        (OPENER_POLICY, "same-origin"),
        (RESOURCE_POLICY, "same-origin"),
    ] {
        response.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    response
}

/// Whether a browser says that the request is from a page of this site. Every browser sends `Origin` with a POST; a
/// request without it is not from the page. The cookie is `SameSite=Strict` besides.
pub(in crate::http) fn is_from_this_site(headers: &HeaderMap) -> bool {
    let text = |name| headers.get(name).and_then(|value| value.to_str().ok());
    let (Some(origin), Some(host)) = (text(ORIGIN), text(HOST)) else { return false };
    let authority = origin.strip_prefix("http://").or_else(|| origin.strip_prefix("https://"));
    authority.is_some_and(|authority| authority.eq_ignore_ascii_case(host))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_own_origin_is_this_site() {
        let asked = |origin: Option<&'static str>| {
            let mut headers = HeaderMap::new();
            headers.insert(HOST, HeaderValue::from_static("shop.example:9394"));
            origin.map(|origin| headers.insert(ORIGIN, HeaderValue::from_static(origin)));
            is_from_this_site(&headers)
        };
        // A proxy in front may speak TLS.
        assert!(asked(Some("http://shop.example:9394")) && asked(Some("https://shop.example:9394")));
        for other in
            ["null", "http://shop.example", "http://evil.example:9394", "http://shop.example:9394.evil.example"]
        {
            assert!(!asked(Some(other)), "{other}");
        }
        assert!(!asked(None));
    }
}

//! What every page has: head, navigation, search, and who is logged in.
//!
//! Renders only.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Instant;

use axum::extract::FromRequestParts;
use axum::http::HeaderMap;
use axum::http::header::COOKIE as COOKIE_HEADER;
use axum::http::request::Parts;
use maud::{DOCTYPE, Markup, html};
use order_timeout_core::alarm::ParkReason;
use order_timeout_core::kind::Kind;
use url::form_urlencoded::byte_serialize;

use super::super::site::{COOKIE, Session, Shared};
use super::words::{number, shown};
use crate::operations::status::Waiting;

/// The pages that have no parameter, and their titles.
const PAGES: [(&str, &str); 6] = [
    ("/", "Status"),
    ("/forecast", "Forecast"),
    ("/parked", "Parked alarms"),
    ("/late", "Late money"),
    ("/unresolved", "Unresolved"),
    ("/pauses", "Pauses"),
];

/// The address of the alarms that are parked for the reason that follows.
pub(super) const PARKED_FOR: &str = "/parked?reason=";

/// The address, which may be asked for by a form, if it is one of our pages; otherwise parked alarms. Never of another
/// site.
pub(super) fn page_at(address: &str) -> &str {
    let is_ours = PAGES.iter().any(|(known, _)| *known == address);
    let reason = address.strip_prefix(PARKED_FOR);
    if is_ours || reason.is_some_and(|reason| ParkReason::WORDS.contains(&reason)) { address } else { "/parked" }
}

/// The address of the login, from which one comes back to this page.
pub(super) fn login_path(page: &str) -> String {
    format!("/login?to={page}")
}

/// Who looks at the page.
#[derive(Debug, Clone)]
pub(super) struct Visitor {
    /// Whether anything can be changed at all.
    pub is_writable: bool,
    /// The login, if there is one.
    pub session: Option<Session>,
    /// The kinds whose orders can be looked at.
    pub kinds: Vec<Kind>,
    /// For the tabs.
    pub waiting: Waiting,
    /// The database's time, RFC 3339; empty where it is not known soon.
    pub at: String,
}

impl FromRequestParts<Arc<Shared>> for Visitor {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, shared: &Arc<Shared>) -> Result<Self, Infallible> {
        let session = session_key(&parts.headers).and_then(|key| shared.sessions.find(key, Instant::now()));
        let (kinds, (waiting, at)) = (shared.kinds().to_vec(), shared.feed.waiting().await);
        Ok(Self { is_writable: shared.is_writable(), session, kinds, waiting, at })
    }
}

/// The key in the page's cookie.
pub(super) fn session_key(headers: &HeaderMap) -> Option<&str> {
    let cookies = headers.get_all(COOKIE_HEADER).into_iter().filter_map(|value| value.to_str().ok());
    let mut pairs = cookies.flat_map(|value| value.split(';')).filter_map(|pair| pair.trim().split_once('='));
    pairs.find_map(|(name, value)| (name == COOKIE).then_some(value))
}

/// A page around its contents.
pub(super) struct Layout<'a> {
    title: &'a str,
    visitor: &'a Visitor,
    is_live: bool,
}

impl<'a> Layout<'a> {
    pub fn new(title: &'a str, visitor: &'a Visitor) -> Self {
        Self { title, visitor, is_live: false }
    }

    /// Its contents change without loading it again.
    pub fn live(self) -> Self {
        Self { is_live: true, ..self }
    }

    pub fn render(&self, contents: Markup) -> Markup {
        html! {
            (DOCTYPE)
            html lang="en" {
                head {
                    meta charset="utf-8";
                    meta name="viewport" content="width=device-width, initial-scale=1";
                    meta name="color-scheme" content="light dark";
                    title { (shown(self.title)) " · order-timeout" }
                    link rel="stylesheet" href="/assets/page.css";
                    link rel="icon" type="image/svg+xml" href="/assets/icon.svg";
                    @if self.is_live {
                        script src="/assets/page.js" defer {}
                        noscript { meta http-equiv="refresh" content="10"; }
                    }
                }
                body {
                    a.skip href="#contents" { "Skip to contents" }
                    header { (self.navigation()) }
                    main #contents { (contents) }
                    footer {
                        p { "order-timeout " (env!("ORDER_TIMEOUT_VERSION")) ". All times are UTC." }
                    }
                }
            }
        }
    }

    fn navigation(&self) -> Markup {
        html! {
            (tabs(self.title, &self.visitor.waiting))
            search {
                form action="/orders" method="get" {
                    label for="find" { "Order" }
                    input #find name="id" type="search" required maxlength="200" autocomplete="off" spellcheck="false"
                        placeholder="its id";
                    (kind_choice(&self.visitor.kinds, None))
                    button { "Find" }
                }
            }
            (self.login())
        }
    }

    fn login(&self) -> Markup {
        match &self.visitor.session {
            Some(session) => html! {
                form.login action="/logout" method="post" {
                    span { (shown(&session.who)) }
                    button { "Log out" }
                }
            },
            None if self.visitor.is_writable => {
                let here = PAGES.iter().find(|(_, title)| *title == self.title);
                let login = here.map_or_else(|| "/login".to_owned(), |(path, _)| login_path(path));
                html! { a.login href=(login) { "Log in" } }
            }
            None => html! { span.login title="http.token_file is not set" { "Read-only" } },
        }
    }
}

/// The pages, each with how much waits for a person there.
pub(super) fn tabs(title: &str, waiting: &Waiting) -> Markup {
    let count = |href| match href {
        "/parked" => waiting.parked,
        "/late" => waiting.late_money,
        "/unresolved" => waiting.unresolved,
        "/pauses" => waiting.pauses,
        _ => 0,
    };
    html! {
        nav #pages aria-label="Pages" {
            ul {
                @for (href, name) in PAGES {
                    li {
                        a href=(href) aria-current=[(name == title).then_some("page")] {
                            (name) @if count(href) > 0 { " " span.count { (number(count(href))) } }
                        }
                    }
                }
            }
        }
    }
}

/// The choice of a kind in a form; nothing where there is only one.
pub(super) fn kind_choice(kinds: &[Kind], chosen: Option<&Kind>) -> Markup {
    html! {
        @if kinds.len() > 1 {
            select name="kind" aria-label="Kind" {
                @for kind in kinds { option value=(kind) selected[chosen == Some(kind)] { (kind) } }
            }
        }
    }
}

/// A table that scrolls by itself on a narrow screen. `class`: empty for a plain one. Of each column its head, and whether it
/// has numbers.
pub(super) fn table(name: &str, class: &str, columns: &[(&str, bool)], rows: &Markup) -> Markup {
    html! {
        div.scroll tabindex="0" role="region" aria-label=(name) {
            table class=[(!class.is_empty()).then_some(class)] {
                thead { tr { @for (head, is_number) in columns { th class=[is_number.then_some("number")] scope="col" { (head) } } } }
                tbody { (rows) }
            }
        }
    }
}

/// The address of an order's story.
pub(super) fn order_path(kind: &Kind, id: &str) -> String {
    let id: String = byte_serialize(id.as_bytes()).map(|part| part.replace('+', "%20")).collect();
    if kind.is_default() { format!("/orders/{id}") } else { format!("/orders/{id}?kind={kind}") }
}

/// A link to it.
pub(super) fn order_link(kind: &Kind, id: &str) -> Markup {
    html! { a href=(order_path(kind, id)) { code { (shown(id)) } } }
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;

    use super::*;

    #[test]
    fn order_paths_name_other_kinds() {
        assert_eq!(order_path(&Kind::ORDER, "a b/7"), "/orders/a%20b%2F7");
        assert_eq!(order_path(&Kind::new("seat").unwrap(), "7"), "/orders/7?kind=seat");
    }

    #[test]
    fn tabs_count_what_waits() {
        let tabs = |parked| tabs("Pauses", &Waiting { parked, ..Waiting::default() }).into_string();
        assert!(tabs(1_200).contains("href=\"/parked\">Parked alarms <span class=\"count\">1,200</span></a>"));
        assert!(!tabs(0).contains("count") && tabs(0).contains("aria-current=\"page\">Pauses<"));
    }

    #[test]
    fn session_key_is_found_among_cookies() {
        let mut headers = HeaderMap::new();
        assert_eq!(session_key(&headers), None);
        headers.insert(COOKIE_HEADER, HeaderValue::from_static("a=1; order_timeout_session=key; b=2"));
        assert_eq!(session_key(&headers), Some("key"));
    }
}

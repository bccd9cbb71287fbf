//! What the API and the page share: the database, what changes are allowed to whom, and the security of their answers.
//!
//! `sources.rs` connects when the first request needs it; `status_feed.rs` reads for all open pages together.

mod auth;
mod hosts;
mod secret;
mod security;
mod sessions;
mod sources;
mod status_feed;

use std::sync::{Arc, Mutex, PoisonError};

use axum::{Router, middleware};
use order_timeout_core::kind::Kind;
use tokio::sync::Semaphore;
use tokio_util::task::AbortOnDropHandle;

use super::{Pages, api, page};
use crate::config::Settings;
use crate::give_way::GiveWay;
use crate::observe::logging::LogThrottle;
use crate::observe::served_kinds::ServedKinds;
use crate::postgres::DatabaseError;
pub(super) use auth::{Denied, authorize, check};
use secret::Token;
pub use secret::TokenError;
pub(super) use security::is_from_this_site;
use security::{API_POLICY, PAGE_POLICY, mark};
pub(super) use sessions::{COOKIE, LONGEST as LONGEST_SESSION, Session, Sessions};
use sources::LazySources;
pub(super) use sources::{SourceError, Sources};
pub(super) use status_feed::{StatusFeed, View};

/// Pages that are kept up to date at once: they must leave connections for probes (`MOST_CONNECTIONS`).
const MOST_STREAMS: usize = 32;

/// The API and the page. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Site(Arc<Shared>);

/// The state behind all requests.
#[derive(Debug)]
pub(super) struct Shared {
    pub settings: Settings,
    pub pages: Pages,
    /// What is recorded of the kinds that this worker serves.
    pub served: ServedKinds,
    pub sessions: Sessions,
    token: Option<Token>,
    wrong_tokens: Mutex<LogThrottle>,
    sources: Arc<LazySources>,
    pub feed: StatusFeed,
    /// One for each page that is kept up to date.
    pub streams: Arc<Semaphore>,
    /// Ends with the site.
    _refreshing: AbortOnDropHandle<()>,
}

impl Site {
    /// Reads the token, if the settings name a file with one. Connects to nothing yet.
    ///
    /// # Errors
    /// [`TokenError`].
    pub(crate) fn new(
        settings: &Settings,
        pages: Pages,
        served: ServedKinds,
        give_way: GiveWay,
    ) -> Result<Self, TokenError> {
        let token = match settings.http.token_file.as_str() {
            "" => None,
            path => Some(Token::read(path)?),
        };
        let sources = Arc::new(LazySources::new(settings));
        let feed = StatusFeed::new();
        let refreshing = tokio::spawn(status_feed::refresh(feed.clone(), sources.clone(), give_way));
        Ok(Self(Arc::new(Shared {
            settings: settings.clone(),
            pages,
            served,
            sessions: Sessions::default(),
            token,
            wrong_tokens: Mutex::default(),
            sources,
            feed,
            streams: Arc::new(Semaphore::new(MOST_STREAMS)),
            _refreshing: AbortOnDropHandle::new(refreshing),
        })))
    }

    pub(super) fn router(self) -> Router {
        let marked = |policy| middleware::from_fn_with_state((self.0.clone(), policy), mark);
        let (api, page) = (api::router().layer(marked(API_POLICY)), page::router().layer(marked(PAGE_POLICY)));
        api.merge(page).with_state(self.0)
    }
}

impl Shared {
    /// Whether a wrong token is logged now: a client that repeats one must not fill the log.
    pub fn may_log_wrong_token(&self) -> bool {
        self.wrong_tokens.lock().unwrap_or_else(PoisonError::into_inner).is_due()
    }

    /// The database, connected at the first call that reaches it.
    pub async fn sources(&self) -> Result<&Sources, DatabaseError> {
        self.sources.get().await
    }

    /// The kinds whose orders the settings name, the default one first.
    pub fn kinds(&self) -> &[Kind] {
        self.sources.kinds()
    }

    /// Whether anything can be changed at all.
    pub fn is_writable(&self) -> bool {
        self.token.is_some()
    }

    /// Whether this is the token. Takes the same time for every wrong one.
    pub fn is_token(&self, given: &str) -> bool {
        self.token.as_ref().is_some_and(|token| token.is(given))
    }
}

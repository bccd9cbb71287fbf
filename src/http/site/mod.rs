//! What the API and the page share: the database, what changes are allowed to whom, and the security of their answers.
//!
//! Connects when the first request needs it, and uses connections of its own: a slow page never takes a worker's.

mod auth;
mod limiter;
mod overview_feed;
mod secret;
mod security;
mod sessions;

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::{Router, middleware};
use tokio::sync::{OnceCell, Semaphore};
use tokio_util::task::AbortOnDropHandle;

use super::{Pages, api, page};
use crate::config::Settings;
use crate::observe::last_hour::SharedLastHour;
use crate::operations::orders_table::OrdersTable;
use crate::postgres::{self, Database, DatabaseError};
pub(super) use auth::{Denied, authorize, check};
use limiter::Limiter;
pub(super) use overview_feed::{OverviewFeed, View};
use secret::Token;
pub use secret::TokenError;
pub(super) use security::{is_from_this_site, mark_api, mark_page};
pub(super) use sessions::{COOKIE, LONGEST as LONGEST_SESSION, Session, Sessions};

/// Connections of the API and the page together.
const CONNECTIONS: u32 = 3;
/// A request waits for a connection no longer than this, and a statement takes no longer: a person waits for it.
const LONGEST_WAIT: Duration = Duration::from_secs(2);
const LONGEST_STATEMENT: Duration = Duration::from_secs(5);

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
    pub last_hour: SharedLastHour,
    pub sessions: Sessions,
    pub limiter: Limiter,
    token: Option<Token>,
    sources: Arc<OnceCell<Sources>>,
    pub feed: OverviewFeed,
    /// One for each page that is kept up to date.
    pub streams: Arc<Semaphore>,
    /// Ends with the site.
    _refreshing: AbortOnDropHandle<()>,
}

/// Where the answers are from.
#[derive(Debug, Clone)]
pub(super) struct Sources {
    pub database: Database,
    pub orders: OrdersTable,
}

impl Site {
    /// Reads the token, if the settings name a file with one. Connects to nothing yet.
    ///
    /// # Errors
    /// [`TokenError`].
    pub fn new(settings: &Settings, pages: Pages, last_hour: SharedLastHour) -> Result<Self, TokenError> {
        let token = match settings.http.token_file.as_str() {
            "" => None,
            path => Some(Token::read(path)?),
        };
        let sources = Arc::new(OnceCell::new());
        let feed = OverviewFeed::new();
        let refreshing = tokio::spawn(overview_feed::refresh(feed.clone(), sources.clone(), settings.clone()));
        Ok(Self(Arc::new(Shared {
            settings: settings.clone(),
            pages,
            last_hour,
            sessions: Sessions::default(),
            limiter: Limiter::default(),
            token,
            sources,
            feed,
            streams: Arc::new(Semaphore::new(MOST_STREAMS)),
            _refreshing: AbortOnDropHandle::new(refreshing),
        })))
    }

    pub(super) fn router(self) -> Router {
        let api = api::router().layer(middleware::from_fn(mark_api));
        let page = page::router().layer(middleware::from_fn(mark_page));
        api.merge(page).with_state(self.0)
    }
}

impl Shared {
    /// The database, connected at the first call that reaches it.
    pub async fn sources(&self) -> Result<&Sources, DatabaseError> {
        sources(&self.sources, &self.settings).await
    }

    /// Whether anything can be changed at all.
    pub fn is_writable(&self) -> bool {
        self.token.is_some()
    }

    /// Whether this is the token. Takes the same time for every wrong one.
    pub fn is_token(&self, given: &str) -> bool {
        self.token.as_ref().is_some_and(|token| token.is(given))
    }

    pub fn now(&self) -> Instant {
        Instant::now()
    }
}

async fn sources<'a>(cell: &'a OnceCell<Sources>, settings: &Settings) -> Result<&'a Sources, DatabaseError> {
    cell.get_or_try_init(|| async {
        let mut own = settings.database.clone();
        own.acquire_timeout = own.acquire_timeout.min(LONGEST_WAIT);
        own.statement_timeout = own.statement_timeout.min(LONGEST_STATEMENT);
        // Shorter than the statement timeout, which would hide that a lock was the cause.
        own.lock_timeout = own.lock_timeout.min(own.statement_timeout / 2);
        let database = Database::connect(&own, CONNECTIONS).await?;
        postgres::require_migrated(&database).await?;
        let orders = OrdersTable::open(database.clone(), settings).await?;
        Ok(Sources { database, orders })
    })
    .await
}

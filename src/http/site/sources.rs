//! The database and each kind's orders table, for the API and the page.
//!
//! Connects when the first request needs it, and uses connections of its own: a slow page never takes a worker's. A kind
//! whose table cannot be used takes nothing from the others.

use std::time::Duration;

use order_timeout_core::kind::Kind;
use tokio::sync::OnceCell;

use crate::config::Settings;
use crate::operations::orders_table::{OrdersTable, Unknown};
use crate::postgres::{self, Database, DatabaseError};

/// Connections of the API and the page together.
const CONNECTIONS: u32 = 3;
/// A request waits for a connection no longer than this, and a statement takes no longer: a person waits for it.
const LONGEST_WAIT: Duration = Duration::from_secs(2);
const LONGEST_STATEMENT: Duration = Duration::from_secs(5);

/// Why the orders of a kind cannot be read.
#[derive(Debug, thiserror::Error)]
pub(in crate::http) enum SourceError {
    /// The settings name no orders for it.
    #[error("there is no kind \"{kind}\" here; give one of {known}")]
    NoKind {
        /// As it was asked for.
        kind: Kind,
        /// The kinds that there are.
        known: String,
    },
    /// The database, or the statements of the kind.
    #[error(transparent)]
    Database(#[from] DatabaseError),
}

/// Where the answers are from, connected at the first call that reaches it.
#[derive(Debug)]
pub(super) struct LazySources {
    settings: Settings,
    kinds: Vec<Kind>,
    connected: OnceCell<Sources>,
}

impl LazySources {
    pub fn new(settings: &Settings) -> Self {
        let named = settings.all_kinds().into_iter().filter(|kind| settings.orders_of(kind).is_some());
        Self { settings: settings.clone(), kinds: named.collect(), connected: OnceCell::new() }
    }

    /// The kinds whose orders the settings name, the default one first.
    pub fn kinds(&self) -> &[Kind] {
        &self.kinds
    }

    pub async fn get(&self) -> Result<&Sources, DatabaseError> {
        self.connected.get_or_try_init(|| Sources::connect(&self.settings, &self.kinds)).await
    }
}

/// Where the answers are from.
#[derive(Debug)]
pub(in crate::http) struct Sources {
    pub database: Database,
    settings: Settings,
    tables: Vec<(Kind, OnceCell<OrdersTable>)>,
}

impl Sources {
    async fn connect(settings: &Settings, kinds: &[Kind]) -> Result<Self, DatabaseError> {
        let mut own = settings.database.clone();
        own.acquire_timeout = own.acquire_timeout.min(LONGEST_WAIT);
        own.statement_timeout = own.statement_timeout.min(LONGEST_STATEMENT);
        // Shorter than the statement timeout, which would hide that a lock was the cause.
        own.lock_timeout = own.lock_timeout.min(own.statement_timeout / 2);
        let database = Database::connect(&own, CONNECTIONS).await?;
        postgres::require_migrated(&database).await?;
        let tables = kinds.iter().map(|kind| (kind.clone(), OnceCell::new())).collect();
        Ok(Self { database, settings: settings.clone(), tables })
    }

    /// The orders table of this kind, opened at the first call that reaches it.
    pub async fn orders(&self, kind: &Kind) -> Result<&OrdersTable, SourceError> {
        let Some((_, cell)) = self.tables.iter().find(|(known, _)| known == kind) else {
            let known: Vec<&str> = self.tables.iter().map(|(kind, _)| kind.as_str()).collect();
            return Err(SourceError::NoKind { kind: kind.clone(), known: known.join(", ") });
        };
        let open = || OrdersTable::open(self.database.clone(), &self.settings, kind);
        Ok(cell.get_or_try_init(open).await?)
    }

    /// The orders table of every kind, or why it cannot be used.
    pub async fn all_orders(&self) -> Vec<(Kind, Result<&OrdersTable, Unknown>)> {
        let mut all = Vec::with_capacity(self.tables.len());
        for (kind, _) in &self.tables {
            all.push((kind.clone(), self.orders(kind).await.map_err(|error| error.to_string())));
        }
        all
    }
}

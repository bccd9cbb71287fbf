//! A connection lent by a pool, which goes back only if its work has ended.
//!
//! sqlx 0.9.0 lends a connection again on which a future was dropped while it waited for the answer to BEGIN: the next
//! borrower works inside that open transaction, and loses its work when the transaction is rolled back
//! (transact-rs/sqlx #4385, #4393). It also waits without limit for a server that vanishes while a connection is
//! returned, and keeps that connection's place in the pool until then (#4349). Runs no statement of its own.

use std::ops::{Deref, DerefMut};
use std::time::Duration;

use sqlx::pool::PoolConnection;
use sqlx::{PgConnection, Postgres};

/// How long a server may take to answer while a connection is returned, a ping. Afterwards it is closed.
const RETURN_TIMEOUT: Duration = Duration::from_secs(5);

/// A connection out of a pool. Dropped during work, it is closed; otherwise it is returned.
#[derive(Debug)]
pub struct Lease {
    /// None only while it is dropped or detached.
    connection: Option<PoolConnection<Postgres>>,
    /// Whether it is closed when it is dropped: its work has not ended, or a session must not outlive its holder.
    closes: bool,
}

impl Lease {
    pub(super) fn new(connection: PoolConnection<Postgres>) -> Self {
        Self { connection: Some(connection), closes: false }
    }

    /// Runs `work` to its end. If the returned future is dropped before, the connection is not returned.
    pub async fn work<T>(&mut self, work: impl AsyncFnOnce(&mut PgConnection) -> T) -> T {
        let closes = std::mem::replace(&mut self.closes, true);
        let done = work(self).await;
        self.closes = closes;
        done
    }

    /// Closes the connection when it is dropped.
    pub fn close_on_drop(&mut self) {
        self.closes = true;
    }

    /// Closes the connection, and waits for that.
    pub async fn close(mut self) {
        if let Some(connection) = self.connection.take() {
            // It is not needed again, so an error while closing it is ignored.
            let _ = connection.close().await;
        }
    }

    /// Ends the connection without a word to the server.
    pub fn discard(mut self) {
        drop(self.connection.take().map(PoolConnection::detach));
    }
}

impl Deref for Lease {
    type Target = PgConnection;

    fn deref(&self) -> &PgConnection {
        self.connection.as_deref().expect("a lease has its connection until it is dropped")
    }
}

impl DerefMut for Lease {
    fn deref_mut(&mut self) -> &mut PgConnection {
        self.connection.as_deref_mut().expect("a lease has its connection until it is dropped")
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let Some(mut connection) = self.connection.take() else { return };
        if self.closes {
            connection.close_on_drop();
        } else {
            // Dropped at its time limit, this future closes the connection and frees its place in the pool.
            tokio::spawn(tokio::time::timeout(RETURN_TIMEOUT, connection.return_to_pool()));
        }
    }
}

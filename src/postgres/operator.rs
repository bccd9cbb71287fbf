//! The operator who asked for a change, for the rows of history that the change writes.
//!
//! Only names the operator; grants and checks nothing.

use sqlx::PgConnection;
use uuid::Uuid;

/// Who asked for a change, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Operator {
    /// A name that a reader of the history knows.
    pub who: String,
    /// One sentence.
    pub why: Option<String>,
    /// The run of the command, which may change many orders.
    pub run: Uuid,
}

impl Operator {
    /// Names the operator for the current transaction: the close statement writes `order_timeout.who` and
    /// `order_timeout.why` into the history.
    ///
    /// # Errors
    /// sqlx's.
    pub async fn name_in_transaction(&self, connection: &mut PgConnection) -> Result<(), sqlx::Error> {
        sqlx::query("SELECT set_config('order_timeout.who', $1, true), set_config('order_timeout.why', $2, true)")
            .bind(&self.who)
            .bind(self.why.as_deref().unwrap_or_default())
            .execute(connection)
            .await
            .map(drop)
    }
}

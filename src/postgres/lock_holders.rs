//! Which sessions and prepared transactions hold locks on the tables that a close changes.
//!
//! Reads only. The state of another role's session is NULL to a role without `pg_read_all_stats`; its process and its
//! application are not.

use order_timeout_client::postgres::Timestamptz;
use order_timeout_core::message::write_rfc3339;
use sqlx::Row;
use sqlx::postgres::PgRow;

use super::Database;

/// A session or a prepared transaction with a lock.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LockHolder {
    /// The process of its session; `None` for a prepared transaction.
    pub pid: Option<i32>,
    /// The session's application and role, or the prepared transaction's name.
    pub of: String,
    /// As in `pg_stat_activity`.
    pub state: Option<String>,
    /// When its transaction began, RFC 3339; `None` if our role may not see it.
    pub since: Option<String>,
    /// Whether it is this that has locked or changed the row, and not another row of a table.
    pub holds_row: bool,
}

impl LockHolder {
    /// The statement that ends it.
    #[must_use]
    pub fn end(&self) -> String {
        match self.pid {
            Some(pid) => format!("SELECT pg_terminate_backend({pid})"),
            None => format!("ROLLBACK PREPARED '{}'", self.of.replace('\'', "''")),
        }
    }
}

impl std::fmt::Display for LockHolder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { pid, of, state, since, .. } = self;
        match pid {
            Some(pid) => {
                write!(f, "pid {pid} ({of}{})", state.iter().map(|state| format!(", {state}")).collect::<String>())?
            }
            None => write!(f, "the prepared transaction {of:?}")?,
        }
        match since {
            Some(since) => write!(f, " since {since}"),
            None => f.write_str(" since a time that only pg_read_all_stats shows"),
        }
    }
}

/// Transactions of less than a second end by themselves. Plain reads keep no close from its rows.
const HOLDERS: &str = "
WITH prepared AS (
    SELECT l.virtualtransaction, p.gid, p.prepared
    FROM pg_prepared_xacts p JOIN pg_locks l ON l.pid IS NULL AND l.locktype = 'transactionid' AND l.transactionid = p.transaction),
holders AS (
    SELECT l.pid, coalesce(a.xact_start, p.prepared) AS since, a.state, p.gid,
           concat_ws(' of role ', nullif(a.application_name, ''), a.usename) AS of,
           coalesce(bool_or(l.locktype = 'transactionid' AND l.mode = 'ExclusiveLock' AND l.transactionid::text = $2), false)
               AS holds_row,
           bool_or(l.locktype = 'relation' AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
               AND l.relation = ANY (ARRAY(SELECT to_regclass(t)::oid FROM unnest($1::text[]) AS t))
               AND l.mode <> 'AccessShareLock') AS holds_table
    FROM pg_locks l LEFT JOIN pg_stat_activity a ON a.pid = l.pid
    LEFT JOIN prepared p ON l.pid IS NULL AND l.virtualtransaction = p.virtualtransaction
    WHERE l.granted AND l.pid IS DISTINCT FROM pg_backend_pid()
    GROUP BY l.pid, l.virtualtransaction, a.xact_start, p.prepared, a.state, p.gid, a.application_name, a.usename)
SELECT pid, coalesce(gid, of) AS of, state, since, holds_row FROM holders
WHERE holds_row OR (holds_table AND coalesce(since < pg_catalog.clock_timestamp() - interval '1 second', true))
ORDER BY holds_row DESC, since NULLS LAST, pid LIMIT 5";

/// The longest, those with the row first. `row`: the transaction that has last locked or changed the row, its `xmax`.
///
/// # Errors
/// sqlx's.
pub async fn lock_holders(
    database: &Database,
    tables: &[String],
    row: Option<&str>,
) -> Result<Vec<LockHolder>, sqlx::Error> {
    let select = sqlx::query(HOLDERS).bind(tables).bind(row);
    let rows = database.run(async |connection| select.fetch_all(connection).await).await?;
    let read = |row: &PgRow| -> Result<LockHolder, sqlx::Error> {
        let since: Option<Timestamptz> = row.try_get("since")?;
        Ok(LockHolder {
            pid: row.try_get("pid")?,
            of: row.try_get("of")?,
            state: row.try_get("state")?,
            since: since.map(|Timestamptz(since)| write_rfc3339(since)),
            holds_row: row.try_get("holds_row")?,
        })
    };
    let holders: Vec<LockHolder> = rows.iter().map(read).collect::<Result<_, _>>()?;
    let of_row = holders.iter().any(|holder| holder.holds_row);
    Ok(holders.into_iter().filter(|holder| holder.holds_row || !of_row).collect())
}

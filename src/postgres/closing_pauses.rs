//! The table `closing_pauses`: periods in which no order is closed, of one kind or of all, and their history.
//!
//! Stores; decides nothing. Workers read it each second, so a pause outlives every one of them.

use order_timeout_client::postgres::Timestamptz;
use order_timeout_core::kind::Kind;
use order_timeout_core::message::write_rfc3339;
use order_timeout_core::order::Timestamp;
use serde::Serialize;
use sqlx::postgres::PgRow;
use sqlx::{PgConnection, Row};

/// Why closing is paused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum PauseCause {
    /// A person asked for it.
    Operator,
    /// A worker found that it would close orders which should not be closed.
    Brake,
}

impl PauseCause {
    /// The words of all causes.
    pub const WORDS: [&str; 2] = [Self::Operator.as_str(), Self::Brake.as_str()];

    /// The word in the table, in metrics and in events.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Operator => "operator",
            Self::Brake => "brake",
        }
    }

    /// The table has a CHECK for these words.
    fn from_word(word: &str) -> Self {
        if word == Self::Brake.as_str() { Self::Brake } else { Self::Operator }
    }
}

/// A pause that lasts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, utoipa::ToSchema)]
pub struct Pause {
    /// The paused kind; `None`: all kinds.
    pub kind: Option<String>,
    /// Why it began.
    pub cause: PauseCause,
    /// One sentence.
    pub reason: String,
    /// A person's name, or that of a worker's machine.
    pub paused_by: String,
    /// RFC 3339.
    pub paused_at: String,
}

impl Pause {
    /// The sentence for pages, logs and the command line.
    #[must_use]
    pub fn sentence(&self) -> String {
        self.sentence_with("is")
    }

    /// The same when it is over.
    #[must_use]
    pub fn sentence_when_over(&self) -> String {
        self.sentence_with("was")
    }

    fn sentence_with(&self, verb: &str) -> String {
        let Self { kind, cause, reason, paused_by, paused_at } = self;
        let of_kind = kind.as_ref().map_or_else(String::new, |kind| format!(" of the kind {kind}"));
        // To the second; the table has the rest.
        let since = paused_at.get(..19).map_or_else(|| paused_at.clone(), |second| format!("{second}Z"));
        let cause = match cause {
            PauseCause::Operator => String::new(),
            PauseCause::Brake => "the brake of ".to_owned(),
        };
        format!("closing{of_kind} {verb} paused since {since} by {cause}{paused_by}: {reason}")
    }
}

/// A pause that is over.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, utoipa::ToSchema)]
pub struct EndedPause {
    /// As it was while it lasted.
    #[serde(flatten)]
    pub pause: Pause,
    /// A person's name.
    pub resumed_by: String,
    /// One sentence, if one was given.
    pub resume_reason: Option<String>,
    /// RFC 3339.
    pub resumed_at: String,
}

const READ: &str = "SELECT kind, cause, reason, paused_by, paused_at FROM closing_pauses
     WHERE resumed_at IS NULL AND ($1::text IS NULL OR kind IS NULL OR kind = $1) ORDER BY id";

/// The pauses that last and apply to this kind, or to any kind; the oldest first.
///
/// # Errors
/// sqlx's.
pub async fn current(connection: &mut PgConnection, kind: Option<&Kind>) -> Result<Vec<Pause>, sqlx::Error> {
    let rows = sqlx::query(READ).bind(kind.map(Kind::as_str)).fetch_all(connection).await?;
    rows.iter().map(read).collect()
}

/// The newest pauses that are over and applied to this kind, or to any kind; the newest first. Only those that ended after
/// `since`, if it is given.
///
/// # Errors
/// sqlx's.
pub async fn ended(
    connection: &mut PgConnection,
    kind: Option<&Kind>,
    since: Option<Timestamp>,
    limit: i64,
) -> Result<Vec<EndedPause>, sqlx::Error> {
    let select = sqlx::query(
        "SELECT kind, cause, reason, paused_by, paused_at, resumed_by, resume_reason, resumed_at FROM closing_pauses
         WHERE resumed_at > coalesce($2, '-infinity') AND ($1::text IS NULL OR kind IS NULL OR kind = $1)
         ORDER BY resumed_at DESC, id DESC LIMIT $3",
    );
    let select = select.bind(kind.map(Kind::as_str)).bind(since.map(Timestamptz)).bind(limit);
    let read_ended = |row: &PgRow| {
        let Timestamptz(resumed_at) = row.try_get("resumed_at")?;
        Ok(EndedPause {
            pause: read(row)?,
            resumed_by: row.try_get("resumed_by")?,
            resume_reason: row.try_get("resume_reason")?,
            resumed_at: write_rfc3339(resumed_at),
        })
    };
    select.fetch_all(connection).await?.iter().map(read_ended).collect()
}

/// Begins a pause and announces it as `closing.paused`, unless there is one for the same kind or kinds already.
/// Returns whether it began.
///
/// # Errors
/// sqlx's.
pub async fn begin(
    connection: &mut PgConnection,
    kind: Option<&Kind>,
    cause: PauseCause,
    reason: &str,
    by: &str,
) -> Result<bool, sqlx::Error> {
    let insert = sqlx::query(
        "WITH began AS (
             INSERT INTO closing_pauses (kind, cause, reason, paused_by) VALUES ($1, $2, $3, $4)
             ON CONFLICT ((coalesce(kind, ''))) WHERE resumed_at IS NULL DO NOTHING
             RETURNING kind, cause, reason, paused_by, paused_at
         )
         INSERT INTO event_outbox (routing_key, type, payload)
         SELECT 'closing.paused', 'closing.paused.v1', jsonb_build_object(
             'kind', b.kind, 'cause', b.cause, 'reason', b.reason, 'paused_by', b.paused_by,
             'paused_at', to_char(b.paused_at AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.US\"Z\"'))
         FROM began b",
    );
    let insert = insert.bind(kind.map(Kind::as_str)).bind(cause.as_str()).bind(reason).bind(by);
    Ok(insert.execute(connection).await?.rows_affected() > 0)
}

/// The same for one kind, without an event.
///
/// # Errors
/// sqlx's.
pub async fn begin_unannounced(
    connection: &mut PgConnection,
    kind: &Kind,
    cause: PauseCause,
    reason: &str,
    by: &str,
) -> Result<bool, sqlx::Error> {
    let insert = sqlx::query(
        "INSERT INTO closing_pauses (kind, cause, reason, paused_by) VALUES ($1, $2, $3, $4)
         ON CONFLICT ((coalesce(kind, ''))) WHERE resumed_at IS NULL DO NOTHING",
    );
    let insert = insert.bind(kind.as_str()).bind(cause.as_str()).bind(reason).bind(by);
    Ok(insert.execute(connection).await?.rows_affected() > 0)
}

/// Ends the pauses of this kind, or all pauses, and announces each as `closing.resumed`. Returns those that it has ended.
///
/// # Errors
/// sqlx's.
pub async fn end(
    connection: &mut PgConnection,
    kind: Option<&Kind>,
    reason: Option<&str>,
    by: &str,
) -> Result<Vec<Pause>, sqlx::Error> {
    let update = sqlx::query(
        "WITH ended AS (
             UPDATE closing_pauses SET resumed_at = clock_timestamp(), resumed_by = $2, resume_reason = $3
             WHERE resumed_at IS NULL AND ($1::text IS NULL OR kind = $1)
             RETURNING id, kind, cause, reason, paused_by, paused_at, resumed_at
         ),
         event AS (
             INSERT INTO event_outbox (routing_key, type, payload)
             SELECT 'closing.resumed', 'closing.resumed.v1', jsonb_build_object(
                 'kind', e.kind, 'cause', e.cause, 'reason', $3::text, 'resumed_by', $2::text,
                 'paused_at', to_char(e.paused_at AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.US\"Z\"'),
                 'resumed_at', to_char(e.resumed_at AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.US\"Z\"'))
             FROM ended e
         )
         SELECT kind, cause, reason, paused_by, paused_at FROM ended ORDER BY id",
    );
    let rows = update.bind(kind.map(Kind::as_str)).bind(by).bind(reason).fetch_all(connection).await?;
    rows.iter().map(read).collect()
}

fn read(row: &PgRow) -> Result<Pause, sqlx::Error> {
    let Timestamptz(paused_at) = row.try_get("paused_at")?;
    Ok(Pause {
        kind: row.try_get("kind")?,
        cause: PauseCause::from_word(row.try_get("cause")?),
        reason: row.try_get("reason")?,
        paused_by: row.try_get("paused_by")?,
        paused_at: write_rfc3339(paused_at),
    })
}

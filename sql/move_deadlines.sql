-- Changes the deadlines of unpaid orders for an operator: an earlier deadline gets its own alarm, and each change a row
-- of history.
--
--   $1 ids      text[]       order ids as the orders table prints them
--   $2 deadline timestamptz  the new deadline of all; NULL: each deadline is moved by $3
--   $3 shift    float8       seconds, negative for earlier; NULL if $2 is given
--   $4 furthest float8       delay.max_delay in seconds: no deadline may be further ahead
--   $5 who text, $6 why text (may be NULL), $7 run uuid: for the history
--
--   order_id text, outcome text, status text, before timestamptz, wanted timestamptz, moved_to timestamptz
--   outcome: later | earlier | same | passed | too_far | no_deadline | not_unpaid | kept (by a trigger); no row: the
--   order does not exist.
WITH found AS MATERIALIZED (
    -- In id order, so that two sessions cannot deadlock.
    SELECT o.id, o.status, o.expires_at
    FROM orders o
    WHERE o.id = ANY ($1::text[]::uuid[])
    ORDER BY o.id
    FOR NO KEY UPDATE
),
moment AS MATERIALIZED (
    -- Read after the rows are locked.
    SELECT clock_timestamp() AS now WHERE (SELECT count(*) FROM found) >= 0
),
wanted AS MATERIALIZED (
    -- Uses the status and the deadline that were read with the row lock: those at the statement's
    -- beginning may be others.
    SELECT f.id, f.expires_at AS before,
           coalesce($2::timestamptz, f.expires_at + make_interval(secs => $3::float8)) AS deadline
    FROM found f
    WHERE f.status = 'unpaid'
),
allowed AS MATERIALIZED (
    SELECT w.id, w.before, w.deadline
    FROM wanted w, moment m
    WHERE w.deadline > m.now
      AND w.deadline <= m.now + make_interval(secs => $4::float8)
      AND w.deadline IS DISTINCT FROM w.before
),
moved AS (
    UPDATE orders o
    SET expires_at = a.deadline
    FROM allowed a
    WHERE o.id = a.id
    -- The value that was stored: a trigger may have refused the change.
    RETURNING o.id, a.before, o.expires_at AS deadline
),
alarm AS (
    -- In the same transaction: the alarm exists if and only if the new deadline does.
    INSERT INTO alarm_outbox (order_id, deadline)
    SELECT m.id::text, m.deadline
    FROM moved m
    WHERE m.deadline < coalesce(m.before, 'infinity')
),
history AS (
    INSERT INTO order_events (order_id, event, by, reason, who, why, run)
    SELECT m.id, 'extended', 'manual',
           'deadline moved from '
               || coalesce(to_char(m.before AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'), 'none')
               || ' to ' || to_char(m.deadline AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'),
           $5::text, $6::text, $7::uuid
    FROM moved m
    WHERE m.deadline IS DISTINCT FROM m.before
)
SELECT f.id::text AS order_id,
       CASE
           WHEN f.status <> 'unpaid' THEN 'not_unpaid'
           WHEN m.deadline < coalesce(m.before, 'infinity') THEN 'earlier'
           WHEN m.deadline > m.before THEN 'later'
           WHEN w.deadline IS NULL THEN 'no_deadline'
           WHEN w.deadline <= t.now THEN 'passed'
           WHEN w.deadline > t.now + make_interval(secs => $4::float8) THEN 'too_far'
           WHEN w.deadline = w.before THEN 'same'
           ELSE 'kept'
       END AS outcome,
       f.status::text AS status, f.expires_at AS before, w.deadline AS wanted, m.deadline AS moved_to
FROM found f
CROSS JOIN moment t
LEFT JOIN wanted w ON w.id = f.id
LEFT JOIN moved m ON m.id = f.id

-- Claims the requested orders that are unpaid and due, for orders that a payment provider is asked about before they are
-- closed. In the place of sql/close.sql, and with the same parameters and columns.
--
--   $1 ids  text[]  order ids as in the messages
--   $2 path text    which path claims them: alarm | look_ahead | sweep | manual
--
--   order_id text, outcome text, deadline timestamptz
--   outcome: claimed (now) | closing (claimed before) | paid | already_closed | not_due | busy | malformed; no row: the order does
--   not exist.
--
-- A claimed order is `closing`: a payment that locks its row sees that and can refuse. It keeps its stock.
WITH asked AS (
    -- A malformed id must not fail the whole batch on the cast, as in sql/close.sql.
    SELECT text_id,
           CASE WHEN text_id LIKE '________-____-____-____-____________'
                 AND text_id NOT LIKE '%-%-%-%-%-%'
                 AND text_id !~ '[^-0-9a-fA-F]' THEN text_id::uuid END AS id
    FROM (SELECT DISTINCT unnest($1::text[]) AS text_id) AS given
),
there AS MATERIALIZED (
    -- Orders that exist here but are not locked below are held by another session. By primary key and nothing else.
    SELECT o.id FROM orders o WHERE o.id = ANY (ARRAY(SELECT a.id FROM asked a WHERE a.id IS NOT NULL))
),
locked AS MATERIALIZED (
    -- In id order, so that two workers cannot deadlock. NO KEY, so that a foreign key's share lock does not conflict. SKIP
    -- LOCKED, so that the claim does not wait for a payment in flight.
    SELECT o.id, o.status, o.expires_at
    FROM orders o
    WHERE o.id = ANY (ARRAY(SELECT t.id FROM there t))
    ORDER BY o.id
    FOR NO KEY UPDATE SKIP LOCKED
),
moment AS MATERIALIZED (
    -- One time for all orders, read after the rows are locked.
    SELECT clock_timestamp() AS now WHERE (SELECT count(*) FROM locked) >= 0
),
due AS MATERIALIZED (
    SELECT l.id FROM locked l WHERE l.status = 'unpaid' AND l.expires_at <= (SELECT m.now FROM moment m)
),
claimed AS (
    UPDATE orders o
    SET status = 'closing'
    WHERE o.id = ANY (ARRAY(SELECT d.id FROM due d))
      -- The precondition again, as text so that the planner cannot choose the deadline index for it.
      AND o.status::text = 'unpaid'
    RETURNING o.id
),
waiting AS (
    -- No worker has the order yet. All of them take orders over by sql/resume_closing.sql, which reads the attempts after
    -- this commit: an attempt that was begun under the lock of the order's row is then visible.
    INSERT INTO close_attempts (kind, order_id, claimed_by, who, why, queue, next_attempt_at)
    SELECT 'order', c.id::text, $2::text,
           -- As in sql/close.sql: for the history of the close.
           (SELECT nullif(current_setting('order_timeout.who', true), '')),
           (SELECT nullif(current_setting('order_timeout.why', true), '')),
           coalesce((SELECT p.provider FROM payment_attempts p
                     WHERE p.order_id = c.id::text AND p.state IN ('open', 'paid')
                     ORDER BY p.created_at DESC, p.provider, p.reference LIMIT 1), ''),
           (SELECT m.now FROM moment m)
    FROM claimed c
    -- In one order, because a row of an earlier claim may be locked.
    ORDER BY c.id::text
    -- A person has made the order unpaid again: this is a new claim.
    ON CONFLICT (kind, order_id) DO UPDATE
        SET claimed_by = excluded.claimed_by, who = excluded.who, why = excluded.why,
            claimed_at = excluded.claimed_at, queue = excluded.queue,
            step = excluded.step, rounds = excluded.rounds, has_waited = excluded.has_waited,
            next_attempt_at = excluded.next_attempt_at, lease = NULL, last_answers = NULL,
            unresolved_reason = NULL, unresolved_at = NULL
)
SELECT a.text_id AS order_id,
       CASE
           WHEN a.id IS NULL THEN 'malformed'
           -- IN, not a join: the planner estimates one row and would use a nested loop over all pairs of orders.
           WHEN a.id IN (SELECT c.id FROM claimed c) THEN 'claimed'
           WHEN l.id IS NULL THEN 'busy'
           WHEN l.status = 'paid' THEN 'paid'
           WHEN l.status = 'closing' THEN 'closing'
           -- Closed, cancelled, or a status that the shop added: not unpaid, so there is nothing to close.
           WHEN l.status <> 'unpaid' THEN 'already_closed'
           ELSE 'not_due'
       END AS outcome,
       l.expires_at AS deadline
FROM asked a
LEFT JOIN locked l ON l.id = a.id
WHERE a.id IS NULL
   OR a.id IN (SELECT t.id FROM there t)

-- Closes claimed orders of which every attempt to pay is proved to be closed at its provider, and returns for each what it
-- found.
--
--   $1 ids     text[]    order ids
--   $2 leases  bigint[]  the lease of each
--   $3 wait    boolean   true: wait for a locked stock row, up to lock_timeout; false: report its orders as busy
--   $4 answers jsonb     order id -> what the providers answered, for the history; an object, because the planner joins
--                        two lists of unknown length by comparing each with every other
--   $5 attempt_orders text[], $6 providers text[], $7 references text[]  the attempts that are proved to be closed
--
--   order_id text, outcome text, deadline timestamptz, closed_by text (the path that claimed it, if it is closed)
--   outcome: closed | already_paid | already_closed | not_due | no_deadline | busy | attempts_changed | kept | lease_lost
--
-- One statement is one transaction: status, stock, resources, part payments, history, event, attempts and the end of the
-- claim are committed together or not at all. Nothing happens without the lease: a worker whose lease has run out finds
-- lease_lost.
--
-- A template: the lines in braces are replaced by those parts of sql/close.sql (src/effects/closing/statements.rs), so
-- that what an order has reserved comes back in the same way with and without a provider.
WITH asked AS MATERIALIZED (
    SELECT a.id::uuid AS id, a.id AS text_id, a.lease FROM unnest($1::text[], $2::bigint[]) AS a (id, lease)
),
proved AS MATERIALIZED (
    SELECT p.order_id, p.provider, p.reference
    FROM unnest($5::text[], $6::text[], $7::text[]) AS p (order_id, provider, reference)
),
there AS MATERIALIZED (
    SELECT o.id FROM orders o WHERE o.id = ANY (ARRAY(SELECT a.id FROM asked a))
),
locked AS MATERIALIZED (
    -- The order's row first, as every payment does; in id order, so that two workers cannot deadlock; SKIP LOCKED, so that
    -- one payment in flight does not hold up the others.
    SELECT o.id, o.status, o.expires_at
    FROM orders o
    WHERE o.id = ANY (ARRAY(SELECT t.id FROM there t))
    ORDER BY o.id
    FOR NO KEY UPDATE SKIP LOCKED
),
held AS MATERIALIZED (
    -- The lease is compared on the locked row. Rows of orders that another session has locked are left alone.
    -- IS TRUE, so that the list is looked up in a hash table: a join would be planned for one row, and would compare each
    -- row of a batch with every other. kind || '' and (… IS NULL) IS TRUE, so that the primary key is used and not the index
    -- of what is due, which holds every claimed order.
    SELECT c.order_id::uuid AS id
    FROM close_attempts c
    WHERE c.order_id = ANY (ARRAY(SELECT l.id::text FROM locked l)) AND c.kind || '' = 'order'
      AND ((c.order_id, c.lease) IN (SELECT a.text_id, a.lease FROM asked a)) IS TRUE
      AND (c.unresolved_at IS NULL) IS TRUE
    ORDER BY c.order_id
    FOR NO KEY UPDATE OF c
),
moment AS MATERIALIZED (
    SELECT clock_timestamp() AS now WHERE (SELECT count(*) FROM held) >= 0
),
unproved AS MATERIALIZED (
    -- An attempt that was written after the order was taken over, and about which nothing was asked.
    SELECT DISTINCT p.order_id
    FROM payment_attempts p
    WHERE p.order_id = ANY ($1::text[]) AND p.state IN ('open', 'paid')
      AND (p.order_id, p.provider, p.reference) NOT IN (SELECT v.order_id, v.provider, v.reference FROM proved v)
),
due AS MATERIALIZED (
    SELECT l.id
    FROM locked l
    WHERE l.status = 'closing' AND (l.id IN (SELECT h.id FROM held h)) IS TRUE
      -- Again: the clock may have been set back since the claim, and no order is closed early.
      AND l.expires_at <= (SELECT m.now FROM moment m)
      AND l.id::text NOT IN (SELECT u.order_id FROM unproved u)
),
{reservations of sql/close.sql}
closed AS (
    UPDATE orders o
    SET status = 'closed', closed_at = (SELECT m.now FROM moment m), closed_by = c.claimed_by,
        close_reason = 'unpaid'
    FROM close_attempts c
    WHERE o.id = ANY (ARRAY(SELECT d.id FROM due d WHERE d.id NOT IN (SELECT w.order_id FROM held_elsewhere w)))
      AND c.kind || '' = 'order' AND c.order_id = o.id::text
      -- The precondition again, as text so that the planner uses the primary key.
      AND o.status::text = 'closing'
    RETURNING o.id, o.expires_at, o.closed_at, o.closed_by, o.received_minor, c.who, c.why, c.rounds, c.last_answers
),
attempts_closed AS (
    -- What is proved is proved, whatever becomes of the order; but only under the lease.
    UPDATE payment_attempts p
    SET state = 'closed'
    FROM proved v
    WHERE p.provider = v.provider AND p.reference = v.reference AND p.order_id = v.order_id AND p.state = 'open'
      AND (v.order_id IN (SELECT h.id::text FROM held h)) IS TRUE
    RETURNING 1
),
finished AS (
    -- Also of orders that were paid or closed by another session, or are deleted: nothing is left to do about them.
    DELETE FROM close_attempts c
    WHERE c.kind || '' = 'order'
      AND c.order_id = ANY (ARRAY(
          SELECT o.id::text FROM closed o
          UNION ALL SELECT l.id::text FROM locked l WHERE l.status <> 'closing'
          UNION ALL SELECT a.text_id FROM asked a WHERE a.id NOT IN (SELECT t.id FROM there t)))
      AND ((c.order_id, c.lease) IN (SELECT a.text_id, a.lease FROM asked a)) IS TRUE
    RETURNING 1
),
history AS (
    INSERT INTO order_events (order_id, event, at, by, reason, who, why, answers)
    SELECT c.id, 'closed', c.closed_at, c.closed_by, 'unpaid', c.who, c.why,
           -- The claim ends here, and with it what it knows of rounds without an answer.
           nullif(concat_ws('; ',
               CASE WHEN c.rounds > 0 THEN concat('rounds without an answer: ', c.rounds, ', the last: ', c.last_answers) END,
               nullif($4::jsonb ->> c.id::text, '')), '')
    FROM closed c
    WHERE (SELECT count(*) FROM attempts_closed) + (SELECT count(*) FROM finished) >= 0
    RETURNING 1
),
event AS (
    INSERT INTO event_outbox (routing_key, type, payload)
    SELECT 'order.closed', 'order.closed.v1',
           jsonb_build_object(
               'order_id', c.id,
               'deadline', to_char(c.expires_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'),
               'closed_at', (SELECT to_char(m.now AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"') FROM moment m),
               'closed_by', c.closed_by,
               'reason', 'unpaid')
    FROM closed c
    RETURNING 1
),
{returns of sql/close.sql}
SELECT a.text_id AS order_id,
       CASE
           WHEN a.id IN (SELECT c.id FROM closed c) THEN 'closed'
           WHEN l.id IS NULL AND a.id IN (SELECT t.id FROM there t) THEN 'busy'
           WHEN l.id IS NULL THEN 'already_closed'
           WHEN a.id NOT IN (SELECT h.id FROM held h) THEN 'lease_lost'
           WHEN l.status = 'paid' THEN 'already_paid'
           WHEN l.status <> 'closing' THEN 'already_closed'
           WHEN a.text_id IN (SELECT u.order_id FROM unproved u) THEN 'attempts_changed'
           WHEN a.id IN (SELECT w.order_id FROM held_elsewhere w) THEN 'busy'
           -- A trigger has skipped the update.
           WHEN a.id IN (SELECT d.id FROM due d) THEN 'kept'
           WHEN l.expires_at IS NULL THEN 'no_deadline'
           ELSE 'not_due'
       END AS outcome,
       l.expires_at AS deadline,
       -- An object, as $4, and no join.
       (SELECT jsonb_object_agg(c.id::text, c.closed_by) FROM closed c) ->> a.text_id AS closed_by
FROM asked a
LEFT JOIN locked l ON l.id = a.id
-- So that part payments are released in any case: a SELECT that is not read is not run.
WHERE (SELECT count(*) FROM part_payments) >= 0

-- Closes the requested orders that are unpaid and due, and returns for each order what it found. An order with an attempt
-- to pay that may bring money is claimed instead: its provider is asked before it is closed.
--
--   $1 ids  text[]  order ids as in the messages
--   $2 path text    which path closes them: alarm | look_ahead | sweep | manual
--   $3 wait boolean true: wait for a locked stock row, up to lock_timeout; false: report its orders as busy
--   $4 is_claimed boolean true: these orders were claimed, and their providers were asked: they are closed unless an attempt
--              may bring money nevertheless, and none is claimed
--   (a statement of your own may leave out what it does not need, from the last one on, and never needs $4)
--
--   order_id text, outcome text, deadline timestamptz
--   An order without a deadline (NULL) is never due: not_due.
--   outcome: closed | claimed (now) | closing (claimed before) | paid | already_closed | not_due | busy | malformed; no row: the
--   order does not exist.
--
-- One statement is one transaction: status, stock, resources (coupons, points), part payments, history and event are
-- committed together or not at all.
WITH asked AS (
    -- A malformed id must not fail the whole batch on the cast: four hyphens in their places, and otherwise hexadecimal
    -- digits. Three cheap checks: one regular expression takes longer than all the rest of a batch of unknown ids.
    SELECT text_id,
           CASE WHEN text_id LIKE '________-____-____-____-____________'
                 AND text_id NOT LIKE '%-%-%-%-%-%'
                 AND text_id !~ '[^-0-9a-fA-F]' THEN text_id::uuid END AS id
    FROM (SELECT DISTINCT unnest($1::text[]) AS text_id) AS given
),
there AS MATERIALIZED (
    -- Orders that exist here but are not locked below are held by another session. This comes first, so that an unknown
    -- id costs one lookup. By primary key and nothing else: with a condition on the status the planner may scan the
    -- deadline index, which costs sixty times as much on a table that was never analysed.
    SELECT o.id FROM orders o WHERE o.id = ANY (ARRAY(SELECT a.id FROM asked a WHERE a.id IS NOT NULL))
),
locked AS MATERIALIZED (
    -- By primary key for the same reason. In id order, so that two workers cannot deadlock. NO KEY, so that a foreign
    -- key's share lock does not conflict. SKIP LOCKED, so that the close does not wait for a payment in flight.
    SELECT o.id, o.status, o.expires_at
    FROM orders o
    WHERE o.id = ANY (ARRAY(SELECT t.id FROM there t))
    ORDER BY o.id
    FOR NO KEY UPDATE SKIP LOCKED
),
moment AS MATERIALIZED (
    -- One time for all orders, read after the rows are locked. clock_timestamp(), not now(): the transaction may have
    -- begun before the deadline.
    SELECT clock_timestamp() AS now WHERE (SELECT count(*) FROM locked) >= 0
),
overdue AS MATERIALIZED (
    SELECT l.id FROM locked l
    WHERE (l.status = 'unpaid' OR $4::boolean AND l.status = 'closing') AND l.expires_at <= (SELECT m.now FROM moment m)
),
to_ask_about AS MATERIALIZED (
    -- Whatever this worker's settings are: one that cannot ask leaves the order to one that can.
    SELECT q.order_id::uuid AS order_id, q.provider FROM orders_to_ask_about(ARRAY(SELECT o.id::text FROM overdue o)) q
),
due AS MATERIALIZED (
    SELECT o.id FROM overdue o WHERE o.id NOT IN (SELECT q.order_id FROM to_ask_about q)
),
items AS MATERIALIZED (
    SELECT i.order_id, i.article_id, i.quantity
    FROM order_items i
    WHERE i.order_id = ANY (ARRAY(SELECT d.id FROM due d))
),
stock_free AS MATERIALIZED (
    -- Only without waiting ($3 is false): then an order is closed only if all its stock rows can be locked now.
    SELECT s.article_id
    FROM stock s
    WHERE NOT $3::boolean AND s.article_id = ANY (ARRAY(SELECT DISTINCT i.article_id FROM items i))
    ORDER BY s.article_id
    FOR NO KEY UPDATE SKIP LOCKED
),
claims AS MATERIALIZED (
    -- Coupons, points and the like. A shop that has none pays for one look at an empty index, not for one per order.
    SELECT r.order_id, r.kind, r.resource_id, r.quantity
    FROM order_resources r
    WHERE (SELECT EXISTS (SELECT FROM order_resources))
      AND r.order_id = ANY (ARRAY(SELECT d.id FROM due d))
),
resources_free AS MATERIALIZED (
    -- As stock_free.
    SELECT s.kind, s.id
    FROM (SELECT DISTINCT c.kind, c.resource_id FROM claims c WHERE NOT $3::boolean) k
    JOIN reserved_resources s ON s.kind = k.kind AND s.id = k.resource_id
    ORDER BY s.kind, s.id
    FOR NO KEY UPDATE OF s SKIP LOCKED
),
held_elsewhere AS MATERIALIZED (
    -- Orders with an article or a resource that another session holds. None if $3 is true: then the updates below wait
    -- for the lock.
    SELECT i.order_id
    FROM items i
    WHERE NOT $3::boolean AND i.article_id NOT IN (SELECT f.article_id FROM stock_free f)
    UNION
    SELECT c.order_id
    FROM claims c
    WHERE NOT $3::boolean AND (c.kind, c.resource_id) NOT IN (SELECT f.kind, f.id FROM resources_free f)
),
closed AS (
    UPDATE orders o
    SET status = 'closed', closed_at = (SELECT m.now FROM moment m), closed_by = $2::text, close_reason = 'unpaid'
    WHERE o.id = ANY (ARRAY(SELECT d.id FROM due d WHERE d.id NOT IN (SELECT w.order_id FROM held_elsewhere w)))
      -- The precondition again, as text so that the planner cannot choose the deadline index for it.
      AND (o.status::text = 'unpaid' OR $4::boolean AND o.status::text = 'closing')
    RETURNING o.id, o.expires_at, o.closed_at, o.received_minor
),
history AS (
    INSERT INTO order_events (order_id, event, at, by, reason, who, why)
    SELECT c.id, 'closed', c.closed_at, $2::text, 'unpaid',
           -- `order-timeout close` sets both for its transaction, a worker neither. Read once for all orders.
           (SELECT nullif(current_setting('order_timeout.who', true), '')),
           (SELECT nullif(current_setting('order_timeout.why', true), ''))
    FROM closed c
    RETURNING 1
),
event AS (
    INSERT INTO event_outbox (routing_key, type, payload)
    SELECT 'order.closed', 'order.closed.v1',
           jsonb_build_object(
               'order_id', c.id,
               'deadline', to_char(c.expires_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'),
               -- Formatted once for all orders.
               'closed_at', (SELECT to_char(m.now AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"') FROM moment m),
               'closed_by', $2::text,
               'reason', 'unpaid')
    FROM closed c
    RETURNING 1
),
claimed AS (
    -- `closing`: a payment that locks the row sees that and can refuse. It keeps its stock.
    UPDATE orders o
    SET status = 'closing'
    WHERE o.id = ANY (ARRAY(SELECT q.order_id FROM to_ask_about q WHERE NOT $4::boolean)) AND o.status::text = 'unpaid'
    RETURNING o.id
),
waiting AS (
    -- No worker has the order yet: those with its provider take it over (sql/resume_closing.sql).
    INSERT INTO close_attempts (kind, order_id, claimed_by, who, why, queue, next_attempt_at)
    SELECT 'order', q.order_id::text, $2::text,
           -- For the history of the close.
           (SELECT nullif(current_setting('order_timeout.who', true), '')),
           (SELECT nullif(current_setting('order_timeout.why', true), '')),
           q.provider, (SELECT m.now FROM moment m)
    FROM to_ask_about q
    WHERE q.order_id IN (SELECT c.id FROM claimed c)
    -- In one order, because a row of an earlier claim may be locked.
    ORDER BY q.order_id
    -- A person has made the order unpaid again: this is a new claim.
    ON CONFLICT (kind, order_id) DO UPDATE
        SET claimed_by = excluded.claimed_by, who = excluded.who, why = excluded.why,
            claimed_at = excluded.claimed_at, queue = excluded.queue,
            step = excluded.step, rounds = excluded.rounds, has_waited = excluded.has_waited,
            next_attempt_at = excluded.next_attempt_at, lease = NULL, last_answers = NULL,
            unresolved_reason = NULL, unresolved_at = NULL
),
part_payments AS MATERIALIZED (
    -- Money that paid a part of an order becomes late money. Called for such orders alone: the others cost nothing.
    SELECT release_part_payments(c.id::text) FROM closed c WHERE c.received_minor IS NOT NULL
),
given_back AS MATERIALIZED (
    SELECT i.article_id, sum(i.quantity)::bigint AS quantity
    FROM items i
    WHERE i.order_id IN (SELECT c.id FROM closed c)
    GROUP BY i.article_id
),
stock_given_back AS (
    -- Last, after all other writes: other batches that return the same articles wait for this commit, and in a flash
    -- sale every batch does. In article order, so that two workers cannot deadlock; each row is found by its key.
    UPDATE stock s
    SET available = s.available + g.quantity, reserved = s.reserved - g.quantity
    FROM (
        SELECT b.article_id, b.quantity FROM given_back b
        WHERE (SELECT count(*) FROM history) + (SELECT count(*) FROM event) >= 0
        ORDER BY b.article_id
    ) g
    WHERE s.article_id = g.article_id
    RETURNING 1
),
resources_given_back AS (
    -- After the stock, as a payment locks them, and in the order of their keys.
    UPDATE reserved_resources s
    SET available = s.available + g.quantity, reserved = s.reserved - g.quantity
    FROM (
        SELECT c.kind, c.resource_id, sum(c.quantity)::bigint AS quantity
        FROM claims c
        WHERE c.order_id IN (SELECT d.id FROM closed d) AND (SELECT count(*) FROM stock_given_back) >= 0
        GROUP BY c.kind, c.resource_id
        ORDER BY c.kind, c.resource_id
    ) g
    WHERE s.kind = g.kind AND s.id = g.resource_id
)
SELECT a.text_id AS order_id,
       CASE
           WHEN a.id IS NULL THEN 'malformed'
           -- IN, not a join: the planner estimates one row and would use a nested loop over all pairs of orders.
           WHEN a.id IN (SELECT c.id FROM closed c) THEN 'closed'
           WHEN a.id IN (SELECT c.id FROM claimed c) THEN 'claimed'
           WHEN l.id IS NULL THEN 'busy'
           WHEN l.status = 'paid' THEN 'paid'
           WHEN l.status = 'closed' THEN 'already_closed'
           WHEN a.id IN (SELECT w.order_id FROM held_elsewhere w) THEN 'busy'
           WHEN l.status = 'closing' AND (NOT $4::boolean OR a.id IN (SELECT q.order_id FROM to_ask_about q)) THEN 'closing'
           -- Cancelled, or a status that the shop added: not unpaid, so there is nothing to close.
           WHEN l.status NOT IN ('unpaid', 'closing') THEN 'already_closed'
           ELSE 'not_due'
       END AS outcome,
       l.expires_at AS deadline
FROM asked a
LEFT JOIN locked l ON l.id = a.id
WHERE (a.id IS NULL
   OR a.id IN (SELECT t.id FROM there t))
  -- So that part payments are released in any case: a SELECT that is not read is not run.
  AND (SELECT count(*) FROM part_payments) >= 0

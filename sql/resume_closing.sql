-- Takes over claimed orders whose time has come: for the first time, after a pause, or because the worker that had them
-- is gone and its lease is over.
--
--   $1 kind      text
--   $2 lease     float8    seconds until another worker may take them over
--   $3 per_queue bigint    the most orders from one provider's queue
--   $4 queues    text[]    queues of which fewer can be taken
--   $5 limits    bigint[]  how many of each
--
--   order_id text, lease bigint, queue text, rounds integer, has_waited boolean, was_judged boolean,
--   provider text, reference text, amount_minor bigint, currency text, state text, payable_until timestamptz
--   One row for each attempt that is not decided; an order without any has one row with NULLs.
WITH RECURSIVE queues (name) AS (
    -- The names of all queues, one index lookup for each: also of those whose provider is in no settings any more.
    (SELECT c.queue FROM close_attempts c
     WHERE c.kind = $1::text AND c.unresolved_at IS NULL ORDER BY c.queue LIMIT 1)
    UNION ALL
    SELECT (SELECT c.queue FROM close_attempts c
            WHERE c.kind = $1::text AND c.unresolved_at IS NULL AND c.queue > q.name ORDER BY c.queue LIMIT 1)
    FROM queues q
    WHERE q.name IS NOT NULL
),
free AS (
    SELECT q.name, coalesce(l.free, $3::bigint) AS free
    FROM queues q
    LEFT JOIN unnest($4::text[], $5::bigint[]) AS l (name, free) ON l.name = q.name
    WHERE q.name IS NOT NULL
),
due AS MATERIALIZED (
    SELECT d.order_id
    FROM free f
    CROSS JOIN LATERAL (
        SELECT c.order_id
        FROM close_attempts c
        WHERE c.kind = $1::text AND c.queue = f.name AND c.unresolved_at IS NULL
          -- statement_timestamp(), so that it can bound the index scan.
          AND c.next_attempt_at <= statement_timestamp()
        ORDER BY c.next_attempt_at, c.order_id
        LIMIT f.free
        -- So that one worker works on one order. SKIP LOCKED: what another session has at this moment is not due.
        FOR NO KEY UPDATE SKIP LOCKED
    ) AS d
),
leased AS (
    UPDATE close_attempts c
    -- 64 random bits: a lease is compared with another of the same order only.
    SET lease = hashtextextended(gen_random_uuid()::text, 0), next_attempt_at = clock_timestamp() + make_interval(secs => $2::float8)
    -- kind || '': so that the primary key is used and not the index of what is due.
    WHERE c.kind || '' = $1::text AND c.order_id = ANY (ARRAY(SELECT d.order_id FROM due d))
    RETURNING c.order_id, c.lease, c.queue, c.rounds, c.has_waited, c.step <> 'claimed' AS was_judged
)
SELECT l.order_id, l.lease, l.queue, l.rounds, l.has_waited, l.was_judged,
       p.provider, p.reference, p.amount_minor, p.currency, p.state, p.payable_until
FROM leased l
-- Every attempt, not only the last: a verdict on one is none on the order.
LEFT JOIN payment_attempts p ON p.order_id = l.order_id AND p.state IN ('open', 'paid')
ORDER BY l.order_id, p.created_at, p.provider, p.reference

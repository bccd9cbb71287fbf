-- The orders tables on which a worker may close, even many orders that are overdue already. A worker that starts on a
-- table without a row here counts its overdue orders first.

CREATE TABLE order_timeout_adoption (
    -- 'orders' for the default table, 'statements' for statements in files, or the name of a mapped table.
    orders     text PRIMARY KEY,
    adopted_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    -- What allowed it: 'first start', 'accepted' or 'upgrade'.
    by         text NOT NULL,
    -- How many were overdue then.
    overdue    bigint
);

-- Workers have run on this schema before, so their orders are known to be closed.
INSERT INTO order_timeout_adoption (orders, by)
SELECT o, 'upgrade' FROM unnest(ARRAY['orders', 'statements']) AS o
WHERE EXISTS (SELECT FROM order_events WHERE event = 'closed')
   OR EXISTS (SELECT FROM event_outbox)
   OR EXISTS (SELECT FROM order_timeout_workers);

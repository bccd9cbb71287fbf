-- The next unpaid overdue orders, in the order (deadline, id).
--
--   $1 grace          float8       seconds after the deadline before an order is returned: its alarm may still arrive
--   $2 after_deadline timestamptz  the deadline of the previous page's last row; '-infinity' begins a pass
--   $3 after_id       text         that row's order id; '' begins a pass
--   $4 limit          bigint
--
--   order_id text, deadline timestamptz
--
-- An order without a deadline (NULL) is never overdue.
SELECT o.id::text AS order_id, o.expires_at AS deadline
FROM orders o
WHERE o.status = 'unpaid'
  -- statement_timestamp(), not clock_timestamp(): a stable function can bound an index scan, a volatile one cannot.
  AND o.expires_at <= statement_timestamp() - make_interval(secs => $1::float8)
  -- One row comparison, so that the index scan begins where the previous page ended.
  AND (o.expires_at, o.id) > ($2::timestamptz, coalesce(nullif($3::text, ''), '00000000-0000-0000-0000-000000000000')::uuid)
ORDER BY o.expires_at, o.id
LIMIT $4::bigint

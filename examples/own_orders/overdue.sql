-- orders.overdue_sql for public.purchases: the next open orders whose time is up, in the order (deadline, id).
SELECT p.id::text AS order_id, p.pay_until AS deadline
FROM public.purchases p
WHERE p.state = 'open'
  AND p.pay_until <= statement_timestamp() - make_interval(secs => $1::float8)
  AND (p.pay_until, p.id) > ($2::timestamptz, coalesce(nullif($3::text, '')::bigint, -1))
ORDER BY p.pay_until, p.id
LIMIT $4::bigint

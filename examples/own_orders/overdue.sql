-- orders.overdue_sql for public.purchases: the next open, unpaid, overdue orders, in the order (deadline, id).
SELECT p.id::text AS order_id, p.pay_until AS deadline
FROM public.purchases p
WHERE p.state = 'open'
  AND p.pay_until >= '0001-01-01 00:00:00+00'
  AND p.pay_until <= statement_timestamp() - make_interval(secs => $1::float8)
  -- Starts after the last row of the previous page. A pass begins with the smallest id.
  AND (p.pay_until, p.id) >= ($2::timestamptz, coalesce(nullif($3::text, ''), '-9223372036854775808')::bigint)
  AND NOT (p.pay_until = $2::timestamptz AND p.id::text = $3::text)
  -- Orders that close.sql would call paid would otherwise be found again and again.
  AND NOT EXISTS (SELECT FROM public.payments y WHERE y.purchase_id = p.id)
ORDER BY p.pay_until, p.id
LIMIT $4::bigint

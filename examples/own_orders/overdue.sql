-- orders.overdue_sql for public.purchases: the next open, unpaid orders whose time is up, in the order (deadline, id).
SELECT p.id::text AS order_id, p.pay_until AS deadline
FROM public.purchases p
WHERE p.state = 'open'
  AND p.pay_until <= statement_timestamp() - make_interval(secs => $1::float8)
  -- From where the last page ended, whose last row is left out. The least id there is where a pass begins.
  AND (p.pay_until, p.id) >= ($2::timestamptz, coalesce(nullif($3::text, ''), '-9223372036854775808')::bigint)
  AND NOT (p.pay_until = $2::timestamptz AND p.id::text = $3::text)
  -- What close.sql would call paid, or it would be found again and again.
  AND NOT EXISTS (SELECT FROM public.payments y WHERE y.purchase_id = p.id)
ORDER BY p.pay_until, p.id
LIMIT $4::bigint

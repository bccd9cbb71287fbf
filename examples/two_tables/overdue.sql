-- orders.overdue_sql for public.web_orders and public.phone_orders: the next open, overdue orders of both, in the order
-- (deadline, id on the wire). Each half reads its own index and stops at the limit.
SELECT o.order_id, o.deadline FROM (
    (SELECT ('web-' || w.id::text) COLLATE "C" AS order_id, w.pay_until AS deadline FROM public.web_orders w
     WHERE w.state = 'open' AND w.pay_until >= '0001-01-01 00:00:00+00'
       AND w.pay_until <= statement_timestamp() - make_interval(secs => $1::float8)
       AND (w.pay_until, ('web-' || w.id::text) COLLATE "C") > ($2::timestamptz, $3::text)
     ORDER BY w.pay_until, ('web-' || w.id::text) COLLATE "C" LIMIT $4::bigint)
    UNION ALL
    (SELECT ('phone-' || p.id::text) COLLATE "C", p.pay_until FROM public.phone_orders p
     WHERE p.state = 'open' AND p.pay_until >= '0001-01-01 00:00:00+00'
       AND p.pay_until <= statement_timestamp() - make_interval(secs => $1::float8)
       AND (p.pay_until, ('phone-' || p.id::text) COLLATE "C") > ($2::timestamptz, $3::text)
     ORDER BY p.pay_until, ('phone-' || p.id::text) COLLATE "C" LIMIT $4::bigint)
) o
ORDER BY o.deadline, o.order_id
LIMIT $4::bigint

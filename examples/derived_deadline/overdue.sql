-- orders.overdue_sql for public.bookings: the next open, overdue bookings, in the order (deadline, id). The expression is
-- that of the index.
SELECT b.id::text AS order_id,
       (b.created_at AT TIME ZONE 'UTC' + make_interval(mins => b.minutes_to_pay)) AT TIME ZONE 'UTC' AS deadline
FROM public.bookings b
WHERE b.state = 'open'
  AND b.created_at AT TIME ZONE 'UTC' + make_interval(mins => b.minutes_to_pay)
      <= statement_timestamp() AT TIME ZONE 'UTC' - make_interval(secs => $1::float8)
  -- Starts after the last row of the previous page. A pass begins with the smallest id.
  AND (b.created_at AT TIME ZONE 'UTC' + make_interval(mins => b.minutes_to_pay), b.id)
      >= ($2::timestamptz AT TIME ZONE 'UTC', coalesce(nullif($3::text, ''), '-9223372036854775808')::bigint)
  AND NOT (b.created_at AT TIME ZONE 'UTC' + make_interval(mins => b.minutes_to_pay) = $2::timestamptz AT TIME ZONE 'UTC'
           AND b.id::text = $3::text)
ORDER BY b.created_at AT TIME ZONE 'UTC' + make_interval(mins => b.minutes_to_pay), b.id
LIMIT $4::bigint

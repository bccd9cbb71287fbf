-- A page of orders by their id, and what is wrong among them, as one JSON object (src/operations/audit/read.rs). $1 text:
-- the id behind which it begins, or an empty text; $2 timestamptz: the first deadline; $3 bigint: rows; $4 bigint: examples of
-- each fault; $5 float8[]: the bounds of the buckets of lateness in milliseconds. What the mapping does not tell is NULL.
WITH {after},
ot_read AS MATERIALIZED (
    SELECT {id_as_keys}, {deadline} AS deadline, ({open}) IS TRUE AS is_open, ({paid}) IS TRUE AS is_paid,
           ({is_closed}) IS TRUE AS is_closed, ({is_released}) IS TRUE AS is_released,
           {closed_at} AS closed_at, {paid_at} AS paid_at, {money}
    FROM {orders} AS {alias}
    WHERE ({ids}) >= ({first}) AND ($1::text = '' OR ({ids}) > ({behind}))
    ORDER BY {ids}
    LIMIT $3::bigint
),
ot_judged AS MATERIALIZED (
    SELECT r.*, {kept} AS kept_minor,
           CASE WHEN r.is_closed AND NOT r.is_released AND r.closed_at >= r.deadline AND {keeps_deadline}
                THEN extract(epoch FROM r.closed_at - r.deadline)::float8 * 1000 END AS late_ms
    FROM ot_read r
    WHERE r.deadline >= $2::timestamptz OR (r.deadline IS NULL AND r.is_closed AND r.closed_at >= $2::timestamptz)
),
ot_found AS MATERIALIZED (
    SELECT j.*, f.fault, extract(epoch FROM coalesce(j.closed_at, statement_timestamp()) - j.deadline)::float8 * 1000 AS after_ms,
           CASE f.fault WHEN 'money_kept' THEN j.kept_minor ELSE j.amount_minor END AS minor
    FROM ot_judged j
    CROSS JOIN LATERAL (VALUES
        ('closed_although_paid',
         j.is_closed AND (j.is_paid OR j.paid_at IS NOT NULL) AND (j.paid_at > j.closed_at) IS NOT TRUE),
        ('paid_after_close', j.is_closed AND j.paid_at > j.closed_at),
        ('money_kept', j.kept_minor > 0),
        ('open_although_paid', j.is_open AND NOT j.is_paid AND j.paid_at IS NOT NULL),
        ('open_long_after_deadline',
         j.is_open AND NOT j.is_paid AND j.deadline < statement_timestamp() - interval '60 s'),
        -- A column may have rounded the time of the close.
        ('closed_early', j.is_closed AND NOT j.is_released AND {keeps_deadline} AND date_trunc('milliseconds', j.closed_at) <
            date_trunc(CASE WHEN j.closed_at = date_trunc('second', j.closed_at) THEN 'second' ELSE 'milliseconds' END, j.deadline)),
        ('closed_late', j.late_ms > 60000),
        ('closed_without_deadline', j.is_closed AND NOT j.is_released AND j.deadline IS NULL AND {keeps_deadline})
    ) AS f (fault, holds)
    -- Few are left for the list above.
    WHERE (j.is_open OR j.is_closed) AND (j.paid_at IS NOT NULL OR j.is_paid OR j.kept_minor > 0 OR j.deadline IS NULL
           OR j.late_ms > 60000 OR j.closed_at < j.deadline OR j.deadline < statement_timestamp() AND j.is_open) AND f.holds
)
SELECT jsonb_build_object(
    'rows', (SELECT count(*) FROM ot_read),
    'last', (SELECT {id} FROM ot_read r ORDER BY {keys_descending} LIMIT 1),
    'orders', (SELECT count(*) FROM ot_judged),
    'open', (SELECT count(*) FROM ot_judged j WHERE j.is_open AND NOT j.is_paid),
    'closed', (SELECT count(*) FROM ot_judged j WHERE j.is_closed),
    'latest_ms', (SELECT max(j.late_ms) FROM ot_judged j),
    'found', (SELECT coalesce(jsonb_agg(jsonb_build_array(g.fault, g.currency, g.orders, g.minor)), '[]')
              FROM (SELECT f.fault, f.currency, count(*) AS orders, coalesce(sum(f.minor), 0) AS minor
                    FROM ot_found f GROUP BY 1, 2) g),
    'examples', (SELECT coalesce(jsonb_agg(jsonb_build_array(r.fault, jsonb_build_object(
                     'id', {id}, 'deadline', {utc_deadline}, 'closed_at', {utc_closed_at}, 'paid_at', {utc_paid_at},
                     'after_ms', r.after_ms, 'amount_minor', r.minor, 'currency', r.currency))), '[]')
                 FROM (SELECT f.*, row_number() OVER (PARTITION BY f.fault
                                                      ORDER BY abs(f.after_ms) DESC NULLS LAST) AS place
                       FROM ot_found f) r
                 WHERE r.place <= $4::bigint),
    'lateness', (SELECT coalesce(jsonb_agg(jsonb_build_array(g.bucket, g.closes)), '[]')
                 FROM (SELECT width_bucket(j.late_ms, $5::float8[]) AS bucket, count(*) AS closes
                       FROM ot_judged j WHERE j.late_ms IS NOT NULL GROUP BY 1) g),
    'hours', (SELECT coalesce(jsonb_agg(jsonb_build_array(g.hour, g.closes, g.late)), '[]')
              FROM (SELECT extract(hour FROM j.closed_at AT TIME ZONE {zone})::integer AS hour, count(*) AS closes,
                           count(*) FILTER (WHERE j.late_ms > 60000) AS late
                    FROM ot_judged j WHERE j.late_ms IS NOT NULL GROUP BY 1) g))

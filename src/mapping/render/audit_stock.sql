-- Rows of stock that reserve more or less than the open orders need, as a JSON array. $1 bigint: at most this many.
WITH ot_needed AS MATERIALIZED (
    SELECT {item_keys}, sum(i.quantity)::numeric AS needs
    FROM (SELECT {id_as_keys} FROM {orders} AS {alias} WHERE {open}) d
    JOIN (SELECT {item_order}, {item_key}, ({quantity}) AS quantity FROM {items}) i ON ({order_keys}) = ({open_keys})
    GROUP BY {item_keys}
),
ot_stock AS (
    SELECT {table} || ' ' || {printed} AS id, t.reserves, coalesce(n.needs, 0) AS needs
    FROM (SELECT {stock_as_keys}, s.{column}::numeric AS reserves FROM {stock} AS s) t
    LEFT JOIN ot_needed n ON ({needed_keys}) = ({stock_keys})
)
SELECT coalesce(jsonb_agg(jsonb_build_object('id', r.id, 'reserves', r.reserves::text, 'needs', r.needs::text,
                                             'difference', (r.reserves - r.needs)::text)), '[]')
FROM (SELECT * FROM ot_stock t WHERE t.reserves < t.needs OR (t.reserves > t.needs AND {tells_more}) ORDER BY abs(t.reserves - t.needs) DESC, t.id LIMIT $1::bigint) r

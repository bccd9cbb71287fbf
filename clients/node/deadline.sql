-- Changes the deadline of an open order of "orders". $1 text: its id; $2 timestamptz: its new deadline.
WITH ot_asked AS MATERIALIZED (
    SELECT CASE WHEN p.text_id LIKE '________-____-____-____-____________' AND p.text_id NOT LIKE '%-%-%-%-%-%' AND p.text_id !~ '[^-0-9a-fA-F]' THEN p.text_id::uuid END AS k1
    FROM (SELECT $1::text AS text_id) AS p
),
ot_locked AS MATERIALIZED (
    SELECT o.* FROM "orders" AS o
    WHERE o."id" = ANY (ARRAY(SELECT t.k1 FROM ot_asked t))
    FOR NO KEY UPDATE OF o
),
ot_decided AS MATERIALIZED (
    SELECT "orders"."id" AS k1,
           CASE WHEN "orders"."expires_at" >= '0001-01-01 00:00:00+00'::timestamptz AND "orders"."expires_at" < '10000-01-01 00:00:00+00'::timestamptz THEN "orders"."expires_at" END AS deadline,
           "orders"."status"::text AS status,
           coalesce((status = 'unpaid'), false) AND (status = 'paid') IS NOT TRUE AS is_open
    FROM ot_locked AS "orders"
),
ot_open AS MATERIALIZED (
    SELECT d.k1 FROM ot_decided d WHERE d.is_open
),
ot_moved AS (
    UPDATE "orders" AS "orders"
    SET "expires_at" = $2::timestamptz
    WHERE "orders"."id" = ANY (ARRAY(SELECT t.k1 FROM ot_open t))
    RETURNING "orders"."expires_at" AS deadline
),
ot_alarm AS (
    INSERT INTO alarm_outbox (order_id, deadline)
    SELECT d.k1::text, m.deadline
    FROM ot_decided d, ot_moved m
    WHERE d.deadline IS NULL OR m.deadline < d.deadline
)
SELECT d.status,
       coalesce(d.deadline, 'infinity') AS deadline,
       (SELECT m.deadline FROM ot_moved m) AS moved_to
FROM ot_decided d

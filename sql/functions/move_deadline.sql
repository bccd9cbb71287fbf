-- Moves deadlines of open orders: an earlier one gets its own alarm. `move_deadline` is for services, `move_deadlines` for
-- operators; both call the function of the kind, which is rendered from its mapping. Close nothing.

-- What `extend_max` of the kind allows an order with this deadline: `first` is the one from which it counts, and `latest` the
-- furthest; both NULL without `extend_max`. A deadline beyond `latest` was set by the shop itself, and is a first one. VOLATILE,
-- and called behind the lock of the order's row.
CREATE OR REPLACE FUNCTION deadline_bounds(
    kind text, order_id text, present timestamptz, OUT first timestamptz, OUT latest timestamptz
) LANGUAGE sql VOLATILE SET search_path FROM CURRENT AS $$
    SELECT b.first, b.first + c.extend_max
    FROM (SELECT make_interval(secs => (s.extend_max ->> $1)::float8) AS extend_max FROM order_timeout_settings s) c
    CROSS JOIN LATERAL (SELECT coalesce(
        (SELECT f.deadline FROM first_deadlines f
         WHERE f.kind = $1 AND f.order_id = $2 AND (f.deadline + c.extend_max >= $3) IS NOT FALSE), $3) AS first) b
    WHERE c.extend_max IS NOT NULL
$$;

-- Of many orders of a kind, whose rows it locks in the order of their ids.
--
--   order_ids      as their table prints them
--   deadline       the new deadline of all; NULL: each deadline is moved by `shift` seconds, negative for earlier
--   furthest       seconds: a deadline may not be further ahead, nor have passed; NULL: it may
--   who, why, run  of an operator, for the history; `who` NULL: nothing is recorded
--
--   outcome        later | earlier | same | passed | too_far (further than `furthest` or `latest`) | no_deadline |
--                  not_unpaid | kept (by a trigger); no row: the order does not exist
--   before         the deadline that the row had
--   wanted         NULL if the order is not open, or has no deadline to which something could be added
--   moved_to       the deadline in the row now, if it was moved
--   latest         what `extend_max` allows; NULL without it
--
-- SECURITY DEFINER: a role needs EXECUTE on this function and no right on a table. Not for callbacks.
CREATE OR REPLACE FUNCTION move_deadlines(
    kind text, order_ids text[], deadline timestamptz, shift float8, furthest float8, who text, why text, run uuid
) RETURNS TABLE (
    order_id text, outcome text, status text, before timestamptz, wanted timestamptz, moved_to timestamptz,
    latest timestamptz
) LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
BEGIN
    -- A week after the last deadline that they allowed; a few at each move, which adds few.
    DELETE FROM first_deadlines f WHERE f.kind = move_deadlines.kind AND f.order_id = ANY (ARRAY(
        SELECT o.order_id FROM first_deadlines o
        WHERE o.kind = move_deadlines.kind
          AND o.deadline < statement_timestamp() - interval '7 days'
              - make_interval(secs => coalesce((SELECT (s.extend_max ->> move_deadlines.kind)::float8 FROM order_timeout_settings s), 0))
        LIMIT 1000 FOR UPDATE SKIP LOCKED));
    RETURN QUERY EXECUTE format('SELECT * FROM %I($1, $2, $3, $4, $5, $6, $7)', function_of_kind(kind, 'move'))
    USING order_ids, deadline, shift, furthest, who, why, run;
END $$;

-- Of one order, for services: in the caller's transaction.
--
--   outcome   later (or the same): the alarm that exists suffices | earlier: a new alarm is in alarm_outbox | too_far: beyond
--             extend_max of the kind | unchanged: the order is not open, or a trigger keeps its deadline; no row: there is no
--             such order
--   The other columns are those of move_deadlines.
--
-- SECURITY DEFINER: a service's role needs EXECUTE on this function and no right on a table.
CREATE OR REPLACE FUNCTION move_deadline(order_id text, deadline timestamptz, kind text DEFAULT 'order')
RETURNS TABLE (outcome text, status text, before timestamptz, moved_to timestamptz, latest timestamptz)
LANGUAGE sql SECURITY DEFINER SET search_path FROM CURRENT AS $$
    SELECT CASE m.outcome WHEN 'same' THEN 'later' WHEN 'no_deadline' THEN 'unchanged' WHEN 'not_unpaid' THEN 'unchanged'
                          WHEN 'kept' THEN 'unchanged' ELSE m.outcome END,
           m.status, m.before, m.moved_to, m.latest
    FROM move_deadlines($3, ARRAY[$1], $2, NULL, NULL, NULL, NULL, NULL) m
$$;

REVOKE ALL ON FUNCTION
    move_deadlines(text, text[], timestamptz, float8, float8, text, text, uuid),
    move_deadline(text, timestamptz, text)
FROM PUBLIC;

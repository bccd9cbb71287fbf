-- Ends the claims of orders that are closed, or about which nothing is left to do, in the transaction of their close.
--
--   $1 kind     text
--   $2 ids      text[]   orders whose claims this transaction holds (sql/hold_claimed.sql)
--   $3 closed   text[]   those among them that it has closed
--   $4 answers  jsonb    order id -> what the providers answered, for the history
WITH ended AS (
    DELETE FROM close_attempts c
    -- kind || '': so that the primary key is used.
    WHERE c.kind || '' = $1::text AND c.order_id = ANY ($2::text[])
    RETURNING c.order_id, c.who, c.why, c.rounds, c.last_answers
)
-- The claim ends here, and with it what it knows. A mapped table has no history of ours.
UPDATE order_events e
SET who = n.who, why = n.why,
    answers = nullif(concat_ws('; ',
        CASE WHEN n.rounds > 0 THEN concat('rounds without an answer: ', n.rounds, ', the last: ', n.last_answers) END,
        nullif($4::jsonb ->> n.order_id, '')), '')
FROM ended n
WHERE $1::text = 'order' AND e.event = 'closed' AND e.order_id = default_order_key(n.order_id) AND n.order_id = ANY ($3::text[])

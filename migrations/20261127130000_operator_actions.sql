-- What operators did to parked alarms, and why: a retry or a drop deletes their rows, so this is what is left of them.
-- Written in the transaction that deletes them. Changes of orders are in order_events, which names the operator itself.

CREATE TABLE operator_actions (
    id     bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    who    text NOT NULL,
    -- NULL: the operator gave no reason.
    why    text,
    -- One command or request may write several rows: a thousand alarms at a time.
    run    uuid NOT NULL,
    action text NOT NULL,
    -- An array of {"id", "reason", "kind", "order_id"}: the alarms as they were parked.
    alarms jsonb NOT NULL,

    CONSTRAINT the_action_is_known CHECK (action IN ('parked_retried', 'parked_dropped'))
);

CREATE INDEX operator_actions_by_age ON operator_actions (at);

-- What happened to each order, in the order it happened.

CREATE TABLE order_events (
    id       bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    -- No foreign key: it costs a fifth of the closing speed, and a history may outlive its order.
    order_id uuid NOT NULL,
    event    text NOT NULL,
    at       timestamptz NOT NULL DEFAULT clock_timestamp(),
    -- Which path did it ('alarm', 'sweep', 'manual' for a close).
    by       text,
    reason   text,

    CONSTRAINT event_is_known CHECK (event IN ('created', 'paid', 'extended', 'closed')),
    CONSTRAINT closes_say_by_what_and_why CHECK (event <> 'closed' OR (by IS NOT NULL AND reason IS NOT NULL))
);

CREATE INDEX order_events_by_order ON order_events (order_id, id);

-- Closing an order twice is not a bug that a test must find: it cannot be written down.
CREATE UNIQUE INDEX an_order_is_closed_once ON order_events (order_id) WHERE event = 'closed';

-- What must reach the broker, written in the transaction that caused it; the worker relays both.

CREATE TABLE event_outbox (
    -- The message id on the wire: how a consumer recognises a second delivery.
    id          uuid PRIMARY KEY DEFAULT gen_random_uuid(),
    -- AMQP holds both in short strings of 255 bytes.
    routing_key text NOT NULL CHECK (octet_length(routing_key) <= 255),
    type        text NOT NULL CHECK (octet_length(type) <= 255),
    payload     jsonb NOT NULL,
    created_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    sent_at     timestamptz
);

-- Unsent rows only. Never a cursor over ids: transactions commit in another order than they take numbers.
CREATE INDEX event_outbox_unsent ON event_outbox (created_at, id) WHERE sent_at IS NULL;
CREATE INDEX event_outbox_sent ON event_outbox (sent_at) WHERE sent_at IS NOT NULL;

CREATE TABLE alarm_outbox (
    id         uuid PRIMARY KEY DEFAULT gen_random_uuid(),
    -- As the orders table prints it.
    order_id   text NOT NULL,
    deadline   timestamptz NOT NULL,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    -- When it was handed to the broker; also set for one whose time had passed by then, which the sweep closes.
    sent_at    timestamptz,

    -- What no message could carry is refused here, in the order's own transaction, and not found out later.
    CONSTRAINT the_order_id_fits_a_message
        CHECK (octet_length(order_id) BETWEEN 1 AND 200 AND order_id !~ '[\x01-\x1f\x7f-\u009f]'),
    CONSTRAINT the_alarm_is_within_the_calendar
        CHECK (deadline BETWEEN '0001-01-01 00:00:00+00' AND '9999-12-31 00:00:00+00')
);

CREATE INDEX alarm_outbox_unsent ON alarm_outbox (created_at, id) WHERE sent_at IS NULL;
CREATE INDEX alarm_outbox_sent ON alarm_outbox (sent_at) WHERE sent_at IS NOT NULL;

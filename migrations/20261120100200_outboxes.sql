-- What must reach the broker, written in the transaction that caused it. Only `event_outbox` is relayed so far; an alarm
-- written into `alarm_outbox` waits for a later version.

CREATE TABLE event_outbox (
    -- The message id on the wire: how a consumer recognises a second delivery.
    id          uuid PRIMARY KEY DEFAULT gen_random_uuid(),
    routing_key text NOT NULL,
    type        text NOT NULL,
    payload     jsonb NOT NULL,
    created_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    sent_at     timestamptz
);

-- Unsent rows only. Never a cursor over ids: transactions commit in another order than they take numbers.
CREATE INDEX event_outbox_unsent ON event_outbox (created_at, id) WHERE sent_at IS NULL;
CREATE INDEX event_outbox_sent ON event_outbox (sent_at) WHERE sent_at IS NOT NULL;

CREATE TABLE alarm_outbox (
    id         uuid PRIMARY KEY DEFAULT gen_random_uuid(),
    order_id   text NOT NULL,
    deadline   timestamptz NOT NULL,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    sent_at    timestamptz
);

CREATE INDEX alarm_outbox_unsent ON alarm_outbox (created_at, id) WHERE sent_at IS NULL;

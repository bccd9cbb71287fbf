-- Alarms that could not be handled, with the reason, until a person retries or drops them.

CREATE TABLE parked_alarms (
    -- Made from the body, so that a message that is delivered again stays one row.
    id        uuid PRIMARY KEY DEFAULT gen_random_uuid(),
    reason    text NOT NULL,
    -- One sentence that names the fault.
    detail    text NOT NULL,
    -- As the message had it; not a foreign key, for the order may not exist.
    order_id  text,
    deadline  timestamptz,
    attempts  integer NOT NULL DEFAULT 0,
    -- The message body as it came, so that nothing is lost.
    body      bytea NOT NULL,
    parked_at timestamptz NOT NULL DEFAULT clock_timestamp(),

    CONSTRAINT reason_is_known CHECK (reason IN
        ('unreadable', 'malformed_id', 'too_far', 'unknown_order', 'close_failed', 'broker_gave_up')),
    CONSTRAINT attempts_are_counted CHECK (attempts >= 0)
);

CREATE INDEX parked_alarms_by_age ON parked_alarms (parked_at, id);
CREATE INDEX parked_alarms_by_reason ON parked_alarms (reason, parked_at);

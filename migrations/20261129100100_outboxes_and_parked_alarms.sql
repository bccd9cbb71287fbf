-- What must reach the broker, written in the transaction that caused it and relayed by a worker; and the alarms that
-- could not be handled.

CREATE TABLE event_outbox (
    -- The message id on the wire: how a consumer recognises a second delivery.
    id              uuid PRIMARY KEY DEFAULT gen_random_uuid(),
    -- AMQP holds both in short strings of 255 bytes.
    routing_key     text NOT NULL CHECK (octet_length(routing_key) <= 255),
    type            text NOT NULL CHECK (octet_length(type) <= 255),
    payload         jsonb NOT NULL,
    created_at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    sent_at         timestamptz,
    -- What the broker refuses waits with a pause of its own, which grows with each refusal.
    refusals        integer NOT NULL DEFAULT 0,
    -- Not before this moment. A row that was never refused has '-infinity', so that one index serves both kinds.
    next_attempt_at timestamptz NOT NULL DEFAULT '-infinity',
    -- For a close statement of your own, which knows the W3C trace context (`traceparent`). NULL: that of the order's last
    -- alarm.
    traceparent     text,
    -- Orders of two kinds may have the same id, so an event finds its alarm by both.
    kind            text NOT NULL DEFAULT 'order',

    -- It travels in a header.
    CONSTRAINT the_trace_context_of_an_event_is_short CHECK (octet_length(traceparent) <= 200),
    -- One event that no broker takes would end the channel, and with it everything that is sent beside it, again and again.
    -- RabbitMQ takes messages of up to 128 MiB, from 4.0 of up to 16; an event that says what has become of an order needs
    -- a thousandth. Not when a row is marked as sent: what a broker has taken fits.
    CONSTRAINT the_payload_fits_into_a_message CHECK (sent_at IS NOT NULL OR octet_length(payload::text) <= 1048576)
);

-- Unsent rows only: new ones by age, refused ones by when they are due, however many wait. Never a cursor over ids:
-- transactions commit in another order than they take numbers.
CREATE INDEX event_outbox_due ON event_outbox (next_attempt_at, created_at, id) WHERE sent_at IS NULL;
-- How many are refused, and how old the oldest is. A row that was never refused is not in it.
CREATE INDEX event_outbox_refused ON event_outbox (created_at) WHERE sent_at IS NULL AND refusals > 0;
CREATE INDEX event_outbox_sent ON event_outbox (sent_at) WHERE sent_at IS NOT NULL;
-- What an order's story asks for. Partial: a close writes unsent rows, so it does not maintain this index; the relay does,
-- when it marks a row as sent. Hash: a lookup needs equality alone, and an entry has four bytes instead of an order id.
CREATE INDEX event_outbox_sent_by_order ON event_outbox USING hash ((payload ->> 'order_id')) WHERE sent_at IS NOT NULL;

CREATE TABLE alarm_outbox (
    id              uuid PRIMARY KEY DEFAULT gen_random_uuid(),
    -- As the orders table prints it.
    order_id        text NOT NULL,
    deadline        timestamptz NOT NULL,
    created_at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    -- When it was handed to the broker; also set for one whose time had passed by then, which the sweep closes.
    sent_at         timestamptz,
    -- Both as in event_outbox.
    refusals        integer NOT NULL DEFAULT 0,
    next_attempt_at timestamptz NOT NULL DEFAULT '-infinity',
    -- The W3C trace context of the code that schedules the alarm: the relay sends it with the alarm, and later with the
    -- event of the order's close. NULL if there is none.
    traceparent     text,
    -- Which sort of deadline it is, if a deployment has several.
    kind            text NOT NULL DEFAULT 'order',

    -- What no message could carry, and what no setting can name, is refused here, in the order's own transaction, and not
    -- found out later.
    CONSTRAINT the_order_id_fits_a_message
        CHECK (octet_length(order_id) BETWEEN 1 AND 200 AND order_id !~ '[\x01-\x1f\x7f-\u009f]'),
    CONSTRAINT the_alarm_is_within_the_calendar
        CHECK (deadline BETWEEN '0001-01-01 00:00:00+00' AND '9999-12-31 00:00:00+00'),
    CONSTRAINT the_trace_context_of_an_alarm_is_short CHECK (octet_length(traceparent) <= 200),
    CONSTRAINT the_kind_of_an_alarm_is_a_name CHECK (kind ~ '^[a-z][a-z0-9_]{0,39}$')
);

-- As those of event_outbox.
CREATE INDEX alarm_outbox_due ON alarm_outbox (next_attempt_at, created_at, id) WHERE sent_at IS NULL;
CREATE INDEX alarm_outbox_refused ON alarm_outbox (created_at) WHERE sent_at IS NULL AND refusals > 0;
CREATE INDEX alarm_outbox_sent ON alarm_outbox (sent_at) WHERE sent_at IS NOT NULL;
CREATE INDEX alarm_outbox_sent_by_order ON alarm_outbox USING hash (order_id) WHERE sent_at IS NOT NULL;
-- How the event relay finds an alarm's trace context. Without tracing it is empty, and an alarm costs no more.
CREATE INDEX alarm_outbox_traced ON alarm_outbox (order_id, created_at) WHERE traceparent IS NOT NULL;

-- Alarms that could not be handled, with the reason, until an operator retries or drops them.
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
    kind      text NOT NULL DEFAULT 'order',

    CONSTRAINT reason_is_known CHECK (reason IN
        ('unreadable', 'malformed_id', 'too_far', 'unknown_order', 'unknown_kind', 'close_failed', 'broker_gave_up')),
    CONSTRAINT attempts_are_counted CHECK (attempts >= 0)
);

CREATE INDEX parked_alarms_by_age ON parked_alarms (parked_at, id);
CREATE INDEX parked_alarms_by_reason ON parked_alarms (reason, parked_at);

-- What operators did to parked alarms, and why: a retry or a drop deletes their rows, so this is what is left of them. And to
-- deadlines in tables of the shop's own: changes of the default orders are in order_events, which names the operator itself.
-- Written in the transaction of the change.
CREATE TABLE operator_actions (
    id     bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    who    text NOT NULL,
    -- NULL: the operator gave no reason.
    why    text,
    -- One command or request may write several rows: a thousand alarms at a time. A run that was interrupted is resumed by them.
    run    uuid NOT NULL,
    action text NOT NULL,
    -- An array of {"id", "reason", "kind", "order_id"}: the alarms as they were parked. Of moved deadlines
    -- {"kind", "order_id", "before", "deadline"}.
    alarms jsonb NOT NULL,

    CONSTRAINT the_action_is_known CHECK (action IN ('parked_retried', 'parked_dropped', 'deadline_moved'))
);

CREATE INDEX operator_actions_by_age ON operator_actions (at);

-- How far along the deadlines each reminder of a kind has been announced.
-- A reminder is announced when the deadline index is read past its order, in the transaction that moves this row on. So
-- it is announced at most once for each deadline, and never for an order that was created, or whose deadline was moved
-- here, after the moment had passed.
CREATE TABLE reminder_progress (
    kind       text NOT NULL,
    -- How long before the deadline.
    before_ms  bigint NOT NULL,
    -- The last order that was read, in the order (deadline, id).
    reached    timestamptz NOT NULL,
    reached_id text NOT NULL DEFAULT '',

    PRIMARY KEY (kind, before_ms),
    CONSTRAINT a_reminder_is_before_the_deadline CHECK (before_ms > 0)
);

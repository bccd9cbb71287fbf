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

-- Orders that a payment provider is asked about before they are closed: the state of the closing protocol, so that any
-- worker can resume it after a crash. A row exists from the claim (`orders.status = 'closing'`) to the order's end.

CREATE TABLE close_attempts (
    kind              text NOT NULL DEFAULT 'order',
    -- As the orders table prints it: that table may be the shop's own, so no foreign key.
    order_id          text NOT NULL,
    -- The path that claimed the order, which its close is recorded with.
    claimed_by        text NOT NULL,
    claimed_at        timestamptz NOT NULL DEFAULT clock_timestamp(),
    -- Which provider's queue the order waits in, so that one provider's orders never hide another's: that of its newest
    -- open attempt, and later the one whose answer is missing. Empty if it has no attempt.
    queue             text NOT NULL DEFAULT '',
    -- What the order waits for.
    step              text NOT NULL DEFAULT 'claimed',
    -- How many rounds ended without an answer.
    rounds            integer NOT NULL DEFAULT 0,
    -- Whether it has waited for a customer who was paying: once, however often the protocol is resumed.
    has_waited        boolean NOT NULL DEFAULT false,
    -- Not before this moment; while a worker has the order, until when.
    next_attempt_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    -- The worker that has the order knows this number, and every write about the order compares it. Drawn at random for
    -- each period: a sequence would need a right of its own. NULL: no worker has the order.
    lease             bigint,
    -- What the providers answered in the last round.
    last_answers      text,
    unresolved_reason text,
    unresolved_at     timestamptz,

    PRIMARY KEY (order_id, kind),
    CONSTRAINT the_step_is_known CHECK (step IN ('claimed', 'in_progress', 'no_answer', 'unresolved')),
    CONSTRAINT unresolved_orders_say_why_and_since_when
        CHECK ((step = 'unresolved') = (unresolved_reason IS NOT NULL AND unresolved_at IS NOT NULL)),
    CONSTRAINT the_reason_is_known CHECK (unresolved_reason IN
        ('amount_differs', 'refunded', 'recorded_paid', 'no_answer', 'paid_after_close', 'refused')),
    CONSTRAINT rounds_are_counted CHECK (rounds >= 0)
);

-- What is due next in each queue. Unresolved orders are not in it: they wait for a person.
CREATE INDEX close_attempts_due ON close_attempts (kind, queue, next_attempt_at, order_id) WHERE unresolved_at IS NULL;
CREATE INDEX close_attempts_unresolved ON close_attempts (unresolved_at) WHERE unresolved_at IS NOT NULL;

-- When a `closing` order is looked at next is in close_attempts now, in one place for every orders table. The column
-- stays until no worker of an earlier version runs.
ALTER TABLE orders DROP CONSTRAINT closing_orders_have_a_next_attempt;
DROP INDEX orders_closing_by_next_attempt;

-- What the providers answered before an order was closed or settled. Nullable and without a default: no row is rewritten.
ALTER TABLE order_events ADD COLUMN answers text;

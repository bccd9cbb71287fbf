-- Orders with a deadline, what they reserve, and the stock they reserve it from.

CREATE TYPE order_status AS ENUM ('unpaid', 'closing', 'paid', 'closed');

CREATE TABLE orders (
    id              uuid PRIMARY KEY,
    status          order_status NOT NULL DEFAULT 'unpaid',
    -- When an unpaid order's time is up. The row decides; alarms only wake the worker.
    expires_at      timestamptz NOT NULL,
    -- When a 'closing' order is looked at next.
    next_attempt_at timestamptz,
    created_at      timestamptz NOT NULL DEFAULT now(),
    paid_at         timestamptz,
    closed_at       timestamptz,
    closed_by       text,
    close_reason    text,

    -- An order that never times out is one without an alarm, not one whose deadline no calendar holds.
    CONSTRAINT the_deadline_is_within_the_calendar
        CHECK (expires_at BETWEEN '0001-01-01 00:00:00+00' AND '9999-12-31 00:00:00+00'),
    CONSTRAINT paid_orders_say_when
        CHECK ((status = 'paid') = (paid_at IS NOT NULL)),
    CONSTRAINT closed_orders_say_when_by_what_and_why
        CHECK ((status = 'closed') = (closed_at IS NOT NULL AND closed_by IS NOT NULL AND close_reason IS NOT NULL)),
    CONSTRAINT only_closed_orders_carry_a_close
        CHECK (status = 'closed' OR (closed_at IS NULL AND closed_by IS NULL AND close_reason IS NULL)),
    CONSTRAINT closed_by_is_a_known_path
        CHECK (closed_by IN ('alarm', 'sweep', 'manual')),
    CONSTRAINT no_order_is_closed_early
        CHECK (closed_at >= expires_at),
    CONSTRAINT closing_orders_have_a_next_attempt
        CHECK ((status = 'closing') = (next_attempt_at IS NOT NULL))
);

-- The deadline index: only unpaid orders stand in it, so it stays small however old the table is.
CREATE INDEX orders_unpaid_by_deadline ON orders (expires_at, id) WHERE status = 'unpaid';

CREATE INDEX orders_closing_by_next_attempt ON orders (next_attempt_at, id) WHERE status = 'closing';

CREATE TABLE stock (
    article_id text PRIMARY KEY,
    available  bigint NOT NULL,
    -- Promised to orders that are neither paid nor closed.
    reserved   bigint NOT NULL DEFAULT 0,

    CONSTRAINT available_is_never_negative CHECK (available >= 0),
    CONSTRAINT reserved_is_never_negative CHECK (reserved >= 0)
);

CREATE TABLE order_items (
    order_id   uuid NOT NULL REFERENCES orders (id) ON DELETE CASCADE,
    article_id text NOT NULL REFERENCES stock (article_id),
    quantity   bigint NOT NULL,

    PRIMARY KEY (order_id, article_id),
    CONSTRAINT quantity_is_positive CHECK (quantity > 0)
);

-- Orders with a deadline, what they reserve, and what happened to each of them.

CREATE TYPE order_status AS ENUM ('unpaid', 'closing', 'paid', 'closed', 'cancelled');

CREATE TABLE orders (
    id             uuid PRIMARY KEY,
    status         order_status NOT NULL DEFAULT 'unpaid',
    -- When an unpaid order's time is up. The row decides; alarms only wake the worker. NULL: the order is never closed,
    -- because it is paid on delivery, by transfer or against an invoice.
    expires_at     timestamptz,
    created_at     timestamptz NOT NULL DEFAULT now(),
    paid_at        timestamptz,
    closed_at      timestamptz,
    closed_by      text,
    close_reason   text,
    -- What it costs, in the currency's smallest unit. NULL: not known, and then any payment pays it.
    amount_minor   bigint,
    currency       text,

    CONSTRAINT the_deadline_is_within_the_calendar
        CHECK (expires_at BETWEEN '0001-01-01 00:00:00+00' AND '9999-12-31 00:00:00+00'),
    CONSTRAINT paid_orders_say_when
        CHECK ((status = 'paid') = (paid_at IS NOT NULL)),
    CONSTRAINT closed_orders_say_when_by_what_and_why
        CHECK ((status = 'closed') = (closed_at IS NOT NULL AND closed_by IS NOT NULL AND close_reason IS NOT NULL)),
    CONSTRAINT only_closed_orders_carry_a_close
        CHECK (status = 'closed' OR (closed_at IS NULL AND closed_by IS NULL AND close_reason IS NULL)),
    CONSTRAINT closed_by_is_a_known_path
        CHECK (closed_by IN ('alarm', 'look_ahead', 'sweep', 'manual', 'released')),
    CONSTRAINT no_order_is_closed_early
        CHECK (closed_at >= expires_at OR closed_by = 'released'),
    -- Anything else could never be paid: a payment's currency is three capital letters.
    CONSTRAINT the_currency_is_three_letters CHECK (currency ~ '^[A-Z]{3}$'),
    CONSTRAINT an_order_costs_no_negative_amount CHECK (amount_minor >= 0)
);

-- The deadline index: only unpaid orders are in it, so it stays small however old the table is.
CREATE INDEX orders_unpaid_by_deadline ON orders (expires_at, id) WHERE status = 'unpaid';

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

-- What an order reserves besides stock: uses of a coupon, points of a customer, anything with a number that is left. A
-- shop that reserves stock alone leaves this table and the next one empty.
CREATE TABLE reserved_resources (
    -- 'coupon', 'points' or a word of the shop's own.
    kind      text NOT NULL,
    -- The coupon's code, the customer's number.
    id        text NOT NULL,
    available bigint NOT NULL,
    -- Promised to orders that are neither paid nor closed.
    reserved  bigint NOT NULL DEFAULT 0,

    PRIMARY KEY (kind, id),
    CONSTRAINT available_resources_are_never_negative CHECK (available >= 0),
    CONSTRAINT reserved_resources_are_never_negative CHECK (reserved >= 0)
);

-- Like order_items: rows stay when the order is paid or closed.
CREATE TABLE order_resources (
    order_id    uuid NOT NULL REFERENCES orders (id) ON DELETE CASCADE,
    kind        text NOT NULL,
    resource_id text NOT NULL,
    quantity    bigint NOT NULL,

    PRIMARY KEY (order_id, kind, resource_id),
    FOREIGN KEY (kind, resource_id) REFERENCES reserved_resources (kind, id),
    CONSTRAINT reserved_quantity_is_positive CHECK (quantity > 0)
);

-- What happened to each order, in the order it happened.
CREATE TABLE order_events (
    id       bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    -- No foreign key: it costs a fifth of the closing speed, and a history may outlive its order.
    order_id uuid NOT NULL,
    event    text NOT NULL,
    at       timestamptz NOT NULL DEFAULT clock_timestamp(),
    -- Which path did it ('alarm', 'look_ahead', 'sweep', 'manual', 'released' for a close).
    by       text,
    reason   text,
    -- Which operator asked for a change, why, and in which run of a command; why also for what the shop released. NULL for
    -- what a worker or the shop did. One command may change many orders; a run that was interrupted is resumed by what it has
    -- already written.
    who      text,
    why      text,
    run      uuid,
    -- What the providers answered before an order was closed or settled.
    answers  text,

    CONSTRAINT event_is_known
        CHECK (event IN ('created', 'paid', 'extended', 'closed', 'cancelled', 'payment_received', 'payment_late',
                         'payment_refunded', 'refund_due', 'reopened')),
    CONSTRAINT closes_say_by_what_and_why CHECK (event <> 'closed' OR (by IS NOT NULL AND reason IS NOT NULL))
);

CREATE INDEX order_events_by_order ON order_events (order_id, id);

-- Closing an order twice is not a bug that a test must find: it cannot be written down.
CREATE UNIQUE INDEX an_order_is_closed_once ON order_events (order_id) WHERE event = 'closed';

-- The deadlines that moved orders had first, while an `extend_max` counts from them.
CREATE TABLE first_deadlines (
    kind     text NOT NULL,
    -- As the orders table of its kind prints it: that table may be the shop's own, so no foreign key.
    order_id text NOT NULL,
    deadline timestamptz NOT NULL,

    PRIMARY KEY (kind, order_id)
);

-- Which of them no longer matter.
CREATE INDEX first_deadlines_by_age ON first_deadlines (kind, deadline);

-- What was received for orders: each payment once, what it counted for, and the money that paid for nothing.

ALTER TABLE orders
    -- What payments have counted toward the order. NULL: none was reported, or it was released when the order closed.
    -- Nullable without a default: added without rewriting a large table.
    ADD COLUMN received_minor bigint;

CREATE TABLE received_payments (
    provider      text NOT NULL,
    -- What the provider knows the payment by: each movement of money has its own.
    reference     text NOT NULL,
    -- As the orders table prints it. No foreign key: that table may be the shop's own, or the order may not exist.
    order_id      text NOT NULL,
    amount_minor  bigint NOT NULL,
    currency      text NOT NULL,
    received_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    -- The answer to the first report, which every later one gets as well.
    outcome       text NOT NULL,
    reason        text,
    missing_minor bigint NOT NULL DEFAULT 0,
    surplus_minor bigint NOT NULL DEFAULT 0,
    -- How much of it counts toward the order now. The rest is in late_payments.
    counted_minor bigint NOT NULL DEFAULT 0,

    PRIMARY KEY (provider, reference),
    CONSTRAINT the_provider_is_a_name_of_the_settings CHECK (provider ~ '^[a-z][a-z0-9_-]{0,39}$'),
    CONSTRAINT the_reference_is_short_text
        CHECK (octet_length(reference) BETWEEN 1 AND 200 AND reference !~ '[\x01-\x1f\x7f-\u009f]'),
    CONSTRAINT the_order_id_fits_a_message
        CHECK (octet_length(order_id) BETWEEN 1 AND 200 AND order_id !~ '[\x01-\x1f\x7f-\u009f]'),
    CONSTRAINT a_payment_is_no_negative_amount CHECK (amount_minor >= 0),
    CONSTRAINT the_currency_is_three_letters CHECK (currency ~ '^[A-Z]{3}$'),
    CONSTRAINT the_outcome_is_known CHECK (outcome IN ('paid', 'partial', 'late')),
    CONSTRAINT late_payments_say_why CHECK ((outcome = 'late') = (reason IS NOT NULL)),
    CONSTRAINT no_more_counts_than_was_paid CHECK (counted_minor BETWEEN 0 AND amount_minor)
);

CREATE INDEX payments_by_order ON received_payments (order_id);

-- Money that paid for nothing. It is given back, or used to reopen its order.
CREATE TABLE late_payments (
    -- What an operator names it by.
    id           bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    order_id     text NOT NULL,
    provider     text NOT NULL,
    reference    text NOT NULL,
    -- The part of the payment that paid for nothing.
    amount_minor bigint NOT NULL,
    currency     text NOT NULL,
    reason       text NOT NULL,
    recorded_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    state        text NOT NULL DEFAULT 'open',
    settled_at   timestamptz,
    -- Who settled it, and why.
    settled_by   text,
    settled_why  text,

    -- One payment can be late once. With the reason, because what is left over of a late payment that reopened its order
    -- is a surplus.
    CONSTRAINT a_payment_is_late_once UNIQUE (provider, reference, reason),
    FOREIGN KEY (provider, reference) REFERENCES received_payments,
    CONSTRAINT the_reason_is_known
        CHECK (reason IN ('closed', 'cancelled', 'not_open', 'after_deadline', 'already_paid', 'surplus', 'part_payment',
                          'other_currency', 'other_order', 'unknown_order')),
    CONSTRAINT the_state_is_known CHECK (state IN ('open', 'refund_due', 'reopened')),
    CONSTRAINT settled_money_says_when_and_by_whom
        CHECK ((state = 'open') = (settled_at IS NULL) AND (state = 'open') = (settled_by IS NULL))
);

CREATE INDEX late_payments_open ON late_payments (id) WHERE state = 'open';
CREATE INDEX late_payments_by_order ON late_payments (order_id);

-- What the settings say and functions in the database must know. The worker and `order-timeout setup` write it.
CREATE TABLE order_timeout_settings (
    is_the_only_row    boolean PRIMARY KEY DEFAULT true,
    -- orders.pay_after_deadline
    pay_after_deadline boolean NOT NULL DEFAULT true,

    CONSTRAINT there_is_one_row CHECK (is_the_only_row)
);
INSERT INTO order_timeout_settings DEFAULT VALUES;

-- NOT VALID: every row satisfied a narrower one, so a long history need not be read under a lock.
ALTER TABLE order_events
    DROP CONSTRAINT event_is_known,
    ADD CONSTRAINT event_is_known
        CHECK (event IN ('created', 'paid', 'extended', 'closed', 'cancelled',
                         'payment_received', 'payment_late', 'refund_due', 'reopened')) NOT VALID;

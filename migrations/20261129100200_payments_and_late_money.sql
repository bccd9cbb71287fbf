-- Attempts to pay an order, the closing of orders whose providers are asked, what was received, and money that paid for
-- nothing.

-- The shop writes a row before it sends a customer to the provider. An order may have several attempts; a verdict on one
-- is none on the order.
CREATE TABLE payment_attempts (
    -- The provider's name in the settings.
    provider      text NOT NULL,
    -- What the provider knows the attempt by.
    reference     text NOT NULL,
    -- As the orders table of its kind prints it: that table may be the shop's own, so no foreign key.
    order_id      text NOT NULL,
    amount_minor  bigint NOT NULL,
    currency      text NOT NULL,
    -- counted: its money was reported and is a part of the price. late: its money pays for nothing. refunded: it was paid and
    -- given back. A provider is asked only about open and paid ones.
    state         text NOT NULL DEFAULT 'open',
    created_at    timestamptz NOT NULL DEFAULT now(),
    -- After this moment the provider takes no payment for the attempt: the shop has told it so. NULL: not known. Needed
    -- where a provider knows an attempt only once the customer has opened it: until then "absent" proves nothing.
    payable_until timestamptz,
    kind          text NOT NULL DEFAULT 'order',

    PRIMARY KEY (provider, reference),
    CONSTRAINT the_provider_is_a_name_of_the_settings CHECK (provider ~ '^[a-z][a-z0-9_-]{0,39}$'),
    CONSTRAINT the_reference_is_short_text
        CHECK (octet_length(reference) BETWEEN 1 AND 200 AND reference !~ '[\x01-\x1f\x7f-\u009f]'),
    CONSTRAINT the_order_id_fits_a_message CHECK (octet_length(order_id) BETWEEN 1 AND 200),
    CONSTRAINT the_kind_is_a_name CHECK (kind ~ '^[a-z][a-z0-9_]{0,39}$'),
    CONSTRAINT an_attempt_pays_no_negative_amount CHECK (amount_minor >= 0),
    CONSTRAINT the_currency_is_three_letters CHECK (currency ~ '^[A-Z]{3}$'),
    CONSTRAINT an_attempt_is_in_a_known_state CHECK (state IN ('open', 'paid', 'counted', 'closed', 'late', 'refunded'))
);

CREATE INDEX payment_attempts_by_order ON payment_attempts (order_id);

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
    -- Which operator claimed it, and why, for the history of its close.
    who               text,
    why               text,

    PRIMARY KEY (order_id, kind),
    CONSTRAINT the_step_is_known CHECK (step IN ('claimed', 'in_progress', 'no_answer', 'unresolved')),
    CONSTRAINT unresolved_orders_say_why_and_since_when
        CHECK ((step = 'unresolved') = (unresolved_reason IS NOT NULL AND unresolved_at IS NOT NULL)),
    CONSTRAINT the_reason_is_known CHECK (unresolved_reason IN
        ('amount_differs', 'refunded', 'recorded_paid', 'no_answer', 'paid_after_close', 'refused', 'no_deadline',
         'no_provider')),
    CONSTRAINT rounds_are_counted CHECK (rounds >= 0)
);

-- What is due next in each queue. Unresolved orders are not in it: they wait for an operator.
CREATE INDEX close_attempts_due ON close_attempts (kind, queue, next_attempt_at, order_id) WHERE unresolved_at IS NULL;
CREATE INDEX close_attempts_unresolved ON close_attempts (unresolved_at) WHERE unresolved_at IS NOT NULL;

-- What was received for orders: each payment once, and what it counted for.
CREATE TABLE received_payments (
    provider      text NOT NULL,
    -- What the provider knows the payment by: each movement of money has its own.
    reference     text NOT NULL,
    -- As the orders table of its kind prints it. No foreign key: that table may be the shop's own, or the order may not exist.
    order_id      text NOT NULL,
    amount_minor  bigint NOT NULL,
    currency      text NOT NULL,
    received_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    -- The answer to each report. Late money that is not settled is judged again.
    outcome       text NOT NULL,
    reason        text,
    missing_minor bigint NOT NULL DEFAULT 0,
    surplus_minor bigint NOT NULL DEFAULT 0,
    -- How much of it counts toward the order now. The rest is in late_payments.
    counted_minor bigint NOT NULL DEFAULT 0,
    kind          text NOT NULL DEFAULT 'order',

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
-- What each close asks about its orders: empty in a shop without part payments.
CREATE INDEX payments_in_parts ON received_payments (order_id) WHERE outcome = 'partial' AND counted_minor > 0;

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
    kind         text NOT NULL DEFAULT 'order',

    FOREIGN KEY (provider, reference) REFERENCES received_payments,
    CONSTRAINT the_reason_is_known
        CHECK (reason IN ('closed', 'cancelled', 'not_open', 'after_deadline', 'already_paid', 'surplus', 'part_payment',
                          'other_currency', 'other_order', 'unknown_order')),
    -- reopened: it pays its order after all, or was reported for another order since.
    CONSTRAINT the_state_is_known CHECK (state IN ('open', 'refund_due', 'reopened')),
    CONSTRAINT late_money_is_no_negative_amount CHECK (amount_minor >= 0),
    CONSTRAINT the_currency_is_three_letters CHECK (currency ~ '^[A-Z]{3}$'),
    CONSTRAINT settled_money_says_when_and_by_whom
        CHECK ((state = 'open') = (settled_at IS NULL) AND (state = 'open') = (settled_by IS NULL))
);

-- With the reason, because what is left over of a late payment that reopened its order is a surplus. Money that reopened
-- its order may be late again: the order was closed or cancelled once more.
CREATE UNIQUE INDEX a_payment_is_late_once ON late_payments (provider, reference, reason) WHERE state <> 'reopened';
CREATE INDEX late_payments_open ON late_payments (id) WHERE state = 'open';
CREATE INDEX late_payments_by_order ON late_payments (order_id);

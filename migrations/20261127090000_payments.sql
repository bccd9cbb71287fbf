-- What an order costs, and each attempt to pay it.
-- Nullable columns without a default: added without rewriting a large table.

ALTER TABLE orders
    -- In the currency's smallest unit. NULL: not known, and then no payment is compared with it.
    ADD COLUMN amount_minor bigint,
    ADD COLUMN currency text;

-- The shop writes a row before it sends a customer to the provider. An order may have several attempts; a verdict on one
-- is none on the order.
CREATE TABLE payment_attempts (
    -- The provider's name in the settings.
    provider     text NOT NULL,
    -- What the provider knows the attempt by.
    reference    text NOT NULL,
    -- As the orders table prints it: that table may be the shop's own, so no foreign key.
    order_id     text NOT NULL,
    amount_minor bigint NOT NULL,
    currency     text NOT NULL,
    state        text NOT NULL DEFAULT 'open',
    created_at   timestamptz NOT NULL DEFAULT now(),

    PRIMARY KEY (provider, reference),
    CONSTRAINT the_provider_is_a_name_of_the_settings CHECK (provider ~ '^[a-z][a-z0-9_-]{0,39}$'),
    CONSTRAINT the_reference_is_short_text
        CHECK (octet_length(reference) BETWEEN 1 AND 200 AND reference !~ '[\x01-\x1f\x7f-\u009f]'),
    CONSTRAINT the_order_id_fits_a_message CHECK (octet_length(order_id) BETWEEN 1 AND 200),
    CONSTRAINT an_attempt_pays_no_negative_amount CHECK (amount_minor >= 0),
    CONSTRAINT the_currency_is_three_letters CHECK (currency ~ '^[A-Z]{3}$'),
    CONSTRAINT an_attempt_is_in_a_known_state CHECK (state IN ('open', 'paid', 'closed'))
);

CREATE INDEX payment_attempts_by_order ON payment_attempts (order_id);

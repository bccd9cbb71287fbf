-- The tables of a shop, which the mapping names, and views of them with the names of the default tables, for the run's own
-- statements.
--
-- Nothing here refuses a wrong close, a negative stock or a second line of history: that is for the checks to find.

CREATE SCHEMA shop;

CREATE TABLE shop.purchases (
    purchase_no uuid PRIMARY KEY,
    state       text NOT NULL DEFAULT 'unpaid',
    pay_until   timestamptz,
    settled_at  timestamptz,
    ended_at    timestamptz,
    ended_by    text,
    total_minor bigint,
    money       text
);
CREATE INDEX purchases_to_pay ON shop.purchases (pay_until, purchase_no) WHERE state = 'unpaid';

CREATE TABLE shop.goods (sku text PRIMARY KEY, free bigint NOT NULL, held bigint NOT NULL DEFAULT 0);

CREATE TABLE shop.purchase_lines (
    purchase_no uuid NOT NULL REFERENCES shop.purchases,
    sku         text NOT NULL REFERENCES shop.goods,
    pieces      integer NOT NULL,
    PRIMARY KEY (purchase_no, sku)
);

-- The customers' attempts to pay. The shop never says that one has ended.
CREATE TABLE shop.attempts (
    provider     text NOT NULL,
    reference    text NOT NULL,
    order_id     text NOT NULL,
    purchase_no  uuid GENERATED ALWAYS AS (order_id::uuid) STORED,
    amount_minor bigint NOT NULL,
    currency     text NOT NULL,
    PRIMARY KEY (provider, reference)
);
CREATE INDEX attempts_of_purchase ON shop.attempts (purchase_no);

CREATE TABLE shop.closes (purchase_no uuid NOT NULL);
CREATE INDEX closes_of_purchase ON shop.closes (purchase_no);
-- For the view of the history alone, which looks each order up.
CREATE INDEX settled_orders ON event_outbox (((payload ->> 'order_id')::uuid)) WHERE type = 'order.paid_late_settled.v1';

-- Not in the schema of the default tables, which stay as they are, and empty.
CREATE SCHEMA as_default;

CREATE VIEW as_default.orders AS
SELECT purchase_no AS id, state AS status, pay_until AS expires_at, settled_at AS paid_at, ended_at AS closed_at,
       ended_by AS closed_by, total_minor AS amount_minor, money AS currency, xmin
FROM shop.purchases;

CREATE VIEW as_default.stock AS SELECT sku AS article_id, free AS available, held AS reserved FROM shop.goods;

CREATE VIEW as_default.order_items AS
SELECT purchase_no AS order_id, sku AS article_id, pieces AS quantity FROM shop.purchase_lines;

CREATE VIEW as_default.payment_attempts AS
SELECT provider, reference, order_id, amount_minor, currency FROM shop.attempts;

-- A mapped table has no history of settlements; each has one event.
CREATE VIEW as_default.order_events AS
SELECT purchase_no AS order_id, 'closed' AS event, NULL AS by FROM shop.closes
UNION ALL
SELECT (payload ->> 'order_id')::uuid, 'paid', 'provider' FROM event_outbox WHERE type = 'order.paid_late_settled.v1';

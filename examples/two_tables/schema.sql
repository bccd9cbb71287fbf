-- A shop whose orders are in two tables, with a history of every change. Yours differ. Add the indexes; nothing else has to
-- change. An id on the wire is the table and its id: web-17, phone-17.
CREATE TABLE public.web_orders (
    id        bigint PRIMARY KEY,
    state     text NOT NULL DEFAULT 'open' CHECK (state IN ('open', 'paid', 'expired')),
    pay_until timestamptz NOT NULL
);
CREATE TABLE public.phone_orders (LIKE public.web_orders INCLUDING ALL);

CREATE TABLE public.order_history (
    order_ref text NOT NULL,
    at        timestamptz NOT NULL,
    old_state text NOT NULL,
    new_state text NOT NULL,
    by        text NOT NULL
);

-- The sweep reads both four times a second, in the order that it returns. They contain only open orders, so they stay small.
CREATE INDEX web_orders_by_deadline ON public.web_orders (pay_until, (('web-' || id::text) COLLATE "C")) WHERE state = 'open';
CREATE INDEX phone_orders_by_deadline ON public.phone_orders (pay_until, (('phone-' || id::text) COLLATE "C")) WHERE state = 'open';

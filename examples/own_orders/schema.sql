-- A shop's own table of orders, as this example's close.sql and overdue.sql know it: yours looks different, and stays as
-- it is but for the index.
CREATE TABLE public.purchases (
    id         bigint PRIMARY KEY,
    state      text NOT NULL DEFAULT 'open' CHECK (state IN ('open', 'paid', 'expired')),
    pay_until  timestamptz NOT NULL,
    expired_at timestamptz
);

-- The sweep reads it four times a second: only open orders stand in it, so it stays small.
CREATE INDEX purchases_open_by_deadline ON public.purchases (pay_until, id) WHERE state = 'open';

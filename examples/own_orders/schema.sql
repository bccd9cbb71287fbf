-- A shop's own tables, as this example's close.sql and overdue.sql use them. Yours differ. Add the index and the
-- function; nothing else has to change.
CREATE TABLE public.purchases (
    id         bigint PRIMARY KEY,
    state      text NOT NULL DEFAULT 'open' CHECK (state IN ('open', 'paid', 'expired')),
    pay_until  timestamptz NOT NULL,
    expired_at timestamptz
);

CREATE TABLE public.inventory (
    article   text PRIMARY KEY,
    available bigint NOT NULL CHECK (available >= 0),
    reserved  bigint NOT NULL DEFAULT 0 CHECK (reserved >= 0)
);

CREATE TABLE public.purchase_lines (
    purchase_id bigint NOT NULL REFERENCES public.purchases,
    article     text NOT NULL REFERENCES public.inventory,
    quantity    bigint NOT NULL CHECK (quantity > 0),
    PRIMARY KEY (purchase_id, article)
);

-- A payment is written in a transaction that locks its purchase first and continues only if that is still open:
--
--   BEGIN;
--   SELECT state FROM public.purchases WHERE id = 7 FOR NO KEY UPDATE;   -- 'expired': refuse the payment
--   INSERT INTO public.payments (purchase_id) VALUES (7);
--   UPDATE public.purchases SET state = 'paid' WHERE id = 7;
--   COMMIT;
--
-- Without that lock a payment and a close at the same instant both succeed: the lock taken for a foreign key does not
-- block the close.
CREATE TABLE public.payments (
    purchase_id bigint PRIMARY KEY REFERENCES public.purchases,
    paid_at     timestamptz NOT NULL DEFAULT clock_timestamp()
);

-- Whether a purchase that the caller has locked is paid. VOLATILE and in plpgsql, so that it sees everything committed
-- before the call. A subquery of the close statement only sees what was committed when that statement began, possibly
-- before the lock.
CREATE FUNCTION public.purchase_is_paid(purchase bigint) RETURNS boolean LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    RETURN EXISTS (SELECT FROM public.payments y WHERE y.purchase_id = purchase);
END $$;

-- The sweep reads this index four times a second. It contains only open orders, so it stays small.
CREATE INDEX purchases_open_by_deadline ON public.purchases (pay_until, id) WHERE state = 'open';

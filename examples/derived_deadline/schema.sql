-- A shop's own table without a column for the deadline: it is derived from when the booking was made and how many minutes
-- its channel gives to pay. The statements beside this file use it; examples/own_orders has stock and payments as well.
CREATE TABLE public.bookings (
    id             bigint PRIMARY KEY,
    state          text NOT NULL DEFAULT 'open' CHECK (state IN ('open', 'paid', 'expired')),
    created_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    minutes_to_pay integer NOT NULL CHECK (minutes_to_pay > 0),
    expired_at     timestamptz
);

-- The sweep reads this index four times a second. An index cannot contain `created_at + interval`, whose result may depend on
-- the session's time zone. In UTC, as a timestamp without zone, it cannot. overdue.sql must have the same expression, letter
-- for letter. If all bookings have the same time to pay, an index on created_at is enough: then compare
-- `created_at <= statement_timestamp() - interval '30 min' - make_interval(secs => $1)`.
CREATE INDEX bookings_open_by_deadline
    ON public.bookings ((created_at AT TIME ZONE 'UTC' + make_interval(mins => minutes_to_pay)), id)
    WHERE state = 'open';

-- A booking and its alarm are one transaction:
--
--   BEGIN;
--   INSERT INTO public.bookings (id, minutes_to_pay) VALUES (7, 15);
--   INSERT INTO order_timeout.alarm_outbox (order_id, deadline)
--       SELECT id::text, created_at + make_interval(mins => minutes_to_pay) FROM public.bookings WHERE id = 7;
--   COMMIT;

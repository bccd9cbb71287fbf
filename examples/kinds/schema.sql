-- The tables of a marketplace, with a column for each deadline: it can be moved (`order-timeout deadline`), and NULL means
-- never. The indexes are those that `order-timeout sql` prints.

CREATE TABLE public.purchases (
    id           bigint PRIMARY KEY GENERATED ALWAYS AS IDENTITY,
    state        text NOT NULL CHECK (state IN ('paid', 'accepted', 'shipped', 'confirmed', 'cancelled')),
    -- Set with state = 'paid': in five minutes.
    accept_by    timestamptz,
    -- Set with state = 'shipped': in fifteen days.
    confirm_by   timestamptz,
    -- Set with state = 'confirmed', if the buyer confirms: in seven days.
    review_by    timestamptz,
    reviewed_at  timestamptz,
    confirmed_at timestamptz,
    cancelled_at timestamptz
);
CREATE INDEX purchases_to_accept ON public.purchases (accept_by, id) WHERE state = 'paid';
CREATE INDEX purchases_to_confirm ON public.purchases (confirm_by, id) WHERE state = 'shipped';
CREATE INDEX purchases_to_review ON public.purchases (review_by, id) WHERE state = 'confirmed' AND reviewed_at IS NULL;

CREATE TABLE public.articles (
    id       text PRIMARY KEY,
    reserved integer NOT NULL DEFAULT 0 CHECK (reserved >= 0)
);

CREATE TABLE public.purchase_items (
    purchase bigint REFERENCES public.purchases,
    article  text REFERENCES public.articles,
    quantity integer NOT NULL CHECK (quantity > 0),
    PRIMARY KEY (purchase, article)
);

CREATE TABLE public.reviews (
    purchase   bigint PRIMARY KEY REFERENCES public.purchases,
    stars      smallint NOT NULL CHECK (stars BETWEEN 1 AND 5),
    -- Not the buyer's own.
    is_default boolean NOT NULL DEFAULT false
);

CREATE TABLE public.trials (
    account  text PRIMARY KEY,
    state    text NOT NULL DEFAULT 'running' CHECK (state IN ('running', 'subscribed', 'ended')),
    -- Three days after the start.
    ends_at  timestamptz NOT NULL,
    ended_at timestamptz
);
CREATE INDEX trials_to_end ON public.trials (ends_at, account) WHERE state = 'running';

CREATE TABLE public.shows (
    id        text PRIMARY KEY,
    free      integer NOT NULL CHECK (free >= 0)
);

CREATE TABLE public.seat_holds (
    id          uuid PRIMARY KEY,
    show        text NOT NULL REFERENCES public.shows,
    seats       integer NOT NULL CHECK (seats > 0),
    state       text NOT NULL DEFAULT 'held' CHECK (state IN ('held', 'sold', 'released')),
    -- Ten minutes after the choice.
    held_until  timestamptz NOT NULL,
    released_at timestamptz
);
CREATE INDEX seat_holds_to_release ON public.seat_holds (held_until, id) WHERE state = 'held';

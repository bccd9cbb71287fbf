-- What an order reserves besides stock: uses of a coupon, points of a customer, whatever has a number that is left. A shop
-- that reserves stock alone leaves both tables empty.

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

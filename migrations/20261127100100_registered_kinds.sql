-- Which kinds a registered worker serves: the workers of a kind share the orders that they read ahead. Workers of former
-- versions serve the kind 'order'.

ALTER TABLE order_timeout_workers ADD COLUMN kinds text[] NOT NULL DEFAULT '{order}';

-- Run once, by the postgres image, when its volume is created. The tables are not made here:
-- `order-timeout setup` migrates.
--
-- DEVELOPMENT PASSWORD, for the compose stack only. To change it:
--   docker compose exec postgres psql -U postgres -c '\password order_timeout'
-- and the same in ORDER_TIMEOUT__DATABASE__URL.

-- A role of its own, because the image makes POSTGRES_USER a superuser, and a worker that runs as a
-- superuser hides every missing right until production.
CREATE ROLE order_timeout LOGIN PASSWORD 'order-timeout-dev';

-- An owner may create in schema public (PostgreSQL 15 and later), which is all a migration needs.
CREATE DATABASE orders OWNER order_timeout;

-- The profile `plugin` runs a second worker against a second broker. In the same database both
-- would sweep the same orders, and neither would show what its own broker did.
CREATE DATABASE orders_plugin OWNER order_timeout;

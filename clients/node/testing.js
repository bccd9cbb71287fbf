// For a shop's own tests: moves the clock of a database that was made for them. Opens no connection.
import { run } from "./database.js";

export async function advance(db, ms) {
  const text = "SELECT order_timeout_clock.advance(($1::text || ' milliseconds')::interval)";
  await run(db, text, [String(ms)], "the clock is not moved", {
    "3F000": "this database was not made for tests; create one with `order-timeout setup --for-tests`",
  });
}

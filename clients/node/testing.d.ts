import type { Transaction } from "order-timeout";

/** Moves the clock that the worker and all statements read forward, on a database that `order-timeout setup --for-tests` has
 * made. Takes effect at once, also within a transaction: a running worker closes what fell due meanwhile. */
export function advance(client: Transaction, ms: number): Promise<void>;

-- What becomes of stock, coupons and points when an order is paid.

-- What paid orders have reserved is consumed: stock and then resources, each in the order of its key, as the close locks
-- them, so that no two sessions can deadlock. Not for callbacks.
CREATE OR REPLACE FUNCTION consume_reserved(order_ids uuid[]) RETURNS void LANGUAGE plpgsql
SET search_path FROM CURRENT AS $$
BEGIN
    UPDATE stock s SET reserved = s.reserved - r.quantity
    FROM (SELECT k.article_id, i.quantity
          FROM (SELECT t.article_id, sum(t.quantity)::bigint AS quantity FROM order_items t
                WHERE t.order_id = ANY (order_ids) GROUP BY t.article_id) i
          JOIN stock k ON k.article_id = i.article_id
          ORDER BY k.article_id FOR NO KEY UPDATE OF k) r
    WHERE s.article_id = r.article_id;
    UPDATE reserved_resources s SET reserved = s.reserved - r.quantity
    FROM (SELECT k.kind, k.id, i.quantity
          FROM (SELECT t.kind, t.resource_id, sum(t.quantity)::bigint AS quantity FROM order_resources t
                WHERE t.order_id = ANY (order_ids) GROUP BY t.kind, t.resource_id) i
          JOIN reserved_resources k ON k.kind = i.kind AND k.id = i.resource_id
          ORDER BY k.kind, k.id FOR NO KEY UPDATE OF k) r
    WHERE s.kind = r.kind AND s.id = r.id;
END $$;

REVOKE ALL ON FUNCTION consume_reserved(uuid[]) FROM PUBLIC;

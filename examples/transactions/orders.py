"""Orders and their emails in one transaction: no email without its order, and no order without its email.

The shop's table and the plane are in the same PostgreSQL database:

    DATABASE_URL=postgresql://me@127.0.0.1/shop python orders.py
"""

import os

import psycopg

import fastness


def order(plane: fastness.Plane, connection: "psycopg.Connection[tuple[int]]", item: str) -> int:
    """Store an order, and have its email sent after the commit."""
    with connection.transaction():
        row = connection.execute("INSERT INTO shop.orders (item) VALUES (%s) RETURNING id", [item]).fetchone()
        assert row is not None
        plane.within(connection).queue("emails").put({"order": row[0], "item": item})
        if item == "unobtainable":
            raise LookupError(item)
        return row[0]


def send_emails(plane: fastness.Plane, connection: "psycopg.Connection[tuple[int]]") -> list[str]:
    """Handle what is in the queue. The row and the ack commit together, so a repeated delivery marks nothing twice."""
    sent = []
    while messages := plane.queue("emails").receive_many(10):
        for message in messages:
            with message, connection.transaction():
                body = message.json()
                connection.execute("UPDATE shop.orders SET emails = emails + 1 WHERE id = %s", [body["order"]])
                plane.within(connection).ack(message)
                sent.append(body["item"])
    return sent


def main() -> None:
    url = os.environ.get("DATABASE_URL")
    if url is None:
        raise SystemExit("Set DATABASE_URL to the database of the shop, such as postgresql://me@127.0.0.1/shop.")
    with fastness.open(url) as plane, psycopg.connect(url, autocommit=True) as connection:
        connection.execute("CREATE SCHEMA IF NOT EXISTS shop")
        connection.execute("DROP TABLE IF EXISTS shop.orders")
        connection.execute(
            "CREATE TABLE shop.orders (id serial PRIMARY KEY, item text NOT NULL, emails int NOT NULL DEFAULT 0)"
        )
        for item in ("kettle", "unobtainable", "teapot"):
            try:
                print(f"order {order(plane, connection, item)}: {item}")
            except LookupError:
                print(f"no order: {item}")
        print("emails:", ", ".join(send_emails(plane, connection)))
        print("orders without an email:", *connection.execute("SELECT count(*) FROM shop.orders WHERE emails <> 1"))


if __name__ == "__main__":
    main()

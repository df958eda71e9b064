"""Find dead letters by their error, retry those that a fix has repaired, and move the others to a queue for people.

fastness serve --data dir:./data &
python search_and_retry.py
"""

import os
import uuid

import fastness

URL = os.environ.get("FASTNESS_URL", "http://127.0.0.1:9440")


def deliver(address: str) -> None:
    if "@" not in address:
        raise ValueError(f"{address} is not an address")
    raise TimeoutError("mail.internal did not answer")


def main() -> None:
    with fastness.connect(URL) as plane:
        emails = plane.queue(f"emails-{uuid.uuid4().hex[:8]}")
        by_hand = plane.queue(f"{emails.name}-by-hand")
        emails.put_many([{"to": "ada@example.com"}, {"to": "nowhere"}, {"to": "bob@example.com"}])
        for message in emails.receive_many(3, wait_seconds=5):
            try:
                deliver(message.json()["to"])
            except (ValueError, TimeoutError) as error:
                message.reject(error)

        timeouts = emails.search(states=["dead"], error="TimeoutError")
        print("retried:", emails.redrive([found.id for found in timeouts.messages]))

        wrong = emails.search(states=["dead"], error="is not an address")
        moved = [found.id for found in wrong.messages]
        print("moved:", sum(outcome.code is None for outcome in emails.move(moved, to=by_hand.name)))

        for message in emails.receive_many(10):
            with message:
                print("delivered to", message.json()["to"])
        print("by hand:", [peeked.id for peeked in by_hand.peek(10)] == moved)


if __name__ == "__main__":
    main()

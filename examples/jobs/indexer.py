"""An indexer: documents are indexed in batches, because one write for 100 documents costs as much as one for one.

The handler gets up to 100 messages at a time, or those of half a second. A batch and the acks of its messages are one
commit, so a crash neither loses nor repeats a batch.

Start a server (`fastness serve`), then: FASTNESS_URL=http://127.0.0.1:9440 python indexer.py
"""

import time
import uuid
from collections import Counter

import fastness


def index(plane: fastness.Plane, messages: list[fastness.Message], key: str) -> None:
    """Add the words of some documents to the index, and acknowledge the documents in the same commit."""
    words = Counter(word for message in messages for word in message.json()["text"].split())
    state = plane.state(key)
    found = state.get()
    counts = Counter(found.value if found is not None else {})
    counts.update(words)
    commit = plane.atomic().update(
        state, dict(counts), if_match=None if found is None else found.etag, if_absent=found is None
    )
    for message in messages:
        commit.ack(message)
    commit.commit()


def main() -> None:
    with fastness.connect() as plane:
        run = uuid.uuid4().hex[:8]
        queue = plane.queue(f"documents-{run}")
        for start in range(0, 250, 125):
            queue.put_many([{"text": f"document number {start + number}"} for number in range(125)])
        batches: list[int] = []

        def handle(messages: list[fastness.Message]) -> None:
            index(plane, messages, f"index/{run}")
            batches.append(len(messages))

        worker = fastness.Worker(plane, {queue.name: handle}, batch=100, batch_wait_seconds=0.5)
        worker.start()
        while queue.stats().acked_total < 250:
            time.sleep(0.05)
        worker.stop()
        document = plane.state(f"index/{run}").get()
        assert document is not None
        print(f"indexed {sum(batches)} documents in {len(batches)} batches; {len(document.value)} words")
        queue.delete()


if __name__ == "__main__":
    main()

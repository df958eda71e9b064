"""Celery without another broker: tasks go through SQS queues of a server, and their results are stored there too.

Start a server (`fastness serve --sqs-port 9324 --sqs-anonymous`), then a worker and this program:

    celery -A celery_orders worker
    python celery_orders.py
"""

import os
from urllib.parse import urlsplit

from celery import Celery, chord

SERVER = urlsplit(os.environ.get("FASTNESS_URL", "http://127.0.0.1:9440"))
SQS = urlsplit(os.environ.get("SQS_URL", "http://127.0.0.1:9324"))

app = Celery("celery_orders", broker=f"sqs://key:secret@{SQS.netloc}", backend=f"fastness://{SERVER.netloc}/main")
app.conf.broker_transport_options = {
    "region": "us-east-1",
    "is_secure": False,  # The address is http.
    "queue_name_prefix": "orders-",
    "visibility_timeout": 60,  # Longer than the longest task: then another worker runs it, too.
    "wait_time_seconds": 20,
    "polling_interval": 0,
}
app.conf.task_acks_late = True  # The task of a worker that is killed runs again.
app.conf.worker_enable_remote_control = False  # SQS cannot send a message to all workers.

PRICES = {"lamp": 4_900, "desk": 32_000, "chair": 12_500}


@app.task(bind=True, max_retries=5)
def price(self, article):  # type: ignore[no-untyped-def]  # Celery's decorators have no types.
    if article == "desk" and self.request.retries == 0:
        raise self.retry(countdown=0.1, exc=TimeoutError("the price service does not answer"))
    return PRICES[article]


@app.task
def bill(prices):  # type: ignore[no-untyped-def]
    return sum(prices)


def main() -> None:
    bills = [chord(price.s(article) for article in order)(bill.s()) for order in (["lamp", "desk"], ["chair"] * 4)]
    for each in bills:
        print("to pay:", each.get(timeout=60))
    try:
        price.delay("sofa").get(timeout=60)
    except KeyError as error:
        print("no price:", error)


if __name__ == "__main__":
    main()

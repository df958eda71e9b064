"""Limit what a universe may hold: a put over the quota is refused, and there is room again when messages are done.

fastness serve --data dir:./data &
python quota.py
"""

import os
import uuid

import fastness
from fastness.errors import QuotaExceeded

URL = os.environ.get("FASTNESS_URL", "http://127.0.0.1:9440")


def main() -> None:
    tenant = f"tenant-{uuid.uuid4().hex[:8]}"
    with fastness.connect(URL) as operator, fastness.connect(URL, universe=tenant) as plane:
        operator.quotas.set(tenant, fastness.Quota(messages=3))
        jobs = plane.queue("jobs")
        for number in range(5):
            try:
                jobs.put({"number": number})
                print("put", number)
            except QuotaExceeded as error:
                print(f"{number} is refused: {error.used} of {error.limit} {error.kind}")
        for message in jobs.receive_many(10):
            message.ack()
        usage = operator.quotas.usage(tenant)
        print(f"after the acks: {usage.messages} of {usage.quota.messages} messages")
        jobs.put({"number": 5})
        print("put 5")


if __name__ == "__main__":
    main()

"""Telemetry: sensors push samples, a monitor reacts to each one at once, and a report reads them later as mail.

Start a server (`fastness serve`), then: FASTNESS_URL=http://127.0.0.1:9440 python push.py
"""

import time
from queue import SimpleQueue

import fastness
from fastness.errors import RateLimited

ALARM_CELSIUS = 90


def push_patiently(plane: fastness.Plane, samples: list[fastness.NewDataPush], sensor: str) -> None:
    """Push samples in one request, and those that exceed the rate limit again when they may be pushed."""
    while samples:
        outcomes = plane.ingress.push_many(samples, sender=sensor, synced=True)
        refused = [outcome for outcome in outcomes if isinstance(outcome, RateLimited)]
        for outcome in outcomes:
            if isinstance(outcome, fastness.FastnessError) and outcome not in refused:
                raise outcome
        samples = [each for each, outcome in zip(samples, outcomes, strict=True) if outcome in refused]
        if refused:
            time.sleep(max(each.retry_after_seconds or 0 for each in refused))


def main() -> None:
    alarms: SimpleQueue[str] = SimpleQueue()

    def react(push: fastness.DataPush) -> None:
        if push.json()["celsius"] >= ALARM_CELSIUS:
            alarms.put(f"{push.sender.partition('@')[0]}: {push.json()['celsius']} degrees")

    with (
        fastness.connect() as plane,
        plane.ingress.on_data_push(react, to="monitor", topic="temperature"),
    ):
        for sensor, celsius in (("oven", (60, 95)), ("fridge", (4, 5))):
            samples = [fastness.NewDataPush("monitor", "temperature", {"celsius": each}) for each in celsius]
            push_patiently(plane, samples, sensor)
        print(alarms.get(timeout=30))
        monitor = plane.mailbox("monitor")
        mails = monitor.read()
        print(f"{len(mails)} samples are stored")
        monitor.confirm(mails)


if __name__ == "__main__":
    main()

"""A client process of `bench_client`: runs the workloads that it reads, one a line, and prints what each took.

python benches/client_process.py URL NAME      {"workload": "put", "threads": 8, "operations": 1000}
"""

import json
import resource
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import fastness
from fastness import Queue

PAYLOAD = b"x" * 100
BATCH = 200


def main() -> None:
    url, name = sys.argv[1:]
    with fastness.connect(url) as plane:
        queue = plane.queue(name)
        queue.put(PAYLOAD)
        print("ready", flush=True)
        for line in sys.stdin:
            task = json.loads(line)
            print(json.dumps(measure(queue, task["workload"], task["threads"], task["operations"])), flush=True)


def measure(queue: Queue, workload: str, threads: int, operations: int) -> dict[str, float]:
    work = {"put": put, "receive and ack": receive_and_ack}[workload]
    if workload != "put":
        for _ in range(0, operations, BATCH):
            queue.put_many([PAYLOAD] * BATCH)
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda _: time.sleep(0.01), range(threads)))  # Starts all threads.
        cpu, began = cpu_seconds(), time.perf_counter()
        if threads == 1:
            work(queue, operations)
        else:
            list(pool.map(work, [queue] * threads, [operations // threads] * threads))
        return {"seconds": time.perf_counter() - began, "cpu_seconds": cpu_seconds() - cpu}


def put(queue: Queue, operations: int) -> None:
    for _ in range(operations):
        queue.put(PAYLOAD)


def receive_and_ack(queue: Queue, operations: int) -> None:
    for _ in range(operations):
        message = queue.receive()
        assert message is not None
        message.ack()


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()

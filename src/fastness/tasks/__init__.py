"""Tasks: functions whose calls are messages of a queue, and workers that run them.

    app = TaskApp("http://127.0.0.1:9440")

    @app.task(queue="emails")
    def send_email(to: str) -> str: ...

    send_email.send("ada@example.com")      # puts a message
    app.worker(concurrency=8).run()         # runs it

A task is a thin layer over queues: everything that holds for messages (leases, attempts, dead letters, keys, results)
holds for its calls.
"""

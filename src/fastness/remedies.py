"""The cause and the remedy of every error code: what `fastness explain`, the server's pages and the reference show.

A code is an error class of `fastness.errors`, or one that only the HTTP API or the command line has (`OTHER_CODES`).
Texts are plain sentences with `code` in backticks; `see` names pages of docs/, without their folder.
"""

from typing import Final, NamedTuple


class Remedy(NamedTuple):
    """Why an error happens, what to do about it, and where to read more."""

    cause: str
    remedy: str
    see: tuple[str, ...] = ()


_RETRIES: Final = "how-to/retries-and-dead-letters.md"
_IDEMPOTENCY: Final = "explanation/idempotency.md"
_SECURE: Final = "how-to/secure-a-server.md"
_PRODUCTION: Final = "how-to/production.md"
_BACKUP: Final = "how-to/back-up-and-restore.md"
_UPGRADE: Final = "how-to/upgrade.md"
_DEPLOYMENT: Final = "how-to/choose-a-deployment.md"
_LEASE: Final = "how-to/hold-a-lease.md"
_LOCKS: Final = "how-to/hold-locks.md"
_WORKFLOWS: Final = "how-to/write-workflows.md"
_MAIL: Final = "how-to/send-mail.md"
_WITHIN: Final = "how-to/your-own-transaction.md"
_MIGRATE: Final = "how-to/move-to-postgresql.md"
_JOB: Final = "how-to/find-a-job.md"
_ENCRYPT: Final = "how-to/encrypt-data.md"
_PIPELINE: Final = "pipeline.md"
_PROTOCOL: Final = "protocol.md"
_LIMITS: Final = "reference/limits.md"

# Codes without an error class: the status of each HTTP answer; None for codes of the command line.
OTHER_CODES: Final[dict[str, int | None]] = {
    "bad_request": 400,
    "body_timeout": 408,
    "body_too_large": 413,
    "console_busy": 503,
    "foreign_origin": 403,
    "http_error": 500,
    "internal_error": 500,
    "invalid_body": 400,
    "invalid_content_type": 415,
    "invalid_etag": 400,
    "invalid_idempotency_key": 400,
    "invalid_nack_intent": 400,
    "invalid_query": 400,
    "malformed_request": 400,
    "mcp_busy": 503,
    "method_not_allowed": 405,
    "missing_fields": 400,
    "missing_owner": 400,
    "missing_queue": 400,
    "not_acceptable": 406,
    "pass_expired": 403,
    "precondition_required": 428,
    "range_not_satisfiable": 416,
    "request_head_too_large": 431,
    "request_timeout": 408,
    "too_many_connections": 503,
    "too_many_pipelined": 429,
    "interrupted": None,
    "usage": None,
}

REMEDIES: Final[dict[str, Remedy]] = {
    "error": Remedy(
        "The server sent a code that this client does not know, because the server is newer than the client.",
        "Read the message, which is the server's. Upgrade the client to the server's version; `fastness status` shows "
        "it.",
        (_UPGRADE,),
    ),
    # Validation.
    "validation": Remedy(
        "The request is wrong in a way that the message names. Nothing was written.",
        "Change the request as the message says. The same request will fail again.",
    ),
    "invalid_url": Remedy(
        "The URL has a scheme that is not supported, or lacks a part, such as the path of `dir:`.",
        "Give `dir:PATH`, `memory:`, `postgresql://USER@HOST/DATABASE` to open a plane, or `http://HOST:9440` to "
        "connect to a server.",
        (_DEPLOYMENT,),
    ),
    "invalid_name": Remedy(
        "The name of a queue, world, agent, universe or key is empty, too long, or has a character that names cannot "
        "have.",
        "Use letters, digits and the characters that the message lists. Put free text into the payload, not into a "
        "name.",
        (_LIMITS,),
    ),
    "invalid_key": Remedy(
        "A key of the key space has a part that is not text, bytes, a number, a boolean or None, or is nested too "
        "deeply.",
        "Build keys with `Subspace.key(…)` from these types only.",
    ),
    "invalid_value": Remedy(
        "A value that is written to the key space is not `bytes`.",
        "Encode it first, for example with `json.dumps(value).encode()`. Queues, states and worlds take Python values.",
    ),
    "invalid_argument": Remedy(
        "An argument is outside of the range that the message names.",
        "Use a value in that range. `limits.md` has every bound and its reason.",
        (_LIMITS,),
    ),
    "idempotency_key_reused": Remedy(
        "A different call was made with the same idempotency key within the last 10 to 20 minutes, or a session of "
        "ordered locks has a claim with this id for other locks.",
        "Give each operation its own key, made of what identifies it, such as the order's number. Repeat a call with "
        "the same key only if all its arguments are the same.",
        (_IDEMPOTENCY,),
    ),
    "key_too_large": Remedy(
        "A key of the key space, with all its parts, is longer than 2,048 bytes.",
        "Shorten its parts: use a hash of a long name as the key, and store the name in the value.",
        (_LIMITS,),
    ),
    "value_too_large": Remedy(
        "A value of the key space is longer than 1 MiB.",
        "Store it as a blob (`plane.blobs.put`), and the hash of the blob as the value.",
        (_LIMITS,),
    ),
    "transaction_too_large": Remedy(
        "One transaction writes more than 16 MiB, counting 128 bytes for each key.",
        "Write in several transactions, or in smaller batches.",
        (_LIMITS,),
    ),
    "empty_batch": Remedy(
        "A call that takes several items was given none.",
        "Skip the call if there is nothing to do.",
    ),
    "batch_too_large": Remedy(
        "One append has more than 256 entries or more than 256 KiB.",
        "Append in several batches. Put large values into blobs and their hashes into the entries.",
        (_LIMITS,),
    ),
    "payload_too_large": Remedy(
        "A payload is over the limit of its kind, or over the size that the caller's token allows.",
        "Send less, or store the body with `plane.blobs.put` and send its hash. `fastness token self` shows the size "
        "that the token allows.",
        (_LIMITS, _SECURE),
    ),
    "answer_too_large": Remedy(
        "The answer is longer than 32 MiB, which is the most that a stream carries in one reply.",
        "Ask for fewer items with `limit`, or read a blob in parts.",
        (_LIMITS,),
    ),
    "nested_transaction": Remedy(
        "A function that runs in a transaction called `transact`, or a handle of the same plane.",
        "Use the transaction that the function was given. Do other work before or after `transact`.",
    ),
    "transaction_ended": Remedy(
        "A transaction was kept, in a variable or a closure, and used after its function returned.",
        "Return what you need from the function, and start another transaction for later work.",
    ),
    "read_only_transaction": Remedy(
        "A function that reads a snapshot of the key space wrote to it.",
        "Use `plane.transact` for functions that write.",
    ),
    "unsupported_tier": Remedy(
        "A transaction was asked to return before it is in the log, which is `BEST_EFFORT`.",
        "Use `Tier.CRITICAL` or `Tier.IMPORTANT`. Only session logs are `BEST_EFFORT`.",
        ("explanation/tiers.md",),
    ),
    "not_synchronous": Remedy(
        "`transact` was given a coroutine function or a generator, which would run after its transaction has ended.",
        "Give a plain function. Await other things before or after the transaction.",
    ),
    "not_embedded": Remedy(
        "The call runs your function inside the database, and this handle is connected to a server.",
        "Open the plane in your process with `fastness.open`, or use calls that a server offers: queues, states, "
        "`plane.atomic()`.",
        (_DEPLOYMENT,),
    ),
    "not_transactional": Remedy(
        "The call waits, or writes to the object store, so it cannot be part of your database transaction.",
        "Call it before or after the transaction. Small payloads and messages without a wait can be inside.",
        (_WITHIN,),
    ),
    "transaction_required": Remedy(
        "The connection that was given to `within` has no open transaction, or one that has failed.",
        "Begin a transaction first, and roll back a failed one before the next call.",
        (_WITHIN,),
    ),
    "wrong_database": Remedy(
        "The connection that was given to `within` is connected to another database than the plane.",
        "Open the plane with the URL of the database that your connection uses.",
        (_WITHIN,),
    ),
    "isolation_unsupported": Remedy(
        "The transaction of your connection has an isolation level in which this call could read stale data.",
        "Use READ COMMITTED, PostgreSQL's default, for transactions with this call.",
        (_WITHIN,),
    ),
    "lock_order_violation": Remedy(
        "A lock was requested while a later one in the declared order is held. Waiting for it could deadlock.",
        "Acquire locks in the order database, entity type, record, and records in the order of their names. Or "
        "acquire all of them in one call.",
        (_LOCKS,),
    ),
    "workflow_misuse": Remedy(
        "The code of a workflow awaits something that is not recorded, such as `asyncio.sleep` or a network call, uses "
        "asyncio, ends without a step that it has not awaited, or uses `run` after the workflow has ended.",
        "Use `run.step` for everything that does I/O, its `timeout` to limit it, `run.sleep` to wait, and `run.gather` "
        "for what runs side by side. Await each step.",
        (_WORKFLOWS,),
    ),
    "unknown_sqs_attribute": Remedy(
        "The call names an attribute that SQS queues do not have, that is computed, or that only FIFO queues have.",
        "Correct the name. Attributes such as `ContentBasedDeduplication` need a queue whose name ends with `.fifo`.",
    ),
    "invalid_sqs_attribute": Remedy(
        "The value of an attribute of an SQS queue is out of range, or not of the form that the attribute has.",
        "Correct the value that the message names. Numbers and booleans are texts, as in `VisibilityTimeout=30`.",
    ),
    "not_dead_letter_queue": Remedy(
        "A message move task takes messages out of a dead-letter queue, and no queue names this one as its own.",
        "Name the dead-letter queue as the source, or set the `RedrivePolicy` of a queue to it first.",
        (_RETRIES,),
    ),
    # NotAllowed.
    "not_allowed": Remedy(
        "The token is missing, unknown, expired or revoked, or it does not allow this verb or universe.",
        "`fastness token self` shows what the token allows. Ask an administrator for one that allows the verb in the "
        "message: `fastness token create NAME --allow VERB`.",
        (_SECURE,),
    ),
    "sender_blocked": Remedy(
        "The recipient has blocked this sender. The mail was not stored.",
        "Do not retry. The recipient can remove the block.",
        (_MAIL,),
    ),
    "sender_mismatch": Remedy(
        "The mail names a sender other than the agent that is connected, or that the token belongs to.",
        "Send as the connected agent, or connect as the other one.",
        (_MAIL,),
    ),
    "send_refused": Remedy(
        "The policy of one of the two universes does not allow events between them, or the recipient is a run.",
        "Allow it in both universes; `fastness world policy` shows and changes the policy of one.",
        ("how-to/write-programs.md",),
    ),
    # NotFound.
    "not_found": Remedy(
        "The named thing does not exist, in this universe, at this address. Names are case-sensitive.",
        "Check the spelling and the universe (`--universe`, default `main`). A path of the HTTP API that does not "
        "exist has the same code: `/docs` lists all paths.",
    ),
    "object_not_found": Remedy(
        "The object store has no object of that name.",
        "Check that the plane is opened with the object store that it was written with (`objects=…`, `--objects`).",
        (_MIGRATE,),
    ),
    "blob_not_found": Remedy(
        "No blob with that hash is stored. It was never put, or it was deleted because nothing named it for the grace "
        "period of one day.",
        "Put it again. Name it in a message, state, world or snapshot, or pin it, so that it is kept.",
        ("how-to/free-space.md",),
    ),
    "world_not_found": Remedy(
        "The world was never created, was deleted, or was created again, and this handle is of its former incarnation.",
        "List worlds with `fastness world list`. Get a new handle with `plane.world(name)`, and create the world if "
        "needed.",
    ),
    "snapshot_not_found": Remedy(
        "The world has no snapshot at that height.",
        "`fastness world show NAME` lists the snapshots. Use one of their heights.",
    ),
    "message_not_found": Remedy(
        "The queue has no message with that id: it was acknowledged, its time to live has passed, it was purged, or "
        "it is in another queue.",
        "Nothing, if another worker was meant to finish it. Results are kept for an hour after the ack: `fastness "
        "message result QUEUE ID`.",
        (_JOB,),
    ),
    "queue_not_found": Remedy(
        "The call has `must_exist`, and the queue does not exist: it was never used and has no policy, or it was "
        "deleted.",
        "Check the name with `fastness queue list`. To create the queue, set a policy or put a message without "
        "`must_exist`.",
    ),
    "mail_not_found": Remedy(
        "The commit confirms a mail that was confirmed before, or whose time to live has passed.",
        "Read the mailbox again, and confirm only mail that was read now.",
        (_MAIL,),
    ),
    "effect_not_found": Remedy(
        "The effect is complete or dead, or its world was deleted.",
        "Nothing: another worker has completed it. `fastness effect list` shows those that are open.",
        ("how-to/effects-and-timers.md",),
    ),
    "item_not_found": Remedy(
        "No item of that sequence was set aside, or it was retried or dropped since.",
        "List the items that are set aside with `fastness world aside list NAME`.",
        ("how-to/write-programs.md",),
    ),
    "result_not_kept": Remedy(
        "The message is done or gone, and it has no result: it was acknowledged without one, or the result has "
        "expired.",
        "Acknowledge with a result (`message.ack(result=…)`), ask for it sooner, or raise `result_ttl_seconds` of the "
        "queue's policy.",
        (_JOB,),
    ),
    "run_not_found": Remedy(
        "No run with that id exists: it was never started, or it was deleted.",
        "`fastness workflow list` shows the runs of the universe.",
        (_WORKFLOWS,),
    ),
    "move_task_not_found": Remedy(
        "No task that moves messages has this handle, or it has ended long ago: the newest 10 of each queue are kept.",
        "List the tasks of the dead-letter queue, and use the handle of one that runs.",
        (_RETRIES,),
    ),
    # Conflict.
    "conflict": Remedy(
        "Another writer was first. Nothing of this call was written.",
        "Read the current state, decide again, and repeat the call.",
        (_IDEMPOTENCY,),
    ),
    "transaction_conflict": Remedy(
        "The transaction was retried 32 times, and other transactions changed what it reads every time.",
        "Try again later. If it lasts, make the transaction shorter, or let one worker write the key that all of them "
        "read.",
    ),
    "object_exists": Remedy(
        "A create-only put found an object of that name.",
        "Read the object that exists, or choose another name.",
    ),
    "object_changed": Remedy(
        "The object was replaced after its ETag was read.",
        "Read it again with its ETag, decide, and put again.",
    ),
    "target_not_empty": Remedy(
        "The target of a migration or a restore holds other data, which is unchanged.",
        "Choose an empty database or a new folder.",
        (_MIGRATE,),
    ),
    "another_history": Remedy(
        "The lake or the stream was read from another plane, or the plane was restored from a backup since.",
        "Use a lake of its own for each plane. After a restore, follow the message: accept the new lineage, or reset "
        "the lake.",
        (_PIPELINE,),
    ),
    "would_lose_data": Remedy(
        "The lake has rows that the plane no longer has, and this command would remove them.",
        "Keep a copy of the lake. Repeat the command with the option that the message names if the rows may go.",
        (_PIPELINE,),
    ),
    "world_exists": Remedy(
        "A world of that name exists, or its deletion has not finished.",
        "Use the existing world, choose another name, or wait until the deletion has finished.",
    ),
    "world_not_active": Remedy(
        "The world is paused, archived or being deleted, and does not accept this call.",
        "`fastness world show NAME` shows its state; `fastness world resume NAME` makes a paused or archived one "
        "active.",
    ),
    "world_held": Remedy(
        "A host runs the world, and only that host writes its journal.",
        "Send the world an item (`world.inbox.put`) instead of appending to its journal.",
        ("how-to/write-programs.md",),
    ),
    "head_advanced": Remedy(
        "Another writer appended to the journal after this one read its head.",
        "Read the new entries, decide again, and append with the head that the error has in `actual`.",
    ),
    "cursor_advanced": Remedy(
        "Another reader drained the inbox after this one read its cursor.",
        "Read from the cursor that the error has in `actual`. Let one reader drain an inbox.",
    ),
    "snapshot_exists": Remedy(
        "A snapshot with other content exists at that height, and snapshots are immutable.",
        "Find out why the reducer gave another state for the same records: it may not be a pure function.",
    ),
    "baseline_regressed": Remedy(
        "The snapshot is older than the baseline, and the baseline only moves forward.",
        "Promote a newer snapshot. Nothing is needed if another process promoted a newer one.",
    ),
    "promotion_refused": Remedy(
        "The snapshot does not fulfil a condition of a baseline; the message names it, such as a pending effect below "
        "it.",
        "Fulfil the condition, then promote it: `fastness world promote NAME 500` for height 500.",
    ),
    "segment_exists": Remedy(
        "Another compaction has exported these heights, or the segment would leave a gap.",
        "Continue from the height in the message. Let one process compact a world.",
    ),
    "lease_held": Remedy(
        "Another owner holds the lease, and it has not expired. The error has `owner` and `expires_ms`.",
        "Wait for it with `acquire(wait_seconds=…)`. `fastness lease show NAME` shows the holder.",
        (_LEASE,),
    ),
    "cas_mismatch": Remedy(
        "The document changed after its ETag was read. The error has `current_etag`.",
        "Get the document again, apply the change to it, and write it with the new ETag.",
    ),
    "version_conflict": Remedy(
        "The entity or the row changed after its version was read. The error has `expected` and `actual`.",
        "Get it again, apply the change to it, and write it with the new version.",
        ("how-to/store-rows.md",),
    ),
    "mailbox_taken": Remedy(
        "Another session joined this mailbox, and the last one to join reads it.",
        "Stop reading in one of the two processes. Do not reconnect automatically, or they replace each other for "
        "ever.",
        (_MAIL,),
    ),
    "agent_exists": Remedy(
        "The agent is registered with another public key.",
        "Use the key that it was registered with. If the key was lost, register the new one with `replace`.",
        ("relay.md",),
    ),
    "queue_in_use": Remedy(
        "Consumers hold messages of the queue, so it was not deleted.",
        "Stop the workers and wait until their messages are settled, or delete it with `force`. `fastness queue "
        "leased QUEUE` shows the owners.",
    ),
    "sqs_queue_exists": Remedy(
        "`CreateQueue` names a queue that exists, with another value of an attribute than it has.",
        "Set the attributes of the existing queue instead, or leave out those that differ.",
    ),
    "move_task_running": Remedy(
        "One task at a time moves messages out of a dead-letter queue, and one is running.",
        "Wait until it has ended, or cancel it, then start the next one.",
        (_RETRIES,),
    ),
    "move_task_not_running": Remedy(
        "The task has completed or failed, or it was cancelled before.",
        "Nothing. Messages that it has moved stay where they are.",
        (_RETRIES,),
    ),
    "message_leased": Remedy(
        "A consumer holds the message, so its priority and delay cannot be changed.",
        "Wait until it is settled, or cancel it, which tells the consumer to stop.",
        (_JOB,),
    ),
    "message_key_taken": Remedy(
        "Another message of the target queue has the unique key or the debounce key of this one, so it was not moved.",
        "Let the other message finish, or cancel it, then move this one. Delete it if the other does the same work.",
        (_JOB,),
    ),
    "message_finished": Remedy(
        "The message is done, dead or cancelled, so it cannot be changed.",
        "Redrive a dead letter first: `fastness queue redrive QUEUE`. Put a new message otherwise.",
        (_JOB, _RETRIES),
    ),
    "message_failed": Remedy(
        "The message failed in all its attempts, or was rejected, so there is no result.",
        "`fastness message show QUEUE ID` has the traceback of each attempt. Fix the cause, then redrive it.",
        (_RETRIES,),
    ),
    "run_exists": Remedy(
        "A run with that id exists, of another workflow or with other arguments.",
        "Choose another id. The same id with the same arguments returns the existing run.",
        (_WORKFLOWS,),
    ),
    "run_ended": Remedy(
        "The run has ended, so it takes no signals and cannot be changed.",
        "`fastness workflow show ID` shows how it ended. Start another run.",
        (_WORKFLOWS,),
    ),
    "run_not_ended": Remedy(
        "The run has not ended, so it cannot be deleted.",
        "Cancel it with `fastness workflow cancel ID`, and delete it when it has ended.",
        (_WORKFLOWS,),
    ),
    "run_failed": Remedy(
        "The workflow raised an exception, so the run has no result.",
        "`fastness workflow show ID` has the error and the steps. Fix the cause and start a run with another id.",
        (_WORKFLOWS,),
    ),
    "run_cancelled": Remedy(
        "The run was cancelled, so it has no result.",
        "Start a run with another id if the work is still needed.",
        (_WORKFLOWS,),
    ),
    "workflow_changed": Remedy(
        "The code of the workflow was changed, and it no longer does what the history of the run says.",
        "Deploy the former code, or make the change with `run.patched`, so that running instances keep their steps. "
        "Then resume what `fastness workflow list --state stopped` shows: `fastness world resume-program run:ID`.",
        ("how-to/versions-of-workflows.md",),
    ),
    "step_failed": Remedy(
        "A step raised an exception in its last attempt. `error_type` and `message` are those of the exception.",
        "Catch it in the workflow to continue or compensate. Give the step more attempts with `retry=Retry(…)`.",
        (_WORKFLOWS,),
    ),
    # Fenced.
    "fenced": Remedy(
        "The lease that was given with a write does not permit it. Nothing was written.",
        "Stop the work that depends on the lease. Acquire it again, and read the current state before you write.",
        (_LEASE, _IDEMPOTENCY),
    ),
    "lease_required": Remedy(
        "A lease is held on the key of this document, so a write must name it.",
        "Acquire the lease and pass it: `state.update(value, lease=lease)`.",
        (_LEASE,),
    ),
    "lease_conflict": Remedy(
        "A newer lease has replaced this one: it expired, or an operator released it, and another owner acquired it.",
        "Stop the work that depends on it, and acquire the lease again.",
        (_LEASE,),
    ),
    "lease_expired": Remedy(
        "The lease expired before the write, because it was not renewed in time: the process was paused or too slow.",
        "Acquire it again. Use a longer `ttl_seconds`, or a `with` block, which renews it in the background.",
        (_LEASE,),
    ),
    "fencing_mismatch": Remedy(
        "The same owner acquired the lease again since, so this copy has an old fence.",
        "Use the lease that the last `acquire` returned. Give each process an owner of its own.",
        (_LEASE,),
    ),
    "txn_mismatch": Remedy(
        "The lease belongs to another transaction of the same owner.",
        "Pass the `txn_id` that the lease was acquired with.",
        (_LEASE,),
    ),
    "queue_message_lease_mismatch": Remedy(
        "The message was delivered again, because its lease had expired. Its current consumer has a higher fence.",
        "Drop the work: the other delivery counts. If it happens often, use a longer `visibility_seconds`, or let a "
        "`Worker` renew the lease.",
        (_RETRIES, _IDEMPOTENCY),
    ),
    "message_cancelled": Remedy(
        "The message was cancelled while a consumer worked on it.",
        "Stop the work. The message is not delivered again, and needs no ack.",
        (_JOB,),
    ),
    # Busy.
    "busy": Remedy(
        "A bound of the server or the database was reached: too many waiting calls, a lock that was not free in time, "
        "or the rate of the token.",
        "Try again after `Retry-After`, with back-off. If it lasts, the message names the bound. `fastness token self` "
        "shows the rate of the token.",
        ("how-to/size-a-server.md", "metrics.md"),
    ),
    "lock_timeout": Remedy(
        "The lock was not released within the time that the caller was willing to wait.",
        "Wait longer, or hold locks for a shorter time. `fastness lock list` shows who holds what.",
        (_LOCKS,),
    ),
    "queue_busy": Remedy(
        "As many consumers wait at this server as `queue_max_consumers` allows, over all queues, or as many watches.",
        "Run fewer consumers, let each receive for several queues, raise the setting, or add a server.",
        ("how-to/size-a-server.md", "reference/settings.md"),
    ),
    "queue_full": Remedy(
        "The mailbox holds as many unconfirmed mails as its policy allows, 1,000 by default.",
        "Let the recipient read and confirm its mail. `fastness mail count AGENT` shows how much waits and since "
        "when. The bound is in `fastness mail policy`.",
        (_MAIL,),
    ),
    "rate_limited": Remedy(
        "The sender has reached its rate of pushes (`ingress_pushes_per_minute`) or of mail over the relay "
        "(`relay_rate_per_second`).",
        "Send again after `retry_after_seconds`. Raise the setting if it is too low.",
        ("ingress.md", "relay.md"),
    ),
    "quota_exceeded": Remedy(
        "The universe holds or does as much as its quota allows. The error has `kind`, `limit` and `used`.",
        "Acks, deletes and reads still work: consume or delete data, or ask an administrator for a higher quota.",
        ("how-to/limit-a-universe.md",),
    ),
    "shutdown_draining": Remedy(
        "The server is shutting down: it finishes the calls in progress and accepts no new ones.",
        "Clients retry by themselves, here after the restart, or at another server. Wait for the restart.",
        (_PRODUCTION,),
    ),
    "sqs_queue_deleted_recently": Remedy(
        "As in SQS, the name of a deleted queue is free again after 60 seconds, or when its last message is deleted.",
        "Wait and create the queue again, or choose another name.",
    ),
    "purge_in_progress": Remedy(
        "As in SQS, a queue is purged through SQS once in 60 seconds at most.",
        "Wait a minute and purge it again, or use `fastness queue purge QUEUE`, which has no such limit.",
    ),
    "result_not_ready": Remedy(
        "The message or the run is not done yet.",
        "Ask again, or wait for it with `wait_seconds`. A run that is `stopped` by an error waits until it is resumed.",
        (_JOB,),
    ),
    "closed": Remedy(
        "The plane, or the handle, was closed before this call, or while it was in progress.",
        "Make calls inside the `with` block of the plane, and close it last.",
    ),
    # Corrupt.
    "corrupt": Remedy(
        "Stored data is damaged. Fastness reports damage and never repairs it silently.",
        "Run `fastness doctor` to list all damage. Restore a backup, or salvage what is readable: `fastness doctor "
        "./data --salvage ./salvaged`.",
        (_BACKUP,),
    ),
    "damaged_database": Remedy(
        "A checksum inside the database does not match, or its log is damaged before its end: a disk fault, or files "
        "that were changed or deleted by other programs.",
        "Check the disk. Restore a backup, or salvage what is readable: `fastness doctor ./data --salvage ./salvaged`.",
        (_BACKUP,),
    ),
    "hash_mismatch": Remedy(
        "The bytes of a blob do not match the hash that names it: its object was changed or damaged.",
        "Put the original body again, or restore it from a backup. `fastness doctor` lists all damaged blobs.",
        (_BACKUP,),
    ),
    "size_mismatch": Remedy(
        "The body of a blob does not have its recorded size: its object was truncated or replaced.",
        "Put the original body again, or restore it from a backup. `fastness doctor` lists all damaged blobs.",
        (_BACKUP,),
    ),
    "missing_object": Remedy(
        "A body that is recorded as stored is not in the object store: it was deleted by another program, or the "
        "plane was opened with another object store.",
        "Check `objects=…` or `--objects` first. Otherwise restore the object from a backup.",
        (_BACKUP, _MIGRATE),
    ),
    "missing_entry": Remedy(
        "The journal of a world has a gap below its head.",
        "Restore a backup. `fastness doctor` lists all worlds with gaps.",
        (_BACKUP,),
    ),
    "checksum_mismatch": Remedy(
        "The bytes of a segment of a journal do not match its recorded checksum.",
        "Restore the segment's object from a backup. `fastness doctor` lists all damaged segments.",
        (_BACKUP,),
    ),
    "malformed_segment": Remedy(
        "A segment of a journal does not contain the entries that are recorded for it.",
        "Restore the segment's object from a backup. `fastness doctor` lists all damaged segments.",
        (_BACKUP,),
    ),
    "seal_broken": Remedy(
        "A sealed mail was encrypted for another key, by another sender than it names, or was changed in transit.",
        "Open the mailbox with the agent's current key. Ask the sender to send it again, after comparing the public "
        "keys.",
        (_MAIL,),
    ),
    "decryption_failed": Remedy(
        "An encrypted value was changed or moved, or was encrypted with another key than the plane has for its "
        "universe.",
        "Give the key file that the data was written with, with all former keys. If the keys are right, the data is "
        "damaged: restore a backup.",
        (_ENCRYPT, _BACKUP),
    ),
    "unreadable_value": Remedy(
        "A row is not in the form in which its reader stores rows, or it names code that the reader may not run. "
        "Another program has written it, or it was stored before the reader was restricted.",
        "Find out which token may write such rows. If the row is your own, name its types in the `allowed_types` of "
        "`FastnessSaver`; otherwise delete the row.",
        (_SECURE, "how-to/langgraph.md"),
    ),
    # Backend.
    "backend": Remedy(
        "The storage or the network below Fastness failed; the message has its error.",
        "Follow the message. Try again later: acknowledged writes are intact.",
    ),
    "directory_in_use": Remedy(
        "Another process has the data directory open, and only one can.",
        "Use the server that has it open (`--url http://127.0.0.1:9440`), or stop the other process, whose id the "
        "message names. Processes on several machines need PostgreSQL.",
        (_DEPLOYMENT,),
    ),
    "plane_in_use": Remedy(
        "Other processes use the plane, and this operation needs it idle.",
        "Stop the servers and programs that the message names, or that `fastness node list` lists, and run it again.",
        ("how-to/operate-postgresql.md",),
    ),
    "migration_unfinished": Remedy(
        "The plane is the target of a migration that was interrupted.",
        "Run the same `fastness migrate SOURCE TARGET` again; it resumes where it stopped.",
        (_MIGRATE,),
    ),
    "encryption_key_missing": Remedy(
        "The plane has encrypted universes, and no key was given, or not the one that wraps their keys.",
        "Give the key file: `encryption_key_file` in the settings of a server, `encryption=` when you open the plane. "
        "Without the key the data cannot be read.",
        (_ENCRYPT,),
    ),
    "path_unusable": Remedy(
        "A file or folder cannot be created, read or written; the message names it and the reason.",
        "Choose another path, or give this user access to it. Do not put a data directory on a network file system.",
        (_PRODUCTION,),
    ),
    "unreachable": Remedy(
        "No server answers at that address, or no PostgreSQL server answered as a primary for 30 s. Nothing was "
        "written.",
        "Check the address, that the server runs (`fastness serve`), and the firewall. Clients reconnect by "
        "themselves; `--patience SECONDS` lets a command wait.",
        ("how-to/high-availability.md",),
    ),
    "disk_full": Remedy(
        "The disk has no space left, or only the reserve (`disk_reserve_bytes`). Acknowledged writes are intact.",
        "`fastness space` shows what is stored. Consume or purge queues, delete archived worlds, or make the disk "
        "larger. Do not delete files in the data directory.",
        ("how-to/free-space.md", _PRODUCTION),
    ),
    "database_failed": Remedy(
        "An earlier write failed, so the key space is closed for writes. Acknowledged writes are intact.",
        "A server reopens it by itself; its log has the cause. An embedded program calls `plane.reopen()`.",
        (_PRODUCTION,),
    ),
    "schema_mismatch": Remedy(
        "The data or PostgreSQL's tables have a format that this version does not support. The message says whether it "
        "is older or newer.",
        "For newer data, install the version that wrote it. Copy older data to a new plane with `fastness migrate "
        "SOURCE TARGET`. For older tables run `fastness migrate URL`.",
        (_UPGRADE,),
    ),
    "unsupported": Remedy(
        "The backend, the server or this installation does not offer the operation; the message says why.",
        "Follow the message: install the extra it names, configure an object store, or upgrade the older side.",
        (_DEPLOYMENT, _UPGRADE),
    ),
    "commit_unknown": Remedy(
        "The connection was lost while the commit was in progress: it may or may not have happened.",
        "Read whether it happened, or repeat the call with the same idempotency key. Puts of the client have such a "
        "key and are repeated automatically.",
        (_IDEMPOTENCY,),
    ),
    # HTTP: requests that are refused before an operation starts.
    "bad_request": Remedy(
        "The request is not valid HTTP for this endpoint; the detail says why.",
        "Change the request. `/docs` has the form of each one.",
        (_PROTOCOL,),
    ),
    "malformed_request": Remedy(
        "The bytes on the connection are no HTTP request: for example TLS was sent to a port without it.",
        "Use `http://` for a server without a certificate and `https://` for one with it.",
        (_SECURE,),
    ),
    "request_timeout": Remedy(
        "The headers of the request did not arrive within `header_seconds`.",
        "Send the request at once after connecting. Raise the setting for slow networks.",
        ("reference/settings.md",),
    ),
    "request_head_too_large": Remedy(
        "The URL and the headers are longer than `header_bytes_max`.",
        "Send long values in the body. Remove cookies and headers that a proxy adds.",
        ("reference/settings.md",),
    ),
    "too_many_pipelined": Remedy(
        "The client sent further requests on a connection without reading the answers of the former ones.",
        "Read each answer before the next request, or use several connections or the stream.",
        (_PROTOCOL,),
    ),
    "too_many_connections": Remedy(
        "As many connections are open as `connections_max` allows, or as the limit of open files permits.",
        "Reuse connections. Raise `connections_max` and the service's limit of open files, or add a server.",
        ("how-to/size-a-server.md",),
    ),
    "body_timeout": Remedy(
        "The body of the request did not arrive in time.",
        "Send it faster, or in smaller parts. A proxy may be buffering or throttling it.",
        (_PROTOCOL,),
    ),
    "body_too_large": Remedy(
        "The body is larger than `body_bytes_max`, or than `stream_bytes_max` for blobs.",
        "Send smaller batches. Store large payloads at `/v1/blobs` and send their hashes.",
        ("reference/settings.md",),
    ),
    "invalid_content_type": Remedy(
        "The endpoint does not accept the body's Content-Type, or the request has none.",
        "Send one of the types that the detail names, usually `application/json`.",
        (_PROTOCOL,),
    ),
    "not_acceptable": Remedy(
        "The endpoint has no answer of a type that the `Accept` header allows.",
        "Accept `application/json`, or one of the types that the detail names.",
        (_PROTOCOL,),
    ),
    "method_not_allowed": Remedy(
        "The path exists, but not with this method.",
        "Use a method of the answer's `Allow` header.",
        (_PROTOCOL,),
    ),
    "invalid_body": Remedy(
        "The body is not valid JSON, or does not fit its schema: a field is unknown or has the wrong type.",
        "Change what the detail names. Unknown fields are refused, so that a misspelt one is not ignored.",
        ("reference/endpoints.md",),
    ),
    "invalid_query": Remedy(
        "A query parameter is unknown, given twice, or has a wrong value.",
        "Use the parameters that the detail lists.",
        ("reference/endpoints.md",),
    ),
    "missing_fields": Remedy(
        "A required field is missing in the body.",
        "Send the field that the detail names.",
        ("reference/endpoints.md",),
    ),
    "missing_owner": Remedy(
        "A request that leases something has no `owner`.",
        "Send the name of the consumer, such as its host and process id. It is shown to operators.",
        ("reference/endpoints.md",),
    ),
    "missing_queue": Remedy(
        "The request names no queue.",
        "Send `queue` in the body, or use the path with the queue's name.",
        ("reference/endpoints.md",),
    ),
    "invalid_etag": Remedy(
        "`If-Match` or `If-None-Match` is not one strong ETag, or differs from the version in the body.",
        "Send the ETag of the last answer, with its quotes, or `*`.",
        (_PROTOCOL,),
    ),
    "precondition_required": Remedy(
        "The write replaces something that may have changed since it was read, so it must name the version.",
        "Read it, and send its ETag in `If-Match`, or `If-None-Match: *` to create it.",
        (_PROTOCOL,),
    ),
    "range_not_satisfiable": Remedy(
        "The `Range` header starts behind the end of the blob.",
        "Read the size from `Content-Range` of the answer, and ask for a range inside of it.",
        (_PROTOCOL,),
    ),
    "invalid_idempotency_key": Remedy(
        "The `Idempotency-Key` header is empty or longer than 255 characters.",
        "Use 1 to 255 characters, such as a UUID.",
        (_IDEMPOTENCY,),
    ),
    "invalid_nack_intent": Remedy(
        "A nack has an `intent` other than `failure` or `defer`, or fields that its intent does not have.",
        "Use `failure` to count the attempt, `defer` to return the message uncounted.",
        (_RETRIES,),
    ),
    "foreign_origin": Remedy(
        "A web page of another site called the server, or a proxy changed the `Host` header.",
        "Call the API from a program or from pages of the same origin. Let the proxy pass on `Host` unchanged.",
        (_SECURE, "console.md"),
    ),
    "console_busy": Remedy(
        "As many pages of the console are live as a server serves: 64, and 16 with one token.",
        "Close pages that are not needed. The page tries again by itself.",
        ("console.md",),
    ),
    "mcp_busy": Remedy(
        "The token has as many MCP sessions as one may have.",
        "End sessions with `DELETE /mcp`, or use a token for each agent.",
        ("how-to/mcp.md",),
    ),
    "pass_expired": Remedy(
        "The link to a report is valid for five minutes, or until the token that opened it is revoked.",
        "Open the report from the console again.",
        ("console.md",),
    ),
    "http_error": Remedy(
        "The HTTP layer refused the request with a status that has no code of its own.",
        "The status and the detail say why.",
        (_PROTOCOL,),
    ),
    "internal_error": Remedy(
        "An unexpected error in the server: a bug in Fastness.",
        "The server's log has the traceback under the correlation id of the answer. Report it with both. The call may "
        "or may not have happened: read before you repeat it.",
    ),
    # The command line.
    "usage": Remedy(
        "The command line has an unknown option, a missing argument or a value that is not allowed.",
        "Read the help of the command that the message names. An unknown name gets the nearest known one as a "
        "suggestion.",
        ("how-to/command-line.md",),
    ),
    "interrupted": Remedy(
        "The command was interrupted, for example with Ctrl+C, before it ended.",
        "Run it again if needed. A write that was in progress may have happened.",
    ),
}

"""The calls that tools/make_api_examples.py records: at least one for each endpoint, in a function for each tag.

    await api("POST /v1/queue/enqueue", {"queue": "jobs", "payload": 1})               a body
    await api("GET /v1/queues/{queue}/peek", queue="jobs", limit=10)                   parameters of the path and query
    await api("POST /v1/queue/enqueue", {...}, example="Enqueue a batch.")             one more example of an endpoint

Only the first call of an endpoint becomes its example, and further ones that have a summary. Functions run in the order
of the file, on one plane; each uses names of its own. Answers that a caller would see in practice make good examples:
no test data.
"""

import base64
import hashlib
from typing import Any, Protocol

from fastness.testing.clock import ManualClock

ORDER = {"order": 1042, "amount_cents": 1990, "currency": "EUR"}
NO_MANIFEST = hashlib.sha256(b"").hexdigest()


class Api(Protocol):
    """Calls one endpoint; see `Recorder` in tools/make_api_examples.py."""

    clock: ManualClock

    async def __call__(
        self, operation: str, body: Any = None, *, example: str = "", headers: Any = None, **parameters: Any
    ) -> Any: ...


def encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


async def run(api: Api) -> None:
    """Make all calls."""
    for record in (
        calls,
        messages,
        queues,
        leases,
        locks,
        states,
        entities,
        collections,
        worlds,
        hosting,
        runs,
        effects,
        timers,
        universes,
        mail,
        ingress,
        agents,
        activity,
        blobs,
        space,
        planes,
        tokens,
        audit,
        backups,
    ):
        await record(api)


async def calls(api: Api) -> None:
    await api("POST /v1/call", {"op": "queues.stats", "queue": "invoices"})
    operations = [
        {"op": "states.update", "key": "orders/1042", "value": {"status": "paid"}},
        {"op": "queues.put", "queue": "receipts", "messages": [{"payload": {"order": 1042}}]},
    ]
    await api("POST /v1/atomic", operations)


async def messages(api: Api) -> None:
    put = "POST /v1/queue/enqueue"
    await api(put, {"queue": "invoices", "payload": ORDER, "key": "customer-7", "max_attempts": 5})
    batch = [{"payload": {"order": number}, "priority": 3} for number in (1043, 1044)]
    await api(put, {"queue": "invoices", "messages": batch}, example="Enqueue a batch.")
    await api(
        put,
        {"queue": "invoices", "payload": ORDER, "delay_seconds": 3600, "unique_key": "order-1042"},
        example="Enqueue a message that is due in an hour, unless one with that key waits.",
    )
    received = await api(
        "POST /v1/queue/dequeue", {"queue": "invoices", "owner": "worker-1", "wait_seconds": -1, "page_size": 2}
    )
    first, second = (_lease(each) for each in received["messages"])
    await api("POST /v1/queue/extend", {"queue": "invoices", **first, "extend_by_seconds": 60})
    await api("POST /v1/queue/visibility", {"queue": "invoices", **first, "visibility_seconds": 10})
    await api("POST /v1/queue/ack", {"queue": "invoices", **first, "result": {"receipt": "r-1042"}})
    failed = {"intent": "failure", "delay_seconds": 30, "last_error": "The bank did not answer."}
    await api("POST /v1/queue/nack", {"queue": "invoices", **second, **failed})
    [third] = (await api("POST /v1/queue/dequeue", {"queue": "invoices", "owner": "worker-1", "wait_seconds": -1}))[
        "messages"
    ]
    await api("POST /v1/queue/reject", {"queue": "invoices", **_lease(third), "last_error": "Unknown order."})
    for number in range(3):
        await api(put, {"queue": "emails", "payload": {"to": f"customer-{number}"}})
    worker = {"queue": "emails", "owner": "worker-1", "wait_seconds": -1}
    await api("POST /v1/queue/dequeueWithState", worker)
    await api("POST /v1/queue/subscribe", {**worker, "wait_seconds": 1, "credit": 1})
    await api("POST /v1/queue/subscribeWithState", {**worker, "wait_seconds": 1, "credit": 1})
    await api("POST /v1/queue/stats", {"queue": "emails"})
    await api("POST /v1/queue/watch", {"queue": "emails"})
    await api("GET /v1/queue/watch", queue="emails")


def _lease(message: dict[str, Any]) -> dict[str, Any]:
    return {name: message[name] for name in ("message_id", "lease_id", "fence")}


async def queues(api: Api) -> None:
    put, queue = "POST /v1/queue/enqueue", {"queue": "thumbnails"}
    policy = {"visibility_seconds": 60, "max_attempts": 3, "retry_delay_seconds": 5, "history": "durable"}
    await api("PUT /v1/queues/{queue}/policy", policy, **queue)
    await api("GET /v1/queues/{queue}/policy", **queue)
    done = await api(put, {**queue, "payload": {"image": "a.png"}, "keep_result": True, "key": "album-1"})
    [leased] = (await api("POST /v1/queue/dequeue", {**queue, "owner": "worker-1", "wait_seconds": -1}))["messages"]
    await api("POST /v1/queue/ack", {**queue, **_lease(leased), "result": {"width": 128}})
    await api("GET /v1/queues/{queue}/messages/{id}/result", **queue, id=done["message_id"])
    waiting = await api(put, {**queue, "payload": {"image": "b.png"}, "key": "album-1"})
    await api("PATCH /v1/queues/{queue}/messages/{id}", {"priority": 9}, **queue, id=waiting["message_id"])
    await api("GET /v1/queues/{queue}/messages/{id}", **queue, id=waiting["message_id"])
    await api("GET /v1/queues/{queue}/peek", **queue, limit=10)
    await api("GET /v1/queues/{queue}/keys/{key:path}", **queue, key="album-1")
    await api("POST /v1/queues/{queue}/keys/{key:path}/pause", {"seconds": 300}, **queue, key="album-1")
    await api("POST /v1/queues/{queue}/keys/{key:path}/resume", {}, **queue, key="album-1")
    await api("POST /v1/queue/dequeue", {**queue, "owner": "worker-1", "wait_seconds": -1})
    await api("GET /v1/queues/{queue}/leased", **queue)
    cancelled = await api(put, {**queue, "payload": {"image": "c.png"}})
    await api("POST /v1/queues/{queue}/messages/{id}/cancel", {}, **queue, id=cancelled["message_id"])
    await api(put, {**queue, "payload": {"image": "d.png"}})
    [dead] = (await api("POST /v1/queue/dequeue", {**queue, "owner": "worker-1", "wait_seconds": -1}))["messages"]
    await api("POST /v1/queue/reject", {**queue, **_lease(dead), "last_error": "Not an image."})
    await api("GET /v1/queues/{queue}/dead-letters", **queue)
    await api("POST /v1/queues/{queue}/redrive", {"ids": [dead["message_id"]]}, **queue)
    await api("GET /v1/queues/{queue}/history", **queue, limit=3)
    await api("POST /v1/queues/{queue}/pause", {}, **queue)
    await api("POST /v1/queues/{queue}/resume", {}, **queue)
    schedule = {"cron": "0 3 * * *", "timezone": "Europe/Berlin", "message": {"payload": {"job": "clean"}}}
    await api("PUT /v1/queues/{queue}/schedules/{name}", schedule, **queue, name="nightly")
    await api("GET /v1/queues/{queue}/schedules", **queue)
    await api("DELETE /v1/queues/{queue}/schedules/{name}", **queue, name="nightly")
    await api("GET /v1/queues/{queue}", **queue)
    await api("GET /v1/queues", limit=3)
    await api("GET /v1/surveys/queues", limit=2)
    await api("GET /v1/queues/{queue}/messages", **queue, states=["leased", "ready"], limit=2)
    ids = [(await api(put, {**queue, "payload": {"image": f"{name}.png"}}))["message_id"] for name in "efg"]
    await api("POST /v1/queues/{queue}/messages/cancel", {"ids": ids[:1]}, **queue)
    await api("POST /v1/queues/{queue}/messages/move", {"ids": ids[1:2], "to": "thumbnails-slow"}, **queue)
    await api("POST /v1/queues/{queue}/messages/delete", {"ids": ids[2:]}, **queue)
    await api("POST /v1/queues/{queue}/purge", {}, **queue)
    await api("DELETE /v1/queues/{queue}", **queue, force=True)


async def leases(api: Api) -> None:
    granted = await api("POST /v1/lease/acquire", {"key": "deploy/api", "owner": "ci-17", "ttl_seconds": 30})
    proof = {name: granted[name] for name in ("key", "lease_id", "fence")}
    await api("POST /v1/lease/describe", {"key": "deploy/api"})
    await api("GET /v1/leases")
    await api("GET /v1/surveys/waits")
    await api("POST /v1/lease/keepalive", {**proof, "ttl_seconds": 60})
    await api("POST /v1/lease/check", proof)
    await api("POST /v1/lease/release", proof)
    granted = await api("POST /v1/lease/acquire", {"key": "deploy/web", "owner": "ci-18"})
    await api("POST /v1/lease/break", {"key": "deploy/web", "fence": granted["fence"]})


async def locks(api: Api) -> None:
    session = {"id": "s3cr3t-of-worker-1-0001"}
    claim = {"session": session, "claim": "c-1", "paths": [["entity_type", "order"], ["record_id", "order/1042"]]}
    await api("POST /v1/locks/acquire", {**claim, "owner": "worker-1", "lease_seconds": 30})
    await api("POST /v1/locks/renew", {"session": session, "lease_seconds": 30})
    [held] = (await api("GET /v1/locks"))["sessions"]
    await api("GET /v1/locks/stats")
    await api("POST /v1/locks/release", {"session": session, "claim": "c-1"})
    await api("POST /v1/locks/acquire", {**claim, "claim": "c-2"})
    await api("POST /v1/locks/end", {"number": held["number"]})


async def states(api: Api) -> None:
    updated = await api("POST /v1/state/update", {"key": "carts/7", "value": {"items": 2}})
    await api("POST /v1/state/get", {"key": "carts/7"})
    await api("POST /v1/state/remove", {"key": "carts/7", "if_match": updated["etag"]})
    await api("PUT /v1/state/{key:path}", {"items": 1}, key="carts/8", headers={"If-None-Match": "*"})
    await api("GET /v1/state/{key:path}", key="carts/8")
    await api("DELETE /v1/state/{key:path}", key="carts/8")


async def entities(api: Api) -> None:
    task = {"kind": "task", "id": "t-1"}
    fields = {"title": "Pay the invoice", "status": "open"}
    await api("PUT /v1/entities/{kind}/{id}", {"fields": fields}, **task, headers={"If-None-Match": "*"})
    await api("PATCH /v1/entities/{kind}/{id}", {"fields": {"status": "done"}}, **task)
    await api("GET /v1/entities/{kind}/{id}", **task)
    await api("GET /v1/entities/{kind}/{id}/history", **task)
    writes = [{"kind": "task", "id": f"t-{number}", "fields": {"status": "open"}} for number in (2, 3)]
    await api("POST /v1/entities/transaction", {"writes": writes})
    await api("GET /v1/entities/{kind}", kind="task", limit=2)
    await api("GET /v1/surveys/kinds")
    await api("DELETE /v1/entities/{kind}/{id}", **task)


async def collections(api: Api) -> None:
    changes = [
        {"change": "put", "partition": "user-7", "key": ["2026-01-01", number], "value": encoded(f"note {number}")}
        for number in (1, 2)
    ]
    notes = {"collection": "notes"}
    await api("POST /v1/collections/{collection}/commit", {"changes": changes}, **notes)
    await api(
        "POST /v1/collections/{collection}/get", {"partition": "user-7", "keys": [["2026-01-01", 1], ["gone"]]}, **notes
    )
    page = {"partition": "user-7", "prefix": ["2026-01-01"], "limit": 1}
    await api("POST /v1/collections/{collection}/scan", page, **notes)
    await api("GET /v1/collections/{collection}/partitions", **notes)
    await api("GET /v1/collections")


async def worlds(api: Api) -> None:
    world = {"world": "ledger"}
    await api("POST /v1/worlds", world)
    await api("PUT /v1/worlds/{world}", {}, world="ledger-2")
    await api("GET /v1/worlds/{world}", **world)
    entries = [{"event": "opened"}, {"event": "paid", "amount_cents": 1990}]
    await api("POST /v1/worlds/{world}/entries", {"entries": entries, "expected_head": 0}, **world)
    await api("GET /v1/worlds/{world}/entries", **world, start=0, limit=10)
    await api("POST /v1/worlds/{world}/inbox", {"item": {"type": "control", "command": "close"}}, **world)
    await api("GET /v1/worlds/{world}/inbox", **world)
    await api("POST /v1/worlds/{world}/drain", {}, **world)
    await api("GET /v1/worlds/{world}/inbox/cursor", **world)
    await api("POST /v1/worlds/{world}/manifest", {"manifest_hash": NO_MANIFEST, "expected_head": 3}, **world)
    await api("POST /v1/worlds/{world}/snapshots", {"data": {"balance": 1990}, "height": 4, "promote": False}, **world)
    more = [{"event": "note", "n": number} for number in range(20)]
    await api("POST /v1/worlds/{world}/entries", {"entries": more, "expected_head": 5}, **world)
    snapshot = {
        "data": {"balance": 1990},
        "height": 20,
        "promote": False,
        "receipt_horizon_height": 20,
        "manifest_hash": NO_MANIFEST,
    }
    await api("POST /v1/worlds/{world}/snapshots", snapshot, **world)
    await api("POST /v1/worlds/{world}/snapshots/{height}/promote", {}, **world, height=20)
    await api("GET /v1/worlds/{world}/restore", **world)
    await api("GET /v1/worlds/{world}/baseline", **world)
    await api("GET /v1/worlds/{world}/snapshots", **world)
    await api("POST /v1/worlds/{world}/compact", {"entries": 8, "margin": 2}, **world)
    await api("GET /v1/worlds/{world}/segments", **world)
    await api("GET /v1/worlds/{world}/check", **world)
    await api("POST /v1/worlds/{world}/fork", {"target": "ledger-copy", "height": 24}, **world)
    await api("POST /v1/worlds/{world}/pause", {}, **world)
    await api("POST /v1/worlds/{world}/resume", {}, **world)
    await api("GET /v1/worlds", limit=3)
    await api("GET /v1/surveys/worlds", limit=2)
    await api("POST /v1/worlds/{world}/archive", {}, world="ledger-2")
    await api("DELETE /v1/worlds/{world}", world="ledger-2")


async def hosting(api: Api) -> None:
    world = {"world": "shop"}
    await api("POST /v1/worlds", {**world, "program": "shop"})
    await api("GET /v1/worlds/{world}/program", **world)
    await api("PUT /v1/worlds/{world}/program", {"program": "shop-v2"}, **world)
    event = {"type": "domain_event", "schema": "order", "payload": encoded('{"order":1042}')}
    for _ in range(2):
        await api("POST /v1/worlds/{world}/inbox", {"item": event}, **world)
    host = {"owner": "host-1"}
    claim = {"programs": ["shop-v2"], **host, "lease_seconds": 30}
    [claimed] = (await api("POST /v1/hosting/claim", claim))["worlds"]
    fence = {"fence": claimed["fence"]}
    turn = {
        **host,
        **fence,
        "expected_head": claimed["head"],
        "take": claimed["items"][-1][0],
        "entries": [{"event": "order accepted"}],
        "aside": [[claimed["items"][0][0], "ValueError: unknown order"]],
    }
    await api("POST /v1/worlds/{world}/turns", turn, **world)
    await api("POST /v1/hosting/renew", {"worlds": [["shop", claimed["fence"]]], **host})
    await api("GET /v1/worlds/{world}/aside", **world)
    await api("POST /v1/worlds/{world}/aside/{sequence}/retry", {}, **world, sequence=claimed["items"][0][0])
    await api("PUT /v1/hosting/policy", {"sends_to": ["partner"]})
    await api("GET /v1/hosting/policy")
    await api("PUT /v1/hosting/policy", {"accepts_from": ["main"], "universe": "partner"})
    await api("POST /v1/worlds", {"world": "orders", "universe": "partner"})
    send = {**host, **fence, "to": "orders", "to_universe": "partner", "schema": "order"}
    await api("POST /v1/worlds/{world}/sends", {**send, "payload": encoded('{"order":1}')}, **world)
    [again] = (await api("POST /v1/hosting/claim", claim))["worlds"]
    last = again["items"][-1][0]
    turn |= {"fence": again["fence"], "expected_head": again["head"], "take": last}
    turn["aside"] = [[last, "ValueError: unknown order"]]
    head = (await api("POST /v1/worlds/{world}/turns", turn, **world))["head"]
    await api("DELETE /v1/worlds/{world}/aside/{sequence}", **world, sequence=last)
    await api(
        "POST /v1/hosting/release", {"worlds": [{"world": "shop", "fence": again["fence"], "head": head}], **host}
    )
    await api("POST /v1/worlds/{world}/inbox", {"item": event}, **world)
    [again] = (await api("POST /v1/hosting/claim", claim))["worlds"]
    failed = {**host, "fence": again["fence"], "error": "ValueError: unknown order", "is_stopped": True}
    await api("POST /v1/worlds/{world}/turns/fail", failed, **world)
    await api("POST /v1/worlds/{world}/program/resume", {}, **world)


async def runs(api: Api) -> None:
    await api("POST /v1/runs", {"workflow": "refund", "id": "refund-1042", "args": [1042]})
    await api("PUT /v1/runs/{id}", {"workflow": "refund", "kwargs": {"order": 1043}}, id="refund-1043")
    await api("GET /v1/runs/{id}", id="refund-1042")
    await api("POST /v1/runs/{id}/signals/{name}", {"value": {"approved": True}}, id="refund-1042", name="approval")
    await api("GET /v1/runs", workflow="refund")
    await api("POST /v1/runs/{id}/cancel", {"reason": "Paid twice.", "force": True}, id="refund-1043")
    await api("DELETE /v1/runs/{id}", id="refund-1043")


async def effects(api: Api) -> None:
    world = {"world": "cards"}
    await api("POST /v1/worlds", world)
    asked = [{"kind": "charge", "intent_hash": encoded(f"card-{number}")} for number in range(4)]
    await api(
        "POST /v1/worlds/{world}/inbox", {"item": {"type": "control", "command": "go", "effects": asked}}, **world
    )
    await api("POST /v1/worlds/{world}/drain", {}, **world)
    await api("GET /v1/effects")
    await api("GET /v1/worlds/{world}/effects", **world, limit=2)
    claim = {"kinds": ["charge"], "owner": "adapter-1", "limit": 4}
    claimed = (await api("POST /v1/effects/claim", claim))["effects"]
    base = "POST /v1/worlds/{world}/effects/{height}/{number}"
    places = [{"height": each["height"], "number": each["number"], **world} for each in claimed]
    fences = [{"fence": each["fence"]} for each in claimed]
    await api(f"{base}/extend", {**fences[0], "lease_seconds": 60}, **places[0])
    await api(f"{base}/complete", {**fences[0], "payload": encoded('{"charge":"ch_1"}')}, **places[0])
    await api(f"{base}/fail", {**fences[1], "error": "The bank did not answer.", "delay_seconds": 10}, **places[1])
    released = [{**places[number], **fences[number]} for number in (2, 3)]
    await api("POST /v1/effects/release", {"effects": released})


async def timers(api: Api) -> None:
    world = {"world": "reminders"}
    await api("POST /v1/worlds", world)
    timer = {"intent_hash": encoded("reminder-1"), "deliver_at_ns": 1_767_344_400_000_000_000}
    await api(
        "POST /v1/worlds/{world}/inbox", {"item": {"type": "control", "command": "go", "timers": [timer]}}, **world
    )
    await api("POST /v1/worlds/{world}/drain", {}, **world)
    await api("GET /v1/timers")
    await api("GET /v1/worlds/{world}/timers", **world)


async def universes(api: Api) -> None:
    await api("GET /v1/universes")
    quota = {"messages": 100_000, "bytes": 1_000_000_000, "rate_per_second": 500}
    await api("PUT /v1/universes/{universe}/quota", quota, universe="partner")
    await api("GET /v1/universes/{universe}/quota", universe="partner")
    await api("GET /v1/universes/{universe}/usage", universe="partner")
    await api("DELETE /v1/universes/{universe}/quota", universe="partner")


async def mail(api: Api) -> None:
    bob = {"agent": "bob"}
    await api("POST /v1/mailboxes/{agent}/join", {"session": "phone"}, **bob)
    mails = [{"to": "bob", "body": encoded("The build is green."), "content_type": "text/plain"}]
    sent = (await api("POST /v1/mail/send", {"sender": "ada", "mails": mails}))["mails"]
    await api("GET /v1/mailboxes/{agent}/mail", **bob, session="phone")
    await api("GET /v1/mailboxes/{agent}", **bob)
    await api("GET /v1/mailboxes")
    await api("POST /v1/mailboxes/{agent}/confirm", {"ids": [sent[0]["id"]]}, **bob)
    await api("GET /v1/mailboxes/{agent}/receipts", agent="ada")
    await api("POST /v1/mailboxes/{agent}/receipts", {"sequence": 0}, agent="ada")
    await api("POST /v1/mailboxes/{agent}/blocks", {"sender": "mallory"}, **bob)
    await api("GET /v1/mailboxes/{agent}/blocks", **bob)
    await api("POST /v1/mailboxes/{agent}/leave", {"session": "phone"}, **bob)
    await api("PUT /v1/mail/policy", {"pending_max": 1000, "ttl_seconds": 86400})
    await api("GET /v1/mail/policy")
    push = {"to": "bob", "topic": "builds", "content_type": "text/plain", "payload_base64": "Z3JlZW4"}
    call = {"jsonrpc": "2.0", "id": 1, "method": "agent.data.push", "params": {**push, "idempotency_key": "build-17"}}
    await api("POST /v1/rpc", call)


async def ingress(api: Api) -> None:
    push = {"to": "bob", "topic": "builds", "content_type": "text/plain", "payload": encoded("red")}
    await api("POST /v1/pushes", {**push, "idempotency_key": "build-18"})
    await api("POST /v1/pushes/batch", {"pushes": [{**push, "idempotency_key": f"build-{n}"} for n in (19, 20)]})
    await api("GET /v1/pushes", limit=10, wait_seconds=0)
    await api("GET /v1/pushes/stats")
    await api("GET /v1/pushes/watch", topic="builds")


async def agents(api: Api) -> None:
    await api("PUT /v1/agents/{name}", {"public_key": encoded("k" * 32)}, name="ada")
    await api("GET /v1/agents/{name}", name="ada")
    await api("GET /v1/agents")


async def activity(api: Api) -> None:
    await api("POST /v1/activity", {"session": "s-1", "records": [{"event": "started"}, {"event": "asked"}]})
    await api("GET /v1/activity", session="s-1")
    await api("GET /v1/activity/files")
    await api("POST /v1/activity/end", {"session": "s-1"})


async def blobs(api: Api) -> None:
    stored = await api("POST /v1/blobs", b"a large document")
    await api("PUT /v1/blobs", b"another document", pinned=True)
    blob = {"hash": stored["hash"]}
    await api("PUT /v1/blobs/{hash}/pin", {}, **blob)
    await api("GET /v1/blobs/{hash}", **blob)
    await api("DELETE /v1/blobs/{hash}/pin", **blob)


async def space(api: Api) -> None:
    await api("GET /v1/space")
    await api("GET /v1/space/status")
    await api("POST /v1/space/collect", {"dry_run": True})


async def planes(api: Api) -> None:
    await api("GET /v1/plane")
    await api("GET /v1/nodes")


async def tokens(api: Api) -> None:
    await api("GET /v1/tokens/self")
    secret = hashlib.sha256(b"the secret that the caller keeps").hexdigest()
    token = {"name": "reader", "universes": ["main"], "verbs": ["queue:stats"], "secret_sha256": secret}
    created = await api("POST /v1/tokens", token)
    await api("GET /v1/tokens")
    await api("DELETE /v1/tokens/{id}", id=created["id"])


async def audit(api: Api) -> None:
    await api("GET /v1/audit", limit=2)
    await api("GET /v1/audit/plane", limit=2)


async def backups(api: Api) -> None:
    begun = await api("POST /v1/backups", {})
    await api("GET /v1/backups/{id}/files", id=begun["id"])
    await api("GET /v1/backups/{id}/files/{path:path}", id=begun["id"], path="keyspace/CURRENT")
    await api("DELETE /v1/backups/{id}", id=begun["id"])
    await api("GET /v1/checkups")

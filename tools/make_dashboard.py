"""Writes the Grafana dashboard, `deploy/grafana/fastness.json`, from the table of its panels below.

python tools/make_dashboard.py            # writes it
python tools/make_dashboard.py --check    # fails if it is not up to date
"""

import json
import sys
from pathlib import Path
from typing import Any, Final, NamedTuple

TARGET: Final = Path(__file__).parents[1] / "deploy" / "grafana" / "fastness.json"
WIDTH: Final = 24  # Of a dashboard, in Grafana's units.
HEIGHT: Final = 8
PER_ROW: Final = 3

_SERVERS: Final = 'job=~"$job"'
_QUEUES: Final = 'job=~"$job", universe=~"$universe", queue=~"$queue"'
_UNIVERSES: Final = 'job=~"$job", universe=~"$universe"'


class Panel(NamedTuple):
    """A chart: its lines are expressions with the name of each series."""

    title: str
    unit: str  # Of Grafana: short, ops (per second), s, bytes, percentunit.
    lines: tuple[tuple[str, str], ...]
    description: str = ""


def rate(metric: str, labels: str, by: str = "", *, durable: bool = False) -> str:
    """The growth of a counter per second. A durable counter is the same on every server, so it is not summed."""
    over = "max" if durable else "sum"
    grouping = f" by ({by})" if by else ""
    return f"{over}{grouping} (rate({metric}{{{labels}}}[$__rate_interval]))"


def quantile(part: float, metric: str, labels: str, by: str = "") -> str:
    """A quantile of a histogram."""
    grouping = ", ".join(filter(None, ("le", by)))
    return f"histogram_quantile({part}, sum by ({grouping}) (rate({metric}_bucket{{{labels}}}[$__rate_interval])))"


def largest(metric: str, labels: str, by: str = "") -> str:
    """A gauge that is the same on every server."""
    return f"max{f' by ({by})' if by else ''} ({metric}{{{labels}}})"


def depth(state: str) -> tuple[str, str]:
    """The messages of the selected queues in one state."""
    own = largest("fastness_queue_messages", f'{_QUEUES}, state="{state}"', "universe, queue")
    return f"sum ({own})", state


ROWS: Final[tuple[tuple[str, tuple[Panel, ...]], ...]] = (
    (
        "Calls",
        (
            Panel(
                "Calls by operation",
                "ops",
                ((f"topk(10, {rate('fastness_requests_total', _SERVERS, 'op')})", "{{op}}"),),
            ),
            Panel(
                "Errors by code",
                "ops",
                ((rate("fastness_requests_total", f'{_SERVERS}, code!~"ok|cancelled"', "code"), "{{code}}"),),
                "Calls that ended with an error.",
            ),
            Panel(
                "Duration of calls, p99",
                "s",
                ((f"topk(10, {quantile(0.99, 'fastness_request_seconds', _SERVERS, 'op')})", "{{op}}"),),
                "Calls that wait for messages or locks are as long as their wait.",
            ),
            Panel(
                "In progress",
                "short",
                (
                    (f"sum by (instance) (fastness_calls_in_flight{{{_SERVERS}}})", "{{instance}}"),
                    (f"sum by (instance) (fastness_calls_waiting{{{_SERVERS}}})", "{{instance}}, waiting"),
                ),
            ),
            Panel(
                "Connections",
                "short",
                (
                    (f"sum (fastness_open_streams{{{_SERVERS}}})", "streams"),
                    (f"sum (fastness_relay_sessions{{{_SERVERS}}})", "agents of the relay"),
                    (f"sum (fastness_mcp_sessions{{{_SERVERS}}})", "MCP sessions"),
                    (f"sum (fastness_http_requests_in_flight{{{_SERVERS}}})", "HTTP requests"),
                ),
            ),
            Panel(
                "Refused before a call began",
                "ops",
                ((rate("fastness_rejects_total", _SERVERS, "reason"), "{{reason}}"),),
            ),
        ),
    ),
    (
        "Queues",
        (
            Panel("Depth", "short", tuple(depth(state) for state in ("ready", "leased", "delayed", "blocked", "dead"))),
            Panel(
                "Ready by queue",
                "short",
                (
                    (
                        "topk(10, "
                        + largest("fastness_queue_messages", f'{_QUEUES}, state="ready"', "universe, queue")
                        + ")",
                        "{{universe}} {{queue}}",
                    ),
                ),
            ),
            Panel(
                "Age of the next message",
                "s",
                (
                    (
                        f"topk(10, {largest('fastness_queue_oldest_age_seconds', _QUEUES, 'universe, queue')})",
                        "{{universe}} {{queue}}",
                    ),
                ),
            ),
            Panel(
                "Messages a second",
                "ops",
                tuple(
                    (f"sum ({rate(f'fastness_queue_{name}_total', _QUEUES, 'universe, queue', durable=True)})", name)
                    for name in ("put", "delivered", "acked", "failed", "dead")
                ),
            ),
            Panel(
                "Dead letters in the range",
                "short",
                (
                    (
                        f"max by (universe, queue) (increase(fastness_queue_dead_total{{{_QUEUES}}}[$__range]))",
                        "{{universe}} {{queue}}",
                    ),
                ),
            ),
            Panel(
                "Leases that expired, redeliveries",
                "ops",
                (
                    (
                        f"sum ({rate('fastness_lease_expired_total', _QUEUES, 'universe, queue', durable=True)})",
                        "expired",
                    ),
                    (rate("fastness_queue_redelivered_total", _QUEUES), "redelivered"),
                ),
                "Workers that crash, or are slower than their leases.",
            ),
            Panel(
                "Time from put to delivery, p99",
                "s",
                (
                    (
                        f"topk(10, {quantile(0.99, 'fastness_queue_dwell_seconds', _QUEUES, 'universe, queue')})",
                        "{{universe}} {{queue}}",
                    ),
                ),
            ),
            Panel(
                "Waiting consumers",
                "short",
                (
                    (f"sum by (queue) (fastness_queue_waiting_consumers{{{_QUEUES}}})", "{{queue}}"),
                    (rate("fastness_consumers_refused_total", _SERVERS), "refused a second"),
                ),
            ),
            Panel(
                "Pushes",
                "ops",
                (
                    (rate("fastness_ingress_pushes_total", _SERVERS, "outcome"), "{{outcome}}"),
                    (rate("fastness_ingress_rejects_total", _SERVERS, "reason"), "refused: {{reason}}"),
                    (rate("fastness_ingress_lost_total", _SERVERS, "reason"), "lost: {{reason}}"),
                ),
            ),
        ),
    ),
    (
        "Locks",
        (
            Panel(
                "Wait for leases and locks, p99",
                "s",
                ((quantile(0.99, "fastness_lock_wait_seconds", _SERVERS, "level"), "{{level}}"),),
            ),
            Panel("Fenced writes", "ops", ((rate("fastness_fenced_total", _SERVERS, "instance"), "{{instance}}"),)),
            Panel(
                "Waits a second",
                "ops",
                ((rate("fastness_lock_wait_seconds_count", _SERVERS, "level"), "{{level}}"),),
            ),
        ),
    ),
    (
        "Storage",
        (
            Panel(
                "Duration of syncs",
                "s",
                (
                    (quantile(0.99, "fastness_sync_seconds", _SERVERS, "instance"), "{{instance}} p99"),
                    (quantile(0.5, "fastness_sync_seconds", _SERVERS, "instance"), "{{instance}} p50"),
                ),
                "RocksDB only.",
            ),
            Panel(
                "Calls of a group commit",
                "short",
                ((quantile(0.99, "fastness_commit_group_size", _SERVERS), "p99"),),
            ),
            Panel(
                "Free disk space",
                "bytes",
                (
                    (f"min by (instance) (fastness_disk_free_bytes{{{_SERVERS}}})", "{{instance}}"),
                    (f"max (fastness_disk_reserve_bytes{{{_SERVERS}}})", "reserve: new data is refused below it"),
                ),
            ),
            Panel("Stored bytes", "bytes", ((largest("fastness_space_bytes", _SERVERS, "kind"), "{{kind}}"),)),
            Panel(
                "Failures of the key space",
                "short",
                (
                    (f"max by (instance) (fastness_database_failed{{{_SERVERS}}})", "{{instance}} has failed"),
                    (f"max by (instance) (fastness_disk_low{{{_SERVERS}}})", "{{instance}} has a full disk"),
                ),
            ),
            Panel(
                "Time since the last collection",
                "s",
                (
                    (
                        f"time() - max by (job) (fastness_gc_last_success_timestamp_seconds{{{_SERVERS}}})",
                        "{{job}}",
                    ),
                ),
            ),
        ),
    ),
    (
        "PostgreSQL",
        (
            Panel(
                "Aborted transactions",
                "ops",
                (
                    (rate("fastness_transaction_conflicts_total", _SERVERS, "instance"), "{{instance}} conflicts"),
                    (rate("fastness_transaction_retries_total", _SERVERS, "instance"), "{{instance}} retries"),
                ),
            ),
            Panel(
                "Waits for locks of other nodes",
                "ops",
                ((rate("fastness_transaction_lock_waits_total", _SERVERS, "instance"), "{{instance}}"),),
            ),
            Panel(
                "Standby",
                "s",
                ((f"max by (instance) (fastness_standby_lag_seconds{{{_SERVERS}}})", "{{instance}} behind"),),
            ),
        ),
    ),
    (
        "Nodes",
        (
            Panel(
                "Nodes",
                "short",
                (
                    (largest("fastness_nodes", _SERVERS, "job"), "{{job}} alive"),
                    (f"sum by (job) (fastness_maintenance_holder{{{_SERVERS}}})", "{{job}} with maintenance"),
                ),
            ),
            Panel(
                "Memory",
                "bytes",
                ((f"max by (instance) (process_resident_memory_bytes{{{_SERVERS}}})", "{{instance}}"),),
            ),
            Panel(
                "Processor", "percentunit", ((rate("process_cpu_seconds_total", _SERVERS, "instance"), "{{instance}}"),)
            ),
        ),
    ),
    (
        "Quotas",
        (
            Panel(
                "Used share of a quota",
                "percentunit",
                (
                    (
                        " / ".join(
                            largest(f"fastness_quota_{name}", _UNIVERSES, "universe, kind")
                            for name in ("used", "limit")
                        ),
                        "{{universe}} {{kind}}",
                    ),
                ),
            ),
            Panel(
                "Used",
                "short",
                ((largest("fastness_quota_used", _UNIVERSES, "universe, kind"), "{{universe}} {{kind}}"),),
            ),
            Panel(
                "Refused by a quota",
                "ops",
                ((rate("fastness_quota_refusals_total", _UNIVERSES, "universe, kind"), "{{universe}} {{kind}}"),),
            ),
        ),
    ),
)


def dashboard() -> dict[str, Any]:
    """The dashboard in Grafana's format."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, charts in ROWS:
        panels.append(_row(len(panels) + 1, title, y))
        y += 1
        for number, chart in enumerate(charts):
            x = number % PER_ROW * (WIDTH // PER_ROW)
            panels.append(_chart(len(panels) + 1, chart, x, y + number // PER_ROW * HEIGHT))
        y += -(-len(charts) // PER_ROW) * HEIGHT
    return {
        "title": "Fastness",
        "uid": "fastness",
        "description": "Queues, calls, locks, storage and nodes of Fastness servers.",
        "tags": ["fastness"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": [_source(), *_variables()]},
        "annotations": {"list": []},
        "links": [],
        "panels": panels,
    }


def _source() -> dict[str, Any]:
    return {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}


def _variables() -> list[dict[str, Any]]:
    queries = {
        "job": "label_values(fastness_calls_in_flight, job)",
        "universe": 'label_values(fastness_queue_messages{job=~"$job"}, universe)',
        "queue": 'label_values(fastness_queue_messages{job=~"$job", universe=~"$universe"}, queue)',
    }
    return [
        {
            "name": name,
            "label": name.capitalize(),
            "type": "query",
            "datasource": {"type": "prometheus", "uid": "${datasource}"},
            "query": {"query": query, "refId": name},
            "definition": query,
            "refresh": 2,
            "sort": 1,
            "multi": True,
            "includeAll": True,
            "allValue": ".*",
            "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
        }
        for name, query in queries.items()
    ]


def _row(id: int, title: str, y: int) -> dict[str, Any]:
    place = {"h": 1, "w": WIDTH, "x": 0, "y": y}
    return {"id": id, "type": "row", "title": title, "collapsed": False, "gridPos": place, "panels": []}


def _chart(id: int, panel: Panel, x: int, y: int) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${datasource}"}
    return {
        "id": id,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.description,
        "datasource": source,
        "gridPos": {"h": HEIGHT, "w": WIDTH // PER_ROW, "x": x, "y": y},
        "fieldConfig": {
            "defaults": {"unit": panel.unit, "min": 0, "custom": {"fillOpacity": 8, "showPoints": "never"}},
            "overrides": [],
        },
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {"refId": chr(ord("A") + number), "datasource": source, "expr": expression, "legendFormat": legend}
            for number, (expression, legend) in enumerate(panel.lines)
        ],
    }


def main() -> None:
    written = json.dumps(dashboard(), indent=2) + "\n"
    if "--check" in sys.argv[1:]:
        if not TARGET.exists() or TARGET.read_text() != written:
            sys.exit(f"{TARGET} is not up to date; run: python tools/make_dashboard.py")
        return
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    TARGET.write_text(written)


if __name__ == "__main__":
    main()

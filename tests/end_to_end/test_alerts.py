"""The alert rules and the dashboard: promtool accepts and tests them, and they name existing metrics and labels."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest
import yaml  # type: ignore[import-untyped]

import make_dashboard

ROOT: Final = Path(__file__).parents[2]
DEPLOY: Final = ROOT / "deploy"
RULES: Final = DEPLOY / "prometheus" / "fastness.rules.yml"
RULE_TESTS: Final = DEPLOY / "prometheus" / "fastness.rules.test.yml"
GUIDE: Final = ROOT / "docs" / "how-to" / "monitor.md"
PROMTOOL: Final = shutil.which("promtool")
FOREIGN: Final = {"up", "ALERTS", "process_resident_memory_bytes", "process_cpu_seconds_total"}
COMMON_LABELS: Final = {"job", "instance", "le", "alertname", "alertstate"}  # Of Prometheus.

_METRIC = re.compile(r"\b((?:fastness|process)_[a-z_]+|up|ALERTS)\b(?:\{([^}]*)\})?")
_ALERT_LIST = re.compile(r"^\| `(fastness_(?!pipeline_)\w+)` \| (\w+)[^|]*\|([^|]*)\|", re.MULTILINE)


def rules() -> list[dict[str, Any]]:
    return list(yaml.safe_load(RULES.read_text())["groups"][0]["rules"])


def documented() -> dict[str, set[str]]:
    """The metrics of docs/metrics.md with their labels, which tests/unit/test_metrics.py compares with the registry."""
    found = _ALERT_LIST.findall((ROOT / "docs" / "metrics.md").read_text())
    known: dict[str, set[str]] = {}
    for name, kind, labels in found:
        names = [f"{name}{end}" for end in ("_bucket", "_sum", "_count")] if kind == "histogram" else [name]
        known |= {each: set(re.findall(r"`(\w+)`", labels)) for each in names}
    return known


def expressions(dashboard: dict[str, Any]) -> list[str]:
    return [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]


def test_dashboards_and_alerts_name_existing_metrics() -> None:
    dashboard = json.loads((DEPLOY / "grafana" / "fastness.json").read_text())
    written = [each["expr"] for each in rules()] + expressions(dashboard)
    written += [each["definition"] for each in dashboard["templating"]["list"] if "definition" in each]
    known = documented()
    assert len(written) > 60
    for expression in written:
        named = _METRIC.findall(expression)
        assert named, expression
        for metric, selected in named:
            if metric in FOREIGN:
                continue
            assert metric in known, f"{metric} is in no table of docs/metrics.md: {expression}"
            labels = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selected))
            assert labels <= known[metric] | COMMON_LABELS, f"{metric} has no such label: {expression}"
        grouped = {label.strip() for by in re.findall(r"by \(([^)]*)\)", expression) for label in by.split(",")}
        available = set().union(*(known.get(metric, set()) for metric, _ in named)) | COMMON_LABELS
        assert grouped <= available, expression


def test_the_dashboard_is_made_from_its_table_and_has_every_row() -> None:
    dashboard = json.loads(make_dashboard.TARGET.read_text())
    assert dashboard == make_dashboard.dashboard()
    rows = [panel["title"] for panel in dashboard["panels"] if panel["type"] == "row"]
    assert rows == ["Calls", "Queues", "Locks", "Storage", "PostgreSQL", "Nodes", "Quotas"]
    places = [
        (panel["gridPos"]["x"] + x, panel["gridPos"]["y"] + y)
        for panel in dashboard["panels"]
        for x in range(panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["h"])
    ]
    assert len(places) == len(set(places)), "panels overlap"
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def test_every_alert_has_a_severity_a_summary_and_a_section_of_the_guide() -> None:
    text = GUIDE.read_text()
    sections = re.findall(r"^### (Fastness\w+)$", text, re.MULTILINE)
    assert sections == [each["alert"] for each in rules()]
    for each in rules():
        assert each["labels"]["severity"] in ("critical", "warning")
        assert each["annotations"]["summary"]
        assert each["annotations"]["runbook"] == f"docs/how-to/monitor.md#{each['alert'].lower()}"
    assert set(re.findall(r"`(fastness_\w+)`", text)) <= {*documented(), *_histograms()}


def _histograms() -> set[str]:
    return {name.removesuffix("_bucket") for name in documented() if name.endswith("_bucket")}


def test_every_alert_can_fire_and_stay_silent() -> None:
    """The tests of the rules have each alert, and in both cases each of its metrics."""
    firing, silent = yaml.safe_load(RULE_TESTS.read_text())["tests"]
    expected = firing["promql_expr_test"][0]["exp_samples"]
    assert [re.findall('"(.*)"', each["labels"])[0] for each in expected] == [each["alert"] for each in rules()]
    metrics = {metric for each in rules() for metric, _ in _METRIC.findall(each["expr"])}
    for case in (firing, silent):
        assert {_METRIC.findall(each["series"])[0][0] for each in case["input_series"]} == metrics
    assert [each["exp_samples"] for each in silent["promql_expr_test"]] == [[], []]


@pytest.mark.skipif(PROMTOOL is None, reason="no promtool on the path; apt-get install prometheus")
@pytest.mark.parametrize("words", [("check", "rules", RULES.name), ("test", "rules", RULE_TESTS.name)])
def test_promtool_accepts_and_tests_the_rules(words: tuple[str, ...]) -> None:
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, *words], cwd=RULES.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(PROMTOOL is None, reason="no promtool on the path; apt-get install prometheus")
def test_promtool_notices_an_alert_that_does_not_fire(tmp_path: Path) -> None:
    assert PROMTOOL is not None
    for file in (RULES, RULE_TESTS):
        (tmp_path / file.name).write_text(file.read_text().replace("fastness_disk_low == 1", "fastness_disk_low == 7"))
    words = [PROMTOOL, "test", "rules", RULE_TESTS.name]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode != 0

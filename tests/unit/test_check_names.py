"""The name check finds names of Fastness that do not exist, and the documents pass it."""

import pytest

import check_names
from tests.support.failures import Failures

RIGHT = """# Names that exist

Call `fastness queue put jobs BODY --delay 5`, `queue stats`, `fastness --url URL top` or `fastness push bob topic`. The
option `--delay` has no variable, but `FASTNESS_URL` is one. The setting `log_format` may be `log_format = "json"`.
Watch `fastness_request_seconds_bucket`, ask for `GET /v1/queues/NAME` or `/v1/queues`, and run `make lint`. Of other
products: `celery --pool threads`, `sudo -u fastness ls`, `synchronous_commit = off`.

```sh
id=$(fastness queue put jobs "$(cat body.json)" --keep-result)   # fastness takes --no-such-option in a comment
FASTNESS_TOKEN=x fastness queue get jobs --wait 20 | grep fastness && docker run fastness serve --port 1
fastness explain -- --no-such-option
```

```toml
port = 9440

[tls]
cert = "server.pem"
```
"""


def problems(text: str) -> list[str]:
    return list(check_names.problems_of(text))


def test_names_that_exist_pass() -> None:
    assert problems(RIGHT) == []


def test_a_name_that_does_not_exist_is_found_with_its_line() -> None:
    failures = Failures()
    for wrong, problem in [
        ("`fastness queue fetch jobs`", "`fastness queue` has no command fetch"),
        ("`fastness fetch`", "`fastness` has no command fetch"),
        ("`fastness queue put jobs x --forever`", "`fastness queue put` has no option --forever"),
        ("`queue put jobs x --forever`", "`fastness queue put` has no option --forever"),
        ("`queue fetch`", "has no command fetch"),
        ("`--snapshot-every`", "no command has the option --snapshot-every"),
        ("`--snapshot-every 7`, too", "no command has the option --snapshot-every"),
        ("```sh\nfastness serve --data memory: \\\n  --forever &\n```", "`fastness serve` has no option --forever"),
        ('```sh\nid="$(fastness queue fetch jobs)"\n```', "`fastness queue` has no command fetch"),
        ("    while fastness queue fetch; do true; done", "`fastness queue` has no command fetch"),
        ("`FASTNESS_HOURS`", "no variable is called FASTNESS_HOURS"),
        ('`log_fromat = "json"`', "no setting is called log_fromat"),
        ("the setting `log_fromat`", "no setting is called log_fromat"),
        ('```toml\nlog_fromat = "json"\n```', "no setting is called log_fromat"),
        ("`fastness_queue_hours_total`", "no metric is called fastness_queue_hours_total"),
        ("`POST /v1/enqueue`", "no endpoint is called POST /v1/enqueue"),
        ("`/v1/enqueue/…`", "no endpoint begins with /v1/enqueue"),
        ("`make everything`", "no target of make is called everything"),
    ]:
        with failures.of((wrong, problem)):
            [found] = problems(f"# A page\n\n{wrong}\n")
            assert problem in found
            assert found.startswith("4: " if wrong.startswith("```") else "3: ")
    failures.check()


def test_the_names_in_the_documents_exist(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        check_names.main()
    assert ended.value.code == 0, capsys.readouterr().out

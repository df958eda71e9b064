"""Settings from a file, the environment and flags; errors name their source."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from fastness.errors import InvalidArgument, InvalidName, PathUnusable
from fastness.limits import WAITING_CONSUMERS_MAX
from fastness.server.settings import Settings
from tests.support.failures import Failures


def load(
    flags: dict[str, Any] | None = None, environment: dict[str, str] | None = None, file: Path | None = None
) -> Settings:
    return Settings.load(flags, file=file, environment=environment or {})


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "fastness.toml"


def test_default_server_listens_on_loopback() -> None:
    assert load() == Settings()
    assert (load().host, load().port, load().tokens, load().drain_seconds) == ("127.0.0.1", 9440, False, 10.0)


def test_environment_overrides_the_file_and_flags_override_both(file: Path) -> None:
    file.write_text('port = 1\nhost = "::1"\ndrain_seconds = 1\n')
    environment = {"FASTNESS_PORT": "2", "FASTNESS_HOST": "127.0.0.2"}
    settings = load({"port": 3}, environment, file)
    assert (settings.port, settings.host, settings.drain_seconds) == (3, "127.0.0.2", 1.0)


def test_missing_flag_overrides_nothing() -> None:
    assert load({"port": None}, {"FASTNESS_PORT": "2"}).port == 2


def test_empty_variable_is_ignored() -> None:
    assert load(environment={"FASTNESS_PORT": ""}).port == 9440


def test_environment_may_name_the_file(file: Path) -> None:
    file.write_text("port = 5")
    assert load(environment={"FASTNESS_CONFIG": str(file)}).port == 5


def test_tables_are_prefixes_of_keys(file: Path) -> None:
    file.write_text('[tls]\ncert = "a"\nkey = "b"\n[queue]\nmax-consumers = 7\n')
    settings = load(file=file)
    assert (settings.tls_cert, settings.tls_key, settings.queue_max_consumers) == ("a", "b", 7)
    assert settings.tls


def test_booleans_are_parsed() -> None:
    for text, value in {"on": True, "YES": True, "1": True, "off": False, "false": False}.items():
        assert load(environment={"FASTNESS_TOKENS": text}).tokens is value, text
        assert load({"tokens": text}).tokens is value, text


def test_flags_may_have_dashes() -> None:
    assert load({"--drain-seconds": "3"}).drain_seconds == 3.0


def test_error_names_the_source_of_its_value(file: Path) -> None:
    failures = Failures()
    cases: list[tuple[dict[str, Any], dict[str, str], str, list[str]]] = [
        ({"prot": 1}, {}, "", ["prot", "the flags (--prot)", "did you mean port"]),
        ({}, {"FASTNESS_DRAIN_SECOND": "1"}, "", ["FASTNESS_DRAIN_SECOND", "did you mean drain_seconds"]),
        ({}, {"FASTNESS_QUEUE_MAX_CONSUMER": "1"}, "", ["did you mean queue_max_consumers"]),
        ({}, {}, "tokns = true", ["tokns", "fastness.toml", "did you mean tokens"]),
        ({}, {}, "[tls]\ncrt = 'a'", ["tls_crt", "did you mean tls_cert"]),
        ({"port": "many"}, {}, "", ["port='many'", "the flags (--port)", "int"]),
        ({"port": 70_000}, {}, "", ["the flags (--port)", "65535"]),
        ({}, {"FASTNESS_PORT": "-1"}, "", ["FASTNESS_PORT", ">= 0"]),
        ({}, {}, 'port = "9440"', ["fastness.toml", "int"]),
        ({}, {"FASTNESS_LOG_FORMAT": "xml"}, "", ["FASTNESS_LOG_FORMAT", "xml"]),
        ({"drain_seconds": "nan"}, {}, "", ["drain_seconds", "--drain-seconds"]),
        ({"drain_seconds": float("inf")}, {}, "", ["drain_seconds"]),
        ({"queue_poll_interval_seconds": 0}, {}, "", ["> 0"]),
        ({"tokens": "perhaps"}, {}, "", ["tokens='perhaps'"]),
        ({"tls_cert": "a"}, {}, "", ["tls_key"]),
        ({"tls_client_ca": "a"}, {}, "", ["tls_cert"]),
        ({"host": ""}, {}, "", ["host is empty"]),
        ({}, {}, "port =", ["not valid TOML"]),
        ({}, {}, f"port = {'[' * 10_000}", ["not valid TOML"]),
        ({}, {}, f"[{'a.' * 10_000}a]", ["not valid TOML"]),
        ({"sqs_anonymous": True}, {}, "", ["give --sqs"]),
        ({"sqs": False, "sqs_port": 9324}, {}, "", ["give --sqs"]),
        ({"sqs": True, "sqs_url": "sqs.example"}, {}, "", ["sqs_url"]),
        ({"sqs": True, "sqs_region": "US East"}, {}, "", ["sqs_region"]),
        ({"sqs": True, "sqs_universe": ""}, {}, "", ["universe"]),
        ({"sqs_port": 65_536}, {}, "", ["sqs_port"]),
    ]
    for flags, environment, text, words in cases:
        with failures.of((flags, environment, text)):
            file.write_text(text)
            with pytest.raises((InvalidArgument, InvalidName)) as raised:
                load(flags, environment, file)
            for word in words:
                assert word in str(raised.value)
    failures.check()


def test_variables_of_clients_and_commands_are_ignored() -> None:
    names = ("URL", "TOKEN", "QUEUE_MESSAGE_ID", "FENCE", "LEASE_ID", "LAKE", "LINEAGE", "LINEAGE_TOKEN")
    for name in names:
        assert load(environment={f"FASTNESS_{name}": "x"}) == Settings(), name


def test_missing_file_is_an_error(file: Path) -> None:
    with pytest.raises(PathUnusable, match=r"fastness\.toml"):
        load(file=file)


def test_settings_become_options_of_the_plane() -> None:
    settings = load(
        {
            "objects": "memory:",
            "compact_every_seconds": 5,
            "queue_max_consumers": 9,
            "queue_poll_interval_seconds": 1,
            "queue_poll_jitter_seconds": 0,
            "queue_resilient_poll_interval_seconds": 60,
        }
    )
    options = settings.options
    assert (options.objects, options.compact_every_seconds) == ("memory:", 5.0)
    assert options.consumers is not None
    assert (options.consumers.consumers_max, options.consumers.poll_seconds) == (9, 1.0)
    defaults = Settings().options.consumers
    assert defaults is not None
    assert defaults.consumers_max == WAITING_CONSUMERS_MAX
    assert (options.consumers.poll_jitter_seconds, options.consumers.resilient_poll_seconds) == (0.0, 60.0)


def test_default_of_every_setting_is_valid() -> None:
    for field in msgspec.structs.fields(Settings):
        assert msgspec.convert(field.default, field.type) == field.default, field.name


def test_a_port_of_its_own_turns_sqs_on() -> None:
    assert not Settings.load(environment={}).sqs_options.enabled
    assert Settings.load({"sqs": True}, environment={}).sqs_options.enabled
    options = Settings.load(environment={"FASTNESS_SQS_PORT": "9324"}).sqs_options
    assert (options.enabled, options.port, options.region, options.universe) == (True, 9324, "us-east-1", "main")

"""Key spaces and object stores together: every backend with a local folder and with S3."""

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import boto3
import pytest
from moto.server import ThreadedMotoServer

from fastness.backends.objects import ObjectStore, open_objects
from fastness.kv import Database
from fastness.testing.conformance.stores import STORE_CHECKS, StoreCheck

_buckets = count()
KEYS = {"aws_access_key_id": "test", "aws_secret_access_key": "test"}


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture(params=["dir", "s3"])
def objects(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    if request.param == "dir":
        return open_objects(f"dir:{tmp_path / 'objects'}")
    endpoint = request.getfixturevalue("s3")
    bucket = f"stores-{next(_buckets)}"
    boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1", **KEYS).create_bucket(Bucket=bucket)
    return open_objects(
        f"s3://{bucket}",
        endpoint=endpoint,
        access_key_id="test",
        secret_access_key="test",
        region="us-east-1",
        client_options={"allow_http": True},
    )


@pytest.mark.parametrize("check", STORE_CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_conformance(check: StoreCheck, open_database: Callable[..., Database], objects: ObjectStore) -> None:
    with open_database() as database:
        check(database, objects)

"""The conformance suite against an S3 server that is already there: docker/compose.yaml's MinIO, or any other."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable

import pytest

from cloudckpt.config import MIB, Config
from cloudckpt.store.base import Store
from cloudckpt.store.resolve import resolve
from tests.store.conformance import StoreConformance

ENDPOINT_URL = os.environ.get("CLOUDCKPT_TEST_S3_ENDPOINT")

if ENDPOINT_URL is None:
    pytest.skip("CLOUDCKPT_TEST_S3_ENDPOINT is not set; `make test-compose` sets it", allow_module_level=True)


class GivenServer(StoreConformance):
    engine = "auto"
    # MinIO does; a server that stands in for it may not.
    honours_conditions = os.environ.get("CLOUDCKPT_TEST_S3_CONDITIONS", "yes") == "yes"

    @pytest.fixture
    def make_store(self) -> Callable[[], Store]:
        options = {
            "key": os.environ["CLOUDCKPT_TEST_S3_KEY"],
            "secret": os.environ["CLOUDCKPT_TEST_S3_SECRET"],
            "endpoint_url": ENDPOINT_URL,
        }
        root = f"s3://{os.environ['CLOUDCKPT_TEST_S3_BUCKET']}/{secrets.token_hex(8)}"
        config = Config(engine=self.engine, part_bytes=5 * MIB, retry_deadline_s=5.0, request_timeout_s=20.0)
        return lambda: resolve(root, options, config)


class TestObstore(GivenServer):
    pass


class TestS3fs(GivenServer):
    engine = "fsspec"

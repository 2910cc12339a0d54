"""The conformance suite against real S3 servers, by both engines."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import s3fs

from cloudckpt.config import MIB, Config
from cloudckpt.store.base import Store
from cloudckpt.store.resolve import resolve
from tests.servers.process import S3Server
from tests.store.conformance import StoreConformance, keys

CONFIG = Config(part_bytes=5 * MIB, retry_deadline_s=5.0, request_timeout_s=20.0)


class S3Conformance(StoreConformance):
    engine = "auto"

    @pytest.fixture
    def server(self) -> S3Server:
        raise NotImplementedError

    @pytest.fixture
    def bucket(self, server: S3Server) -> str:
        # Dots: no certificate and no wildcard DNS entry would serve it as a host name.
        return server.make_bucket(f"ckpt.{secrets.token_hex(4)}-x")

    @pytest.fixture
    def make_store(self, server: S3Server, bucket: str) -> Callable[[], Store]:
        config = Config(**{**vars(CONFIG), "engine": self.engine})
        return lambda: resolve(f"s3://{bucket}/a b/50%+=ü", server.storage_options, config)

    @pytest.fixture(autouse=True)
    def look_for_parts(self, server: S3Server, bucket: str) -> None:
        self._server, self._bucket = server, bucket

    def check_no_leftovers(self, store: Store) -> None:
        client = self._server.client()
        try:
            assert client.list_multipart_uploads(Bucket=self._bucket).get("Uploads", []) == []
        finally:
            client.close()


class OnJuicefs(S3Conformance):
    honours_conditions = False

    @pytest.fixture
    def server(self, juicefs_s3: S3Server) -> S3Server:
        return juicefs_s3


class OnMoto(S3Conformance):
    @pytest.fixture
    def server(self, moto_s3: S3Server) -> S3Server:
        return moto_s3


class TestObstoreOnJuicefs(OnJuicefs):
    pass


class TestObstoreOnMoto(OnMoto):
    pass


class TestS3fsOnJuicefs(OnJuicefs):
    engine = "fsspec"


class TestS3fsOnMoto(OnMoto):
    engine = "fsspec"


class TestPassedInFilesystem(OnJuicefs):
    """The user's own instance, with its caches on."""

    @pytest.fixture
    def make_store(self, server: S3Server, bucket: str) -> Callable[[], Store]:
        def make() -> Store:
            filesystem = s3fs.S3FileSystem(**server.storage_options, use_listings_cache=True, skip_instance_cache=True)
            return resolve(f"s3://{bucket}/a b", {"fs": filesystem}, CONFIG)

        return make


@pytest.mark.parametrize("engine", ["auto", "fsspec"])
def test_the_bucket_itself_may_be_the_root(juicefs_s3: S3Server, engine: str):
    bucket = juicefs_s3.make_bucket(f"root-{engine}")
    for url in (f"s3://{bucket}", f"s3://{bucket}/"):
        store = resolve(url, juicefs_s3.storage_options, Config(engine=engine))
        store.put("a/b", b"1")
        store.put("top", b"1")
        assert keys(store) == ["a/b", "top"]
        assert keys(store, "a") == ["a/b"]
        assert list(store.common_prefixes("")) == ["a"]
        assert store.delete(["a/b", "top"]) == {}
        store.close()


def test_listings_go_past_one_page(juicefs_s3: S3Server):
    bucket = juicefs_s3.make_bucket("pages")
    names = [f"run/{index // 400}/{index:05d}" for index in range(1100)]
    stores = [
        resolve(f"s3://{bucket}", juicefs_s3.storage_options, Config(engine=engine)) for engine in ("auto", "fsspec")
    ]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda key: stores[0].put(key, b"1"), names))
    for store in stores:
        assert keys(store, "run") == names
        assert list(store.common_prefixes("run")) == ["0", "1", "2"]
    assert stores[0].delete(names) == {}
    for store in stores:
        assert keys(store) == []
        store.close()

"""Where endpoint, region and credentials come from: the options, else boto3's chain."""

from __future__ import annotations

import datetime as dt
import ipaddress
import re
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from cloudckpt.config import Config
from cloudckpt.errors import NotFoundError, StoreError
from cloudckpt.store.base import Store
from cloudckpt.store.resolve import resolve
from cloudckpt.store.s3_options import S3Options, parse, with_boto3_chain
from tests.servers.faults import ALWAYS, Fault, FaultyS3, faulty_s3
from tests.servers.process import S3Server

QUICK = {"retry_deadline_s": 3.0, "request_timeout_s": 5.0}


@pytest.fixture
def server() -> Iterator[FaultyS3]:
    with faulty_s3() as running:
        yield running


@pytest.fixture(params=["auto", "fsspec"])
def config(request: pytest.FixtureRequest) -> Config:
    return Config(engine=request.param, **QUICK)


@pytest.fixture
def opened() -> Iterator[list[Store]]:
    stores: list[Store] = []
    yield stores
    for store in stores:
        store.close()


def signed_with(server: FaultyS3) -> list[tuple[str, str]]:
    """Key id and region of every request."""
    found = [
        re.search(r"Credential=([^/]+)/\d+/([^/]+)/s3/", request.headers.get("authorization", ""))
        for request in server.requests
    ]
    return [(match[1], match[2]) for match in found if match]


def test_everything_from_the_environment(juicefs_s3: S3Server, monkeypatch, config: Config, opened: list[Store]):
    bucket = juicefs_s3.make_bucket(f"env-{config.engine}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", juicefs_s3.key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", juicefs_s3.secret)
    monkeypatch.setenv("AWS_ENDPOINT_URL", juicefs_s3.endpoint_url)
    store = resolve(f"s3://{bucket}/run", config=config)
    opened.append(store)
    store.put("key", b"1")
    assert store.get("key") == b"1"


@pytest.mark.parametrize("variable", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"])
def test_the_option_wins_over_the_environment(server: FaultyS3, monkeypatch, config, opened, variable: str):
    monkeypatch.setenv(variable, "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-test-1")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "of another key")
    opened.append(resolve("s3://bkt/run", server.storage_options, config))
    opened[0].put("key", b"1")
    assert signed_with(server) == [("test-key", "eu-test-1")]
    assert "x-amz-security-token" not in server.requests[0].headers


def test_the_variable_for_s3_wins_over_the_general_one(server: FaultyS3, monkeypatch, config, opened):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", server.endpoint_url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "env-key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "env-secret")
    opened.append(resolve("s3://bkt/run", config=config))
    opened[0].put("key", b"1")
    assert signed_with(server) == [("env-key", "us-east-1")]


def test_a_profile_brings_endpoint_region_and_credentials(
    server: FaultyS3, tmp_path: Path, monkeypatch, config, opened
):
    settings = tmp_path / "config"
    settings.write_text(
        f"[profile lab]\nregion = lab-1\nendpoint_url = {server.endpoint_url}\n"
        "aws_access_key_id = lab-key\naws_secret_access_key = lab-secret\n"
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", str(settings))
    opened.append(resolve("s3://bkt/run", {"profile": "lab"}, config))
    opened[0].put("key", b"1")
    assert signed_with(server) == [("lab-key", "lab-1")]


def test_client_kwargs_do_as_well(server: FaultyS3, config, opened):
    options = {
        "client_kwargs": {
            "endpoint_url": server.endpoint_url,
            "region_name": "r-1",
            "aws_access_key_id": "a",
            "aws_secret_access_key": "b",
        }
    }
    opened.append(resolve("s3://bkt/run", options, config))
    opened[0].put("key", b"1")
    assert signed_with(server) == [("a", "r-1")]


def test_anonymous_requests_are_not_signed(server: FaultyS3, config, opened):
    opened.append(resolve("s3://bkt/run", {"anon": True, "endpoint_url": server.endpoint_url}, config))
    opened[0].put("key", b"1")
    assert "authorization" not in server.requests[0].headers


def test_a_custom_endpoint_may_have_a_path_and_buckets_may_have_dots(server: FaultyS3, config, opened):
    """duckdb/duckdb-httpfs#377."""
    options = {**server.storage_options, "endpoint_url": f"{server.endpoint_url}/base/path"}
    opened.append(resolve("s3://a.b-c/run", options, config))
    with pytest.raises(NotFoundError):
        opened[0].get("key")
    assert [request.target.partition("?")[0] for request in server.requests] == ["/base/path/a.b-c/run/key"]


def test_no_credentials_at_all_is_told(server: FaultyS3, config, opened):
    with pytest.raises(StoreError, match=r"(?i)credentials") as caught:
        resolve("s3://bkt/run", {"endpoint_url": server.endpoint_url}, config).get("key")
    assert not caught.value.retryable
    assert server.requests == []


@pytest.mark.parametrize("wrong", ["key", "secret"])
def test_wrong_credentials_fail_without_retries(juicefs_s3: S3Server, config, opened, wrong: str):
    bucket = juicefs_s3.make_bucket(f"wrong-{wrong}-{config.engine}")
    options = {**juicefs_s3.storage_options, wrong: "hunter2"}
    opened.append(resolve(f"s3://{bucket}/run", options, config))
    for call in (lambda: opened[0].get("key"), lambda: opened[0].put("key", b"1")):
        with pytest.raises(StoreError, match=r"InvalidAccessKeyId|SignatureDoesNotMatch") as caught:
            call()
        assert not caught.value.retryable
        assert wrong == "key" or "hunter2" not in str(caught.value)
    assert opened[0].counts.retries == 0


def test_rotated_credentials_are_read_again(server: FaultyS3, tmp_path: Path, monkeypatch, config, opened):
    shared = tmp_path / "credentials"
    text = "[default]\naws_access_key_id = {0}\naws_secret_access_key = {0}\naws_session_token = {0}\n"
    shared.write_text(text.format("old"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(shared))
    opened.append(resolve("s3://bkt/run", {"endpoint_url": server.endpoint_url}, config))
    opened[0].put("key", b"1")
    shared.write_text(text.format("new"))
    server.faults = [Fault("status", status=400, code="ExpiredToken")]
    assert opened[0].get("key") == b"1"
    assert [key for key, _ in signed_with(server)] == ["old", "old", "new"]


def test_expired_credentials_that_were_given_are_not_retried(server: FaultyS3, config, opened):
    opened.append(resolve("s3://bkt/run", {**server.storage_options, "token": "t"}, config))
    server.faults = [Fault("status", status=400, code="ExpiredToken", times=ALWAYS)]
    with pytest.raises(StoreError, match="ExpiredToken") as caught:
        opened[0].get("key")
    assert not caught.value.retryable
    assert len(server.requests) == 1


def test_options_are_read_into_plain_fields():
    options = parse(
        {
            "username": "k",
            "password": "s",
            "use_ssl": False,
            "requester_pays": True,
            "client_kwargs": {"verify": "/ca.pem", "endpoint_url": None},
            "config_kwargs": {
                "s3": {"addressing_style": "virtual", "payload_signing_enabled": True},
                "retries": {},
                "signature_version": "s3v4",
                "region_name": "r",
            },
            "use_listings_cache": True,
            "token": None,
        }
    )
    assert options == S3Options(
        key="k",
        secret="s",
        use_ssl=False,
        requester_pays=True,
        verify="/ca.pem",
        addressing_style="virtual",
        payload_signing=True,
        region="r",
    )
    assert "'s'" not in repr(options)


def test_what_cannot_be_translated_is_named():
    options = parse(
        {
            "version_aware": True,
            "client_kwargs": {"api_version": "x"},
            "config_kwargs": {"proxies": {}, "s3": {"use_dualstack_endpoint": True}, "signature_version": "s3"},
        }
    )
    assert set(options.unknown) == {
        "version_aware",
        "client_kwargs.api_version",
        "config_kwargs.proxies",
        "config_kwargs.s3.use_dualstack_endpoint",
        "config_kwargs.signature_version",
    }


def test_a_ca_bundle_and_the_s3_section_come_from_the_chain(tmp_path: Path, monkeypatch):
    settings = tmp_path / "config"
    settings.write_text("[default]\ns3 =\n  addressing_style = virtual\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(settings))
    monkeypatch.setenv("AWS_CA_BUNDLE", "/ca.pem")
    monkeypatch.setenv("AWS_REGION", "r-2")
    found = with_boto3_chain(S3Options())
    assert (found.verify, found.addressing_style, found.region) == ("/ca.pem", "virtual", "r-2")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A private CA's certificate for 127.0.0.1, and its key beside it."""
    folder = tmp_path_factory.mktemp("tls")
    day, key = dt.timedelta(days=1), ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    built = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(dt.datetime.now(dt.UTC) - day)
        .not_valid_after(dt.datetime.now(dt.UTC) + day)
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    plain = serialization.NoEncryption()
    (folder / "ca.pem").write_bytes(built.public_bytes(serialization.Encoding.PEM))
    (folder / "key.pem").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
    )
    return folder / "ca.pem"


@pytest.fixture
def tls_server(certificate: Path) -> Iterator[FaultyS3]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, certificate.with_name("key.pem"))
    with faulty_s3(context) as running:
        yield running


@pytest.mark.parametrize("how", ["option", "variable", "off"])
def test_a_private_ca(tls_server: FaultyS3, certificate: Path, monkeypatch, config, opened, how: str):
    options = dict(tls_server.storage_options)
    if how == "option":
        options["client_kwargs"] = {"verify": str(certificate)}
    elif how == "off":
        options["client_kwargs"] = {"verify": False}
    else:
        monkeypatch.setenv("AWS_CA_BUNDLE", str(certificate))
    opened.append(resolve("s3://bkt/run", options, config))
    opened[0].put("key", b"1")
    assert opened[0].get("key") == b"1"


def test_an_unknown_certificate_is_refused_without_retries(tls_server: FaultyS3, config, opened):
    opened.append(resolve("s3://bkt/run", tls_server.storage_options, config))
    with pytest.raises(StoreError, match=r"(?i)certificate") as caught:
        opened[0].get("key")
    assert not caught.value.retryable
    assert tls_server.requests == []

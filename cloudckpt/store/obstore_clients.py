"""Native clients from a URL and the ``storage_options`` that fsspec's filesystems take."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from obstore.store import AzureStore, GCSStore, S3Store

from cloudckpt.config import MIB, Config
from cloudckpt.store.paths import mask
from cloudckpt.store.s3_options import S3Options, parse, with_boto3_chain

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig

_GCS = {"service_account": "service_account", "service_account_key": "service_account_key"}
_AZURE = {
    "account_name": "account_name",
    "account_key": "account_key",
    "sas_token": "sas_token",
    "tenant_id": "tenant_id",
    "client_id": "client_id",
    "client_secret": "client_secret",
    "endpoint_url": "endpoint",
    "use_emulator": "use_emulator",
}


@dataclass(frozen=True)
class Clients:
    """``single`` never retries (the caller does); ``upload`` retries the parts of a multipart upload."""

    single: S3Store | GCSStore | AzureStore
    upload: S3Store | GCSStore | AzureStore
    bucket: str
    identity: str
    """Endpoint and bucket, for caches of what a server can do."""
    watch_credentials: Callable[[], Callable[[], bool]] | None = None
    """See `ChainCredentials.watch`; None for credentials that were given."""


def understands(scheme: str, url: str, storage_options: Mapping[str, Any]) -> bool:
    """Whether URL and options can be translated; else fsspec's own filesystem has to take them."""
    if "@" in url.split("://", 1)[1].partition("/")[0]:
        return False  # abfs://container@account.dfs...: adlfs reads the account out of it
    if scheme in ("s3", "s3a"):
        return not parse(storage_options).unknown
    return set(storage_options) <= set(_GCS if scheme in ("gs", "gcs") else _AZURE)


def make_clients(scheme: str, bucket: str, storage_options: Mapping[str, Any], config: Config) -> Clients:
    if scheme in ("s3", "s3a"):
        return _make_s3(bucket, parse(storage_options), config)
    names = _GCS if scheme in ("gs", "gcs") else _AZURE
    options: dict[str, Any] = {names[name]: value for name, value in storage_options.items()}
    endpoint = str(options.get("endpoint") or "")
    # obstore takes the same arguments for these two; only the class differs.
    make: Any = GCSStore if scheme in ("gs", "gcs") else AzureStore
    allow_http = endpoint.startswith("http://")
    single = make(
        bucket, **options, client_options=_client_options(config, allow_http=allow_http), retry_config=_NO_RETRY
    )
    upload = make(
        bucket,
        **options,
        client_options=_client_options(config, allow_http=allow_http, nbytes=config.part_bytes),
        retry_config=_part_retry(config),
    )
    account = options.get("account_name") or os.environ.get("AZURE_STORAGE_ACCOUNT_NAME", "")
    return Clients(single, upload, bucket, f"{scheme}|{endpoint}|{account}|{bucket}")


_NO_RETRY: RetryConfig = {"max_retries": 0}
SLOWEST_BYTES_PER_S = MIB
"""What one connection is thought to send at least, beyond the time that it may stall."""


def _part_retry(config: Config) -> RetryConfig:
    return {
        # The deadline ends it; the number only has to be out of the way.
        "max_retries": 1000,
        "retry_timeout": timedelta(seconds=config.retry_deadline_s),
        "backoff": {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=10), "base": 2},
    }


def _client_options(config: Config, *, allow_http: bool = False, nbytes: int = 0) -> ClientConfig:
    stall_s = config.request_timeout_s
    return {
        "allow_http": allow_http,
        "connect_timeout": timedelta(seconds=stall_s),
        # While a body of ``nbytes`` is sent nothing is read, so this has to cover all of the sending.
        "read_timeout": timedelta(seconds=stall_s + nbytes / SLOWEST_BYTES_PER_S),
        # For the whole request with its body: a slow one that moves is no failure.
        "timeout": timedelta(seconds=max(config.retry_deadline_s, 10 * config.request_timeout_s)),
    }


def _make_s3(bucket: str, given: S3Options, config: Config) -> Clients:
    options = with_boto3_chain(given)
    endpoint = _endpoint(bucket, options)
    tls: ClientConfig = {"allow_http": (endpoint or "").startswith("http://")}
    if options.verify is False:
        tls["allow_invalid_certificates"] = True
    elif isinstance(options.verify, str):
        tls["root_certificate"] = Path(options.verify).read_bytes()
    arguments: dict[str, Any] = {
        "region": options.region or "us-east-1",
        "virtual_hosted_style_request": options.addressing_style == "virtual",
        # Hashing the body costs 0.6 CPU s/GiB, twice as much as all the rest of an upload. TLS
        # protects it already, and every chunk has a checksum of its own, which readers verify.
        "unsigned_payload": not options.payload_signing,
        # DeleteObjects is not the same everywhere: JuiceFS' gateway and others refuse obstore's.
        "disable_bulk_delete": True,
    }
    if endpoint is not None:
        # obstore prefers the variable AWS_ENDPOINT_URL_S3 to its own "endpoint".
        arguments["endpoint"] = arguments["aws_endpoint_url_s3"] = endpoint
    if options.requester_pays:
        arguments["request_payer"] = True
    watch_credentials = _add_credentials(arguments, options)
    return Clients(
        single=S3Store(bucket, retry_config=_NO_RETRY, client_options={**_client_options(config), **tls}, **arguments),
        upload=S3Store(
            bucket,
            retry_config=_part_retry(config),
            client_options={**_client_options(config, nbytes=config.part_bytes), **tls},
            **arguments,
        ),
        bucket=bucket,
        identity=f"s3|{mask(endpoint or '')}|{bucket}",
        watch_credentials=watch_credentials,
    )


def _endpoint(bucket: str, options: S3Options) -> str | None:
    endpoint = options.endpoint_url
    if endpoint is None:
        return None if options.use_ssl else f"http://s3.{options.region or 'us-east-1'}.amazonaws.com"
    if "://" not in endpoint:
        endpoint = f"{'https' if options.use_ssl else 'http'}://{endpoint}"
    endpoint = endpoint.rstrip("/")
    if options.addressing_style == "virtual":
        # obstore then wants the bucket to be in the endpoint's host already.
        parts = urlsplit(endpoint)
        return parts._replace(netloc=f"{bucket}.{parts.netloc}").geturl()
    return endpoint


def _add_credentials(arguments: dict[str, Any], options: S3Options) -> Callable[[], Callable[[], bool]] | None:
    if options.anon:
        arguments["skip_signature"] = True
        return None
    if options.key is not None and options.secret is not None:
        # Not by obstore's own options: it would add AWS_SESSION_TOKEN, which goes with another key.
        given = {
            "access_key_id": options.key,
            "secret_access_key": options.secret,
            "token": options.token,
            "expires_at": None,
        }
        arguments["credential_provider"] = lambda: given
        return None
    from cloudckpt.store.credentials import ChainCredentials

    provider = ChainCredentials(options.profile)
    provider()  # having none is told here, in boto3's words, and not by the first request
    arguments["credential_provider"] = provider
    return provider.watch

"""The ``storage_options`` of s3fs, read into plain fields; and what boto3's chain adds to them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

_CREDENTIALS = {
    "key": "key",
    "username": "key",
    "secret": "secret",
    "password": "secret",
    "token": "token",
    "profile": "profile",
    "anon": "anon",
    "endpoint_url": "endpoint_url",
    "use_ssl": "use_ssl",
    "requester_pays": "requester_pays",
}
_CLIENT_KWARGS = {
    "endpoint_url": "endpoint_url",
    "region_name": "region",
    "verify": "verify",
    "use_ssl": "use_ssl",
    "aws_access_key_id": "key",
    "aws_secret_access_key": "secret",
    "aws_session_token": "token",
}
_S3_SECTION = {"addressing_style": "addressing_style", "payload_signing_enabled": "payload_signing"}
# These tune s3fs' own caches, botocore's own retries and the like: nothing to translate.
_WITHOUT_MEANING_HERE = {
    "use_listings_cache",
    "listings_expiry_time",
    "max_paths",
    "skip_instance_cache",
    "default_block_size",
    "default_fill_cache",
    "default_cache_type",
    "cache_regions",
    "max_concurrency",
    "fixed_upload_size",
}
_CONFIG_KWARGS_WITHOUT_MEANING_HERE = {
    "retries",
    "max_pool_connections",
    "connect_timeout",
    "read_timeout",
    "request_checksum_calculation",
    "response_checksum_validation",
    "tcp_keepalive",
    "user_agent_extra",
}


@dataclass(frozen=True, kw_only=True)
class S3Options:
    """``unknown`` names what this project cannot translate; its client has to be s3fs itself."""

    key: str | None = None
    secret: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)
    profile: str | None = None
    anon: bool = False
    endpoint_url: str | None = None
    region: str | None = None
    use_ssl: bool = True
    verify: bool | str | None = None
    addressing_style: str | None = None
    requester_pays: bool = False
    payload_signing: bool = False
    unknown: tuple[str, ...] = ()


def parse(storage_options: Mapping[str, Any]) -> S3Options:
    fields: dict[str, Any] = {}
    unknown: list[str] = []
    for name, value in storage_options.items():
        if name == "client_kwargs":
            _take(value or {}, _CLIENT_KWARGS, fields, unknown, "client_kwargs.")
        elif name == "config_kwargs":
            _take_config(value or {}, fields, unknown)
        elif name in _CREDENTIALS:
            if value is not None:
                fields[_CREDENTIALS[name]] = value
        elif name not in _WITHOUT_MEANING_HERE:
            unknown.append(name)
    return S3Options(**fields, unknown=tuple(unknown))


def _take(
    given: Mapping[str, Any], names: Mapping[str, str], fields: dict[str, Any], unknown: list[str], prefix: str
) -> None:
    for name, value in given.items():
        if name not in names:
            unknown.append(prefix + name)
        elif value is not None:
            fields.setdefault(names[name], value)


def _take_config(given: Mapping[str, Any], fields: dict[str, Any], unknown: list[str]) -> None:
    for name, value in given.items():
        if name == "s3":
            _take(value or {}, _S3_SECTION, fields, unknown, "config_kwargs.s3.")
        elif name == "region_name":
            fields.setdefault("region", value)
        elif name == "signature_version" and value in ("s3v4", "v4"):
            continue
        elif name not in _CONFIG_KWARGS_WITHOUT_MEANING_HERE:
            unknown.append(f"config_kwargs.{name}")


def with_boto3_chain(options: S3Options) -> S3Options:
    """Fill in endpoint, region, CA bundle and addressing style as boto3 would find them.

    Credentials are not part of it: they may expire, and are asked for when they are needed.
    """
    import botocore.session
    from botocore.configprovider import ConfiguredEndpointProvider

    session = botocore.session.Session(profile=options.profile)
    profile = session.get_scoped_config()
    endpoint_url = options.endpoint_url
    if endpoint_url is None and not session.get_config_variable("ignore_configured_endpoint_urls"):
        endpoint_url = ConfiguredEndpointProvider(
            full_config=session.full_config, scoped_config=profile, client_name="s3"
        ).provide()
    verify = options.verify
    if verify is None:
        verify = session.get_config_variable("ca_bundle") or os.environ.get("REQUESTS_CA_BUNDLE")
    s3_section = profile.get("s3")
    addressing_style = options.addressing_style
    if addressing_style is None and isinstance(s3_section, Mapping):
        addressing_style = s3_section.get("addressing_style")
    return replace(
        options,
        endpoint_url=endpoint_url,
        region=options.region or os.environ.get("AWS_REGION") or session.get_config_variable("region"),
        verify=verify,
        addressing_style=addressing_style,
    )

from __future__ import annotations

from pathlib import Path

import pytest

from cloudckpt.errors import StoreError
from cloudckpt.store.credentials import REREAD_S, ChainCredentials

TEXT = "[lab]\naws_access_key_id = {0}\naws_secret_access_key = secret-{0}\n"


def test_files_are_read_again_after_a_while_or_when_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    shared = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(shared))
    now_s = [1000.0]
    shared.write_text(TEXT.format("first"))
    provider = ChainCredentials("lab", clock=lambda: now_s[0])
    assert provider()["access_key_id"] == "first"
    assert provider()["secret_access_key"] == "secret-first"
    shared.write_text(TEXT.format("second"))
    now_s[0] += REREAD_S - 1
    assert provider()["access_key_id"] == "first"
    now_s[0] += 2
    assert provider()["access_key_id"] == "second"
    shared.write_text(TEXT.format("third"))
    assert provider.watch()()
    assert provider()["access_key_id"] == "third"


def test_one_request_reads_them_anew_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    shared = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(shared))
    shared.write_text(TEXT.format("first"))
    provider = ChainCredentials("lab")
    first, second = provider.watch(), provider.watch()
    assert not first(), "they are the same as before"
    shared.write_text(TEXT.format("second"))
    assert second()
    assert first(), "others have been read meanwhile"
    assert not provider.watch()(), "a request with these would be refused again"


def test_having_none_is_a_clear_error():
    with pytest.raises(StoreError, match=r"no AWS credentials.*key=.*anon=True"):
        ChainCredentials(None)()

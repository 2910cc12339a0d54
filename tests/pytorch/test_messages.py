"""What lies in a store is believed only if a rank of the session wrote it, under that key."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from cloudckpt.errors import NoBucketError
from cloudckpt.pytorch.messages import ForgedMessageError, Messages, Session
from cloudckpt.store.local import LocalStore
from cloudckpt.store.resolve import resolve
from tests.servers.process import S3Server

KEY = "0123456789ab.sync/00001/outcome"


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path)


def test_what_was_said_is_heard(store: LocalStore):
    session = Session.draw()
    Messages(store, session).put(KEY, b"said")
    other = Messages(store, pickle.loads(pickle.dumps(session)))
    assert other.get(KEY) == b"said"
    assert other.get(f"{KEY}2") is None
    assert other.get_many([KEY, "none", KEY]) == [b"said", None, b"said"]
    assert other.keys("0123456789ab.sync") == [KEY]
    other.delete([KEY])
    assert other.get(KEY) is None


@pytest.mark.parametrize("change", ["bit of the text", "bit of the code", "cut", "empty", "another key", "another job"])
def test_what_another_wrote_is_refused(store: LocalStore, change: str):
    session = Session.draw()
    Messages(store, Session.draw() if change == "another job" else session).put(KEY, b"said")
    data = bytearray(store.get(KEY))
    if change == "bit of the text":
        data[-1] ^= 1
    elif change == "bit of the code":
        data[0] ^= 1
    elif change == "cut":
        del data[-1]
    elif change == "empty":
        data.clear()
    key = KEY if change != "another key" else f"{KEY}2"
    store.put(key, data)
    messages = Messages(store, session)
    with pytest.raises(ForgedMessageError, match=rf"{key} in {store.url} was not written by this job"):
        messages.get(key)
    (found,) = messages.get_many([key])
    assert isinstance(found, ForgedMessageError)


def test_a_bucket_that_is_missing_is_not_a_message_that_is_missing(juicefs_s3: S3Server):
    store = resolve("s3://no-such-bucket-here/run", juicefs_s3.storage_options)
    with pytest.raises(NoBucketError):
        Messages(store, Session.draw()).get(KEY)
    store.close()


def test_the_secret_is_not_shown():
    session = Session.draw()
    assert session.id in repr(session)
    assert repr(session.secret) not in repr(session)
    assert len(session.secret) == 32
    assert session != Session.draw()

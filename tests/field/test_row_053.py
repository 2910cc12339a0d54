"""NVIDIA/Megatron-LM#2288: staging buffers are not given back while a slow writer still reads them."""

from __future__ import annotations

import time

import pytest
import torch

from benchmarks import relay
from tests.field.places import Place
from tests.servers.faults import faulty_s3

MIB = 1 << 20


@pytest.mark.parametrize("executor", ["thread", "process"])
@pytest.mark.parametrize("max_pending_saves", [1, 2])
def test_two_saves_100_ms_apart(executor: str, max_pending_saves: int):
    with faulty_s3() as server, relay.start(server.endpoint_url, rate_bytes_s=MIB) as link:
        place = Place("s3://bkt/run", server.storage_options | {"endpoint_url": link.url})
        config = place.config(max_pending_saves=max_pending_saves)
        w = torch.ones(MIB // 4)
        pending = []
        for value in (1.0, 2.0, 3.0):
            w.fill_(value)
            pending.append(place.async_save({"w": w}, f"step-{value:.0f}", executor=executor, config=config))
            time.sleep(0.1)
        w.fill_(4)
        for value, one in zip((1.0, 2.0, 3.0), pending, strict=True):
            one.result(60)
            assert torch.equal(place.read(f"step-{value:.0f}")["w"], torch.full_like(w, value))

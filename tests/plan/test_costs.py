"""Costs counted for all ranks at once, against the parts that ranks really carry out."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloudckpt.plan.costs import exchange_costs, plain_costs
from cloudckpt.plan.exchange import plan_exchange
from cloudckpt.plan.exchange_part import part_of_rank
from cloudckpt.plan.reads import plan_load
from cloudckpt.plan.shard import PieceTable, TensorSpec
from cloudckpt.plan.wants import Wants
from cloudckpt.plan.writes import plan_save
from tests.plan.test_plans import jobs, stored

Job = tuple[list[TensorSpec], list[PieceTable], list[PieceTable], int, int]


@settings(max_examples=100)
@given(jobs())
def test_plain_reads(job: Job) -> None:
    specs, held, wanted, chunk_bytes, read_bytes = job
    chunks = stored(plan_save(specs, held, chunk_bytes=chunk_bytes))
    plan = plan_load(chunks, wanted, read_bytes=read_bytes)
    costs, needed = plain_costs(chunks, Wants.of(wanted), read_bytes=read_bytes)
    for rank in range(len(wanted)):
        reads = plan.rank(rank).reads
        assert costs.fetched[rank] == sum(read.nbytes for read in reads)
        assert costs.requests[rank] == len(reads)
        assert costs.sent[rank] == 0
        assert needed[rank] == sum(int(chunks.nbytes[read.chunks].sum()) for read in reads)


@pytest.mark.parametrize("mode", ["auto", "broadcast", "alltoall"])
@settings(max_examples=60)
@given(jobs(), st.sampled_from([64, 4096]))
def test_exchange(mode: str, job: Job, buffer_bytes: int) -> None:
    specs, held, wanted, chunk_bytes, read_bytes = job
    chunks = stored(plan_save(specs, held, chunk_bytes=chunk_bytes))
    plan = plan_exchange(chunks, Wants.of(wanted), mode=mode, buffer_bytes=buffer_bytes)
    costs = exchange_costs(plan, read_bytes=read_bytes)
    assert costs.sent.sum() == plan.bytes_sent
    for rank in range(len(wanted)):
        part = part_of_rank(plan, rank, read_bytes=read_bytes)
        assert costs.fetched[rank] == sum(read.nbytes for read in part.reads)
        assert costs.requests[rank] == len(part.reads)
    once = np.concatenate([np.zeros(0, dtype=np.int64), *(r.chunks for r in _reads(plan, len(wanted), read_bytes))])
    assert sorted(once.tolist()) == plan.chunk.tolist()


def _reads(plan, num_ranks, read_bytes):
    return [read for rank in range(num_ranks) for read in part_of_rank(plan, rank, read_bytes=read_bytes).reads]

"""When a plan may serve again, and when it must not; several ranks in one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloudckpt.errors import InvalidStateError
from cloudckpt.format.box import Box
from cloudckpt.format.document import MeshEntry
from cloudckpt.format.tree import key_token
from cloudckpt.format.values import encode
from cloudckpt.plan.shard import PieceTable
from cloudckpt.plan.skeleton import split
from cloudckpt.plan.tree import LeafSpec, Tie
from cloudckpt.transfer.description import RankLayout, SaveOptions, check_options
from cloudckpt.transfer.job import Blueprint
from cloudckpt.transfer.planning import PLANS_KEPT, Planner, RankPlan

OPTIONS = SaveOptions(
    url="memory://x",
    step=1,
    layout="packed",
    compression=None,
    overwrite=False,
    values="check",
    check_replicas="plain",
    chunk_bytes=4096,
)


class Array:
    """A tensor of which a rank holds rows ``[start, stop)``."""

    def __init__(
        self,
        rows: int,
        start: int,
        stop: int,
        dtype: str = "float32",
        alias_of: tuple[Any, ...] | None = None,
        tie: Tie | None = None,
    ):
        self.tie = tie
        self.shape, self.start, self.stop, self.dtype, self.alias_of = (rows, 4), start, stop, dtype, alias_of


class Own:
    def __init__(self, value: Any) -> None:
        self.value = value


def described(state: Any, meshes: tuple[MeshEntry, ...] = ()) -> tuple[RankLayout, list[Any]]:
    leaves: list[LeafSpec] = []
    pieces: list[tuple[int, Box]] = []

    def leaf(path: tuple[Any, ...], obj: Any) -> Any:
        if isinstance(obj, Own):
            return {"$": "per_rank", "value": encode(obj.value)}
        if not isinstance(obj, Array):
            return None
        name = key_token(encode(path))
        root = None if obj.alias_of is None else key_token(encode(obj.alias_of))
        pieces.append((len(leaves), Box((obj.start, 0), (obj.stop - obj.start, 4))))
        leaves.append(LeafSpec(name, path, obj.dtype, obj.shape, alias_of=root, tie=obj.tie))
        return {"$": "tensor", "array": name}

    skeleton, values = split(encode(state, leaf=leaf))
    return RankLayout(skeleton, tuple(leaves), PieceTable.build(pieces), meshes), values


class Job:
    """The ranks of a job; ``planners`` may be replaced."""

    def __init__(self, num_ranks: int) -> None:
        self.planners = [Planner() for _ in range(num_ranks)]

    def save(self, states: Sequence[Any], options: SaveOptions = OPTIONS) -> tuple[Blueprint, list[RankPlan], str]:
        """Also says how the plan came about: "warm", "cold", or "asked" where layouts had to be asked for."""
        parts = [
            planner.describe(options, *described(state), {"rank": rank})
            for rank, (planner, state) in enumerate(zip(self.planners, states, strict=True))
        ]
        check_options(parts)
        how = "cold"
        found = self.planners[0].assign([part.in_brief() for part in parts])
        if found is None:
            how = "asked"
            found = self.planners[0].assign(parts)
            assert found is not None
        assignment, blueprint = found
        if assignment.plan is None:
            how = "warm"
        plans = [
            planner.accept(assignment, part.digest, rank)
            for rank, (planner, part) in enumerate(zip(self.planners, parts, strict=True))
        ]
        return blueprint, plans, how


def halves(step: int = 1, **more: Any) -> list[Any]:
    return [{"w": Array(8, 4 * r, 4 * r + 4), "step": step, **more} for r in range(2)]


def told(blueprint: Blueprint, plans: Sequence[RankPlan]) -> Any:
    """All of what a plan says, but the attempt."""
    grids = [grid.encode() for grid in blueprint.arrays.chunks.grids]
    jobs = [replace(plan.job, attempt="") for plan in plans]
    leaves = [[replace(spec, tie=None) for spec in plan.arrays.leaves] for plan in plans]
    arrays = [(plan.arrays.names, plan.checked) for plan in plans]
    return (
        blueprint.notes,
        leaves,
        blueprint.tree,
        blueprint.metadata,
        blueprint.meshes,
        grids,
        blueprint.arrays.chunks.owner.tolist(),
        jobs,
        arrays,
    )


def test_a_warm_plan_is_the_cold_one_with_new_values() -> None:
    job = Job(2)
    first, first_plans, how = job.save(halves(1))
    assert how == "cold"
    second, second_plans, how = job.save(halves(2))
    assert how == "warm"
    assert second.tree["step"] == 2
    fresh, fresh_plans, how = Job(2).save(halves(2))
    assert how == "cold"
    assert told(second, second_plans) == told(fresh, fresh_plans)
    attempts = {first.attempt, second.attempt, *(plan.job.attempt for plan in (*first_plans, *second_plans))}
    assert len(attempts) == 2
    assert {plan.job.attempt for plan in second_plans} == {second.attempt}


CHANGES: dict[str, list[Any]] = {
    "shape": [{"w": Array(9, 0, 4), "step": 1}, {"w": Array(9, 4, 9), "step": 1}],
    "piece": [{"w": Array(8, 0, 3), "step": 1}, {"w": Array(8, 3, 8), "step": 1}],
    "one piece": [{"w": Array(8, 0, 4), "step": 1}, {"w": Array(8, 3, 8), "step": 1}],
    "dtype": [{"w": Array(8, 4 * r, 4 * r + 4, "bfloat16"), "step": 1} for r in range(2)],
    "name": [{"v": Array(8, 4 * r, 4 * r + 4), "step": 1} for r in range(2)],
    "type of a key": [{1: Array(8, 4 * r, 4 * r + 4), "step": 1} for r in range(2)],
    "one array more": [
        {"w": Array(8, 4 * r, 4 * r + 4), "step": 1, **({"b": Array(2, 0, 2)} if r else {})} for r in range(2)
    ],
    "one container more": [{"w": [Array(8, 4 * r, 4 * r + 4)], "step": 1} for r in range(2)],
    "ranks swapped": [{"w": Array(8, 4 - 4 * r, 8 - 4 * r), "step": 1} for r in range(2)],
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_layout_gets_another_plan(change: str) -> None:
    job = Job(2)
    job.save(halves())
    blueprint, plans, how = job.save(CHANGES[change])
    assert how in {"cold", "asked"}
    fresh, fresh_plans, _ = Job(2).save(CHANGES[change])
    assert told(blueprint, plans) == told(fresh, fresh_plans)
    assert job.save(halves())[2] == "warm"
    assert job.save(CHANGES[change])[2] == "warm"


def test_ties_are_part_of_the_layout() -> None:
    def state(tied: bool) -> dict[str, Any]:
        return {"a": Array(8, 0, 8), "b": Array(8, 0, 8, alias_of=("a",) if tied else None)}

    job = Job(2)
    for states, names in (([True, True], 1), ([False, False], 2), ([True, False], 2), ([True, True], 1)):
        blueprint, plans, _ = job.save([state(tied) for tied in states])
        assert len(blueprint.arrays.names) == names
        fresh, fresh_plans, _ = Job(2).save([state(tied) for tied in states])
        assert told(blueprint, plans) == told(fresh, fresh_plans)


def test_declared_ties_are_proved_on_every_save() -> None:
    """Their digests are no part of the layout, which would else be another one after every step of training."""

    def stages(first: int, last: int) -> list[Any]:
        box = Box((0, 0), (8, 4))
        source = Tie(None, frozenset({(box, first)}))
        copy = Tie(key_token(encode(("emb",))), frozenset({(box, last)}), "emb")
        return [{"emb": Array(8, 0, 8, tie=source)}, {"head": Array(8, 0, 8, tie=copy)}]

    job = Job(2)
    found = []
    for digests in ((1, 1), (2, 2), (3, 4), (5, 6), (7, 7), (8, 9)):
        blueprint, plans, how = job.save(stages(*digests))
        fresh, fresh_plans, _ = Job(2).save(stages(*digests))
        assert told(blueprint, plans) == told(fresh, fresh_plans)
        assert len(blueprint.notes) == len(blueprint.arrays.names) - 1
        found.append((how, len(blueprint.arrays.names)))
    assert found == [("cold", 1), ("warm", 1), ("asked", 2), ("warm", 2), ("warm", 1), ("warm", 2)]


@pytest.mark.parametrize(
    "options",
    [
        replace(OPTIONS, chunk_bytes=64),
        replace(OPTIONS, layout="zarr"),
        replace(OPTIONS, compression="zstd"),
        replace(OPTIONS, values="rank0"),
        replace(OPTIONS, check_replicas="all"),
        replace(OPTIONS, rules="others"),
    ],
)
def test_options_are_part_of_the_layout(options: SaveOptions) -> None:
    job = Job(2)
    job.save(halves())
    blueprint, plans, how = job.save(halves(), options)
    assert how == "cold"
    fresh, fresh_plans, _ = Job(2).save(halves(), options)
    assert told(blueprint, plans) == told(fresh, fresh_plans)
    assert job.save(halves())[2] == "warm"


def test_place_and_step_are_not() -> None:
    job = Job(2)
    job.save(halves())
    blueprint, _, how = job.save(halves(), replace(OPTIONS, url="memory://y", step=2, overwrite=True))
    assert (how, blueprint.step) == ("warm", 2)


def test_different_options_are_an_error_on_warm_saves_too() -> None:
    job = Job(2)
    job.save(halves())
    parts = [
        planner.describe(replace(OPTIONS, step=rank), *described(state), {})
        for rank, (planner, state) in enumerate(zip(job.planners, halves(), strict=True))
    ]
    with pytest.raises(InvalidStateError, match=r"save\(\) was called with .*step=0.* on rank 0 but .*step=1"):
        check_options(parts)


def test_values_are_compared_on_warm_saves_too() -> None:
    job = Job(2)
    job.save(halves())
    differing = [halves(2)[0], halves(3)[1]]
    with pytest.raises(InvalidStateError) as cold:
        Job(2).save(differing)
    with pytest.raises(InvalidStateError) as warm:
        job.save(differing)
    assert str(warm.value) == str(cold.value)
    assert "'step' differs between ranks 0 and [1]" in str(warm.value)
    assert job.save(halves(4))[2] == "warm"


def test_values_may_grow_and_change_their_kind() -> None:
    job = Job(2)
    for step, log in enumerate(([], [1.5], [1.5, 2.5], {"loss": 1.5}, None)):
        states = halves(step, log=log, rng=Own(step))
        blueprint, plans, how = job.save(states)
        assert how == ("warm" if step else "cold")
        fresh, fresh_plans, _ = Job(2).save(states)
        assert told(blueprint, plans) == told(fresh, fresh_plans)
    assert blueprint.tree["rng"] == {"$": "per_rank", "values": {"0": 4, "1": 4}}


def test_a_rank_that_forgot_is_asked() -> None:
    job = Job(2)
    job.save(halves())
    for rank in range(2):
        job.planners[rank] = Planner()
        assert job.save(halves())[2] in {"cold", "asked"}
        assert job.save(halves())[2] == "warm"


def test_a_bounded_number_is_kept() -> None:
    job = Job(2)

    def sized(size: int) -> list[Any]:
        return [{"w": Array(8 + size, 0, 4)}, {"w": Array(8 + size, 4, 8 + size)}]

    for size in range(PLANS_KEPT + 1):
        assert job.save(sized(size))[2] == "cold"
    for size in range(PLANS_KEPT, 0, -1):
        assert job.save(sized(size))[2] == "warm"
    assert job.save(sized(0))[2] == "cold"
    assert all(len(planner._plans) == PLANS_KEPT for planner in job.planners)
    assert len(job.planners[0]._layouts) == PLANS_KEPT


def test_every_field_counts() -> None:
    """Also those that are added one day: whoever adds one need not think of this."""
    layout, _ = described({"w": Array(8, 0, 4), "b": Array(3, 0, 3)}, (MeshEntry(shape=(2,), dim_names=("dp",)),))
    digests = {layout.digest(OPTIONS)}
    first, *others = layout.leaves
    leaf_changes: dict[str, Any] = {
        "id": "x",
        "dtype": "int8",
        "shape": (8, 4, 1),
        "checked": True,
        "alias_of": "y",
        "note": "z",
        "tie": Tie("a", frozenset()),
    }
    for field in fields(LeafSpec):
        if field.name != "path":
            changed = replace(first, **{field.name: leaf_changes[field.name]})
            digests.add(replace(layout, leaves=(changed, *others)).digest(OPTIONS))
    for field in fields(PieceTable):
        column = getattr(layout.pieces, field.name)
        changed_column = np.zeros(2, dtype=np.int32) if column is None else column + 1
        pieces = replace(layout.pieces, **{field.name: changed_column})
        digests.add(replace(layout, pieces=pieces).digest(OPTIONS))
    digests.add(replace(layout, meshes=()).digest(OPTIONS))
    digests.add(replace(layout, meshes=(MeshEntry(shape=(2,), dim_names=("tp",)),)).digest(OPTIONS))
    for change in ({"to": "b"}, {"text": "a"}, {"is_needed": True}):
        changed = replace(first, tie=replace(Tie("a", frozenset()), **change))
        digests.add(replace(layout, leaves=(changed, *others)).digest(OPTIONS))
    digests.add(replace(layout, skeleton={"w": None}).digest(OPTIONS))
    digests.add(replace(layout, matched=(0,)).digest(OPTIONS))
    assert len(digests) == 1 + len(leaf_changes) + len(fields(PieceTable)) + 3 + 4


@st.composite
def layouts(draw: st.DrawFn) -> list[list[Any]]:
    """Some layouts of three ranks, and a sequence of them."""
    known = []
    for _ in range(draw(st.integers(1, 6))):
        names = draw(st.lists(st.sampled_from("abcd"), min_size=1, unique=True))
        states: list[Any] = [{"step": 0} for _ in range(3)]
        for name in names:
            rows = draw(st.integers(1, 12))
            cuts = sorted(draw(st.tuples(st.integers(0, rows), st.integers(0, rows))))
            holders = draw(st.permutations(range(3)))
            for rank, (start, stop) in zip(holders, zip([0, *cuts], [*cuts, rows], strict=True), strict=True):
                if start < stop or draw(st.booleans()):
                    states[rank][name] = Array(rows, start, stop, draw(st.just("float32")))
        known.append(states)
    order = draw(st.lists(st.integers(0, len(known) - 1), min_size=1, max_size=12))
    return [known[i] for i in order]


@given(layouts(), st.data())
def test_random_layouts_in_turn(sequence: list[list[Any]], data: st.DataObject) -> None:
    """Whatever was saved before, and whoever forgot it, the plan is the one that a new job would make."""
    job = Job(3)
    for step, states in enumerate(sequence):
        if data.draw(st.integers(0, 5)) == 0:
            job.planners[data.draw(st.integers(0, 2))] = Planner()
        for state in states:
            state["step"] = step
        blueprint, plans, _ = job.save(states)
        fresh, fresh_plans, _ = Job(3).save(states)
        assert told(blueprint, plans) == told(fresh, fresh_plans)


def test_the_order_of_columns_cannot_be_mistaken() -> None:
    """Numbers that stand in another column, or in a table of another width, are another layout."""
    layout, _ = described({"w": Array(8, 0, 4)})
    table = layout.pieces
    swapped = PieceTable(table.tensor, table.shape, table.offset)
    wide = PieceTable(table.tensor, np.zeros((1, 1), dtype=np.int64), table.shape)
    assert len({replace(layout, pieces=pieces).digest(OPTIONS) for pieces in (table, swapped, wide)}) == 3

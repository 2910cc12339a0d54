"""Which migrations lead from one model version to another."""

from __future__ import annotations

import pytest

from cloudckpt.errors import InvalidStateError, MismatchError
from cloudckpt.plan import migrations
from cloudckpt.plan.migrations import migration, migrations_between


@pytest.fixture(autouse=True)
def nothing_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migrations, "_registered", {})


def register(*pairs: tuple[str | None, str]) -> None:
    for number, (from_, to) in enumerate(pairs):

        def rules(number: int = number) -> list[tuple[str, str]]:
            return [(f"a{number}", f"b{number}")]

        migration(from_, to)(rules)


def ways(stored: str | None, wanted: str | None) -> list[str]:
    return [str(step) for step in migrations_between(stored, wanted, "run/step-1")]


def test_nothing_to_do():
    assert ways("1", None) == ways("1", "1") == ways(None, None) == []


def test_chains():
    register(("1", "2"), ("2", "3"), ("3", "4"), (None, "1"))
    assert ways("1", "4") == ["'1' -> '2'", "'2' -> '3'", "'3' -> '4'"]
    assert ways(None, "2") == ["(none) -> '1'", "'1' -> '2'"]


def test_the_shortest_way_and_of_equals_the_first():
    register(("1", "2"), ("2", "3"), ("3", "4"), ("1", "3"), ("1", "x"), ("x", "4"), ("4", "1"))
    assert ways("1", "4") == ["'1' -> '3'", "'3' -> '4'"]
    assert ways("4", "3") == ["'4' -> '1'", "'1' -> '3'"]


def test_no_way():
    with pytest.raises(MismatchError, match=r"run/step-1 holds model version \(none\), and version '2' .*: none\)"):
        ways(None, "2")
    register(("1", "2"), ("3", "4"))
    with pytest.raises(MismatchError, match=r"version '2', and version '1' .* \(registered: '1' -> '2', '3' -> '4'\)"):
        ways("2", "1")


def test_two_functions_for_one_step():
    register(("1", "2"))
    register(("1", "2"))  # the same, loaded again

    def other() -> list[tuple[str, str]]:
        return []

    with pytest.raises(InvalidStateError, match=r"a migration '1' -> '2' already: .*register.*rules, and now .*other"):
        migration("1", "2")(other)


@pytest.mark.parametrize(("from_", "to"), [("1", "1"), ("", "1"), (1, "3"), ("1", None), ("1", 2), (None, None)])
def test_what_is_no_version(from_: object, to: object):
    with pytest.raises(InvalidStateError, match="version"):
        migration(from_, to)  # type: ignore[arg-type]


@pytest.mark.parametrize("version", ["", 3, ("1",)])
def test_what_is_no_version_to_load(version: object):
    with pytest.raises(InvalidStateError, match="a model version is a string"):
        ways("1", version)  # type: ignore[arg-type]

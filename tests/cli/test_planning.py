"""``cloudckpt plan``: what it prints, what it refuses, and that a load then costs what it said."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import cloudckpt
from cloudckpt.cli import main
from tests.ranks import RankPool

CONFIG = cloudckpt.Config(chunk_bytes=4096)
RULES = [("*.wq", {"tp": 0}), ("*.wo", {"tp": 1, "dp_shard": 0})]
RULE_ARGUMENTS = ["--rule", "*.wq=tp:0", "--rule", "*.wo=tp:1,dp_shard:0"]


def state(rows: float = 1, columns: float = 1) -> dict[str, Any]:
    """A model of two layers, or a part of it by the RULES. Sizes fill whole multiples of an exchange's alignment."""
    layers = {
        str(i): {"wq": torch.ones(int(64 * rows), 64), "wo": torch.ones(int(64 * columns), int(64 * rows))}
        for i in range(2)
    }
    return {"model": layers, "norm": torch.ones(100), "numbers": np.arange(8), "step": 3}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = str(tmp_path_factory.mktemp("plan") / "c")
    cloudckpt.save(state(), made, config=CONFIG)
    return made


def planned(url: str, *arguments: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["plan", url, *arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_every_rank_without_rules_wants_everything(url: str, capsys: pytest.CaptureFixture[str]):
    plan = planned(url, "--mesh", "dp_replicate=4", "--ranks-per-node", "2", capsys=capsys)
    needed = plan["bytes_needed"]
    assert plan["num_ranks"] == 4
    assert [rank["bytes_needed"] for rank in plan["ranks"]] == [needed] * 4
    exchange = plan["exchange"]
    assert list(exchange) == ["none", "auto", "auto in node"]
    # Chunks are small here, so what lies between them counts.
    assert 4 * needed <= exchange["none"]["fetched"] < 4.8 * needed
    assert needed <= exchange["auto"]["fetched"] < 1.2 * needed
    assert 2 * needed <= exchange["auto in node"]["fetched"] < 2.4 * needed
    assert exchange["none"]["sent"] == 0 < exchange["auto in node"]["sent"] < exchange["auto"]["sent"]
    for name, total in exchange.items():
        for kind, value in total.items():
            assert value == sum(rank["exchange"][name][kind] for rank in plan["ranks"])


def test_the_table(url: str, capsys: pytest.CaptureFixture[str]):
    assert main(["plan", url, "--mesh", "dp_shard=2,tp=2", *RULE_ARGUMENTS]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[1] == "ranks 4: dp_shard=2 tp=2"
    assert lines[2] == "tensors 5, 4 of them cut by rules, the others wanted whole by every rank"
    assert lines[5] == "exchange fetched / needed sent requests"
    assert lines[9].startswith("rank dp_shard tp needed none: fetched requests auto: fetched sent requests")
    assert [line.split()[:3] for line in lines[10:]] == [
        ["0", "0", "0"],
        ["1", "0", "1"],
        ["2", "1", "0"],
        ["3", "1", "1"],
    ]


def test_rules_from_files(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    mesh = ["--mesh", "tp=2,dp_shard=2"]
    expected = planned(url, *mesh, *RULE_ARGUMENTS, capsys=capsys)
    (tmp_path / "rules.json").write_text(json.dumps([["*.wq", {"tp": 0}, {"0": [64]}], RULES[1]]))
    (tmp_path / "rules.toml").write_text('rules = [["*.wq", {tp = 0}, {0 = [64]}], ["*.wo", {tp = 1, dp_shard = 0}]]')
    for name in ("rules.json", "rules.toml"):
        assert planned(url, *mesh, "--rules", str(tmp_path / name), capsys=capsys) == expected
    one_by_one = planned(url, *mesh, "--rules", str(tmp_path / "rules.json"), "--rule", "norm=cp:0", capsys=capsys)
    assert one_by_one["num_cut"] == 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mesh", "xp=2"], "--mesh is a list"),
        (["--mesh", "tp=2,tp=2"], "--mesh is a list"),
        (["--mesh", "tp=0"], "axis tp must be a positive int"),
        (["--mesh", "tp=2,ep=3"], "cannot be divided"),
        (["--mesh", "tp=2", "--order", "pp,xp"], "unknown axes"),
        (["--mesh", "tp=2", "--rule", "w"], "--rule is PATTERN="),
        (["--mesh", "tp=2", "--rule", "w=xp:0"], "there is no axis 'xp'"),
        (["--mesh", "tp=2", "--rules", "none.json"], "cannot read the rules"),
        (["--mesh", "tp=2", "--rules", "object.json"], "must hold a list of rules"),
        (["--mesh", "tp=2", "--ranks-per-node", "0"], "at least 1"),
        ([], "--mesh"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_usage(
    url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
):
    monkeypatch.chdir(tmp_path)
    Path("object.json").write_text("{}")
    with pytest.raises(SystemExit) as caught:
        main(["plan", url, *arguments])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("rule", "message"),
    [("nothing=tp:0", "no tensor on any rank matches"), ("norm=tp:1", "'norm' has 1 dims")],
    ids=["unmatched", "dim"],
)
def test_rules_that_do_not_fit_the_checkpoint(url: str, capsys: pytest.CaptureFixture[str], rule: str, message: str):
    assert main(["plan", url, "--mesh", "tp=2", "--rule", rule]) == 1
    assert message in capsys.readouterr().err


def save_packed(url: str) -> None:
    rules = cloudckpt.ShardingRules([("qkv", {"tp": 0}, {0: [8, 4, 4]})], cloudckpt.ParallelConfig(tp=2))
    cloudckpt.save({"qkv": torch.ones(8, 2)}, url, rules=rules)


def test_segments_other_than_those_of_the_checkpoint_are_refused(
    tmp_path: Path, ranks: RankPool, capsys: pytest.CaptureFixture[str]
):
    ranks.run(2, save_packed, str(tmp_path))
    assert main(["plan", str(tmp_path), "--mesh", "tp=4", "--rule", "qkv=tp:0"]) == 1
    assert "saved with the segments [8, 4, 4]" in capsys.readouterr().err


def test_it_needs_no_torch(url: str):
    code = "import sys; from cloudckpt.cli import main; main(sys.argv[1:]); assert 'torch' not in sys.modules"
    command = [sys.executable, "-c", code, "plan", url, "--mesh", "tp=2", "--rule", "*.wq=tp:0"]
    subprocess.run(command, check=True, capture_output=True, timeout=100)


def load_by_rules(url: str, exchange: str) -> tuple[int, int, int, int]:
    parallel = cloudckpt.ParallelConfig(dp_shard=2, tp=2)
    rules = cloudckpt.ShardingRules(RULES, parallel)
    report = cloudckpt.load(state(0.5, 0.5), url, rules=rules, exchange=exchange)
    assert parallel.world_size == dist.get_world_size()
    return report.bytes_needed, report.bytes_fetched, report.bytes_sent, report.num_requests


def test_a_load_costs_what_was_planned(url: str, ranks: RankPool, capsys: pytest.CaptureFixture[str]):
    plan = planned(url, "--mesh", "dp_shard=2,tp=2", *RULE_ARGUMENTS, capsys=capsys)
    for exchange in ("none", "auto"):
        costs = plan["exchange"][exchange]
        # One more request, for the manifest.
        expected = (plan["bytes_needed"], costs["fetched"], costs["sent"], costs["requests"] + 1)
        assert ranks.run(4, load_by_rules, url, exchange) == [expected] * 4

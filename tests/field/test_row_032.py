"""NVIDIA-NeMo/Automodel#3261: saving a step again leaves the old mark of completion on half new data.

tests/recipes/test_kills.py kills at every other point too.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.field.places import Place
from tests.recipes.kills import Zygote, save_job, value_at

OVERWRITE = {"step": 5, "overwrite": True}


@pytest.mark.parametrize("layout", ["packed", "zarr"])
@pytest.mark.parametrize("place", ["local", "juicefs", "moto"], indirect=True)
def test_a_kill_after_half_of_the_objects_leaves_the_old_step_whole(
    place: Place, zygote: Zygote, tmp_path: Path, layout: str
):
    url, log = place.url("step-5"), tmp_path / "events"
    first = (save_job, url, 1, str(log), None, "store", place.options, {"step": 5, "layout": layout})
    assert zygote.run([first])[0].raised is None
    old_keys = place.keys("step-5")
    # A pack is an object once it is closed; a plain chunk once it is put. The manifest is the last one.
    name = "after upload.close" if layout == "packed" else "after put"
    events = log.read_text().splitlines()
    written = [i for i, event in enumerate(events) if event == name]
    log.unlink()
    half = written[len(written) // 2 - 1]
    again = (save_job, url, 2, str(log), half, "store", place.options, {**OVERWRITE, "layout": layout})
    assert zygote.run([again])[0].signal == signal.SIGKILL
    assert value_at(url, place.options) == 1
    assert set(old_keys) < set(place.keys("step-5"))
    again = (save_job, url, 2, str(log), None, "nothing", place.options, {**OVERWRITE, "layout": layout})
    assert zygote.run([again])[0].raised is None
    assert value_at(url, place.options) == 2

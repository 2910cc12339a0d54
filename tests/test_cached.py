"""Computed properties hold no lock that a forked child could inherit."""

from __future__ import annotations

import threading

from cloudckpt._cached import cached_property


class Thing:
    def __init__(self, gate: threading.Event | None = None) -> None:
        self.gate = gate
        self.times = 0

    @cached_property
    def value(self) -> int:
        self.times += 1
        if self.gate is not None:
            assert self.gate.wait(60)
        return 7


def test_another_thread_does_not_wait():
    gate = threading.Event()
    thread = threading.Thread(target=lambda: Thing(gate).value)
    thread.start()
    other = Thing()
    found: list[int] = []
    second = threading.Thread(target=lambda: found.append(other.value), daemon=True)
    second.start()
    second.join(30)
    assert found == [7]
    assert (other.value, other.times) == (7, 1)
    gate.set()
    thread.join()

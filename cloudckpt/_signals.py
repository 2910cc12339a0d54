"""Being told that the process must end soon, and telling all ranks."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterable
from types import FrameType
from typing import Any

from cloudckpt.errors import InvalidStateError
from cloudckpt.pytorch.announce import Announcements

DUE_STEPS = 2
"""How many steps after that in which a rank has seen a signal all ranks save. By then all have heard of it: ranks that
meet in every step are less than one apart, and a host may be one more ahead of its device."""


class StopSignals:
    """From signals to a step at which all ranks save. Every rank makes its own, in the same order.

    The handler remembers that a signal came, and tells those of other runs that were there before; nothing else.
    """

    def __init__(self, signals: Iterable[signal.Signals], announcements: Announcements) -> None:
        """Raises InvalidStateError outside of the main thread, where Python lets nobody catch signals."""
        self._signals = tuple(signals)
        if self._signals and threading.current_thread() is not threading.main_thread():
            raise InvalidStateError("save_on_signal: signals can be caught only by what is made in the main thread")
        self._announcements = announcements
        self.was_due = False
        self._is_told = False
        self._due: int | None = None
        self._before: dict[int, Any] = {}
        self._is_closed = False
        for number in self._signals:
            self._before[number] = signal.signal(number, self._note)

    def due(self, step: int) -> bool:
        if not self._signals:
            return False
        if self._due is None:
            self._due = self._announcements.heard()
        if self._due is None and self._is_told:
            later = 0 if self._announcements.is_alone else DUE_STEPS
            self._due = self._announcements.announce(step + later)
        if self._due is None or step < self._due:
            return False
        self._announcements.settle()
        self._due = None
        self._is_told = False
        self.was_due = True
        return True

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        for number in self._before:
            # Who came later keeps the signal.
            if signal.getsignal(number) == self._note:
                handler = self._earlier(number)
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def _earlier(self, number: int) -> Any:
        """What had the signal before, but for runs that are closed by now."""
        handler = self._before[number]
        owner = getattr(handler, "__self__", None)
        return owner._earlier(number) if isinstance(owner, StopSignals) and owner._is_closed else handler

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._is_told = True
        handler = self._earlier(number)
        if isinstance(getattr(handler, "__self__", None), StopSignals):
            handler(number, frame)


def chosen_signals(choice: bool | signal.Signals | Iterable[signal.Signals]) -> tuple[signal.Signals, ...]:
    """True stands for SIGTERM, which schedulers send before they take a node away."""
    if isinstance(choice, bool):
        return (signal.SIGTERM,) if choice else ()
    try:
        return tuple(map(signal.Signals, (choice,) if isinstance(choice, int) else choice))
    except (TypeError, ValueError) as error:
        raise InvalidStateError(f"save_on_signal must be a bool or signals, not {choice!r}: {error}") from error

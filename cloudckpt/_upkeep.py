"""Retention beside training: asked for after a commit, done in a thread that ends when there is nothing left to do."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from weakref import WeakSet

from cloudckpt._fallback import Place
from cloudckpt.background.pending import close_at_exit
from cloudckpt.config import Config
from cloudckpt.errors import CloudckptError
from cloudckpt.plan.retention import RetentionPolicy
from cloudckpt.retention import Removal, Retention
from cloudckpt.store.base import Store
from cloudckpt.store.resolve import resolve

logger = logging.getLogger(__name__)

SWEEP_S = 3600.0
"""How often orphans are looked for, which takes listings of all objects; more often only where they die sooner."""


class Upkeep:
    """Of one run, on the coordinator. ``busy``: the directories that are being saved to."""

    def __init__(
        self,
        run: Place,
        policies: Sequence[RetentionPolicy],
        *,
        orphan_age_s: float,
        config: Config,
        busy: Callable[[], Collection[str]],
    ) -> None:
        self._place = run
        self._policies = policies
        self._orphan_age_s = orphan_age_s
        self._config = config
        self._busy = busy
        self._opened: tuple[Store, Retention] | None = None
        self._next_sweep_s = 0.0
        self._state = threading.Lock()
        self._is_asked = False
        self._thread: threading.Thread | None = None
        self._complaints: list[str] = []
        self.turn = threading.Lock()
        """Held while steps may be removed."""
        _ALL.add(self)

    def ask(self) -> None:
        """Have it done soon; returns at once."""
        with self._state:
            self._is_asked = True
            if self._thread is None:
                thread = threading.Thread(target=self._work, name="cloudckpt-retention", daemon=False)
                thread.start()
                self._thread = thread

    def run(self, *, sweep: bool = True) -> Removal:
        """Do it now, after what is being done. Raises StoreError."""
        with self.turn:
            if self._opened is None:
                store = resolve(self._place.url, self._place.storage_options, self._config)
                self._opened = store, Retention(store, self._policies, orphan_age_s=self._orphan_age_s)
            if sweep:
                self._next_sweep_s = time.monotonic() + min(SWEEP_S, self._orphan_age_s)
            removal = self._opened[1].run(busy=self._busy(), sweep=sweep)
        for step in removal.steps:
            logger.info("removed step %d from %s", step, self._opened[0].url)
        for complaint in removal.complaints():
            logger.warning("%s: %s", self._opened[0].url, complaint)
        return removal

    def take_complaints(self) -> list[str]:
        """What has gone wrong in the background since the last call."""
        with self._state:
            found, self._complaints = self._complaints, []
        return found

    def wait(self) -> None:
        """Until nothing is asked for."""
        while (thread := self._thread) is not None:
            thread.join()

    def close(self) -> None:
        self.wait()
        with self.turn:
            if self._opened is not None:
                self._opened[0].close()
                self._opened = None

    def _work(self) -> None:
        while True:
            with self._state:
                if not self._is_asked:
                    self._thread = None
                    return
                self._is_asked = False
            found: list[str] = []
            try:
                found.extend(self.run(sweep=time.monotonic() >= self._next_sweep_s).complaints())
            except CloudckptError as error:
                logger.warning("retention of %s failed: %s", self._place.url, error)
                found.append(str(error))
            except Exception as error:  # a policy of the user's
                logger.exception("retention of %s failed", self._place.url)
                found.append(f"{type(error).__name__}: {error}")
            with self._state:
                self._complaints.extend(found)


_ALL: WeakSet[Upkeep] = WeakSet()


def _wait_for_all() -> None:
    for upkeep in tuple(_ALL):
        upkeep.wait()


close_at_exit(_wait_for_all)

"""The only place where object keys are built and parsed; the names of arrays in them: `array_names`."""

from __future__ import annotations

import hashlib
import re
import secrets

from cloudckpt.errors import FormatError, InvalidStateError

MANIFEST = "manifest.json"
PIN = "keep"
"""The key, relative to a checkpoint, of the object that keeps retention from removing it."""

_MAX_STEP_DIGITS = 18
MAX_STEP = 10**_MAX_STEP_DIGITS - 1

_SIBLING = re.compile(r"\.\./([^/]*)/(.*)", re.DOTALL)
_STEP = re.compile(rf"step-([0-9]{{1,{_MAX_STEP_DIGITS}}})")
_LEASE = re.compile(r"([^/]+)/([0-9a-f]{12})/lease")
_OWN_LEASE = re.compile(r"[0-9a-f]{12}/lease")
_ATTEMPT = re.compile(r"([0-9a-f]{12})(\.zarr|\.sync)?/.*", re.DOTALL)
_PACK = re.compile(r"[0-9a-f]{12}/r[0-9]{5,9}-[0-9]{3,9}\.zarr\.zip")
_SCRATCH = re.compile(r"(.*/)?\.cloudckpt-(probe|clock|tmp)-.*", re.DOTALL)
_CHUNK = re.compile(r"(.+)/c((?:/(?:0|[1-9][0-9]{0,17}))*)")
_KEY_FAULTS = {
    "has a control character or a lone surrogate": re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]"),
    "has a backslash": re.compile(r"\\"),
    "starts with a scheme or a drive": re.compile(r"\A[A-Za-z][A-Za-z0-9+.-]*:"),
    "has an empty, '.' or '..' part": re.compile(r"(\A|/)\.{0,2}(/|\Z)"),
    "is longer than 1024 characters": re.compile(r"(?s).{1025}"),  # S3's limit
}


def step_dir(step: int) -> str:
    """The directory of a step's checkpoint in its run; InvalidStateError for what is not a step."""
    if type(step) is not int or not 0 <= step < 10**_MAX_STEP_DIGITS:
        raise InvalidStateError(f"a step must be an int from 0 to 10**{_MAX_STEP_DIGITS} - 1")
    return f"step-{step:08d}"


def parse_step(name: str) -> int | None:
    """The step of a directory name, with any zero padding; None if it does not name a step."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def new_attempt() -> str:
    """A random id: 12 hexadecimal digits."""
    return secrets.token_hex(6)


def parse_attempt(key: str) -> str | None:
    """The id of the attempt (or of the coordination of a save) that an object of a checkpoint belongs to.

    None where the object is no attempt's: the manifest, a pin, and whatever others have put there.
    """
    match = _ATTEMPT.fullmatch(key)
    return match[1] if match else None


def is_scratch(key: str) -> bool:
    """Whether an object or directory is of use to nobody but the process that made it: a probe, a temporary file."""
    return _SCRATCH.fullmatch(key) is not None


def clock_dir() -> str:
    """A new directory of a run, in which a store is asked what time it is."""
    return f".cloudckpt-clock-{secrets.token_hex(8)}"


def pack_key(attempt: str, rank: int, index: int) -> str:
    """The key, relative to the checkpoint, of the ``index``-th pack that ``rank`` writes."""
    return f"{attempt}/r{rank:05d}-{index:03d}.zarr.zip"


def is_pack(key: str) -> bool:
    """Whether an object of a checkpoint is a pack, of whatever attempt."""
    return _PACK.fullmatch(key) is not None


def plain_root(attempt: str) -> str:
    """The key, relative to the checkpoint, under which a plain zarr hierarchy stands."""
    return f"{attempt}.zarr"


def sync_root(session: str, number: int) -> str:
    """The key, relative to the checkpoint, under which the ranks of one save leave messages for one another.

    A function of the session's id and the save's number in it: all ranks know it without having met.
    """
    return f"{hashlib.sha256(f'{session}/{number}'.encode()).hexdigest()[:12]}.sync"


def sync_key(root: str, round_number: int, name: str, rank: int | None = None) -> str:
    """The key of a message below ``root``: one of a round, or, with ``rank``, each rank's own."""
    return f"{root}/{round_number:05d}/{name}" + ("" if rank is None else f"/{rank:05d}")


def parse_sync_rank(key: str) -> int | None:
    """Whose message a key is that was made with a ``rank``; None for what is none."""
    name = key.rpartition("/")[2]
    return int(name) if re.fullmatch(r"[0-9]{5,9}", name) else None


def parse_sync_round(key: str) -> int | None:
    """The round that a message is of; None for one that is of none."""
    match = re.match(r"[0-9a-f]{12}\.sync/([0-9]{5,9})/", key)
    return int(match[1]) or None if match else None


def chunk_key(array_name: str, index: tuple[int, ...]) -> str:
    """The key of a chunk in a zarr v3 store with the default chunk key encoding."""
    return "/".join((array_name, "c", *map(str, index)))


def parse_chunk_key(key: str) -> tuple[str, tuple[int, ...]] | None:
    """The inverse of `chunk_key`; None for what is not the key of a chunk."""
    match = _CHUNK.fullmatch(key)
    return (match[1], tuple(map(int, match[2].split("/")[1:]))) if match else None


def check_key(key: object) -> str:
    """Return ``key`` if it names an object of the checkpoint or of a sibling on every store; else raise FormatError."""
    if not isinstance(key, str):
        raise FormatError(f"an object key must be a string, not {key!r:.200}")
    _, below = split_key(key)
    for fault, pattern in _KEY_FAULTS.items():
        if pattern.search(below):
            raise FormatError(f"unsafe object key {key!r:.200}: it {fault}")
    # Copies would put it before its time, and retention remove it. There are stores to which upper case is the same.
    if below.lower() in (MANIFEST, PIN) or _OWN_LEASE.fullmatch(below.lower()):
        raise FormatError(f"unsafe object key {key!r:.200}: it is that of a manifest, a pin or a lease")
    return key


def split_key(key: str) -> tuple[str | None, str]:
    """The step directory of a sibling that ``../<step dir>/<key>`` leads to, None for any other key, and the rest."""
    match = _SIBLING.fullmatch(key)
    return (match[1], match[2]) if match and parse_step(match[1]) is not None else (None, key)


def sibling_key(step_dir: str, key: str) -> str:
    """The key, relative to a checkpoint, of an object of another checkpoint of the same run."""
    return f"../{step_dir}/{key}"


def key_in_run(step_dir: str, key: str) -> str:
    """The key, relative to the run, of what the checkpoint in ``step_dir`` calls ``key``."""
    sibling, below = split_key(key)
    return f"{sibling or step_dir}/{below}"


def split_run_key(key: str) -> tuple[str, str]:
    """Of a key relative to a run, the directory and what is below it."""
    name, _, below = key.partition("/")
    return name, below


def key_seen_from(step_dir: str, key: str) -> str:
    """The inverse of `key_in_run`."""
    other, below = split_run_key(key)
    return below if other == step_dir else sibling_key(other, below)


def is_of_attempt(key: str, attempt: str) -> bool:
    """Whether the attempt may have written the object: a part of its key is the attempt's alone."""
    return key.partition("/")[0] in (attempt, plain_root(attempt))


def lease_key(attempt: str) -> str:
    """The key, relative to the checkpoint, of the lease that a running attempt holds."""
    return f"{attempt}/lease"


def parse_lease(key: str) -> tuple[str, str] | None:
    """The step directory and the attempt of a lease, by its key relative to the run; None for any other object."""
    match = _LEASE.fullmatch(key)
    return (match[1], match[2]) if match and parse_step(match[1]) is not None else None

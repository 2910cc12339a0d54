"""The command line."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from io import TextIOWrapper

from cloudckpt.cli.parser import make_parser
from cloudckpt.errors import CloudckptError


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0, or 1 for a fault or an error. Wrong usage exits with 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # keys may hold what a terminal cannot show
    options = make_parser().parse_args(arguments)
    try:
        code: int = options.run(options)
        sys.stdout.flush()
        return code
    except CloudckptError as error:
        from cloudckpt.cli.text import printable

        print(f"cloudckpt: {printable(str(error), keep_lines=True)}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # The reader (head, less) has seen enough; the interpreter's own flush at exit must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130

"""``python -m cloudckpt``."""

from cloudckpt.cli import main

main()

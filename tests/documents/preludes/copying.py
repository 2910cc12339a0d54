"""The module that the page's command line names: with the migrations of the page's example."""

from pathlib import Path

Path("my_migrations.py").write_text(
    """
import cloudckpt
from cloudckpt import Concatenate, Stack


@cloudckpt.migration("1", "2")
def stack_experts():
    return [Stack("{p:*}.experts.{e}.w", "{p}.experts")]


@cloudckpt.migration("2", "3")
def fuse():
    return [Concatenate(("{p:*}.wq", "{p:*}.wk"), "{p}.wqk")]
"""
)

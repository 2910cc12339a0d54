"""Everything that knows torch. Importing it makes torch's plain values known to format/values.py."""

from cloudckpt.pytorch import plain as plain

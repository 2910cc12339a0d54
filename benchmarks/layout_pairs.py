"""What loads under other layouts fetch, in bytes needed: the table of pairs that the tests assert.

python benchmarks/layout_pairs.py
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.ranks import RankPool
from tests.recipes.layout_pairs import NUM_RANKS, TABLES, as_table, run_pairs, whole_table


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    pool = RankPool()
    try:
        for name in TABLES:
            with tempfile.TemporaryDirectory() as folder:
                rows = whole_table(name, pool.run(NUM_RANKS, run_pairs, name, folder))
            wrong = [row for row in rows if row.wrong]
            print(f"{name}: {len(rows)} pairs, {len(wrong)} with other bits than saved\n\n{as_table(rows)}\n")
    finally:
        pool.stop()


if __name__ == "__main__":
    main()

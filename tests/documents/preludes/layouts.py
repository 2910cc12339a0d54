"""The file of rules that the page's command line names."""

import json
from pathlib import Path

Path("rules.json").write_text(json.dumps([["*.wq.weight", {"tp": 0}], ["*.qkv.weight", {"tp": 0}, {"0": [8, 2, 2]}]]))

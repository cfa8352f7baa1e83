"""Makes the helpers of the tests importable, and keeps their processes off the network."""

import os
import sys
from pathlib import Path

HERE = Path(__file__).parent
for folder in (HERE, HERE / "distributed"):
    sys.path.insert(0, str(folder))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

"""What all tests share."""

import os
from pathlib import Path

# Processes that tests start see this tree too, installed or not.
SOURCE = str(Path(__file__).resolve().parent.parent / "src")
os.environ["PYTHONPATH"] = os.pathsep.join([SOURCE, *filter(None, [os.environ.get("PYTHONPATH")])])

"""python -m bitdial."""

import sys

from bitdial.cli import main

sys.exit(main())

# SPDX-License-Identifier: MIT
"""``python -m rotquant_hip``."""

import sys

from rotquant_hip.cli import main

if __name__ == "__main__":
    sys.exit(main())

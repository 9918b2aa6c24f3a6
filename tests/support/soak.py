"""The length of the long tests: short in every run, long under `make soak`."""

import os

IS_SOAK = os.environ.get("TUNDISH_SOAK", "0") != "0"

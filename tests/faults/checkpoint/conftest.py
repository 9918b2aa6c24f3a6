"""What several tests of faults share."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from disorder import Disorder


@pytest.fixture(scope="session")
def disorder(tmp_path_factory: pytest.TempPathFactory) -> Disorder:
    return Disorder(tmp_path_factory.mktemp("disorder"))

"""Options and fixtures of all tests. Nothing here needs torch unless a test asks for a GPU."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# Two workers of two threads each would wait for one another on two cores. Set before torch loads;
# the processes that tests start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# What the user has cached is neither read nor changed.
os.environ["AUTOCKPT_CACHE"] = "0"


# Copies of bug reports, run by test_cases: no tests by themselves.
collect_ignore = ["cases"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="write the golden files anew instead of comparing with them",
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not for_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in for_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def measured_alone() -> Iterator[None]:
    """Let no model that a test has dropped while it was watched disturb the next one's figures.

    Its mode is left at the next optimised forward, which may not come; under a mode numbers are
    passed to operators as tensors, and count.
    """
    yield
    modes = sys.modules.get("autockpt._torch.modes")
    if modes is not None and modes._get_current_dispatch_mode_stack():
        gc.collect()
        modes.leave_what_is_left_behind()


@pytest.fixture(autouse=True, scope="module")
def collector() -> None:
    """Let the garbage collector pass over what there is before a file of tests.

    Measurements collect first, and would look through all of torch and what earlier files hold.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def quiet() -> Iterator[None]:
    """Tests at the minimum leave no room for what piles up around the model, which is warned of."""
    logger = logging.getLogger("autockpt")
    level = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(level)


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Return a check that a text equals the golden file of this name."""
    folder = Path(__file__).parent / "golden"

    def check(name: str, text: str) -> None:
        path = folder / name
        if request.config.getoption("--update-golden"):
            path.write_text(text, encoding="utf-8")
        assert text == path.read_text(encoding="utf-8"), (
            f"{name} has changed; if that is meant: python -m pytest --update-golden"
        )

    return check

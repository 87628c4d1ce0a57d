"""What every test shares: no network, one thread, and a check that nothing global is left changed."""

from __future__ import annotations

import os
from collections.abc import Iterator

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: it reads them once
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np
import pytest
import torch

from tests.versions import APIS, HAS_NOTEBOOKS, HAS_OFFLOADING

pytest_plugins = ["tests.smollm2"]

torch.set_num_threads(1)  # for models this small, a second thread costs more than it brings


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "hooked: needs HookedTransformer (TransformerLens 2.x, 3.x)")
    config.addinivalue_line("markers", "bridge: needs TransformerBridge (TransformerLens 3.x, 4.x)")
    config.addinivalue_line("markers", "offloads: needs bridges with offloaded weights (TransformerLens 4.x)")
    config.addinivalue_line(
        "markers", "notebooks: needs the notebook packages (the environment of TransformerLens 3.x)"
    )


def pytest_report_header() -> list[str]:
    where = os.environ.get("IGLENS_TL_BROWSER")
    browser = f"browser: {where or 'none; the tests that need one are left out (IGLENS_TL_BROWSER=/path/to/chromium)'}"
    return [browser] if HAS_NOTEBOOKS else [browser, "notebooks: left out; they are tested with TransformerLens 3"]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what the installed version does not promise; where it promises and lacks it, the test fails.

    So with a browser: tests that need one are left out where `IGLENS_TL_BROWSER` names none, and fail where it names
    one that does not start. The notebooks' tests are left out by version too: see `tests.versions.HAS_NOTEBOOKS`.
    """
    absent = [api for api in ("hooked", "bridge") if api not in APIS]
    absent += [] if os.environ.get("IGLENS_TL_BROWSER") else ["browser"]
    absent += [] if HAS_NOTEBOOKS else ["notebooks"]
    absent += [] if HAS_OFFLOADING else ["offloads"]
    foreign = [item for item in items if any(item.get_closest_marker(name) for name in absent)]
    config.hook.pytest_deselected(items=foreign)
    items[:] = [item for item in items if item not in foreign]


def _global_state() -> dict[str, object]:
    # Python's own random state is left out: beartype draws from it to choose the items of a list that it checks.
    kind, keys, *place = np.random.get_state()
    return {
        "default dtype": torch.get_default_dtype(),
        "gradients enabled": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "number of threads": torch.get_num_threads(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "torch's random state": hash(torch.get_rng_state().numpy().tobytes()),
        "numpy's random state": hash((kind, keys.tobytes(), *place)),
    }


@pytest.fixture(autouse=True)
def nothing_global_changes() -> Iterator[None]:
    """Fail a test that leaves a global setting or a random state other than it found it.

    Build models through `tests.models`, which gives the random states back; draw from a `torch.Generator` of your own.
    """
    before = _global_state()
    yield
    after = _global_state()
    changed = [name for name in before if before[name] != after[name]]
    assert not changed, f"the test changed {', '.join(changed)}"

"""Fixtures with the embedded SmolLM2-135M, as a pytest plugin: `pytest_plugins = ["tests.smollm2"]`.

- `smollm2`: the model through every way in that this TransformerLens must have, one test a way: `bridge-raw`,
  `bridge-compat`, `hooked`, `hooked-folded`.
- `smollm2_default`: the same without folding, through the preferred way in.

Models are shared: leave no hook behind and write to no weight. At most two (540 MB each) are in memory: pytest groups
the tests of one parameter and drops its model before the next is loaded.
"""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports huggingface_hub, which reads it once

from typing import Any

import pytest

from iglens_tl.demo import demo_model
from tests.versions import APIS

PROMPT = "The capital of France is"
PROMPT_IDS = (504, 3575, 282, 4649, 314)
PARIS = 7042

MUST_HAVE = tuple(api for api in ("bridge", "hooked") if api in APIS)  # the preferred one first
WAYS = {
    name: way
    for name, way in {
        "bridge-raw": ("bridge", False),
        "bridge-compat": ("bridge", True),
        "hooked": ("hooked", False),
        "hooked-folded": ("hooked", True),
    }.items()
    if way[0] in MUST_HAVE
}
DEFAULT = next(iter(WAYS))


@pytest.fixture(scope="session")
def smollm2_default() -> Any:
    return demo_model(WAYS[DEFAULT][0])


@pytest.fixture(scope="session", params=WAYS)
def smollm2(request: pytest.FixtureRequest) -> Any:
    if request.param == DEFAULT:
        return request.getfixturevalue("smollm2_default")
    api, processed = WAYS[request.param]
    return demo_model(api, processed=processed)

"""Which ways into TransformerLens the installed version must have.

The table is what each major version promises, not what happens to be importable: a version that has lost an API makes
the tests that need it fail; nothing is skipped because an import failed.
"""

from __future__ import annotations

from importlib.metadata import version

TL_VERSION = version("transformer_lens")
TL_MAJOR = int(TL_VERSION.split(".", maxsplit=1)[0])

_MUST_HAVE = {2: {"hooked"}, 3: {"hooked", "bridge"}, 4: {"bridge"}}
APIS = _MUST_HAVE[TL_MAJOR]

HAS_HOOKED = "hooked" in APIS
HAS_BRIDGE = "bridge" in APIS

HAS_NOTEBOOKS = TL_MAJOR == 3
"""The notebook packages are part of the development environment, which has TransformerLens 3, and of no other."""

HAS_OFFLOADING = TL_MAJOR >= 4
"""Before, TransformerLens refuses a bridge whose weights lie on the disk."""

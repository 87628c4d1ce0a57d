"""Exact layer-by-layer probability attribution for TransformerLens.

`ig_lens(model, prompt, targets=" Paris")` says between which two states of the residual stream the probability of a
token is produced; the credits sum to the change of the model's own probability.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from iglens_tl._checks import MissingActivationError, QuadratureError, ReadoutMismatchError, UnsupportedModelError
    from iglens_tl.attribution import ig_lens
    from iglens_tl.components import split
    from iglens_tl.diagnosis import Diagnosis, Finding, doctor
    from iglens_tl.generation import generate_and_attribute
    from iglens_tl.results import IGLensResult, Onset
    from iglens_tl.splits import SplitResult
    from iglens_tl.targets import NEXT, TOP, TokenSet

__version__ = "0.1.0"

__all__ = [
    "NEXT",
    "TOP",
    "Diagnosis",
    "Finding",
    "IGLensResult",
    "MissingActivationError",
    "Onset",
    "QuadratureError",
    "ReadoutMismatchError",
    "SplitResult",
    "TokenSet",
    "UnsupportedModelError",
    "__version__",
    "doctor",
    "generate_and_attribute",
    "ig_lens",
    "split",
]

# The module of each public name. It is imported when the name is first used: a saved result loads where there is no
# TransformerLens, and the command line prints its help before torch is there.
_HOMES = {
    "NEXT": "targets",
    "TOP": "targets",
    "Diagnosis": "diagnosis",
    "Finding": "diagnosis",
    "IGLensResult": "results",
    "MissingActivationError": "_checks",
    "Onset": "results",
    "QuadratureError": "_checks",
    "ReadoutMismatchError": "_checks",
    "SplitResult": "splits",
    "TokenSet": "targets",
    "UnsupportedModelError": "_checks",
    "doctor": "diagnosis",
    "generate_and_attribute": "generation",
    "ig_lens": "attribution",
    "split": "components",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

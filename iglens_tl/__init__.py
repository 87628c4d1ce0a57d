"""Exact layer-by-layer probability attribution for TransformerLens.

`ig_lens(model, prompt, targets=" Paris")` says between which two states of the residual stream the probability of a
token is produced; the credits sum to the change of the model's own probability.
"""

from iglens_tl._checks import MissingActivationError, ReadoutMismatchError, UnsupportedModelError
from iglens_tl.attribution import ig_lens
from iglens_tl.diagnosis import Diagnosis, Finding, doctor
from iglens_tl.results import IGLensResult, Onset
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
    "ReadoutMismatchError",
    "TokenSet",
    "UnsupportedModelError",
    "__version__",
    "doctor",
    "ig_lens",
]

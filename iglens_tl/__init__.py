"""Exact layer-by-layer probability attribution for TransformerLens.

`ig_lens(model, prompt, targets=" Paris")` says between which two states of the residual stream the probability of a
token is produced; the credits sum to the change of the model's own probability.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from iglens_tl._checks import MissingActivationError, QuadratureError, ReadoutMismatchError, UnsupportedModelError
    from iglens_tl.ablation import ablate_layers
    from iglens_tl.ablation_result import AblationResult
    from iglens_tl.answer_result import AnswerResult
    from iglens_tl.answers import attribute_answer
    from iglens_tl.attribution import ig_lens
    from iglens_tl.companion_results import DLAResult, LayerPathResult, LogitLensResult
    from iglens_tl.companions import direct_logit_attribution, logit_lens
    from iglens_tl.comparison import LensComparison
    from iglens_tl.components import split
    from iglens_tl.context import context_need
    from iglens_tl.context_result import ContextNeed
    from iglens_tl.contrast import difference
    from iglens_tl.dataset import run_dataset
    from iglens_tl.diagnosis import Diagnosis, Finding, doctor
    from iglens_tl.estimation import Estimate, estimate
    from iglens_tl.generation import generate_and_attribute
    from iglens_tl.layer_paths import layer_conductance, layer_integrated_gradients
    from iglens_tl.lineup import compare
    from iglens_tl.reference import ReferenceUpdates, reference_updates
    from iglens_tl.report import report_html, write_report
    from iglens_tl.results import IGLensResult, Onset
    from iglens_tl.splits import SplitResult
    from iglens_tl.study import onset_study
    from iglens_tl.study_result import OnsetStudy
    from iglens_tl.summary import DatasetSummary, summarize
    from iglens_tl.targets import NEXT, TOP, TokenSet

__version__ = "0.1.0"

__all__ = [
    "NEXT",
    "TOP",
    "AblationResult",
    "AnswerResult",
    "ContextNeed",
    "DLAResult",
    "DatasetSummary",
    "Diagnosis",
    "Estimate",
    "Finding",
    "IGLensResult",
    "LayerPathResult",
    "LensComparison",
    "LogitLensResult",
    "MissingActivationError",
    "Onset",
    "OnsetStudy",
    "QuadratureError",
    "ReadoutMismatchError",
    "ReferenceUpdates",
    "SplitResult",
    "TokenSet",
    "UnsupportedModelError",
    "__version__",
    "ablate_layers",
    "attribute_answer",
    "compare",
    "context_need",
    "difference",
    "direct_logit_attribution",
    "doctor",
    "estimate",
    "generate_and_attribute",
    "ig_lens",
    "layer_conductance",
    "layer_integrated_gradients",
    "logit_lens",
    "onset_study",
    "reference_updates",
    "report_html",
    "run_dataset",
    "split",
    "summarize",
    "write_report",
]

# The module of each public name. It is imported when the name is first used: a saved result loads where there is no
# TransformerLens, and the command line prints its help before torch is there.
_HOMES = {
    "NEXT": "targets",
    "TOP": "targets",
    "AblationResult": "ablation_result",
    "AnswerResult": "answer_result",
    "ContextNeed": "context_result",
    "DLAResult": "companion_results",
    "DatasetSummary": "summary",
    "Diagnosis": "diagnosis",
    "Estimate": "estimation",
    "Finding": "diagnosis",
    "IGLensResult": "results",
    "LayerPathResult": "companion_results",
    "LensComparison": "comparison",
    "LogitLensResult": "companion_results",
    "MissingActivationError": "_checks",
    "Onset": "results",
    "OnsetStudy": "study_result",
    "QuadratureError": "_checks",
    "ReadoutMismatchError": "_checks",
    "ReferenceUpdates": "reference",
    "SplitResult": "splits",
    "TokenSet": "targets",
    "UnsupportedModelError": "_checks",
    "ablate_layers": "ablation",
    "attribute_answer": "answers",
    "compare": "lineup",
    "context_need": "context",
    "difference": "contrast",
    "direct_logit_attribution": "companions",
    "doctor": "diagnosis",
    "estimate": "estimation",
    "generate_and_attribute": "generation",
    "ig_lens": "attribution",
    "layer_conductance": "layer_paths",
    "layer_integrated_gradients": "layer_paths",
    "logit_lens": "companions",
    "onset_study": "study",
    "reference_updates": "reference",
    "report_html": "report",
    "run_dataset": "dataset",
    "split": "components",
    "summarize": "summary",
    "write_report": "report",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

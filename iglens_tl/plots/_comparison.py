"""The same layers under several methods: one panel a method, each with its own unit."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from torch import Tensor

from iglens_tl._fields import OfTokens
from iglens_tl._layout import Token
from iglens_tl.comparison import LensComparison
from iglens_tl.plots import _style
from iglens_tl.plots._words import in_title, of_kind, one_token, path_title, same_question, where

if TYPE_CHECKING:
    import plotly.graph_objects

_NAMES = {
    "ig_lens": "IG-Lens: credit",
    "logit_lens": "logit lens: level after the layer",
    "dla": "direct logit attribution",
    "layer_conductance": "layer conductance",
    "layer_integrated_gradients": "layer integrated gradients",
}
_PANEL = 125  # pixels of height


class LayerDrops(OfTokens, Protocol):
    """What is read of an ablation: its tokens, and the drop of the target by layer."""

    @property
    def drop(self) -> Tensor: ...
    @property
    def layer_labels(self) -> tuple[str, ...]: ...
    @property
    def unit(self) -> str: ...


class _Panel(NamedTuple):
    name: str
    unit: str
    labels: Sequence[str]
    amounts: Sequence[float]
    is_level: bool = False


def comparison(
    compared: LensComparison, batch: int = 0, pos: int = 0, *, ablation: LayerDrops | None = None
) -> plotly.graph_objects.Figure:
    """One token's layers under each method, panel under panel; the layers are the same, the units each method's own.

    Panels are not to be compared in height: a credit, a level, a share of a logit and a drop are different quantities.

    Args:
        compared: what `iglens_tl.compare` found.
        batch, pos: which token, on the axes of the result.
        ablation: what `iglens_tl.ablate_layers` found for the same tokens, whole blocks; its drops are the last panel.

    Returns:
        A figure with one bar trace a method, in `compared.units`, in the order of `compared.method_labels`.

    Raises:
        ImportError: where Plotly is not installed.
        IndexError: for a `batch` or `pos` outside the axes.
        ValueError: for a masked entry, or an ablation of other tokens or other layers.
    """
    of_kind("comparison", compared, LensComparison)
    token = one_token(compared, batch, pos)
    panels = [_of_method(compared, index, token) for index in range(len(compared.method_labels))]
    if ablation is not None:
        panels.append(_of_ablation(compared, ablation, token))
    title = f"Layers under {len(panels)} methods: {in_title(compared, token)}"
    fig = _style.dressed(_drawn(panels), title, where(compared, token), _PANEL * len(panels), above=18)
    fig.update_xaxes(
        type="category", categoryorder="array", categoryarray=list(panels[0].labels), autotickangles=[0, -90]
    )
    fig.update_xaxes(title_text=path_title(compared.segment_labels), row=len(panels), col=1)
    return fig


def _of_method(compared: LensComparison, index: int, token: Token) -> _Panel:
    name, unit = compared.method_labels[index], compared.units[index]
    labels = [_style.escaped(label) for label in compared.segment_labels]
    amounts = compared.amounts[(index, slice(None), *token)].tolist()
    return _Panel(_NAMES.get(name, name), unit, labels, amounts, is_level=name == "logit_lens")


def _of_ablation(compared: LensComparison, ablation: LayerDrops, token: Token) -> _Panel:
    _check(compared, ablation, token)
    how = [str(getattr(ablation, name)) for name in ("mode", "effect") if hasattr(ablation, name)]
    drops = dict(zip(ablation.layer_labels, ablation.drop[(slice(None), *token)].tolist(), strict=True))
    labels = [label for label in compared.segment_labels if label in drops]
    name = f"ablation: drop{' (' + ', '.join(how) + ')' if how else ''}"
    return _Panel(name, ablation.unit, [_style.escaped(label) for label in labels], [drops[label] for label in labels])


def _check(compared: LensComparison, ablation: LayerDrops, token: Token) -> None:
    if ablation.mask.shape != compared.mask.shape or not bool(ablation.mask[token]):
        raise ValueError(
            f"ablation must be of the tokens that are compared, [batch, pos] {list(compared.mask.shape)}, and hold {token}; "
            f"it is {list(ablation.mask.shape)}. Give both calls the same input, targets and positions."
        )
    if not same_question(compared, ablation):
        own, other = (result.target_strings[token[0]][token[1]] for result in (compared, ablation))
        raise ValueError(
            "ablation must be of the prompts, positions and targets that are compared; it is of others (its target there is "
            f"{other!r}, the comparison's {own!r}). "
            "Give both calls the same input, targets and positions."
        )
    strange = [label for label in ablation.layer_labels if label not in compared.segment_labels]
    if strange:
        raise ValueError(
            f"ablation must be of layers that are segments of the comparison ({', '.join(compared.segment_labels[:6])}, "
            f"...); it has {', '.join(strange[:6])}. Ablate whole blocks, and compare with layers=None."
        )


def _drawn(panels: Sequence[_Panel]) -> plotly.graph_objects.Figure:
    """Bars in panels that share their x axis; a level is grey, for it has no sign."""
    go = _style.graph_objects()
    subplots = importlib.import_module("plotly.subplots")
    names = [f"<b>{_style.escaped(panel.name)}</b>" for panel in panels]
    gap = 0.3 / len(panels)
    fig = subplots.make_subplots(
        rows=len(panels), cols=1, shared_xaxes=True, subplot_titles=names, vertical_spacing=gap
    )
    for row, panel in enumerate(panels, 1):
        fig.add_trace(go.Bar(x=panel.labels, y=panel.amounts, **_looks(panel)), row=row, col=1)
        fig.update_yaxes(title_text=_style.escaped(panel.unit), nticks=4, zerolinecolor="#8c8c8c", row=row, col=1)
    fig.update_annotations(x=0, xanchor="left", font_size=12)
    fig.update_layout(showlegend=False, bargap=0.25)
    return fig


def _looks(panel: _Panel) -> dict[str, Any]:
    marker = {"color": _style.WHOLE} if panel.is_level else _style.signed_bars(panel.amounts)
    hover = f"{_style.escaped(panel.name)}<br>segment %{{x}}<br>%{{y:.6~g}} {_style.escaped(panel.unit)}<extra></extra>"
    return {"marker": marker, "hovertemplate": hover}

"""Results as Plotly figures: which layers made a token's probability, at a glance.

Every function takes a result and returns a `plotly.graph_objects.Figure`; none shows or writes anything, runs a model or
computes an attribution again. Plotly (6 or 7) comes with `pip install iglens_tl[plots]` and is imported when the first
figure is made.

Units are those of the result (probability, nats or logits) and stand at the axis or the colour bar. A gain is blue, a loss
orange; size is darkness and sign is written too, so that a grey print keeps both. Layers go upward, as the stream does. Tokens
stand in quotes, escaped; positions, not texts, tell them apart; masked entries are left out. A figure is as wide as its page,
from 400 px on, and as high as its rows need.

What a figure does not say: a credit is no causal effect of a layer through the layers above it.

    from iglens_tl import IGLensResult, plots

    result = IGLensResult.load("france.safetensors")
    plots.waterfall(result)  # one token: from the first state through the signed credits to the probability
    plots.heatmap(result)    # tokens by layers
"""

from iglens_tl.plots._comparison import LayerDrops, comparison
from iglens_tl.plots._dataset import mean_credits
from iglens_tl.plots._export import write_image
from iglens_tl.plots._heatmap import heatmap
from iglens_tl.plots._layers import gain_loss, trajectories
from iglens_tl.plots._parts import heads, top_parts
from iglens_tl.plots._waterfall import waterfall

__all__ = [
    "LayerDrops",
    "comparison",
    "gain_loss",
    "heads",
    "heatmap",
    "mean_credits",
    "top_parts",
    "trajectories",
    "waterfall",
    "write_image",
]

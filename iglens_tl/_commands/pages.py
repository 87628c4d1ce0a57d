"""A report of what a command computed, with the companions read off one more run of the same tokens."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from iglens_tl._commands import models

if TYPE_CHECKING:
    from iglens_tl._report.beside import Companion
    from iglens_tl.results import IGLensResult

_SHARED = ("layers", "incl_mid", "baseline", "dtype")


def write(model: Any, result: IGLensResult, args: argparse.Namespace, settings: dict[str, Any]) -> None:
    """Write the report that `--html` asks for, where it does."""
    if args.html is None:
        return
    with models.clean_stdout():
        from iglens_tl import write_report

        write_report(result, args.html, companions=companions(model, result, settings))


def companions(model: Any, result: IGLensResult, settings: dict[str, Any]) -> list[Companion]:
    """Logit lens and direct logit attribution of a result of one prompt, on one cache.

    What a model does not have (single logits behind an unusual readout, say) is left out, and said on stderr.
    """
    import torch

    from iglens_tl import compare, logit_lens

    assert result.tokens is not None  # a command runs the model itself
    mask = result.mask[0]
    with torch.no_grad():
        logits, cache = model.run_with_cache(result.tokens, names_filter=_is_state)
    ask: dict[str, Any] = {
        **{name: settings[name] for name in _SHARED if name in settings},
        "cache": cache,
        "logits": logits,
        "attention_mask": torch.ones_like(result.tokens),  # a pad token in a prompt of its own is no padding
        "positions": result.positions[0][mask].tolist(),
        "targets": result.target_ids[:, mask, 0],
        "incorrect_targets": None if result.incorrect_ids is None else result.incorrect_ids[:, mask, 0],
    }
    found: list[Companion] = [logit_lens(model, result.tokens, **ask)]
    try:
        found.append(compare(model, result.tokens, methods=("dla",), metric=result.metric, **ask))
    except ValueError as error:
        print(f"iglens: the report goes without direct logit attribution: {error}", file=sys.stderr)
    return found


def _is_state(name: str) -> bool:
    return name.endswith(("hook_resid_pre", "hook_resid_mid", "hook_resid_post"))

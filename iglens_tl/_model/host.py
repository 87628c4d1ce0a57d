"""What a TransformerLens model is to this package, and which models are refused before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

import torch

from iglens_tl._checks import UnsupportedModelError, shorten

_ENCODERS = ("HookedEncoder", "HookedEncoderDecoder", "HookedAudioEncoder", "BertNextSentencePrediction")
_BESIDE_THE_READOUT = (
    "mlm_head",
    "prediction_head",
    "project_out",
    "hc_head",
    "sigma_map",
    "classifier_ln",
)
"""Components that a bridge may mount between the last block and the logits, beside `ln_final` and `unembed`."""


@dataclass(frozen=True)
class Host:
    """A supported model and the numbers that the rest of the package needs of it."""

    model: Any
    kind: Literal["hooked", "bridge"]
    n_layers: int
    d_model: int
    d_vocab: int
    d_vocab_out: int

    @property
    def name(self) -> str:
        return str(getattr(self.model.cfg, "model_name", None) or type(self.model).__name__)

    @cached_property
    def hook_points(self) -> dict[str, Any]:
        """The model's hook points by every name they have (a bridge takes 15 ms to list them, so they are listed once)."""
        return dict(self.model.hook_dict)

    @cached_property
    def hook_names(self) -> frozenset[str]:
        """The names of the hook points."""
        return frozenset(self.hook_points)

    @contextmanager
    def hooks(self, hooks: Sequence[tuple[str, Callable[..., Any]]]) -> Generator[None]:
        """`model.hooks(fwd_hooks=...)`, with the hook points listed once; a bridge lists them anew for every name.

        The user's hooks run before these and stay where they are. A name that the model does not have is passed over, and
        its hook does not fire.
        """
        points = [(self.hook_points[name], hook) for name, hook in hooks if name in self.hook_points]
        self.model.context_level += 1
        level = self.model.context_level
        try:
            for point, hook in points:
                point.add_hook(hook, level=level)
            yield
        finally:
            for point, _ in points:
                point.remove_hooks("fwd", level=level)
            self.model.context_level -= 1

    @property
    def tokenizer(self) -> Any:
        return getattr(self.model, "tokenizer", None)

    @property
    def norm(self) -> torch.nn.Module | None:
        """The final norm, None where the model has none."""
        if getattr(self.model.cfg, "normalization_type", None) is None:
            return None
        return self.model.ln_final

    @property
    def device(self) -> torch.device:
        """Where token ids go in."""
        device = torch.device(getattr(self.model.cfg, "device", None) or next(self.model.parameters()).device)
        return torch.device("cpu") if device.type == "meta" else device  # all weights offloaded to the disk

    @property
    def max_tokens(self) -> int | None:
        """The longest prompt, None where positions are not finite (ALiBi, state-space models)."""
        cfg = self.model.cfg
        if (
            getattr(cfg, "positional_embedding_type", None) in ("alibi", "none", None)
            or "mamba" in architecture(self.model).lower()
        ):
            # MPT lays out its ALiBi biases for so many positions; others reckon them as they need them.
            laid_out = getattr(
                getattr(getattr(self.model, "original_model", None), "config", None), "max_seq_len", None
            )
            return None if laid_out is None else int(laid_out)
        return int(cfg.n_ctx)

    @property
    def skips_left_padding(self) -> bool:
        """Whether an attention mask keeps padding on the left out of the run (not where a recurrence ignores the mask)."""
        return not architecture(self.model).startswith(("Rwkv", "RecurrentGemma"))


def architecture(model: Any) -> str:
    """The Hugging Face architecture, or an empty string."""
    cfg = model.cfg
    return str(getattr(cfg, "architecture", None) or getattr(cfg, "original_architecture", None) or "")


def weight_of(module: Any, name: str) -> torch.Tensor | None:
    """A weight by TransformerLens's name for it; None where there is none, or none at hand (offloaded)."""
    try:
        weight = getattr(module, name, None)
    except NotImplementedError:  # so TransformerLens 4.3 says that its values are elsewhere
        return None
    return weight if isinstance(weight, torch.Tensor) and not weight.is_meta else None


def is_cache(thing: object) -> bool:
    return isinstance(thing, Mapping) or _is_a(thing, "ActivationCache")


def _is_a(thing: object, name: str) -> bool:
    """Whether a class of that name is among the thing's classes.

    TransformerLens is told by names, never imported: results load without it, and its import paths differ by version.
    """
    return any(cls.__name__ == name for cls in type(thing).__mro__)


def _hook_points(modules: Iterable[torch.nn.Module | None]) -> list[Any]:
    inside = (part for module in modules if module is not None for part in module.modules())
    return [part for part in inside if _is_a(part, "HookPoint")]


def host_of(model: Any) -> Host:
    """Accept a model or refuse it with the reason; runs nothing.

    Raises:
        TypeError: for what is no TransformerLens model.
        UnsupportedModelError: for encoders, encoder-decoders, and models whose path from the last state to the logits is
            not final norm, unembedding and output transform.
        ValueError: for a model in training mode.
    """
    kind = _kind(model)
    _refuse_encoders(model)
    _refuse_training(model)
    _refuse_other_readouts(model)
    cfg = model.cfg
    return Host(
        model=model,
        kind=kind,
        n_layers=int(cfg.n_layers),
        d_model=int(cfg.d_model),
        d_vocab=int(cfg.d_vocab),
        d_vocab_out=_width_of_logits(model),
    )


def _kind(model: Any) -> Literal["hooked", "bridge"]:
    if type(model).__name__ in _ENCODERS:
        raise UnsupportedModelError(_encoder_message(type(model).__name__))
    if not isinstance(model, torch.nn.Module) or not hasattr(model, "cfg") or not hasattr(model, "hook_dict"):
        raise TypeError(
            "ig_lens needs a HookedTransformer, a TransformerBridge or an ActivationCache of one; got "
            f"{type(model).__module__}.{type(model).__name__}. Wrap a Hugging Face model with "
            "TransformerBridge.boot_transformers(name, hf_model=model, tokenizer=tokenizer), or before TransformerLens 3 with "
            "HookedTransformer.from_pretrained(name, hf_model=model, tokenizer=tokenizer)."
        )
    return "bridge" if hasattr(model, "original_model") and hasattr(model, "adapter") else "hooked"


def _encoder_message(name: str) -> str:
    return (
        f"{name} is an encoder or encoder-decoder. IG-Lens reads the next-token probability of decoder-only models from one "
        "residual stream; use a causal language model."
    )


def _refuse_encoders(model: Any) -> None:
    parts: Mapping[str, Any] = getattr(model, "_modules", {})
    config = getattr(getattr(model, "original_model", None), "config", None)
    name = architecture(model)
    encoder = (
        "encoder_blocks" in parts
        or "decoder_blocks" in parts
        or bool(getattr(config, "is_encoder_decoder", False))
        or name.endswith(("ForMaskedLM", "ForPreTraining", "ForNextSentencePrediction", "ForSequenceClassification"))
        or getattr(model.cfg, "attention_dir", "causal") != "causal"
    )
    if encoder:
        raise UnsupportedModelError(_encoder_message(name or type(model).__name__))


def _refuse_training(model: Any) -> None:
    roots = [("", model), ("original_model.", getattr(model, "original_model", None))]
    modules = [
        (prefix + name, module)
        for prefix, root in roots
        if isinstance(root, torch.nn.Module)
        for name, module in root.named_modules()
    ]
    if hasattr(model, "original_model"):
        training = [name or "the model" for name, module in modules if module.training]
    else:  # a HookedTransformer has no dropout and no batch statistics: its own flag changes nothing
        training = [name for name, module in modules if module.training and _acts_by_mode(module)]
    if training:
        raise ValueError(
            f"the model must be in evaluation mode (dropout would change every run); in training mode: {shorten(training, 3)}. "
            "Call model.eval() first."
        )


def _acts_by_mode(module: torch.nn.Module) -> bool:
    return isinstance(module, (torch.nn.Dropout, torch.nn.modules.batchnorm._BatchNorm))  # pyright: ignore[reportPrivateUsage] -- the common base of the batch norms


def _refuse_other_readouts(model: Any) -> None:
    name = architecture(model) or type(model).__name__
    parts: Mapping[str, Any] = getattr(model, "_modules", {})
    if getattr(model, "unembed", None) is None or getattr(model, "blocks", None) is None:
        raise UnsupportedModelError(f"{name} has no blocks or no unembedding that this package could read through.")
    if int(model.cfg.d_vocab) < 1:
        raise UnsupportedModelError(f"{name} has no vocabulary; IG-Lens attributes the probability of a next token.")
    beside = [part for part in _BESIDE_THE_READOUT if part in parts]
    if beside:
        raise UnsupportedModelError(
            f"{name} has {shorten(beside)} between its last block and its logits; IG-Lens reads final norm and unembedding "
            "only and would not give the model's probability."
        )
    if getattr(model.cfg, "normalization_type", None) is not None and not isinstance(
        getattr(model, "ln_final", None), torch.nn.Module
    ):
        raise UnsupportedModelError(
            f"{name} declares normalization_type={model.cfg.normalization_type!r} but TransformerLens "
            f"{package_version('transformer_lens')} exposes no ln_final for it, so its final norm cannot be applied."
        )
    streams = [block for block in model.blocks if getattr(block, "hook_out_is_single_residual_stream", True) is False]
    if streams:
        raise UnsupportedModelError(f"{name} carries several residual streams; IG-Lens needs a single one.")


def _width_of_logits(model: Any) -> int:
    weight = getattr(model.unembed, "W_U", None)
    if not isinstance(weight, torch.Tensor) or weight.ndim != 2:
        return int(getattr(model.cfg, "d_vocab_out", model.cfg.d_vocab))
    if weight.shape[0] != model.cfg.d_model and weight.is_floating_point():
        raise UnsupportedModelError(
            f"the unembedding takes {weight.shape[0]} dimensions and the residual stream has {model.cfg.d_model}: "
            f"{architecture(model) or 'the model'} projects in between (as OPT-350m's project_out), which is not supported."
        )
    return int(weight.shape[1]) if weight.is_floating_point() else int(model.cfg.d_vocab_out)


@contextmanager
def quiet(*modules: torch.nn.Module | None) -> Generator[None]:
    """Detach the hooks that sit on TransformerLens's hook points inside these modules, and put them back.

    The readout calls `ln_final` and `unembed` on rows that are no forward pass of the user's: a user's hook must neither
    see them nor change them.
    """
    kept: list[tuple[dict[str, Any], str, Any]] = []
    for point in _hook_points(modules):
        for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
            hooks = vars(point).get(name)
            if hooks:
                kept.append((vars(point), name, hooks))
                vars(point)[name] = type(hooks)()
    try:
        yield
    finally:
        for holder, name, hooks in kept:
            holder[name] = hooks


def hooked_points(*modules: torch.nn.Module | None) -> list[str]:
    """Names of the hook points inside these modules that carry forward hooks."""
    return [str(point.name) for point in _hook_points(modules) if point.fwd_hooks]


def hook_functions(*modules: torch.nn.Module | None) -> list[tuple[str, Callable[..., Any]]]:
    """The forward hooks on the hook points inside these modules, as they were given, each with the name of its point."""
    found: list[tuple[str, Callable[..., Any]]] = []
    for point in _hook_points(modules):
        added = {handle.hook.id for handle in point.fwd_hooks}  # a bridge has hooks of its own beside them
        every: Mapping[int, Callable[..., Any]] = vars(point)["_forward_hooks"]
        found += [(str(point.name), _as_given(hook)) for number, hook in every.items() if number in added]
    return found


def _as_given(full_hook: Callable[..., Any]) -> Callable[..., Any]:
    """What TransformerLens's `add_hook` wrapped into a hook of PyTorch."""
    names: tuple[str, ...] = getattr(getattr(full_hook, "__code__", None), "co_freevars", ())
    cells = getattr(full_hook, "__closure__", None) or ()
    return next((cell.cell_contents for name, cell in zip(names, cells, strict=True) if name == "hook"), full_hook)


def package_version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "unknown"


def provenance(host: Host) -> dict[str, Any]:
    """Versions, model and flags that a result carries."""
    cfg = host.model.cfg
    return {
        "model": host.name,
        "architecture": architecture(host.model),
        "api": "HookedTransformer" if host.kind == "hooked" else "TransformerBridge",
        "normalization_type": getattr(cfg, "normalization_type", None),
        "compatibility_mode": bool(getattr(host.model, "compatibility_mode", False)),
        "n_layers": host.n_layers,
        "model_dtype": str(getattr(cfg, "dtype", "unknown")).removeprefix("torch."),
        **{name: package_version(name) for name in ("iglens_tl", "transformer_lens", "transformers", "torch")},
    }

"""Ablation on tiny models: values by hand, other ways of hooking, batches, what is left behind, what is refused."""

from __future__ import annotations

import math

import pytest
import torch

import iglens_tl._model.continuing as continuing
from iglens_tl import (
    AblationResult,
    ReferenceUpdates,
    TokenSet,
    UnsupportedModelError,
    ablate_layers,
    ig_lens,
    reference_updates,
)
from tests.families import FAMILIES
from tests.models import BATCH, HOOKED, NATIVE, TOKENS, bridge, converted, hooked
from tests.oracles import lens_head
from tests.subjects import KINDS, N_LAYERS, ROWS, cached, each_kind, fresh, one_kind, padded, speaking, subject, tiny
from tests.watching import forwards, refused, untouched

# One float32 model run in another batch: up to 1e-7 in p here.
SAME = 2e-6
REFERENCE = [[2, 3, 5, 7, 11, 13], [9, 8, 7, 6], [21, 22, 23, 24, 25]]
POINTS = {"attn": "hook_attn_out", "mlp": "hook_mlp_out", "head": "attn.hook_z"}
MODES = ("zero", "skip", "mean", "resample", "placebo")
COMPONENTS = ("block", "attn", "mlp", "head")


def prob(logits, targets, at=-1):
    z = logits[:, at].double()
    return (z.gather(-1, targets[:, None])[:, 0] - z.logsumexp(-1)).exp()


def hooks_for(component, block, positions, value, head=None):
    """TransformerLens hooks that put `value` (of a block: its input plus `value`) in the place of an output."""
    kept = {}

    def save(tensor, hook):
        kept["before"] = tensor.clone()

    def put(tensor, hook):
        tensor = tensor.clone()
        if component == "block":
            tensor[:, positions] = kept["before"][:, positions] + value
        elif component == "head":
            tensor[:, positions, head] = value
        else:
            tensor[:, positions] = value
        return tensor

    if component == "block":
        return [(f"blocks.{block}.hook_resid_pre", save), (f"blocks.{block}.hook_resid_post", put)]
    return [(f"blocks.{block}.{POINTS[component]}", put)]


def by_hooks(model, tokens, targets, hooks):
    with torch.no_grad():
        return prob(model.run_with_hooks(tokens, fwd_hooks=hooks), targets)


def assert_as_hooked(model, component, scope, tokens=BATCH, mode="zero", value=0.0, reference=None):
    """Every row of the result equals a full forward pass with TransformerLens's own hooks."""
    targets = torch.tensor([6, 5])[: len(tokens)]
    result = ablate_layers(
        model, tokens, targets=targets[:, None], component=component, scope=scope, mode=mode, reference=reference
    )
    n = tokens.shape[1]
    positions = [n - 1] if scope == "target" else list(range(n))
    for row, (label, block) in enumerate(zip(result.layer_labels, result.blocks, strict=True)):
        head = int(label.split("H")[1]) if component == "head" else None
        put = value if reference is None else reference.means[component][block].float()
        wanted = by_hooks(
            model,
            tokens,
            targets,
            hooks_for(component, block, positions, put if head is None or reference is None else put[head], head),
        )
        assert (result.after[row, :, 0] - wanted).abs().max() <= SAME, label
    return result


# --- Values by hand ----------------------------------------------------------------------------------------------


@pytest.mark.hooked
def test_the_scopes_of_a_zeroed_mlp():
    """TransformerLens issue 980: which positions are ablated is half of the answer."""
    model, tokens, target = hooked(scale=2, **HOOKED["RMS"]), torch.tensor([[7, 8, 9]]), 48
    results = [
        ablate_layers(model, tokens, targets=target, component="mlp", layers=[0], scope=scope)
        for scope in ("target", "all")
    ]
    assert float(results[0].clean) == pytest.approx(0.4897, abs=5e-5)
    assert float(results[0].after) == pytest.approx(0.8985, abs=5e-5)
    assert float(results[1].after) == pytest.approx(0.9380, abs=5e-5)


def toy():
    """A Llama that decides in block 1 and nowhere else: only its MLP writes, and it writes " 7" whatever the token."""
    model = FAMILIES["Llama"].build()
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.data.zero_()
    generator = torch.Generator().manual_seed(4)
    answer = parameters["lm_head.weight"].data[7]
    down = parameters["model.layers.1.mlp.down_proj.weight"]
    down.data = torch.outer(answer / answer.norm(), torch.rand(down.shape[1], generator=generator))
    return model


class ByHand:
    """The toy in float64: what block 1 adds at a token, and the probability of 7 of a state."""

    def __init__(self, model):
        self.of = {name: tensor.detach().double().clone() for name, tensor in model.state_dict().items()}
        self.eps = model.config.rms_norm_eps

    def normed(self, h, weight):
        return h / (h.pow(2).mean(-1, keepdim=True) + self.eps).sqrt() * self.of[weight]

    def embedded(self, token):
        return self.of["model.embed_tokens.weight"][token]

    def update(self, token):
        at = "model.layers.1."
        x = self.normed(self.embedded(token), at + "post_attention_layernorm.weight")
        gate, up = (self.of[f"{at}mlp.{name}_proj.weight"] @ x for name in ("gate", "up"))
        return self.of[at + "mlp.down_proj.weight"] @ (gate / (1 + (-gate).exp()) * up)

    def p(self, h):
        z = self.of["lm_head.weight"] @ self.normed(h, "model.norm.weight")
        return float((z[7] - z.logsumexp(0)).exp())


@pytest.fixture(scope="module", params=KINDS)
def decided(request):
    model = toy()
    by_hand = ByHand(model)
    return (bridge(model) if request.param == "bridge" else converted(model)), by_hand


TOY_PROMPT = [3, 14, 15, 9]


@pytest.mark.parametrize("scope", ["target", "all"])
@pytest.mark.parametrize("mode", ["zero", "skip", "mean", "resample"])
@pytest.mark.parametrize("component", ["block", "mlp"])
def test_the_deciding_layer_is_found(decided, mode, scope, component):
    model, by_hand = decided
    reference = None
    if mode in ("mean", "resample"):
        reference = reference_updates(model, [[2, 5, 8, 30]], max_donors=1, components=[component])
    result = ablate_layers(
        model, TOY_PROMPT, targets=7, mode=mode, scope=scope, component=component, reference=reference
    )
    instead = torch.zeros(())
    if mode == "mean":
        instead = sum(by_hand.update(token) for token in (5, 8, 30)) / 3
    elif mode == "resample":
        assert reference is not None
        instead = by_hand.update([2, 5, 8, 30][reference.places[0, 1]])
    token = by_hand.embedded(9)
    clean, after = by_hand.p(token + by_hand.update(9)), by_hand.p(token + instead)
    # Float32 readout of float32 states against float64: up to 3e-7 here.
    assert result.clean.item() == pytest.approx(clean, abs=1e-6)
    assert result.after[:, 0, 0].tolist() == pytest.approx([clean, after, clean], abs=1e-6)
    assert clean - by_hand.p(token) > 0.5, "the toy decides in its block 1"


def test_the_placebo_does_not_find_it(decided):
    model, _ = decided
    removed = ablate_layers(model, TOY_PROMPT, targets=7)
    placebo = ablate_layers(model, TOY_PROMPT, targets=7, mode="placebo", n_samples=16)
    assert removed.drop[:, 0, 0].argmax() == 1
    # In 32 dimensions a random push of that length still turns the state.
    assert placebo.drop[1].abs().item() < 0.4 * removed.drop[1].item()
    # Blocks that add nothing are changed by nothing.
    assert placebo.drop[[0, 2]].abs().max() <= 1e-7
    assert placebo.after[1].item() != placebo.clean.item()


@each_kind
def test_direct_effects_by_hand(kind):
    """The last state without the part, through the float64 head that was copied out of the model."""
    model, head = subject(kind).model, subject(kind).head
    cache = cached(model, BATCH)
    last, targets = cache[f"blocks.{N_LAYERS - 1}.hook_resid_post"][:, -1].double(), torch.tensor([7, 9])
    means = reference_updates(model, REFERENCE)
    for component in COMPONENTS:
        for mode in ("zero", "mean"):
            given = means if mode == "mean" else None
            result = ablate_layers(
                model, BATCH, targets=targets[:, None], component=component, effect="direct", mode=mode, reference=given
            )
            for row, block in enumerate(result.blocks):
                if component == "block":
                    u = cache[f"blocks.{block}.hook_resid_post"] - cache[f"blocks.{block}.hook_resid_pre"]
                elif component == "head":
                    which = int(result.layer_labels[row].split("H")[1])
                    weight = model.blocks[block].attn.W_O.detach()[which].double()
                    u = cache[f"blocks.{block}.attn.hook_z"][:, :, which].double() @ weight
                else:
                    u = cache[f"blocks.{block}.{POINTS[component]}"]
                instead = torch.zeros(())
                if mode == "mean":
                    instead = means.means[component][block]
                    instead = instead[which] @ weight if component == "head" else instead
                wanted = head.prob(last - u[:, -1].double() + instead, targets)
                assert (result.after[row, :, 0] - wanted).abs().max() <= SAME, (component, mode, block)


@pytest.mark.hooked
def test_direct_effect_of_a_head_behind_a_post_norm():
    """The norm behind attention is linear once its scale is frozen at the clean run's."""
    model = hooked(**HOOKED["post-norms and soft-caps, as Gemma-2"])
    head, cache = lens_head(model), cached(model, TOKENS)
    result = ablate_layers(model, TOKENS, targets=7, component="head", effect="direct")
    for row, (label, block) in enumerate(zip(result.layer_labels, result.blocks, strict=True)):
        at, which = f"blocks.{block}.", int(label.split("H")[1])
        written = (
            cache[at + "attn.hook_z"][0, -1, which].double() @ model.blocks[block].attn.W_O.detach()[which].double()
        )
        scale, weight = (
            cache[at + "ln1_post.hook_scale"][0, -1].double(),
            model.blocks[block].ln1_post.w.detach().double(),
        )
        wanted = head.prob(
            cache["blocks.2.hook_resid_post"][0, -1].double() - written / scale * weight, torch.tensor(7)
        )
        assert result.after[row].item() == pytest.approx(wanted.item(), abs=SAME)


# --- Other ways of hooking ---------------------------------------------------------------------------------------


@each_kind
@pytest.mark.parametrize("scope", ["target", "all"])
@pytest.mark.parametrize("component", COMPONENTS)
def test_equal_to_hooked_forward_passes(kind, component, scope):
    model = subject(kind).model
    reference = reference_updates(model, REFERENCE)
    result = assert_as_hooked(model, component, scope)
    assert result.settings["prefix_reused"]
    assert_as_hooked(model, component, scope, mode="mean", reference=reference)


SETTINGS = {"hooked": HOOKED, "bridge": NATIVE}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in KINDS for name in SETTINGS[kind]])
def test_every_setting(kind, name):
    """Parallel blocks, attention only, post-norms, other norms and positions, one layer."""
    model = tiny(kind, **SETTINGS[kind][name])
    for component in COMPONENTS:
        if component == "mlp" and "ttention only" in name:
            with pytest.raises(UnsupportedModelError, match="hook_mlp_out"):
                ablate_layers(model, TOKENS, component="mlp")
        else:
            assert_as_hooked(model, component, "target", TOKENS)


_SWEPT = ("GPT-J", "GPT-NeoX", "Gemma-2", "OLMo-2", "Granite", "Mixtral", "Cohere")


@pytest.mark.bridge
@pytest.mark.parametrize("name", _SWEPT)
def test_families(name):
    """Parallel blocks, norms behind sublayers, factors on what is added, experts."""
    model = bridge(FAMILIES[name].build())
    for component in COMPONENTS:
        assert assert_as_hooked(model, component, "all").settings["prefix_reused"]


@pytest.mark.bridge
def test_blocks_that_cannot_be_called_by_themselves():
    """BLOOM hands its blocks biases laid out for the batch: the ablations share full forward passes."""
    model = bridge(FAMILIES["BLOOM"].build())
    for component in COMPONENTS:
        result = assert_as_hooked(model, component, "target")
        assert not result.settings["prefix_reused"]


@pytest.mark.bridge
def test_state_space_models_by_block():
    model = bridge(FAMILIES["Mamba"].build())
    assert_as_hooked(model, "block", "all")
    for component in COMPONENTS[1:]:
        with refused(model, UnsupportedModelError, 'component="block"'):
            ablate_layers(model, TOKENS, component=component)


@pytest.mark.bridge
def test_hybrids_where_they_have_the_component():
    model = bridge(FAMILIES["Jamba"].build())
    assert_as_hooked(model, "mlp", "target")
    attention = [layer for layer in range(model.cfg.n_layers) if f"blocks.{layer}.hook_attn_out" in model.hook_dict]
    assert attention
    assert len(attention) < model.cfg.n_layers
    with refused(model, UnsupportedModelError, "hook_attn_out"):
        ablate_layers(model, TOKENS, component="attn")
    result = ablate_layers(model, TOKENS, targets=7, component="attn", layers=attention)
    wanted = by_hooks(model, TOKENS, torch.tensor([7]), hooks_for("attn", attention[0], [5], 0.0))
    assert result.after[0, 0, 0].item() == pytest.approx(wanted.item(), abs=SAME)


@each_kind
@pytest.mark.parametrize("component", COMPONENTS)
def test_full_forward_passes_agree_with_entering(kind, component, monkeypatch):
    model = subject(kind).model
    entered = ablate_layers(model, BATCH, component=component, batch_size=3)
    monkeypatch.setattr(continuing, "_call", lambda *_: (_ for _ in ()).throw(RuntimeError("cannot")))
    run = ablate_layers(model, BATCH, component=component, batch_size=3)
    assert (run.settings["prefix_reused"], entered.settings["prefix_reused"]) == (False, True)
    assert (run.after - entered.after).abs().max() <= SAME
    assert run.forwards > entered.forwards


@each_kind
def test_of_a_hooked_run_it_is_the_hooked_run_that_is_ablated(kind):
    model, push = subject(kind).model, torch.linspace(-1, 1, 32)
    own = [
        ("blocks.1.hook_resid_pre", lambda tensor, hook: tensor + push),
        ("blocks.2.hook_mlp_out", lambda tensor, hook: 2 * tensor),
    ]
    targets = torch.tensor([7, 9])
    with model.hooks(fwd_hooks=own), untouched(model):
        result = ablate_layers(model, BATCH, targets=targets[:, None], component="attn", scope="all")
        clean = by_hooks(model, BATCH, targets, [])
    assert (result.clean[:, 0] - clean).abs().max() <= SAME
    assert (clean - prob(model(BATCH).detach(), targets)).abs().max() > 100 * SAME, "the hooks do something"
    for block in range(N_LAYERS):
        wanted = by_hooks(model, BATCH, targets, [*own, *hooks_for("attn", block, range(6), 0.0)])
        assert (result.after[block, :, 0] - wanted).abs().max() <= SAME


@each_kind
def test_a_run_that_changes_from_time_to_time_is_refused(kind):
    """The control that every batch carries comes out otherwise than it went in."""
    model, times = subject(kind).model, []

    def drifting(tensor, hook):
        times.append(0)
        return tensor * (1 + 0.01 * len(times))

    with model.hooks(fwd_hooks=[("blocks.2.hook_resid_pre", drifting)]), pytest.raises(UnsupportedModelError) as caught:
        ablate_layers(model, TOKENS)
    assert "from run to run" in str(caught.value)


@each_kind
def test_an_ablation_that_does_not_take_is_refused(kind):
    """A hook of the user's that puts the output back after the ablation."""
    model = subject(kind).model
    clean = cached(model, TOKENS)["blocks.1.hook_resid_post"]
    with (
        model.hooks(fwd_hooks=[("blocks.1.hook_resid_post", lambda tensor, hook: clean.expand_as(tensor).clone())]),
        refused(model, UnsupportedModelError, "do not add up"),
    ):
        ablate_layers(model, TOKENS, component="mlp", layers=[1])


# --- Batches, positions, draws -----------------------------------------------------------------------------------


@each_kind
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("mode", ["zero", "mean", "resample", "placebo"])
def test_a_row_of_a_batch_is_the_row_alone(kind, side, mode, tmp_path):
    model = speaking(kind, tmp_path)
    tokens, mask = padded(side)
    keys = {
        "mode": mode,
        "reference": REFERENCE if mode in ("mean", "resample") else None,
        "n_samples": 2 if mode in ("resample", "placebo") else 1,
    }
    for component, scope in (("block", "all"), ("attn", "target")):
        settings = {**keys, "component": component, "scope": scope}
        whole = ablate_layers(model, tokens, attention_mask=mask, positions=None, **settings)
        for i, row in enumerate(ROWS):
            alone = ablate_layers(model, row, positions=None, **settings)
            assert torch.equal(whole.target_ids[i][whole.mask[i]], alone.target_ids[0])
            assert (whole.after[:, i][:, whole.mask[i]] - alone.after[:, 0]).abs().max() <= SAME
    assert whole.after[:, ~whole.mask].isnan().all()


@each_kind
def test_positions_are_ablated_one_at_a_time(kind):
    """Scope "target" at position 3 changes position 3 alone, also where position 5 is read in the same call."""
    model = subject(kind).model
    both = ablate_layers(model, TOKENS, targets=7, positions=[3, 5])
    for i, position in enumerate((3, 5)):
        one = ablate_layers(model, TOKENS, targets=7, positions=position)
        assert (both.after[:, :, i] - one.after[:, :, 0]).abs().max() <= SAME


@each_kind
def test_the_first_position_can_be_spared(kind):
    model = subject(kind).model
    spared = ablate_layers(model, TOKENS, targets=7, scope="all", include_first=False, component="mlp")
    wanted = [
        by_hooks(model, TOKENS, torch.tensor([7]), hooks_for("mlp", b, [1, 2, 3, 4, 5], 0.0)).item() for b in range(3)
    ]
    assert spared.after[:, 0, 0].tolist() == pytest.approx(wanted, abs=SAME)
    assert spared.settings["include_first"] is False
    assert "but each prompt's first" in str(spared).replace("\n", " ")
    whole = ablate_layers(model, TOKENS, targets=7, scope="all", component="mlp")
    assert whole.settings["include_first"] is True
    assert (whole.after - spared.after).abs().max() > 1e-3
    # At the first position itself, nothing is then left to ablate.
    at_first = ablate_layers(model, TOKENS, targets=7, scope="all", include_first=False, positions=0)
    assert at_first.drop.abs().max() <= SAME


@each_kind
def test_draws_depend_on_the_seed_and_average(kind):
    model = subject(kind).model
    two = reference_updates(model, [[2, 3, 5]], components=["block"])
    assert two.places.tolist() == [[0, 1], [0, 2]]

    def after(**settings):
        return ablate_layers(
            model, TOKENS, targets=7, layers=[1], mode="resample", reference=two, **settings
        ).after.item()

    each = {after(seed=seed) for seed in range(12)}
    rounded = sorted({round(value, 6) for value in each})
    assert len(rounded) == 2, "two donors, two values"
    assert after(seed=3) == after(seed=3)
    share = (after(seed=1, n_samples=32) - rounded[0]) / (rounded[1] - rounded[0]) * 32
    assert share == pytest.approx(round(share), abs=0.05)
    assert 4 <= share <= 28
    placebo = [
        ablate_layers(model, TOKENS, targets=7, mode="placebo", seed=seed, n_samples=n).after
        for seed, n in ((0, 1), (1, 1), (0, 2))
    ]
    assert not torch.equal(placebo[0], placebo[1])
    assert not torch.equal(placebo[0], placebo[2])


@each_kind
@pytest.mark.parametrize("component", ["attn", "mlp", "head"])
def test_a_placebo_is_as_long_as_the_output(kind, component):
    """Seen where it is put in: by a hook of the user's on what attention or MLP add."""
    model = subject(kind).model
    added = "hook_mlp_out" if component == "mlp" else "hook_attn_out"
    # A user's hook runs before ours at the same point: look one step further on.
    behind = "hook_resid_post" if component == "mlp" else "hook_resid_mid"
    seen = []
    with model.hooks(fwd_hooks=[(f"blocks.1.{behind}", lambda tensor, hook: seen.append(tensor.clone()))]):
        result = ablate_layers(model, TOKENS, component=component, mode="placebo", layers=[1])
    cache = cached(model, TOKENS)
    for row in range(len(result.blocks)):
        output = cache[f"blocks.1.{added}"][0, -1]
        if component == "head":
            output = cache["blocks.1.attn.hook_z"][0, -1, row] @ model.blocks[1].attn.W_O.detach()[row]
        control, changed = seen[-1][0], seen[-1][1 + row]
        assert (control[:-1] - changed[:-1]).abs().max() <= 1e-5
        # Differences of float32 numbers around 1.
        assert (changed - control)[-1].norm().item() == pytest.approx(output.norm().item(), rel=1e-3)


# --- The reference -----------------------------------------------------------------------------------------------


@each_kind
def test_means_leave_out_first_positions_and_padding(kind, tmp_path):
    model = speaking(kind, tmp_path)
    tokens, mask = padded("left")
    found = reference_updates(model, tokens, attention_mask=mask)
    assert (found.n_prompts, found.n_positions) == (4, 5 + 2 + 3)
    caches = [cached(model, row[None]) for row in ROWS]
    for layer in range(N_LAYERS):
        rows = [cache[f"blocks.{layer}.hook_attn_out"][0, 1:].double() for cache in caches]
        assert (found.means["attn"][layer] - torch.cat(rows).mean(0)).abs().max() <= 1e-5
        heads = [cache[f"blocks.{layer}.attn.hook_z"][0, 1:].double() for cache in caches]
        assert (found.means["head"][layer] - torch.cat(heads).mean(0)).abs().max() <= 1e-5
        for donor, (prompt, position) in enumerate(found.places.tolist()):
            assert position > 0
            state = caches[prompt][f"blocks.{layer}.hook_resid_pre"][0, position]
            update = caches[prompt][f"blocks.{layer}.hook_resid_post"][0, position] - state
            assert (found.donors["block"][layer, donor] - update).abs().max() <= 1e-5


@each_kind
def test_a_reference_is_saved_and_checked(kind, tmp_path):
    model = subject(kind).model
    found = reference_updates(model, REFERENCE, max_donors=5, seed=2)
    found.save(tmp_path / "r.safetensors")
    loaded = ReferenceUpdates.load(tmp_path / "r.safetensors")
    assert repr(loaded) == repr(found)
    assert len(loaded.places) == 5
    one, other = (ablate_layers(model, TOKENS, mode="resample", reference=r, component="head") for r in (found, loaded))
    assert one.equals(other)
    again = ablate_layers(model, TOKENS, mode="mean", reference=REFERENCE)
    assert (again.after - ablate_layers(model, TOKENS, mode="mean", reference=found).after).abs().max() <= 1e-12
    assert again.forwards == 2 + len(REFERENCE)
    with refused(model, ValueError, "holds attn", "block is needed"):
        ablate_layers(model, TOKENS, mode="mean", reference=reference_updates(model, REFERENCE, components=["attn"]))
    stranger = tiny(kind, n_layers=2)
    with refused(model, ValueError, "of the model that is ablated", "n_layers 2"):
        ablate_layers(model, TOKENS, mode="mean", reference=reference_updates(stranger, REFERENCE))
    twin = tiny(kind, seed=1)
    with refused(model, ValueError, "of the model that is ablated", "weights"):
        ablate_layers(model, TOKENS, mode="mean", reference=reference_updates(twin, REFERENCE))
    with refused(model, ValueError, "no position beside each prompt's first"):
        reference_updates(model, [[3], [4]])
    with refused(model, ValueError, "components"):
        reference_updates(model, REFERENCE, components=["layer"])


# --- The result --------------------------------------------------------------------------------------------------


@each_kind
def test_labels_metrics_and_files(kind, tmp_path):
    model = subject(kind).model
    whole = ig_lens(model, BATCH)
    result = ablate_layers(model, BATCH, positions=[-2, -1])
    assert result.layer_labels == whole.segment_labels
    assert torch.equal(result.target_ids[:, 1], whole.target_ids[:, 0])
    assert (result.clean[:, 1] - whole.values[-1][:, 0]).abs().max() <= SAME
    result.save(tmp_path / "a.safetensors")
    assert AblationResult.load(tmp_path / "a.safetensors").equals(result)
    frame = result.to_dataframe()
    assert len(frame) == 3 * 4
    assert frame.loc[frame["batch"].eq(1) & frame["position"].eq(5), "drop"].tolist() == result.drop[:, 1, 1].tolist()
    assert frame["layer"].cat.categories.tolist() == ["0", "1", "2"]
    assert "drop = clean - after" in result.to_text(200)
    assert result._repr_html_().count("<table") == 4
    labels = [ablate_layers(model, TOKENS, component=c, layers=[2]).layer_labels for c in COMPONENTS]
    assert labels == [("2",), ("2_attn",), ("2_mlp",), ("L2H0", "L2H1", "L2H2", "L2H3")]


@each_kind
def test_metrics_follow_from_probabilities(kind):
    model = subject(kind).model
    p = ablate_layers(model, TOKENS, targets=7).after_prob
    q = ablate_layers(model, TOKENS, targets=9).after_prob
    by_metric = {m: ablate_layers(model, TOKENS, targets=7, metric=m) for m in ("prob", "log_prob", "log_odds")}
    assert torch.equal(by_metric["log_prob"].after_prob, p)
    assert (by_metric["log_prob"].after - p.log()).abs().max() <= 1e-9
    assert (by_metric["log_odds"].after - (p.log() - (-p).log1p())).abs().max() <= 1e-6
    versus = ablate_layers(model, TOKENS, targets=7, incorrect_targets=9)
    # Log of the sum over all other tokens, with one target or two of them apart: float32 sums.
    assert (versus.after - (p - q)).abs().max() <= 1e-8
    logits = ablate_layers(model, TOKENS, targets=7, incorrect_targets=9, metric="logit")
    assert (logits.after - (p.log() - q.log())).abs().max() <= 1e-5
    either = ablate_layers(model, TOKENS, targets=TokenSet([7, 9]))
    assert (either.after - (p + q)).abs().max() <= 1e-8


@each_kind
def test_zero_and_skip_are_one_and_say_so(kind):
    model = subject(kind).model
    for component in COMPONENTS:
        zero, skip = (ablate_layers(model, TOKENS, component=component, mode=m) for m in ("zero", "skip"))
        assert torch.equal(zero.after, skip.after)
        assert zero.settings["replacement"] == skip.settings["replacement"]
        assert "the same" in zero.settings["replacement"]


@each_kind
def test_what_was_run_is_counted(kind):
    model = subject(kind).model
    with forwards(model) as count:
        result = ablate_layers(model, TOKENS)
    assert count.runs == result.forwards == 2
    # Two whole runs; block 0's absence runs blocks 1 and 2, block 1's runs block 2; the control runs along with the first.
    assert result.block_evaluations == 2 * 3 + (2 + 1) + 2
    direct = ablate_layers(model, TOKENS, effect="direct", component="head")
    assert (direct.forwards, direct.block_evaluations) == (2, 6)
    assert direct.settings["prefix_reused"] is None


# --- What is left behind, what is refused ------------------------------------------------------------------------


@each_kind
@pytest.mark.parametrize("component", COMPONENTS)
def test_nothing_is_left_behind(kind, component):
    made = fresh(kind).model
    with untouched(made):
        ablate_layers(made, BATCH, component=component, mode="resample", reference=REFERENCE, progress=True)
        ablate_layers(made, BATCH, component=component, mode="placebo", scope="all")

    class StopError(Exception):
        pass

    def stop(tensor, hook):
        if len(tensor) > 1:
            raise StopError

    # A hook that fails in the ablated runs alone: what it raises comes through.
    with (
        made.hooks(fwd_hooks=[("blocks.2.hook_resid_pre", stop)]),
        untouched(made),
        pytest.raises(StopError),
    ):
        ablate_layers(made, TOKENS, component=component)


REFUSALS = [
    ({"component": "layer"}, ValueError, "component must be one of 'block', 'attn', 'mlp', 'head'"),
    ({"mode": "noise"}, ValueError, "mode must be one of"),
    ({"scope": "some"}, ValueError, "scope must be one of"),
    ({"effect": "both"}, ValueError, "effect must be one of"),
    ({"metric": "loss"}, ValueError, "metric must be one of"),
    ({"mode": "mean"}, ValueError, "needs reference="),
    ({"mode": "resample"}, ValueError, "needs reference="),
    ({"reference": REFERENCE}, ValueError, 'reference= goes with mode="mean"'),
    ({"effect": "direct", "scope": "all"}, ValueError, 'scope="target"'),
    ({"include_first": True}, ValueError, 'include_first goes with scope="all"'),
    ({"scope": "all", "include_first": 1}, TypeError, "True, False or None"),
    ({"n_samples": 2}, ValueError, "mode='zero' draws nothing"),
    ({"n_samples": 0, "mode": "placebo"}, ValueError, "n_samples must be at least 1"),
    ({"seed": -1}, ValueError, "seed must be at least 0"),
    ({"seed": 0.5}, TypeError, "seed must be a whole number"),
    ({"batch_size": 0}, ValueError, "batch_size must be at least 1"),
    ({"layers": [3]}, ValueError, "blocks 0 to 2"),
    ({"layers": [1, 1]}, ValueError, "a block twice"),
    ({"layers": []}, ValueError, "an empty list"),
    ({"layers": ["1_mid"]}, ValueError, "'1_mid'"),
    ({"layers": 2}, TypeError, "a list of block numbers"),
    ({"layers": "2"}, TypeError, "a list of block numbers"),
    ({"metric": "logit", "targets": TokenSet([1, 2])}, ValueError, "single tokens"),
    ({"max_memory": "lots"}, ValueError, "max_memory"),
]


@each_kind
@pytest.mark.parametrize(("settings", "error", "said"), REFUSALS, ids=lambda v: str(v)[:40])
def test_refusals(kind, settings, error, said):
    model = subject(kind).model
    with forwards(model) as count, refused(model, error, said):
        ablate_layers(model, TOKENS, **settings)
    assert count.runs == 0


@each_kind
def test_a_cache_cannot_be_ablated(kind):
    model = subject(kind).model
    cache = model.run_with_cache(TOKENS)[1]
    with refused(model, TypeError, "runs the model, which a cache cannot"):
        ablate_layers(cache)


@each_kind
def test_layers_by_name_and_in_order(kind):
    model = subject(kind).model
    whole = ablate_layers(model, TOKENS)
    some = ablate_layers(model, TOKENS, layers=["2", 0])
    assert some.blocks == (0, 2)
    assert (some.after - whole.after[[0, 2]]).abs().max() <= SAME
    assert not math.isnan(some.drop.sum().item())


@one_kind
def test_components_of_a_reference_are_names(kind):
    model = subject(kind).model
    alone = reference_updates(model, TOKENS, components="block")
    assert set(alone.means) == {"block"}
    with pytest.raises(
        ValueError, match="components must name some of block, attn, mlp, head, or be None for all; got none"
    ):
        reference_updates(model, TOKENS, components=[])
    with pytest.raises(TypeError, match=r"a list of block numbers, \[2\] for block 2 alone"):
        ablate_layers(model, TOKENS, targets=7, layers=2)

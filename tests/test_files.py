"""Saving and loading: everything comes back, byte for byte, with nothing but torch and safetensors."""

import json
import os
import stat
import subprocess
import sys

import numpy as np
import pytest
import safetensors.torch
import torch

from iglens_tl.results import IGLensResult
from tests.made_results import make, one, rich


@pytest.mark.parametrize("result", [rich(), one([0.1, 0.9]), make([[[0.0]], [[1.0]]], mask=[[False]])])
def test_a_round_trip_changes_nothing(result, tmp_path):
    result.save(tmp_path / "a.safetensors")
    loaded = IGLensResult.load(str(tmp_path / "a.safetensors"))
    assert loaded.equals(result)
    assert isinstance(loaded.token_strings[0], tuple)
    loaded.save(tmp_path / "b.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


def test_the_bytes_do_not_depend_on_the_process(tmp_path):
    rich().save(tmp_path / "a.safetensors")
    code = f"from tests.made_results import rich; rich().save({str(tmp_path / 'b.safetensors')!r})"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": "123"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


def test_the_order_of_settings_does_not_matter(tmp_path):
    for name, settings in (("a", {"x": 1, "y": 2}), ("b", {"y": 2, "x": 1})):
        one([0.1, 0.9], settings=settings).save(tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_nan_payloads_and_negative_zero_survive(tmp_path):
    odd = torch.tensor([0x7FF8000000000123, -0x8000000000000000, 0x7FF0000000000000]).view(torch.float64)
    result = make([[[0.0] * 3], [[1.0] * 3]], model_value=odd[None])
    result.save(tmp_path / "a.safetensors")
    loaded = IGLensResult.load(tmp_path / "a.safetensors")
    assert torch.equal(loaded.model_value.view(torch.int64), odd[None].view(torch.int64))


def test_views_are_saved_as_what_they_show(tmp_path):
    wide = torch.arange(6, dtype=torch.float64).reshape(3, 2)
    result = make(wide.t()[:, None, :])
    changed = make(wide.t()[:, None, :], model_value=result.total.expand(1, 3))
    changed.save(tmp_path / "a.safetensors")
    assert IGLensResult.load(tmp_path / "a.safetensors").equals(changed)


def test_saving_over_a_loaded_file_leaves_the_loaded_numbers(tmp_path):
    path = tmp_path / "a.safetensors"
    one([0.1, 0.9]).save(path)
    loaded = IGLensResult.load(path)
    one([0.2, 0.3]).save(path)
    assert loaded.equals(one([0.1, 0.9]))
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.safetensors"]


def test_a_failed_save_leaves_the_old_file_and_no_litter(tmp_path, monkeypatch):
    path = tmp_path / "a.safetensors"
    one([0.1, 0.9]).save(path)

    def refuse(source, target):
        raise OSError("no")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="no"):
        one([0.2, 0.3]).save(path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.safetensors"]
    assert IGLensResult.load(path).equals(one([0.1, 0.9]))


@pytest.mark.skipif(os.name != "posix", reason="file modes are a POSIX matter")
def test_a_saved_file_has_the_modes_of_any_new_file(tmp_path):
    (tmp_path / "plain").write_bytes(b"")
    one([0.1, 0.9]).save(tmp_path / "a.safetensors")
    modes = {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("plain", "a.safetensors")}
    assert len(modes) == 1


def test_files_of_another_kind_are_refused(tmp_path):
    path = tmp_path / "x"
    with pytest.raises(FileNotFoundError):
        IGLensResult.load(path)
    path.write_bytes(b"PK\x03\x04 not at all")
    with pytest.raises(ValueError, match=r"x is not a \(whole\) safetensors file"):
        IGLensResult.load(path)
    safetensors.torch.save_file({"a": torch.zeros(1)}, path, {"format": "pt"})
    with pytest.raises(ValueError, match=r"""no metadata key "iglens_tl" \(it has \['format'\]\)"""):
        IGLensResult.load(path)
    safetensors.torch.save_file({"a": torch.zeros(1)}, path)
    with pytest.raises(ValueError, match=r"it has none"):
        IGLensResult.load(path)


def test_a_cut_file_is_refused(tmp_path):
    path = tmp_path / "x"
    rich().save(path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"not a \(whole\) safetensors file"):
        IGLensResult.load(path)


def rewritten(path, **header):
    with safetensors.safe_open(path, "pt") as file:
        old = json.loads(file.metadata()["iglens_tl"])
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 (not a dict)
    safetensors.torch.save_file(tensors, path, {"iglens_tl": json.dumps({**old, **header})})


def test_newer_formats_and_other_results_are_refused(tmp_path):
    path = tmp_path / "x"
    one([0.1, 0.9]).save(path)
    rewritten(path)
    assert IGLensResult.load(path).equals(one([0.1, 0.9]))
    rewritten(path, kind="SplitResult")
    with pytest.raises(ValueError, match=r"holds another kind of result, SplitResult, not IGLensResult"):
        IGLensResult.load(path)
    rewritten(path, format=99)
    with pytest.raises(ValueError, match="is of format 99, this version of iglens_tl reads up to 1: upgrade"):
        IGLensResult.load(path)


def test_any_text_survives(tmp_path):
    texts = ("\ud800", "\x00", "東京")
    result = make(np.zeros((2, 1, 3)), token_strings=(texts,), targets=[list(texts)], answer="\udfff")
    result.save(tmp_path / "x")
    assert IGLensResult.load(tmp_path / "x").target_strings == (texts,)


def test_loading_needs_no_transformer_lens(tmp_path):
    rich().save(tmp_path / "x")
    code = (
        "import sys; sys.modules['transformer_lens'] = sys.modules['transformers'] = None\n"
        "from iglens_tl.results import IGLensResult\n"
        f"print(IGLensResult.load({str(tmp_path / 'x')!r}).n_segments)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "4\n"

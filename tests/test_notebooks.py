"""The notebooks run from start to end, and what is stored in them is what they show now."""

from __future__ import annotations

import base64
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import iglens_tl
from tests.test_readme import NUMBER, assert_prints

pytestmark = pytest.mark.notebooks

FOLDER = Path(__file__).parent.parent / "notebooks"
NAMES = [path.stem for path in sorted(FOLDER.glob("*.ipynb"))]
WITHOUT_SMOLLM2 = {"05_your_own_model"}
EACH = [pytest.param(name, marks=() if name in WITHOUT_SMOLLM2 else pytest.mark.smollm2) for name in NAMES]

TRAINED = "trained"  # the tag of cells that show a model trained in the notebook: its numbers differ by machine
# Printed numbers have four decimals; figures hold logits, of size 15 in float32, which differ by a few 1e-5 by machine.
FIGURES = 2e-4


def runner() -> Any:
    """`notebooks/run.py`, imported where it is used: the other environments have no notebook packages."""
    from notebooks import run

    return run


def test_there_are_five() -> None:
    assert [name[:2] for name in NAMES] == ["01", "02", "03", "04", "05"]


@pytest.mark.parametrize("name", NAMES)
def test_what_is_stored_is_of_this_code_and_clean(name: str) -> None:
    run, stored = runner(), runner().read(name)
    assert stored.metadata.iglens_tl.code_sha256 == run.code_hash(stored), "the code has changed: make notebooks"
    assert [cell.execution_count for cell in run.code_cells(stored)] == [*range(1, 1 + len(run.code_cells(stored)))]
    assert run.cleaned(stored) == stored
    for figure in run.figures(stored):
        assert base64.b64decode(figure[run.PNG]).startswith(b"\x89PNG")
    text = "".join(_texts(output) for cell in run.code_cells(stored) for output in cell.outputs)
    assert not [word for word in ("Traceback", "Warning", "site-packages", str(FOLDER.parent)) if word in text]


def _texts(output: Any) -> str:
    """What one reads of an output; pictures and packed numbers may spell anything."""
    return output.get("text", "") + "".join(text for kind, text in output.get("data", {}).items() if "text/" in kind)


def test_files_are_small() -> None:
    sizes = [path.stat().st_size for path in FOLDER.glob("*.ipynb")]
    assert max(sizes) < 400_000
    assert sum(sizes) < 1_500_000


@pytest.mark.parametrize("name", EACH)
def test_it_runs_and_shows_what_is_stored(name: str) -> None:
    run, stored = runner(), runner().read(name)
    fresh = run.execute(stored)  # raises where a cell does; each claim in a notebook is followed by its check
    said = [output for cell in run.code_cells(fresh) for output in cell.outputs if output.get("name") == "stderr"]
    assert not [output.text for output in said if "Traceback" in output.text]
    for old, new in zip(run.code_cells(stored), run.code_cells(run.cleaned(fresh)), strict=True):
        assert [output.output_type for output in old.outputs] == [output.output_type for output in new.outputs]
        if TRAINED not in old.metadata.get("tags", []):
            for was, now in zip(old.outputs, new.outputs, strict=True):
                assert_same(was, now)


def assert_same(stored: Any, fresh: Any) -> None:
    """One output: the text of a stream or a table, or the numbers and words of a figure."""
    if stored.output_type == "stream":
        assert_prints(_dots(stored.text), _dots(fresh.text))
    elif runner().PLOTLY in stored.data:
        assert_same_figure(stored.data[runner().PLOTLY], fresh.data[runner().PLOTLY])
    else:
        assert_prints(stored.data["text/plain"], fresh.data["text/plain"])


def _dots(text: str) -> str:
    return text.replace("·", "0")  # a printed number that is nearly nought


def assert_same_figure(stored: Any, fresh: Any) -> None:
    """Same structure and words; numbers within `FIGURES`, whether in lists or packed."""
    if isinstance(stored, dict) and "bdata" in stored:
        assert np.allclose(_unpacked(stored), _unpacked(fresh), rtol=0, atol=FIGURES, equal_nan=True)
    elif isinstance(stored, dict):
        assert stored.keys() == fresh.keys()
        for key in stored:
            assert_same_figure(stored[key], fresh[key])
    elif isinstance(stored, list):
        for old, new in zip(stored, fresh, strict=True):
            assert_same_figure(old, new)
    elif isinstance(stored, str):
        assert NUMBER.sub("#", stored) == NUMBER.sub("#", fresh)
    else:
        assert fresh == pytest.approx(stored, abs=FIGURES, nan_ok=True)


def _unpacked(array: Any) -> Any:
    return np.frombuffer(base64.b64decode(array["bdata"]), array["dtype"])


def made(*outputs: Any) -> Any:
    from nbformat import v4

    code = v4.new_code_cell("1 + 1", id="code", outputs=list(outputs), metadata={"tags": ["trained"], "execution": {}})
    return v4.new_notebook(cells=[v4.new_markdown_cell("words", id="words"), code], metadata={"widgets": {}})


def test_the_kernel_is_this_interpreter_with_this_package() -> None:
    from nbformat import v4

    code = "import sys, iglens_tl\nprint(sys.prefix)\nprint(iglens_tl.__file__)"
    done = runner().execute(v4.new_notebook(cells=[v4.new_code_cell(code)]))
    assert done.cells[0].outputs[0].text.split() == [sys.prefix, iglens_tl.__file__]


def test_storing_leaves_out_what_differs_from_run_to_run() -> None:
    from nbformat import v4

    figure = {runner().PLOTLY: {"data": [], "layout": {}, "config": {"plotlyServerURL": "https://plot.ly"}}}
    dirty = made(
        v4.new_output("stream", name="stdout", text="a\n"),
        v4.new_output("stream", name="stderr", text="UserWarning: /somewhere"),
        v4.new_output("stream", name="stdout", text="b\n"),
        v4.new_output("display_data", data=figure),
    )
    kept = runner().cleaned(dirty)
    assert kept.cells[1].outputs[0].text == "a\nb\n"
    assert kept.cells[1].outputs[1].data == {runner().PLOTLY: {"data": [], "layout": {}}}
    assert len(kept.cells[1].outputs) == 2
    assert kept.cells[1].metadata == {"tags": ["trained"]}
    assert set(kept.metadata) == {"kernelspec", "language_info", "iglens_tl"}
    assert len(dirty.cells[1].outputs) == 4


def test_the_hash_is_of_the_code_alone() -> None:
    notebook, hash_of = made(), runner().code_hash
    first = hash_of(notebook)
    notebook.cells[0].source = "other words"
    assert hash_of(notebook) == first
    notebook.cells[1].source = "1 + 2"
    assert hash_of(notebook) != first


def test_a_figure_with_another_number_or_word_is_another() -> None:
    packed = {"dtype": "f8", "bdata": base64.b64encode(np.array([0.5, np.nan]).tobytes()).decode()}
    moved = {**packed, "bdata": base64.b64encode(np.array([0.501, np.nan]).tobytes()).decode()}
    figure = {"x": packed, "y": [1.0, None], "name": "block 0.1"}
    assert_same_figure(figure, {**figure, "y": [1.0 + FIGURES / 2, None], "name": "block 0.2"})
    for other in ({"x": moved}, {"y": [1.1, None]}, {"y": [1.0]}, {"name": "layer 0.1"}):
        with pytest.raises((AssertionError, ValueError)):
            assert_same_figure(figure, {**figure, **other})

"""Run the notebooks from start to end and store what they show: `make notebooks`, or `python notebooks/run.py 04`.

What is stored is small and says nothing of the machine or the hour: no times, no warnings or progress bars, no paths; each
Plotly figure has a PNG beside it, for readers whose viewer runs no scripts (kaleido draws it, with Chrome or Chromium; running
alone needs neither). The metadata holds a hash of the code that the outputs are of.
"""

from __future__ import annotations

import base64
import copy
import hashlib
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

FOLDER = Path(__file__).resolve().parent
NOTEBOOKS = {path.stem: path for path in sorted(FOLDER.glob("0*.ipynb"))}
PLOTLY, PNG = "application/vnd.plotly.v1+json", "image/png"
_WIDTH, _SCALE = 760, 1  # of a stored picture
_SECONDS = 900  # for one cell; a slow machine is no error


def read(name: str) -> NotebookNode:
    """A notebook as it is stored."""
    return nbformat.read(NOTEBOOKS[name], as_version=4)


def execute(notebook: NotebookNode) -> NotebookNode:
    """A copy with fresh outputs, made by this interpreter with this tree's package.

    Raises:
        nbclient.exceptions.CellExecutionError: where a cell raises.
    """
    fresh = copy.deepcopy(notebook)
    paths = [str(FOLDER.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "PLOTLY_RENDERER": "plotly_mimetype",
        "COLUMNS": "100",  # what printed tables are wide
        "OMP_NUM_THREADS": "1",  # sums of floats depend on how many threads share them
    }
    client = NotebookClient(
        fresh,
        timeout=_SECONDS,
        kernel_name="python3",  # the environment's own
        record_timing=False,
        resources={"metadata": {"path": str(FOLDER)}},
    )
    client.execute(env=env)
    return fresh


def cleaned(notebook: NotebookNode) -> NotebookNode:
    """A copy without what differs from run to run: errors' stream, times, kernel paths, Plotly's server."""
    kept = copy.deepcopy(notebook)
    kept.metadata = NotebookNode(
        kernelspec={"display_name": "Python 3", "language": "python", "name": "python3"},
        language_info={"name": "python"},
        iglens_tl={"code_sha256": code_hash(notebook)},
    )
    for cell in code_cells(kept):
        cell.metadata = NotebookNode({key: cell.metadata[key] for key in ("tags",) if key in cell.metadata})
        cell.outputs = _joined([output for output in cell.outputs if output.get("name") != "stderr"])
        for output in cell.outputs:
            output.get("data", {}).get(PLOTLY, {}).pop("config", None)
    return kept


def _joined(outputs: list[NotebookNode]) -> list[NotebookNode]:
    """Pieces of the printed stream that follow each other, in one."""
    joined: list[NotebookNode] = []
    for output in outputs:
        if joined and output.output_type == joined[-1].output_type == "stream":
            joined[-1].text += output.text
        else:
            joined.append(output)
    return joined


def with_pictures(notebook: NotebookNode) -> NotebookNode:
    """A copy in which every Plotly figure has a PNG beside it."""
    drawn = copy.deepcopy(notebook)
    for figure in figures(drawn):
        figure[PNG] = _png(figure[PLOTLY])
    return drawn


def _png(figure: dict[str, Any]) -> str:
    import plotly.graph_objects as go

    from iglens_tl import plots

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "figure.png"
        plots.write_image(go.Figure(figure), path, width=_WIDTH, scale=_SCALE)
        return base64.b64encode(path.read_bytes()).decode()


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def figures(notebook: NotebookNode) -> list[NotebookNode]:
    """The data of each output that is a Plotly figure."""
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    return [output.data for output in outputs if PLOTLY in output.get("data", {})]


def code_hash(notebook: NotebookNode) -> str:
    """SHA-256 of the code, by which stored outputs are known to be of it."""
    return hashlib.sha256("\0".join(cell.source for cell in code_cells(notebook)).encode()).hexdigest()


def main(chosen: list[str]) -> None:
    """Run and store every notebook, or those whose names begin with one of `chosen`."""
    for name, path in NOTEBOOKS.items():
        if not chosen or name.startswith(tuple(chosen)):
            nbformat.write(with_pictures(cleaned(execute(read(name)))), path)
            print(f"{name}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main(sys.argv[1:])

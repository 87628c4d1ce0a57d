"""Imports run downwards only, one folder knows TransformerLens, and the house rules of size and naming hold."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import iglens_tl

PACKAGE = Path(iglens_tl.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

LEVELS = {
    "_core.quadrature": 10,
    "_core.distinct": 10,
    "_core.levels": 10,
    "_core.states": 10,
    "_memory": 10,
    "_core.readout": 11,
    "_core.segments": 12,
    "_core.averaging": 13,
    "_core.spectrum": 13,
    "_core": 14,
    "_checks": 10,
    "targets": 10,
    "_dataset_source": 20,
    "_ranks": 20,
    "_shards": 20,
    "_run_record": 21,
    "_plan": 20,
    "_fields": 20,
    "_onset": 21,
    "_files": 21,
    "_display": 21,
    "_layout": 22,
    "_tables": 22,
    "_fragment": 22.5,
    "_text": 23,
    "_shard_rows": 25,
    "_dataset_sums": 25,
    "summary": 26,
    "_html": 23,
    "_tokens_asked": 23,
    "_ladder": 24,
    "_draws": 10,
    "_token_html": 23.5,
    "results": 24,
    "_shares": 25,
    "_share_text": 26,
    "splits": 27,
    "companion_results": 24,
    "ablation_result": 25,
    "context_result": 25,
    "answer_result": 25,
    "contrast": 25,
    "comparison": 25,
    "plots._style": 45,
    "plots._script": 45,
    "plots._words": 46,
    "plots._heatmap": 47,
    "plots._waterfall": 47,
    "plots._layers": 47,
    "plots._parts": 47,
    "plots._comparison": 47,
    "plots._dataset": 47,
    "plots._export": 45,
    "plots": 48,
    "_report.beside": 26,
    "_report.strip": 25,
    "_report.figure": 49,
    "_report.payload": 50,
    "_report.page": 51,
    "_report": 52,
    "report": 53,
    "_model.host": 30,
    "_model.head": 31,
    "_model.states": 31,
    "_model.tokens": 31,
    "_model.answers": 32,
    "_model.adding": 32,
    "_model.identity": 32,
    "_model.neurons": 33,
    "_model.parts": 34,
    "_model.continuing": 33,
    "_model.ablating": 35,
    "_model.direction": 32,
    "_model.greedy": 33,
    "_model": 36,
    "_agreement": 10,
    "_request": 40,
    "_trajectory": 41,
    "_asked": 42,
    "reference": 42,
    "_prompt_runs": 43,
    "_interventions": 43,
    "_division": 43,
    "_stretches": 44,
    "_orders": 44,
    "attribution": 50,
    "ablation": 50,
    "context": 50,
    "components": 51,
    "companions": 50,
    "answers": 51,
    "dataset": 51,
    "_batches": 42,
    "_dataset_checks": 43,
    "_full_model": 42,
    "layer_paths": 50,
    "lineup": 52,
    "diagnosis": 50,
    "estimation": 50,
    "generation": 51,
    "_slopes": 43,
    "_study_statistics": 10,
    "_study_prompts": 20,
    "_study_files": 21,
    "_study_analysis": 21,
    "_study_page": 24,
    "study_result": 25,
    "_study_predictors": 53,
    "_study_effects": 54,
    "study": 55,
    "_gguf": 51,
    "_boot": 50,
    "loading": 53,
    "demo": 52,
    "": 60,
    "_commands.errors": 61,
    "_commands.arguments": 62,
    "_commands.models": 63,
    "_commands.readout": 63,
    "_commands.output": 63,
    "_commands.pages": 63.5,
    "_commands.attribute": 64,
    "_commands.doctor": 64,
    "_commands.compare": 64,
    "_commands.ablate": 64,
    "_commands.answer": 64,
    "_commands.run": 64,
    "_commands.split": 64,
    "_commands.summarize": 64,
    "_commands.study": 64,
    "_commands": 65,
    "cli": 70,
    "__main__": 71,
}
"""A module imports from modules of a lower number only."""

KNOWS_TRANSFORMER_LENS = {"_boot", "loading", "demo"}
KNOWS_TRANSFORMERS = {"_boot", "_gguf", "loading", "demo"}


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def imports_of(path: Path, top_level_only: bool = False) -> set[str]:
    """Full names of what a file imports; `from a import b` counts as `a.b`."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = tree.body if top_level_only else list(ast.walk(tree))
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} uses a relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def own_modules(names: set[str]) -> set[str]:
    """The package's modules among imported names."""
    modules = {module_of(path) for path in FILES}
    own: set[str] = set()
    for name in names:
        if name.split(".")[0] != "iglens_tl":
            continue
        inner = name.removeprefix("iglens_tl").removeprefix(".")
        own.add(inner if inner in modules else inner.rpartition(".")[0])
    return own


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_every_module_has_its_place_and_imports_downwards(path: Path) -> None:
    name = module_of(path)
    assert name in LEVELS, f"{name} has no level: add it to LEVELS where it belongs"
    upward = {other for other in own_modules(imports_of(path)) if LEVELS[other] >= LEVELS[name]}
    assert not upward, f"{name} imports {upward}, which are not below it"


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_foreign_libraries_stay_where_they_belong(path: Path) -> None:
    name, roots = module_of(path), {found.split(".")[0] for found in imports_of(path)}
    allowed = (name in KNOWS_TRANSFORMER_LENS, name in KNOWS_TRANSFORMERS, name.startswith("plots"))
    seen = ("transformer_lens" in roots, "transformers" in roots, "plotly" in roots)
    assert all(may or not does for may, does in zip(allowed, seen, strict=True)), f"{name} imports {sorted(roots)}"


@pytest.mark.parametrize("path", [path for path in FILES if module_of(path).startswith("_core.")], ids=module_of)
def test_the_core_imports_torch_only(path: Path) -> None:
    foreign = {name.split(".")[0] for name in imports_of(path)} - set(sys.stdlib_module_names)
    assert foreign <= {"torch", "numpy", "jaxtyping", "iglens_tl"}


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_hooked_transformer_is_never_imported_at_module_level(path: Path) -> None:
    names = imports_of(path, top_level_only=True)
    assert not any("HookedTransformer" in name or "TransformerBridge" in name for name in names)


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_no_private_name_crosses_a_module(path: Path) -> None:
    private = {
        name
        for name in imports_of(path)
        if name.startswith("iglens_tl.") and name.rpartition(".")[2].startswith("_") and not name.endswith("__")
    }
    modules = {f"iglens_tl.{module_of(other)}" for other in FILES}
    assert private <= modules, f"{module_of(path)} imports private names {private - modules}"


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_files_fit_their_sentence(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 400
    assert ast.get_docstring(ast.parse(text)), "a module begins with the sentence that says what it is"
    assert not any(word in path.stem for word in ("util", "misc", "helper"))


def test_functions_are_small() -> None:
    def code_lines(node: ast.FunctionDef) -> int:
        body = node.body[1:] if ast.get_docstring(node) else node.body
        return sum(statement.end_lineno - statement.lineno + 1 for statement in body if statement.end_lineno)

    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in FILES]
    sizes = sorted(code_lines(node) for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    assert sizes[len(sizes) // 2] < 10
    assert sizes[len(sizes) * 9 // 10] < 35


@pytest.mark.parametrize("name", iglens_tl.__all__)
def test_public_names_are_documented_and_share_no_module_name(name: str) -> None:
    thing = getattr(iglens_tl, name)
    assert name in {"__version__", "TOP", "NEXT"} or len(thing.__doc__) > 40
    assert not (PACKAGE / f"{name}.py").exists()


def test_import_pulls_in_neither_transformer_lens_nor_an_extra() -> None:
    heavy = ["transformer_lens", "transformers", "pandas", "plotly", "captum", "gguf", "scipy", "iglens_tl.demo"]
    code = f"import sys, iglens_tl; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

"""The README tells the truth: its examples run, print what it shows, and its table is the tested one."""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from iglens_tl import cli, ig_lens

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")
BAR = re.compile(r"[ █▒│▏▎▍▌▋▊▉]+$", flags=re.MULTILINE)


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def assert_prints(shown: str, printed: str) -> None:
    """Same words; numbers within one unit of the last printed digit, since versions and APIs differ by up to 1e-5."""
    shown, printed = BAR.sub("", shown.strip()), BAR.sub("", printed.strip())
    assert NUMBER.sub("#", printed).split() == NUMBER.sub("#", shown).split()
    numbers = [[float(number) for number in NUMBER.findall(text)] for text in (printed, shown)]
    assert numbers[0] == pytest.approx(numbers[1], abs=1.5e-4)


@pytest.mark.smollm2
def test_the_first_examples_print_what_they_show(smollm2_default: Any) -> None:
    code = blocks("python")[0].replace("model = demo_model()", "")
    names = {"model": smollm2_default}
    printed = [_printed(block, names) for block in (code, *blocks("python")[2:4])]
    for shown, found in zip(blocks("text"), printed, strict=False):  # the blocks that follow are of the shell
        assert_prints(shown, found)


def _printed(code: str, names: dict[str, Any]) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(code, names)
    return out.getvalue()


@pytest.mark.smollm2
def test_the_questions_can_be_asked(smollm2_default: Any) -> None:
    def ablate(tensor: torch.Tensor, hook: Any) -> torch.Tensor:
        return torch.zeros_like(tensor)

    names = {
        "model": smollm2_default,
        "torch": torch,
        "prompt": "The capital of France is",
        "prompts": ["The capital of France is", "Everyone knows that the capital of Italy is"],
        "translator": lambda state, index: state,
        "ablate": ablate,
    }
    exec(next(block for block in blocks("python") if block.startswith("from iglens_tl import NEXT")), names)


@pytest.mark.smollm2
def test_the_other_examples_run(smollm2_default: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where the data set's shards go
    names = {
        "model": smollm2_default,
        "result": ig_lens(smollm2_default, "The capital of France is", targets=" Paris"),
        "prompt": "The capital of France is",
        "prompts": ["The capital of France is", "Everyone knows that the capital of Italy is"],
        "sentences": [
            f"Number {i} of the sentences that were written for this is rather long, as it has to be." for i in range(8)
        ],
    }
    for start in (
        "from iglens_tl import plots",
        "from iglens_tl import ablate_layers",
        "from iglens_tl import estimate",
    ):
        exec(next(block for block in blocks("python") if block.startswith(start)), names)
    assert len(names["figure"].data) > 0
    assert "2 prompts" in str(names["summarize"]("credits"))


@pytest.mark.smollm2
def test_the_command_prints_what_it_shows(
    smollm2_default: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = next(block for block in blocks("text") if block.startswith("$ iglens"))
    command, _, table = shown.partition("\n")
    monkeypatch.setattr("iglens_tl.demo.demo_model", lambda *args, **kwargs: smollm2_default)
    question, *options = re.findall(r'"[^"]*"|\S+', command.removeprefix("$ iglens "))
    assert cli.main([question.strip('"'), *options]) == 0
    assert_prints(table, capsys.readouterr().out)


def test_the_table_of_models_is_the_tested_one() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.support"], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.strip() in README

"""docs/ablation.md tells the truth: its examples run and print what it shows."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest

from tests.test_readme import assert_prints

TEXT = (Path(__file__).parent.parent / "docs" / "ablation.md").read_text(encoding="utf-8")


@pytest.mark.smollm2
def test_the_examples_print_what_they_show(smollm2_default: Any) -> None:
    names = {"model": smollm2_default}
    shown = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", TEXT, flags=re.DOTALL)
    assert len(shown) == TEXT.count("```python") == 3
    for code, printed in shown:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(code, names)
        assert_prints(printed, out.getvalue())

"""What a study measured, and what follows from it: tables with intervals, a verdict by rule, a Markdown page.

One row a (pair, block); a pair is a prompt and a position of it, its target the model's most probable next token there. All
effects are drops of the target's probability (positive: the block was needed), all scores are in their method's own unit.

What it does not claim: see the last section of the page. The statistics are those that `studies/onset/PLAN.md` fixed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from iglens_tl import _study_analysis as analysis
from iglens_tl import _study_page
from iglens_tl._checks import one_of
from iglens_tl._fragment import fragment
from iglens_tl._study_files import StudyFolder, read_table, write_table

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True, eq=False, repr=False)
class OnsetStudy:
    """The measurements of an onset study.

    Attributes:
        table: the long table, one row a pair and block. Columns: `prompt_index`, `prompt_id`, `kind`, `prompt`, `position`,
            `token`, `target`, `target_id`, `word_kind`, `prob`, `block`; scores of the block (`credit`, `credit_log_prob`,
            `straight`, `dla`, `patching`, ...); effects (`drop_<mode>_<scope>`, `direct_<mode>`: drops of
            the probability; `kept_transplant`, `kept_cut`: the probability kept when context is taken away from the next
            block on); depths of the pair (`onset_<rule>`, `lens_first_top`, ...: hidden states); `forwards`,
            `block_evaluations`, `seconds`: its cost.
        settings: the call, in JSON values.
        provenance: model and versions, in JSON values.
    """

    table: pandas.DataFrame = field(repr=False)
    settings: Mapping[str, Any]
    provenance: Mapping[str, Any]

    @property
    def n_pairs(self) -> int:
        return int((self.table["block"] == 0).sum()) if len(self.table) else 0

    @property
    def n_prompts(self) -> int:
        return int(self.table["prompt_index"].nunique()) if len(self.table) else 0

    def agreement(self, outcome: str = analysis.PRIMARY, *, first_block: int = 0) -> pandas.DataFrame:
        """Every predictor against one outcome, controls among them.

        Args:
            outcome: one of `outcomes()`.
            first_block: the first block that counts; 1 leaves block 0 out.

        Returns:
            One row a predictor: mean over pairs of Spearman's `rho` over blocks, `top1` and `top3` hit rates, each with the
            ends of its 95 % bootstrap interval over prompts (`_low`, `_high`) and the number of pairs that have it (`_n`).

        Raises:
            ValueError: for another outcome, or a study without rows.
        """
        one_of("outcome", outcome, tuple(analysis.OUTCOMES))
        return analysis.agreement(self.measurements(), outcome, first_block)

    @staticmethod
    def outcomes() -> tuple[str, ...]:
        """The names of the outcomes."""
        return tuple(analysis.OUTCOMES)

    def primary(self) -> pandas.DataFrame:
        """The credit less each rival on the primary outcome, Holm-corrected over all rows (`p_holm`)."""
        return analysis.primary(self.measurements())

    def verdict(self) -> str:
        """By the rule of the plan: "holds", "does not hold" or "mixed"."""
        return analysis.verdict(self.primary())

    def depths(self) -> pandas.DataFrame:
        """Across pairs: every depth against every causal depth; `rho` and mean `error` in blocks, beside the best constant's."""
        return analysis.depths(self.measurements())

    def strata(self, outcome: str = analysis.PRIMARY, *, first_block: int = 0) -> pandas.DataFrame:
        """The credit and constant controls on parts of the pairs: monotone or not, kinds of word, kinds of prompt."""
        one_of("outcome", outcome, tuple(analysis.OUTCOMES))
        return analysis.strata(self.measurements(), outcome, first_block)

    def variants(self, *, first_block: int = 0) -> pandas.DataFrame:
        """The variant of the credit that is best on half of the prompts, on the other half, for each total effect."""
        return analysis.variants(self.measurements(), first_block)

    def measurements(self) -> analysis.Measurements:
        """The table as arrays `[pair, block]`.

        Raises:
            ValueError: for a study without rows.
        """
        if not len(self.table):
            raise ValueError(
                "the study has no pair yet: no prompt was run, or no position was eligible (min_prob, min_position)."
            )
        return analysis.Measurements.of(self.table, int(self.settings.get("seed", 0)))

    def to_dataframe(self) -> pandas.DataFrame:
        """A copy of the long table."""
        return self.table.copy()

    def to_markdown(self, departures: str = "", n_resamples: int = 1999) -> str:
        """The page: data, verdict, tables with intervals and controls, cost, limits.

        Args:
            departures: what was done otherwise than planned, in Markdown; said on the page, "none" if empty.
            n_resamples: of every bootstrap; the primary test takes five times as many.
        """
        return _study_page.page(self.measurements(), self.settings, self.provenance, departures, n_resamples)

    def __str__(self) -> str:
        head = f"OnsetStudy: {self.n_pairs} pairs of {self.n_prompts} prompts, model {self.provenance.get('model')}"
        if not self.n_pairs:
            return head
        return f"{head}\n{_study_page.summary(self.measurements())}"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        head, *rest = str(self).splitlines()
        return fragment(head, _study_page.summary_table(self.measurements()) if rest else "")

    def save(self, path: str | Path) -> None:
        """Write everything to one Parquet file."""
        write_table(Path(path), self.table, {"settings": dict(self.settings), "provenance": dict(self.provenance)})

    @classmethod
    def load(cls, path: str | Path) -> OnsetStudy:
        """Read what `save` wrote, or the folder of `onset_study` (also while it runs).

        Raises:
            FileNotFoundError: where there is neither.
            ValueError: for a Parquet file of something else.
        """
        if not Path(path).is_dir():
            table, note = read_table(path)
            return cls(table, note["settings"], note["provenance"])
        folder = StudyFolder(Path(path))
        note = folder.note()
        return cls(folder.table(), note["settings"], note["provenance"])

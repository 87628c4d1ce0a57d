"""IG-Lens over a data set: resumable, in Parquet shards, on one process or many.

`run_dataset(model, prompts, out)` attributes every prompt as `ig_lens` does and writes the long table, a batch at a
time, into the folder `out`. A run that is killed at any moment loses the batch in flight and nothing else: the same call
goes on where it ended and repeats no row. Launched on many processes (`accelerate launch`, `torchrun`), each takes its
share and writes its own shards; who is in a batch does not depend on how many there are, nor on where a run was
interrupted.

A prompt that cannot be attributed is recorded with its reason, and the run goes on. What a credit means, its unit and
its sign are `ig_lens`'s; docs/datasets.md has the columns.

Example::

    from iglens_tl import run_dataset, summarize

    run_dataset(model, "facts.jsonl", "facts-credits", metric="log_prob")
    print(summarize("facts-credits"))                 # also while the run is going on
    frame = pandas.read_parquet("facts-credits")      # one row a prompt, position and segment
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from iglens_tl import _run_record
from iglens_tl._batches import Item, Question, batches_of, padded, reason, together
from iglens_tl._checks import whole_number
from iglens_tl._dataset_checks import check_against_rows, check_numbers, check_settings, per_prompt
from iglens_tl._dataset_source import Columns, facts_of, source_of
from iglens_tl._dataset_sums import require_scipy
from iglens_tl._model.host import Host, host_of, provenance
from iglens_tl._model.identity import function_identity, model_identity
from iglens_tl._ranks import Ranks, first_decides, ranks_for, wait_for_all
from iglens_tl._request import Lens
from iglens_tl._shard_rows import failure_rows, result_rows
from iglens_tl._shards import Lock, RunFolder
from iglens_tl.attribution import ig_lens
from iglens_tl.summary import DatasetSummary, summarize
from iglens_tl.targets import TOP

if TYPE_CHECKING:
    import pyarrow

Failure = tuple[int, str | None, str]
"""A prompt that failed: its number in the data set, its hash, and why."""


@dataclass(frozen=True)
class Job:
    """A run, settled: the model, what is asked of it, and where the rows go."""

    host: Host
    keywords: Mapping[str, Any]
    folder: RunFolder
    run: str
    ranks: Ranks


def run_dataset(
    model: Any,
    prompts: Any,
    out: str | Path,
    *,
    prompt_column: str = "prompt",
    target_column: str = "target",
    incorrect_column: str = "incorrect_target",
    targets: Any = TOP,
    incorrect_targets: Any = None,
    positions: Any = -1,
    layers: Any = None,
    incl_mid: bool = False,
    baseline: Any = "embed",
    metric: str = "prob",
    estimator: str = "prediction_aware",
    n_steps: int = 1,
    lens: Lens | None = None,
    dtype: torch.dtype | None = None,
    prepend_bos: bool | None = None,
    max_memory: int | float | str | None = None,
    batch_size: int = 32,
    progress: bool | None = None,
) -> DatasetSummary:
    """Attribute every prompt of a data set and write the results into a folder; go on where an earlier call ended.

    Args:
        model: a `HookedTransformer` or a `TransformerBridge`.
        prompts: a list (of strings, lists of token ids, or mappings), the path of a text file (one prompt a line), of a
            JSON-lines file (`.jsonl`, `.ndjson`, `.json`) or of a Parquet file, or a `datasets.Dataset`. Token ids are run as
            they are, with no padding assumed.
        out: the folder; made where it is not there.
        prompt_column, target_column, incorrect_column: where rows with columns have the prompt and, if they have some,
            their own targets (a token string or id; a list of them is a `TokenSet`).
        targets, incorrect_targets: as for `ig_lens`, where the rows bring none: one for all prompts, `TOP`, `NEXT`, a
            list with one a prompt, or a tensor `[prompts, pos]`.
        positions, layers, incl_mid, metric, estimator, n_steps, lens, dtype, prepend_bos, max_memory: as for `ig_lens`.
        baseline: as for `ig_lens`; a tensor is `[d_model]`, `[prompts, d_model]` or `[prompts, pos, d_model]`.
        batch_size: prompts that run together, at most; long ones run with fewer. May differ when a run is resumed.
        progress: whether a progress bar is shown on stderr; None: where stderr is a terminal.

    Returns:
        A `DatasetSummary` of what the folder holds when this process has done its share (at the first rank: all of
        them), as `summarize(out)` gives it.

    Raises:
        UnsupportedModelError: for a model whose probability cannot be read this way.
        ValueError: for a folder of another run (other data, model or settings; each difference is named), or one that
            another run is writing into; for settings that no prompt could meet; where no row can be used.
        TypeError: for a `lens` or a hook on the model that cannot be pickled, and so not told from another.
        OSError: where a shard cannot be written (a full disk): the same call goes on once there is room.
    """
    settings: dict[str, Any] = {
        "layers": layers, "incl_mid": incl_mid, "baseline": baseline, "metric": metric, "estimator": estimator,
        "n_steps": n_steps, "lens": lens, "dtype": dtype,
    }  # fmt: skip
    require_scipy()
    check_numbers(settings, max_memory)
    size = whole_number("batch_size", batch_size, 1)
    host = host_of(model)
    source = source_of(prompts, Columns(prompt_column, target_column, incorrect_column))
    facts = facts_of(source)
    asked = (_tensor(targets), _tensor(incorrect_targets))
    question = Question(*asked, facts.has_targets, facts.has_incorrect, positions, prepend_bos)
    check_against_rows(question, baseline, facts, source.columns)
    check_settings(host, question, settings)
    told = {
        **settings,
        "targets": "of the rows" if facts.has_targets else asked[0],
        "incorrect_targets": "of the rows" if facts.has_incorrect else asked[1],
        "positions": positions,
        "prepend_bos": prepend_bos,
        "lens": None if lens is None else function_identity(host, lens, "lens"),
    }
    identity = _run_record.identity_of(facts, model_identity(host), told)
    keywords = {**settings, "positions": positions, "max_memory": max_memory}
    ranks = ranks_for(host.device.type)
    job = Job(host, keywords, RunFolder(Path(out)), _run_record.run_digest(identity), ranks)
    with _inside(job, identity) as (lock, done):
        batches = ranks.share(batches_of(host, source.rows(), question, size, done))
        with _bar(facts.n_rows, len(done), False if ranks.index else progress) as bar:
            _run_all(job, batches, bar)
            _see_others_through(job, lock, bar)
    return summarize(job.folder.path)


def _tensor(spec: Any) -> Any:
    return torch.as_tensor(spec) if isinstance(spec, np.ndarray) else spec


@contextmanager
def _inside(job: Job, identity: Mapping[str, Any]) -> Generator[tuple[Lock, list[int]]]:
    """The folder, made or found to be this run's, and the prompts that are done; locked while it is written into."""
    job.folder.path.mkdir(parents=True, exist_ok=True)
    with job.folder.locked() as lock:

        def look() -> tuple[str, list[int]]:
            lock.take()
            done = _run_record.begin(job.folder, identity)
            job.folder.clean()
            return job.run, done

        run, done = first_decides(job.ranks, look)
        lock.share()
        wait_for_all(job.ranks)  # or a quick first rank could take one that is still to come for one that is gone
        if run != job.run:
            raise ValueError(
                f"rank {job.ranks.index} has other data, model or settings than rank 0; launch the same call on all."
            )
        yield lock, done


def _bar(n_prompts: int, n_done: int, progress: bool | None) -> Any:
    from tqdm import tqdm

    disable = None if progress is None else not progress
    return tqdm(total=n_prompts, initial=n_done, unit="prompt", disable=disable, dynamic_ncols=True)


def _run_all(job: Job, batches: Iterator[list[Item]], bar: Any) -> None:
    failed = 0
    for batch in batches:
        failed += _run_one(job, batch)
        if failed:
            bar.set_postfix(failed=failed, refresh=False)
        bar.update(job.folder.n_done() - bar.n)  # what other ranks have done is seen here, too


def _see_others_through(job: Job, lock: Lock, bar: Any) -> None:
    """The first rank stays until no other is left, so that what it returns is the whole."""
    while job.ranks.index == 0 and job.ranks.count > 1 and not lock.is_last():
        time.sleep(0.2)
        bar.update(job.folder.n_done() - bar.n)


def _run_one(job: Job, batch: Sequence[Item]) -> int:
    """Attribute a batch and write its shard; gives how many of its prompts failed."""
    import pyarrow as pa

    sound = [item for item in batch if item.fault is None]
    tables, failed = _attributed(job, sound)
    failed += [(item.index, item.prompt_hash, item.fault) for item in batch if item.fault is not None]
    about = {
        "run": job.run,
        "rank": [job.ranks.index, job.ranks.count],
        "failed": sorted(index for index, _, _ in failed),
        "provenance": provenance(job.host),
    }
    job.folder.write(pa.concat_tables([*tables, failure_rows(failed)]), [item.index for item in batch], about)
    return len(failed)


def _attributed(job: Job, batch: Sequence[Item]) -> tuple[list[pyarrow.Table], list[Failure]]:
    """The rows of a batch; where it fails as a whole, its prompts run one by one, and those that fail are named."""
    if not batch:
        return [], []
    try:
        return [_rows_of(job, batch)], []
    except Exception as error:
        _stop_if_lost(error)
        if len(batch) == 1:
            return [], [(batch[0].index, batch[0].prompt_hash, reason(error, batch[0].index))]
    alone = [_attributed(job, [item]) for item in batch]
    return [table for tables, _ in alone for table in tables], [
        failure for _, failures in alone for failure in failures
    ]


def _stop_if_lost(error: Exception) -> None:
    """An error after which the device computes nothing more is no prompt's fault: what follows would all fail."""
    if isinstance(error, getattr(torch, "AcceleratorError", ())):
        raise error


def _rows_of(job: Job, batch: Sequence[Item]) -> pyarrow.Table:
    pad = getattr(job.host.tokenizer, "pad_token_id", None)
    tokens, mask = padded(batch, pad if isinstance(pad, int) and 0 <= pad < job.host.d_vocab else 0)
    keywords = dict(job.keywords)
    if per_prompt(keywords["baseline"]):
        keywords["baseline"] = keywords["baseline"][[item.index for item in batch]]
    result = ig_lens(
        job.host.model,
        tokens,
        attention_mask=mask,
        targets=together([item.targets for item in batch]),
        incorrect_targets=together([item.incorrect for item in batch]),
        **keywords,
    )
    return result_rows(result, [item.index for item in batch], [item.prompt_hash for item in batch])

"""What a printed result consists of: headings, columns, sums and the words that say what a credit is.

The two forms are a profile (one token: a row for each segment) and a map (many tokens: a row for each). Segments that
do not fit are merged with their neighbours and their credits added, so that what is shown always sums to the total.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from iglens_tl._display import SMALL, credit, joined, level, precise, quoted
from iglens_tl._fields import OfTokens, ResultFields
from iglens_tl._onset import RULES, TINY, names_at, onset_index, pick, rules_of

_QUANTITY = {
    "prob": "probability",
    "log_prob": "log-probability (nats)",
    "log_odds": "log-odds (nats)",
    "logit": "logit",
}


Token = tuple[int, int]  # a place on the batch and the pos axis
Rule = tuple[str, float]  # an onset rule and its fraction
DEFAULT_RULE: Rule = ("mass", 0.5)


class Group(NamedTuple):
    """Adjacent segments `start .. stop-1` that are shown as one."""

    label: str
    start: int
    stop: int


class Column(NamedTuple):
    """A column of a table; `numbers` are what a bar shows, on a `scale` of its own or on that of the whole table."""

    title: str
    cells: Sequence[str]
    right: bool = True
    numbers: Sequence[float] | None = None
    scale: float | None = None


def grouped(labels: Sequence[str], count: int) -> list[Group]:
    """The segments in at most `count` groups of adjacent ones, as equal in size as can be.

    >>> [group.label for group in grouped(["0", "1", "2", "3", "4"], 2)]
    ['0-1', '2-4']
    """
    count = max(1, min(count, len(labels)))
    bounds = [index * len(labels) // count for index in range(count + 1)]
    return [
        Group(merged_label(labels[start], labels[stop - 1]), start, stop) for start, stop in itertools.pairwise(bounds)
    ]


def grouped_by_mass(result: ResultFields, tokens: Sequence[Token], count: int) -> list[Group]:
    """The segments in at most `count` groups of adjacent ones, the finer the more these tokens' credit lies there.

    The group that holds the largest share of |credit| is split, where its halves are most equal, until there are
    `count`. A larger `count` only splits groups further.
    """
    rows, columns = (list(axis) for axis in zip(*tokens, strict=True))
    size = result.attribution[:, rows, columns].abs().nan_to_num(posinf=0)
    share = (size / size.sum(0).clamp(min=TINY)).sum(1)
    mass = [0.0, *share.cumsum(0).tolist()]
    bounds = [0, result.n_segments]
    while len(bounds) <= min(count, result.n_segments):
        # A group of no mass still weighs its length a little, so that ties go to the longest.
        weight = [
            (mass[stop] - mass[start] + 1e-9 * (stop - start), start, stop)
            for start, stop in itertools.pairwise(bounds)
            if stop - start > 1
        ]
        _, start, stop = max(weight)
        bounds = sorted([*bounds, _balanced(mass, start, stop)])
    labels = result.segment_labels
    return [
        Group(merged_label(labels[start], labels[stop - 1]), start, stop) for start, stop in itertools.pairwise(bounds)
    ]


def _balanced(mass: Sequence[float], start: int, stop: int) -> int:
    """Where to split so that both sides hold as equal a mass as can be; of equals, where the heavier is shortest."""

    def key(cut: int) -> tuple[float, int]:
        left, right = mass[cut] - mass[start], mass[stop] - mass[cut]
        excess = round(left - right, 9)
        heavy = [cut - start] * (excess >= 0) + [stop - cut] * (excess <= 0)
        return abs(excess), max(heavy)

    return min(range(start + 1, stop), key=key)


def merged_label(first: str, last: str) -> str:
    """One name for the segments from `first` to `last`.

    >>> merged_label("0", "6"), merged_label("0-2", "3-5"), merged_label("3_attn", "3_mlp"), merged_label("base", "4")
    ('0-6', '0-5', '3', 'base-4')
    """
    if first == last:
        return first
    start = first.split("-", maxsplit=1)[0].removesuffix("_attn")
    end = last.rsplit("-", maxsplit=1)[-1].removesuffix("_mlp")
    return start if start == end else f"{start}-{end}"


def group_credits(result: ResultFields, token: Token, groups: Sequence[Group]) -> list[float]:
    """The summed credit of each group of segments, for one token."""
    credits: list[float] = result.attribution[(slice(None), *token)].tolist()
    return [sum(credits[group.start : group.stop]) for group in groups]


def _value(result: ResultFields, state: int, token: Token) -> float:
    return float(result.values[(state, *token)])


def shown_tokens(result: OfTokens) -> list[Token]:
    """The (batch, pos) entries that exist, in order."""
    return [(row, column) for row, column in result.mask.nonzero().tolist()]


def profile_columns(result: ResultFields, token: Token, groups: Sequence[Group]) -> list[Column]:
    """The columns of one token's profile, a row for each group of segments."""
    credits = group_credits(result, token, groups)
    ends = [level(_value(result, group.stop, token)) for group in groups]
    return [
        Column("segment", [group.label for group in groups], right=False),
        Column("credit", [credit(value) for value in credits], numbers=credits),
        Column("level", ends),
    ]


def map_columns(
    result: ResultFields, tokens: Sequence[Token], groups: Sequence[Group], levels: bool, rule: Rule = DEFAULT_RULE
) -> list[Column]:
    """The columns of a map, a row for each token: who it is, its credits by group, what they sum to."""
    return [
        *who_columns(result, tokens),
        *credit_columns(result, tokens, groups, levels),
        *sum_columns(result, tokens, rule),
    ]


def who_columns(result: ResultFields, tokens: Sequence[Token]) -> list[Column]:
    """Where each token stands, its text, and the target that is read there."""
    columns = [Column("pos", [str(int(result.positions[token])) for token in tokens])]
    if result.mask.shape[0] > 1:
        columns.insert(0, Column("batch", [str(row) for row, _ in tokens]))
    one_answer = result.answer is not None and result.mask.shape[0] == 1
    if result.token_strings is not None and not one_answer:  # there, it is the target of the row above
        columns.append(Column("token", [quoted(token_at(result, token)) for token in tokens], right=False))
    for title, grid in (("target", result.target_strings), ("incorrect", result.incorrect_strings)):
        if grid is not None:
            columns.append(Column(title, [quoted(grid[row][column]) for row, column in tokens], right=False))
    return columns


def token_at(result: OfTokens, token: Token) -> str:
    """The text of the token at which a target is read, "" where there is no text."""
    return "" if result.token_strings is None else result.token_strings[token[0]][int(result.positions[token])]


def credit_columns(
    result: ResultFields, tokens: Sequence[Token], groups: Sequence[Group], levels: bool
) -> list[Column]:
    """A column of credits for each group of segments, with the level at its end beside it if asked for."""
    rows = [group_credits(result, token, groups) for token in tokens]
    columns: list[Column] = []
    for index, group in enumerate(groups):
        credits = [row[index] for row in rows]
        columns.append(Column(group.label, [credit(value) for value in credits], numbers=credits))
        if levels:
            ends = [level(_value(result, group.stop, token)) for token in tokens]
            columns.append(Column("level", ends))
    return columns


def sum_columns(result: ResultFields, tokens: Sequence[Token], rule: Rule = DEFAULT_RULE) -> list[Column]:
    """What each token's credits add up to, and its onset by a rule."""

    def column(title: str, tensor: Tensor, write: Callable[[float], str]) -> Column:
        return Column(title, [write(float(tensor[token])) for token in tokens])

    columns = [column("sum", result.attribution.sum(0), credit), column("total", result.total, credit)]
    if result.model_value is not None:
        columns.append(column("model", result.model_value, level))
    labels = onset_labels(result, *rule)
    return [*columns, Column("onset", [labels[row][column] for row, column in tokens])]


def onset_labels(result: ResultFields, rule: str, fraction: float) -> list[list[str]]:
    """The onset of every token as text: a label, "none", or "undefined" where the metric does not have the rule."""
    if rule not in rules_of(result):
        return [["undefined"] * row.shape[0] for row in result.mask]
    labels = pick(names_at(rule, result)[0], onset_index(result, rule, fraction))
    return [[label or "none" for label in row] for row in labels]


def headings(result: ResultFields) -> list[tuple[str, str]]:
    """What was asked, as (name, text): the prompt first, which alone may have to be cut at its start."""
    tokens = shown_tokens(result)
    lines: list[tuple[str, str]] = []
    if tokens and result.token_strings is not None and len({row for row, _ in tokens}) == 1:
        # What follows the first token that is read is, of an answer, the answer.
        lines.append(("prompt", prompt(result, tokens[-1 if result.answer is None else 0])))
    if len(tokens) == 1:
        lines.extend(token_headings(result, tokens[0]))
    if result.answer is not None:
        lines.append(("answer", quoted(result.answer)))
    baseline = f", baseline {result.settings['baseline']}" if "baseline" in result.settings else ""
    lines.append(("metric", f"{result.metric} [{result.unit}]{baseline}, estimator {result.estimator}"))
    return lines


def prompt(result: OfTokens, token: Token) -> str:
    """The prompt up to the token at which a target is read, padding left out."""
    row, place = token[0], int(result.positions[token])
    texts = [] if result.token_strings is None else result.token_strings[row][: place + 1]
    real = [True] * len(texts) if result.token_mask is None else result.token_mask[row].tolist()
    return quoted(joined(text for text, keep in zip(texts, real, strict=False) if keep))


def token_headings(result: ResultFields, token: Token) -> list[tuple[str, str]]:
    """What was asked of one token and what was read: target, incorrect where there is one, value."""
    lines = [("target", f"{named(result.target_strings, result.target_ids, token)}, {where_read(result, token)}")]
    if result.incorrect_ids is not None and result.incorrect_strings is not None:
        lines.append(("incorrect", named(result.incorrect_strings, result.incorrect_ids, token)))
    first, last = (precise(_value(result, index, token)) for index in (0, -1))
    own = "" if result.model_value is None else f"; the model's own logits: {precise(float(result.model_value[token]))}"
    return [*lines, ("value", f"{first} at {result.state_labels[0]} -> {last} at {result.state_labels[-1]}{own}")]


def where_read(result: OfTokens, token: Token) -> str:
    """The place at which a target is read: `read at position 4 ' is'`."""
    at = f" {quoted(token_at(result, token))}" if result.token_strings is not None else ""
    return f"read at position {int(result.positions[token])}{at}"


def named(grid: Sequence[Sequence[str]], ids: Tensor, token: Token) -> str:
    """A target with its id: `' Paris' (id 7042)`."""
    numbers = [str(number) for number in ids[token].tolist() if number >= 0]
    return f"{quoted(grid[token[0]][token[1]])} ({'id' if len(numbers) == 1 else 'ids'} {', '.join(numbers)})"


def title(result: ResultFields) -> str:
    """The first line: how much there is."""
    n = len(shown_tokens(result))
    k = result.n_segments
    path = f"{k} segment{'' if k == 1 else 's'} from {result.state_labels[0]} to {result.state_labels[-1]}"
    return f"IGLensResult: {n} token{'' if n == 1 else 's'}, {path}"


def profile_summary(result: ResultFields, token: Token, fraction: float = 0.5) -> list[tuple[str, str]]:
    """Under a profile: what the credits sum to, and where the value sets in by every rule."""
    whole = float(result.attribution.sum(0)[token])
    numbers = f"{whole:+.5g}, total {float(result.total[token]):+.5g}, gap {float(result.gap[token]):.1g}"
    rules = ", ".join(f"{rule} {onset_labels(result, rule, fraction)[token[0]][token[1]]}" for rule in RULES)
    return [("sum", numbers), ("onset", f"{rules} (fraction {fraction:g})")]


_RULE_WORDS = {
    "mass": "the first segment at which |credit| has added up to {} of all",
    "crossing": "the first state from which the value stays at {} of its final one or above",
    "peak": "the segment of the largest credit",
    "rank": "the first state from which the target stays the most probable token",
}


def onset_meaning(rule: str, fraction: float) -> str:
    """Where a rule finds the onset, in words."""
    return _RULE_WORDS[rule].format(f"{fraction:g}")


def map_note(rule: Rule = DEFAULT_RULE) -> str:
    """Under a map: the rule of its onset column."""
    return f'onset: {onset_meaning(*rule)} (rule "{rule[0]}"); onsets() gives every rule.'


def quantity(result: ResultFields) -> str:
    """What credits are amounts of."""
    words = _QUANTITY[result.metric]
    if result.incorrect_ids is not None:
        words = f"difference in {words}, target less incorrect,"
    if "difference" not in result.settings:
        return words
    return f"{words.removesuffix(',')}, of the first run less the second,"


def reading(result: ResultFields) -> str:
    """What a credit means, and what it does not."""
    return (
        f"credit = extra {quantity(result)} that norm+unembedding read from the state after this segment, given the state "
        f"before it; not the layer's causal effect through the blocks above. {SMALL} = less than 0.00005."
    )

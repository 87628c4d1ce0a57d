"""The command line: what reaches stdout, stderr and the exit code, on tiny models put in the place of a loaded one."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys

import pandas
import pytest
import torch

import iglens_tl
from iglens_tl import NEXT, IGLensResult, cli, generate_and_attribute, ig_lens, loading
from iglens_tl._commands import arguments, attribute, output
from iglens_tl._onset import RULES
from iglens_tl._request import DTYPES
from iglens_tl.demo import DemoModelError
from iglens_tl.diagnosis import Diagnosis, Finding
from tests.families import FAMILIES
from tests.models import bridge, hooked, word_tokenizer
from tests.versions import APIS

PARIS = 7042
SPECIAL = {"bos": 47, "eos": 48, "pad": 49}
TEMPLATE = (
    "{% for m in messages %}w47 w20 {{ m['content'] }} w21{% endfor %}{% if add_generation_prompt %} w22{% endif %}"
)
SHORT = ["--max-new-tokens", "4"]


def speaking_hooked(tokenizer):
    model = hooked()
    model.set_tokenizer(tokenizer)
    return model


BUILDERS = {
    "hooked": speaking_hooked,
    "bridge": lambda tokenizer: bridge(FAMILIES["Llama"].build(), tokenizer=tokenizer),
}


def tokenizer_in(folder, template):
    tokenizer = word_tokenizer(folder, **SPECIAL)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return tokenizer


@pytest.fixture(params=[pytest.param(api, marks=getattr(pytest.mark, api)) for api in BUILDERS])
def model(request, tmp_path, monkeypatch):
    """A tiny model with words w0 ... w49 and a chat template, in the place of every model that is loaded."""
    made = BUILDERS[request.param](tokenizer_in(tmp_path, TEMPLATE))
    monkeypatch.setattr(loading, "load_model", lambda name, **settings: made)
    return made


@pytest.fixture
def no_model(monkeypatch):
    """Loading a model is an error that no handler of bad input would hide."""

    def load(name, **settings):
        raise AssertionError(f"{name} was loaded")

    monkeypatch.setattr(loading, "load_model", load)


@pytest.fixture
def run(capsys, monkeypatch):
    """Call the command line with words and an input; gives exit code, stdout, stderr."""

    def call(*words, stdin=""):
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        code = cli.main(list(words))
        return (code, *capsys.readouterr())

    return call


def one_line(text):
    """The text of stderr, which must be one line of ours."""
    assert re.fullmatch(r"iglens: [^\n]+\n", text), text
    return text


def credits(text):
    return [row["credit"] for row in json.loads(text)]


def expected(result):
    return result.to_dataframe()["credit"].tolist()


# --- what is computed ----------------------------------------------------------------------------------------------


def test_a_prompt_is_answered_and_its_tokens_attributed(model, run):
    code, out, err = run("w5 w6", *SHORT, "--width", "100")
    result = generate_and_attribute(model, "w5 w6", chat=True, max_new_tokens=4)
    assert (code, err) == (0, "")
    assert out.startswith(result.to_text(100, levels=True))
    assert f"answer     {result.answer!r}" in out
    assert f"max |sum - Δp| = {float(result.gap.abs().max()):.2g} over {result.mask.sum()} tokens" in out
    assert "not the layer's causal effect" in " ".join(out.split())


CALLS = {
    "words": (["w5", "w6"], lambda m: generate_and_attribute(m, "w5 w6", chat=True, max_new_tokens=4)),
    "no chat": (["w5 w6", "--no-chat"], lambda m: generate_and_attribute(m, "w5 w6", max_new_tokens=4)),
    "no BOS": (
        ["w5 w6", "--no-chat", "--no-prepend-bos"],
        lambda m: generate_and_attribute(m, "w5 w6", prepend_bos=False, max_new_tokens=4),
    ),
    "states": (
        ["w5 w6", "--layers", "1", "2_pre", "--baseline", "zero"],
        lambda m: generate_and_attribute(
            m, "w5 w6", chat=True, max_new_tokens=4, layers=[1, "2_pre"], baseline="zero"
        ),
    ),
    "states with commas": (
        ["--layers=0,2", "w5 w6"],
        lambda m: generate_and_attribute(m, "w5 w6", chat=True, max_new_tokens=4, layers=[0, 2]),
    ),
    "k segments, another metric": (
        ["w5 w6", "--k", "2", "--metric", "log_odds", "--baseline", "mean"],
        lambda m: generate_and_attribute(
            m, "w5 w6", chat=True, max_new_tokens=4, layers=2, metric="log_odds", baseline="mean"
        ),
    ),
    "an estimator that integrates": (
        ["w5 w6", "--estimator", "midpoint", "--n-steps", "3", "--dtype", "float64"],
        lambda m: generate_and_attribute(
            m, "w5 w6", chat=True, max_new_tokens=4, estimator="midpoint", n_steps=3, dtype=torch.float64
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_options_are_keywords_of_the_answer(model, run, name):
    words, call = CALLS[name]
    code, out, err = run(*words, *SHORT, "--json")
    assert (code, err) == (0, "")
    assert credits(out) == expected(call(model))


TARGETS = {
    "a string": (["w5 w6", "--target", "w9"], lambda m: ig_lens(m, "w5 w6", targets="w9")),
    "an id": (["w5 w6", "--target", "id:30"], lambda m: ig_lens(m, "w5 w6", targets=30)),
    "a difference": (
        ["w5 w6", "--target", "w9", "--incorrect-target", "id:30", "--incl-mid"],
        lambda m: ig_lens(m, "w5 w6", targets="w9", incorrect_targets=30, incl_mid=True),
    ),
    "in the template": (
        ["w5 w6", "--target", "w9", "--chat"], lambda m: ig_lens(m, [47, 20, 5, 6, 21, 22], targets="w9"),
    ),
    "no BOS": (
        ["w5 w6", "--target", "w9", "--no-prepend-bos"],
        lambda m: ig_lens(m, "w5 w6", targets="w9", prepend_bos=False),
    ),
    "own tokens": (
        ["w5 w6 w7", "--no-generate"], lambda m: ig_lens(m, "w5 w6 w7", targets=NEXT, positions=None),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TARGETS)
def test_a_target_is_attributed_without_generation(model, run, name):
    words, call = TARGETS[name]
    code, out, err = run(*words, "--json")
    assert (code, err) == (0, "")
    assert credits(out) == expected(call(model))


def test_a_single_target_is_a_profile(model, run):
    code, out, _ = run("w5 w6", "--target", "w9", "--width", "90", "--onset-frac", "0.9")
    assert code == 0
    assert out.startswith(ig_lens(model, "w5 w6", targets="w9").to_text(90, onset_fraction=0.9))
    assert "over 1 token;" in out


def test_without_a_template_the_prompt_is_plain(run, tmp_path, monkeypatch):
    tokenizer = tokenizer_in(tmp_path, None)
    model = next(iter(BUILDERS[api] for api in ("bridge", "hooked") if api in APIS))(tokenizer)
    monkeypatch.setattr(loading, "load_model", lambda name, **settings: model)
    code, out, _ = run("w5 w6", *SHORT, "--json")
    assert code == 0
    assert credits(out) == expected(generate_and_attribute(model, "w5 w6", max_new_tokens=4))
    code, _, err = run("w5 w6", "--chat")
    assert code == 2
    assert "chat template" in one_line(err)


@pytest.mark.parametrize("rule", ["mass", "crossing", "peak", "rank"])
def test_the_onset_column_follows_the_rule(model, run, rule):
    _, out, _ = run("w5 w6 w7 w8", "--no-generate", "--width", "120", "--onset-rule", rule)
    result = ig_lens(model, "w5 w6 w7 w8", targets=NEXT, positions=None)
    rows = out.split("\n\n")[1].splitlines()[1:]
    labels = [label or "none" for label, kept in zip(result.onset(rule).labels[0], result.mask[0], strict=True) if kept]
    assert [row.split()[-1] for row in rows] == labels
    assert f'(rule "{rule}")' in out


def test_the_model_is_asked_for_as_the_options_say(run, monkeypatch):
    seen = {}

    def load(name, **settings):
        seen.update(settings, name=name)
        raise loading.ModelLoadError("there is no such model\nat all")

    monkeypatch.setattr(loading, "load_model", load)
    code, out, err = run("w5", "--model", "some/name", "--hooked", "--device", "cpu", "--model-dtype", "bfloat16")
    assert seen == {"name": "some/name", "api": "hooked", "device": "cpu", "dtype": torch.bfloat16}
    assert (code, out, err) == (2, "", "iglens: there is no such model at all\n")
    run("w5")
    assert seen == {"name": loading.DEMO, "api": None, "device": None, "dtype": torch.float32}


# --- where it goes -------------------------------------------------------------------------------------------------


def test_stdout_holds_the_result_alone(model, run, monkeypatch):
    def chatty(name, **settings):
        print("Loaded pretrained model into HookedTransformer")
        return model

    monkeypatch.setattr(loading, "load_model", chatty)
    with model.hooks(fwd_hooks=[("blocks.0.hook_resid_pre", lambda tensor, hook: print("noise"))]):
        code, out, err = run("w5 w6", *SHORT, "--json")
    assert code == 0
    assert len(json.loads(out)) > 0
    assert "Loaded pretrained model" in err
    assert "noise" in err


def test_csv_goes_to_stdout(model, run):
    code, out, _ = run("w5 w6", "--target", "w9", "--csv")
    table = pandas.read_csv(io.StringIO(out), keep_default_na=False, float_precision="round_trip")
    assert code == 0
    assert table["credit"].tolist() == expected(ig_lens(model, "w5 w6", targets="w9"))


def test_files_are_written_beside_the_table(model, run, tmp_path):
    files = [str(tmp_path / name) for name in ("a.json", "a.csv", "a.safetensors")]
    code, out, err = run(
        "w5 w6", "--target", "w9", "--json", files[0], "--csv", files[1], "--save", files[2], "--width", "80"
    )
    result = ig_lens(model, "w5 w6", targets="w9")
    assert (code, err) == (0, "")
    assert out.startswith(result.to_text(80))
    assert credits((tmp_path / "a.json").read_text()) == expected(result)
    assert pandas.read_csv(files[1], keep_default_na=False, float_precision="round_trip")[
        "credit"
    ].tolist() == expected(result)
    assert IGLensResult.load(files[2]).equals(result)


def test_warnings_are_one_line_on_stderr(model, run):
    code, out, err = run("w47 w5 w6", "--target", "w9", "--prepend-bos", "--json")
    assert code == 0
    assert json.loads(out)
    assert re.fullmatch(r"iglens: warning: [^\n]*two BOS tokens[^\n]*\n", err)


# --- where the prompt comes from -----------------------------------------------------------------------------------


def test_the_prompt_can_come_from_stdin(model, run):
    code, out, _ = run("--stdin", *SHORT, "--json", stdin="w5\nw6\n")
    assert code == 0
    assert credits(out) == expected(generate_and_attribute(model, "w5\nw6", chat=True, max_new_tokens=4))


@pytest.mark.parametrize("words", [["--", "doctor"], ["--", "doctor", "who"], ["doctor who"], ["doctor "]])
def test_a_prompt_may_begin_with_the_name_of_a_command(model, run, words):
    code, out, err = run("--target=w9", "--json", *words) if words[0] == "--" else run(*words, "--target=w9", "--json")
    assert (code, err) == (0, "")
    assert credits(out) == expected(ig_lens(model, " ".join(words).removeprefix("-- "), targets="w9"))


def test_after_two_dashes_there_is_no_command(model, run):
    code, _, err = run("--", "doctor")
    assert code == 2
    assert "max_new_tokens=80" in one_line(err)


def test_the_loop_goes_on_after_an_error_and_ends_at_an_empty_line(model, run):
    long = " ".join(["w5"] * 100)
    code, out, err = run("--loop", "--target", "w9", "--json", stdin=f"w5 w6\n{long}\nw7\n\nw8\n")
    results = [ig_lens(model, prompt, targets="w9") for prompt in ("w5 w6", "w7")]
    assert code == 2
    assert "n_ctx" in one_line(err)
    parts = out.split("]\n")[:-1]
    assert [credits(part + "]") for part in parts] == [expected(result) for result in results]


def test_the_loop_ends_at_the_end_of_its_input(model, run):
    code, out, err = run("--loop", "--target", "w9", "--width", "80", stdin="w5 w6")
    assert (code, err) == (0, "")
    assert out.count("IGLensResult: 1 token") == 1
    assert run("--loop", stdin="") == (0, "", "")


# --- what is refused -----------------------------------------------------------------------------------------------

BEFORE_LOADING = {
    "nothing": ([], "no prompt"),
    "an empty prompt": ([""], "prompt is empty"),
    "a blank prompt": ([" \n"], "prompt is empty"),
    "an empty stdin": (["--stdin"], "prompt is empty"),
    "two prompts": (["w5", "--stdin"], "a prompt and --stdin"),
    "a prompt and a loop": (["w5", "--loop"], "a prompt and --loop"),
    "two inputs": (["--stdin", "--loop"], "--stdin and --loop"),
    "a target and none": (["w5", "--target", "w9", "--no-generate"], "--target and --no-generate"),
    "a length of no answer": (["w5", "--target", "w9", "--max-new-tokens", "3"], "with --target there is none"),
    "a lone incorrect target": (["w5", "--incorrect-target", "w9"], "needs --target"),
    "layers and k": (["w5", "--layers", "1", "--k", "2"], "not allowed with"),
    "layers and halves": (["w5", "--layers", "1", "--incl-mid"], "not allowed with"),
    "a prompt among the layers": (["--layers", "1", "the cat"], "'the cat' is no state"),
    "a prompt taken for a file": (["--json", "w5 w6"], "no prompt: write it in quotes, before"),
    "chat and BOS": (["w5", "--chat", "--prepend-bos"], "--chat and --prepend-bos"),
    "no steps": (["w5", "--n-steps", "0"], "whole number from 1"),
    "half a token": (["w5", "--max-new-tokens", "1.5"], "whole number from 1"),
    "no segments": (["w5", "--k", "-1"], "whole number from 1"),
    "a share above one": (["w5", "--onset-frac", "1.5"], r"number in (0, 1]"),
    "a share that is none": (["w5", "--onset-frac", "nan"], r"number in (0, 1]"),
    "a share of the peak": (["w5", "--onset-rule", "peak", "--onset-frac", "0.5"], "asks for no share"),
    "a crossing of nats": (["w5", "--onset-rule", "crossing", "--metric", "log_prob"], "share of a probability"),
    "an unknown metric": (["w5", "--metric", "p"], "invalid choice: 'p'"),
    "an unknown baseline": (["w5", "--baseline", "pad"], "invalid choice: 'pad'"),
    "an unknown option": (["w5", "--frobnicate"], "--frobnicate"),
    "an abbreviation": (["w5", "--max-new", "3"], "--max-new"),
    "a broken id": (["w5", "--target", "id:x"], "id:7042, got 'id:x'"),
    "two results on stdout": (["w5", "--json", "--csv"], "--json and --csv"),
    "a file for a loop": (["--loop", "--save", "x"], "--save FILE would be written over"),
    "no such folder": (["w5", "--save", "/no/such/folder/x"], "there is no folder '/no/such/folder'"),
    "a folder as a file": (["w5", "--json", "/"], "no name for a file"),
    "a missing file": (["w5", "--model", "missing.gguf"], "no file or folder 'missing.gguf'"),
    "a missing folder": (["w5", "--model", "./missing"], "no file or folder './missing'"),
    "a folder of something else": (["w5", "--model", "/"], "has no config.json"),
    "a device that is not there": (["w5", "--device", "abacus"], "--device abacus"),
    "a device without numbers": (["w5", "--device", "meta"], "--device meta"),
    "no model to examine": (["doctor"], "MODEL"),
    "a missing model to examine": (["doctor", "missing.gguf"], "no file or folder 'missing.gguf'"),
}


@pytest.mark.parametrize("name", BEFORE_LOADING)
@pytest.mark.usefixtures("no_model")
def test_bad_input_is_one_line_before_a_model_is_loaded(run, name):
    words, message = BEFORE_LOADING[name]
    code, out, err = run(*words)
    assert (code, out) == (2, "")
    assert message in one_line(err)


AFTER_LOADING = {
    "two tokens": (["w5", "--target", "w8 w9"], "exactly one token"),
    "no such id": (["w5", "--target", "id:50"], "[0, 50)"),
    "a target against itself": (["w5", "--target", "w9", "--incorrect-target", "w9"], "share token id"),
    "no such state": (["w5", *SHORT, "--layers", "7"], "states 0 to 3"),
    "too many segments": (["w5", *SHORT, "--k", "4"], "between 1 and 3"),
    "too long an answer": (["w5"], "n_ctx"),
    "a template and a BOS": (["w5", "--no-prepend-bos"], "add --no-chat"),
    "no next token": (["w5", "--no-generate", "--no-prepend-bos"], "no selected position has a next token"),
}


@pytest.mark.parametrize("name", AFTER_LOADING)
def test_bad_input_is_one_line_once_the_model_is_there(model, run, name):
    words, message = AFTER_LOADING[name]
    code, out, err = run(*words)
    assert (code, out) == (2, "")
    assert message in one_line(err)


def test_a_demo_model_that_cannot_be_had_is_one_line(run, monkeypatch):
    def load(name, **settings):
        raise DemoModelError("no space")

    monkeypatch.setattr(loading, "load_model", load)
    assert run("w5") == (2, "", "iglens: no space\n")


def test_an_input_of_no_text_is_one_line(capsys, monkeypatch, no_model):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe"), encoding="utf-8"))
    assert cli.main(["--stdin"]) == 2
    assert "decode" in one_line(capsys.readouterr().err)


def test_a_traceback_on_request(run):
    code, _, err = run("w5", "--k", "2", "--layers", "1", "--traceback")
    assert code == 2
    assert err.startswith("Traceback")
    assert err.splitlines()[-1].startswith("iglens: ")


def test_our_own_mistakes_are_not_hidden(run, monkeypatch):
    def load(name, **settings):
        raise KeyError("a bug")

    monkeypatch.setattr(loading, "load_model", load)
    with pytest.raises(KeyError, match="a bug"):
        run("w5")


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt, 130), (BrokenPipeError, 141)])
def test_interruptions_are_silent(model, run, monkeypatch, error, code):
    def stop(result, args):
        raise error

    monkeypatch.setattr(output, "show", stop)
    monkeypatch.setattr(cli, "_drop_stdout", lambda: None)
    assert run("w5", "--target", "w9") == (code, "", "")
    assert run("--loop", "--target", "w9", stdin="w5\nw6\n") == (code, "", "")


# --- commands ------------------------------------------------------------------------------------------------------


def test_doctor_examines_a_model(model, run):
    code, out, err = run("doctor", "some/name")
    assert (code, err) == (0, "")
    assert out == f"{iglens_tl.doctor(model)}\n"


def test_doctor_says_by_its_exit_code_that_something_is_wrong(model, run, monkeypatch):
    diagnosis = Diagnosis("some/name", (Finding("mode", False, "the model is in training mode."),))
    monkeypatch.setattr(iglens_tl, "doctor", lambda model: diagnosis)
    assert run("doctor", "some/name") == (1, f"{diagnosis}\n", "")


@pytest.mark.parametrize("words", [["--help"], ["doctor", "--help"], ["--version"]])
@pytest.mark.usefixtures("no_model")
def test_help_and_version_go_to_stdout(run, words):
    code, out, err = run(*words)
    assert (code, err) == (0, "")
    assert "iglens" in out


def test_every_command_is_in_the_help(run):
    _, out, _ = run("--help")
    assert all(f"iglens {name} --help" in out for name in cli.COMMANDS)


def test_the_choices_are_the_package_s():
    assert tuple(RULES) == output.RULES
    assert {getattr(torch, name) for name in arguments.DTYPES} == set(DTYPES)
    assert attribute.USAGE.startswith("iglens ")


# --- true processes ------------------------------------------------------------------------------------------------


def process(*words, **settings):
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "iglens_tl", *words],
        capture_output=True,
        text=True,
        check=False,
        **settings,
    )


@pytest.mark.parametrize(("words", "code"), [(["--help"], 0), (["w5", "--k", "0"], 2), (["--version"], 0)])
def test_what_needs_no_model_imports_no_torch(words, code):
    source = (
        f"import sys; from iglens_tl.cli import main; code = main({words!r}); "
        "print(code, sorted({'torch', 'transformer_lens', 'numpy', 'pandas'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[-1] == f"{code} []"


@pytest.mark.parametrize("size", [10, 1_000_000])
def test_a_closed_pipe_is_silent(size):
    source = (
        "import sys; from iglens_tl import cli; from iglens_tl._commands import attribute; "
        f"attribute.run = lambda args: print('x' * {size}) or 0; sys.exit(cli.main(['w5']))"
    )
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed:
        done = subprocess.run(
            [sys.executable, "-c", source], stdout=closed, stderr=subprocess.PIPE, text=True, check=False
        )
    assert (done.returncode, done.stderr) == (141, "")


def test_a_process_says_what_is_wrong_and_exits():
    done = process("w5", "--stdin", input="w6")
    assert (done.returncode, done.stdout) == (2, "")
    one_line(done.stderr)


@pytest.mark.smollm2
def test_the_embedded_model_in_a_process_of_its_own():
    words = ["The capital of France is", "--target", f"id:{PARIS}", "--no-prepend-bos", "--device", "cpu"]
    done = process(*words, "--json")
    rows = json.loads(done.stdout)
    assert done.returncode == 0
    # 2e-5: float32 rounding of a whole forward pass, which differs by TransformerLens version.
    assert rows[-1]["value_end"] == pytest.approx(0.77253, abs=2e-5)
    assert [row["credit"] for row in rows[-3:]] == pytest.approx([0.0102, 0.0598, 0.7022], abs=7e-5)
    assert rows[-1]["target"] == " Paris"
    assert sum(row["credit"] for row in rows) == pytest.approx(
        rows[-1]["value_end"] - rows[0]["value_start"], abs=1e-12
    )


@pytest.mark.smollm2
def test_a_terminal_without_unicode_gets_escapes():
    words = ["東京 is", "--no-generate", "--k", "2", "--width", "100"]
    done = process(*words, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0
    assert "max |sum - \\u0394p|" in done.stdout

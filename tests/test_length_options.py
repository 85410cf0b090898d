"""The options of `advise run` that say how long samples are, and how batches are made of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from advisor.cli import main
from advisor.profiler.errors import PlanError
from advisor.profiler.records import Lengths, LengthSource
from advisor.question import Typed, advice_id_of, request_of

ADVISE = str(Path(sys.executable).with_name("advise"))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns the working folder, with a file of lengths."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.txt").write_text("5\n3\n5\n128\n")
    (tmp_path / "good.csv").write_text("name,tokens,chars\na,5,50\nb,128,900\n")
    return tmp_path


def _lengths(**options: object) -> Lengths:
    typed = Typed(target="hf:gpt2", steps=1000, **{"lengths": Path("good.txt"), **options})  # type: ignore[arg-type]
    found = request_of(typed).lengths
    assert found is not None
    return found


# --- what becomes of them


@pytest.mark.usefixtures("folder")
def test_lengths_of_a_file_are_in_the_request() -> None:
    assert _lengths() == Lengths(values=(3, 5, 128), counts=(1, 2, 1), source=LengthSource.FILE)


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"padding": "longest"}, {}),
        ({"padding": "128"}, {"pad_to": 128}),
        ({"padding": "multiple:64"}, {"pad_multiple": 64}),
        ({"tokens_per_batch": 512}, {"tokens_per_batch": 512}),
        ({"tokens_per_batch": 128, "padding": "128"}, {"tokens_per_batch": 128, "pad_to": 128}),
        ({"sorted_by_length": True}, {"shuffled": False}),
    ],
)
def test_options_say_how_batches_are_made(
    options: dict[str, object], expected: dict[str, object]
) -> None:
    found = _lengths(**options)
    for name in ("tokens_per_batch", "pad_to", "pad_multiple", "shuffled"):
        assert getattr(found, name) == expected.get(
            name, getattr(Lengths(values=(), counts=()), name)
        )


@pytest.mark.usefixtures("folder")
def test_column_is_chosen() -> None:
    assert _lengths(lengths=Path("good.csv"), lengths_column="tokens").values == (5, 128)


def test_request_without_the_options_has_no_lengths() -> None:
    assert request_of(Typed(target="hf:gpt2", steps=1000)).lengths is None


def test_id_of_an_advice_takes_no_lengths() -> None:
    with pytest.raises(PlanError, match="is only shown"):
        advice_id_of(Typed(target="a1b2c3", lengths=Path("good.txt")))


# --- mistakes


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "--lengths bad.txt is empty: one length for each sample is needed"),
        ("\n\n", "--lengths bad.txt has no lengths"),
        ("5\n0\n", "--lengths bad.txt has 0 in line 2: the length of a sample is 1 to 16,777,216"),
        ("5\n-7\n", "--lengths bad.txt has -7 in line 2"),
        ("5\nlong\n", "--lengths bad.txt has text in line 2: 'long' is no length"),
        ("5\n1000000000\n", "--lengths bad.txt has 1000000000 in line 2"),
        ("5\n\x1b[31m\n", r"'\x1b[31m' is no length"),
        ("\0\1\2", "--lengths bad.txt is no text: it has zero bytes"),
        (None, "--lengths bad.txt cannot be read: there is no such file (check the path)"),
    ],
)
def test_bad_file_is_one_sentence_and_starts_nothing(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    content: str | None,
    said: str,
) -> None:
    if content is not None:
        (folder / "bad.txt").write_text(content)
    _wrong("--lengths bad.txt", said, capsys, monkeypatch)


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--lengths-column n", "--lengths-column came without --lengths"),
        ("--tokens-per-batch 512", "--tokens-per-batch came without --lengths"),
        ("--padding longest", "--padding came without --lengths: it says how batches are made"),
        ("--sorted-by-length", "--sorted-by-length came without --lengths"),
        ("--lengths good.txt --padding short", "--padding 'short' is unknown (longest, a whole"),
        ("--lengths good.txt --padding 0", "--padding '0' is unknown"),
        ("--lengths good.txt --padding -8", "--padding '-8' is unknown"),
        ("--lengths good.txt --padding multiple:", "--padding 'multiple:' is unknown"),
        ("--lengths good.txt --padding multiple:0", "--padding 'multiple:0' is unknown"),
        ("--lengths good.txt --padding multiple:x", "--padding 'multiple:x' is unknown"),
        ("--lengths good.txt --padding 64", "a sample has length 128: batches are padded to 64"),
        ("--lengths good.txt --padding 99999999", "--padding 99999999 is out of range"),
        ("--lengths good.txt --padding multiple:99999999", "multiple:99999999 is out of range"),
        ("--lengths good.txt --padding " + "9" * 5000, "is unknown"),
        ("--lengths good.txt --tokens-per-batch 0", "--tokens-per-batch 0 is out of range"),
        ("--lengths good.txt --tokens-per-batch -1", "--tokens-per-batch -1 is out of range"),
        ("--lengths good.txt --tokens-per-batch x", "Invalid value for '--tokens-per-batch'"),
        ("--lengths good.txt --tokens-per-batch 100", "a batch holds 100 tokens"),
        ("--lengths good.txt --tokens-per-batch 128 --padding 256", "not one padded sample fits"),
        ("--lengths good.txt --lengths-column n", "--lengths-column has no effect on --lengths"),
        ("--lengths good.csv", "its columns are name, tokens, chars (give one with"),
        ("--lengths good.csv --lengths-column tokns", "did you mean tokens?"),
        ("--lengths good.csv --lengths-column name", "has text in line 2: 'a' is no length"),
        ("--lengths .", "--lengths . is a folder without Arrow files"),
        ("--lengths good.bin", "--lengths good.bin cannot be read: there is no such file"),
    ],
)
def test_bad_option_is_one_sentence_and_starts_nothing(
    options: str,
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _wrong(options, said, capsys, monkeypatch)


def _wrong(
    options: str,
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_process(*_: object, **__: object) -> None:
        raise AssertionError("a process was started for a request that is wrong")

    monkeypatch.setattr(subprocess, "Popen", no_process)
    assert main(["run", "hf:gpt2", "--steps", "1000", *options.split(" ")]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert line.startswith("advise: ")
    assert said in line


@pytest.mark.usefixtures("folder")
def test_wrong_plan_is_said_before_the_file_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "hf:gpt2", "--steps", "0", "--lengths", "missing.txt"]) == 2
    assert "--steps 0" in capsys.readouterr().err


def test_command_says_it_without_a_traceback(folder: Path) -> None:
    (folder / "bad.txt").write_text("12\n\nabc\n")
    done = subprocess.run(
        [ADVISE, "run", "hf:gpt2", "--steps", "1000", "--lengths", "bad.txt"],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == (
        "advise: --lengths bad.txt has text in line 3: 'abc' is no length (one whole number for "
        "each sample is expected: tokenise first, and give the column of token ids or their "
        "number)\n"
    )


def test_help_names_every_option() -> None:
    done = subprocess.run([ADVISE, "run", "--help"], capture_output=True, text=True, check=True)
    for option in ("lengths", "lengths-column", "tokens-per-batch", "padding", "sorted-by-length"):
        assert f"--{option} " in done.stdout

"""SARIF 2.1.0: what the standard asks of a log, and what makes a review show the right line.

The rules are those of the OASIS standard; the numbers are its sections.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from advisor.profiler.records import Config, Diagnosis, Fix, FixKind, Interval
from advisor.sarif import FINGERPRINT, sarif_json, sarif_log

ROOT = Path("/home/ann/my job")
BREAK = Fix(
    cause="PRINT_OR_LOGGING",
    what="a graph ends here, it prints: remove it",
    file="/home/ann/my job/models/nét [1].py",
    line=14,
    code='print(f"{h}")',
    link="https://meta-pytorch.github.io/compile-graph-break-site/gb/gb0059.html",
    gain=Interval(median=1.21, low=1.1, high=1.35),
)
LIBRARY = replace(BREAK, file="/usr/lib/python3/lib.py", line=3, code="x.item()")
AGAIN = Fix(
    kind=FixKind.RECOMPILE,
    cause="OTHER",
    what="compiled 7 times more because `L['d'] == {1: 2}` and [a](1) no longer held: mend",
    file="/home/ann/my job/train.py",
    line=31,
)
OTHER_BREAK = Fix(cause="OTHER", what="the compiler gave up", file="/home/ann/my job/a.py", line=0)
NOTHING = Fix(kind=FixKind.COMPILER, cause="NOTHING_COMPILED", what="compiled nothing")
HINT = Fix(
    kind=FixKind.JOB,
    cause="DATA_WAIT",
    what="more workers",
    gain=Interval(median=1.5, low=1.0, high=2.0),
    measured=True,
)
FOUND = Diagnosis(
    target="train.py:build",
    summary=("It gains little.",),
    advice_id="a1b2c3d4e5",
    config=Config(),
    fixes=(NOTHING, BREAK, LIBRARY, AGAIN, OTHER_BREAK, HINT),
)


def _check_log(log: dict[str, Any]) -> None:
    """Asserts what the standard demands of the parts that are used here."""
    assert set(log) == {"$schema", "version", "runs"}
    assert log["version"] == "2.1.0"  # 3.13.2
    assert urlsplit(log["$schema"]).scheme == "https"  # 3.13.3
    assert len(log["runs"]) == 1
    run = log["runs"][0]
    assert set(run) == {"tool", "originalUriBaseIds", "results", "properties"}  # 3.14
    driver = run["tool"]["driver"]
    assert driver["name"]  # 3.19.8
    for base in run["originalUriBaseIds"].values():  # 3.14.14: absolute, ends in a slash
        assert urlsplit(base["uri"]).scheme == "file"
        assert base["uri"].endswith("/")
    ids = [rule["id"] for rule in driver["rules"]]
    assert len(ids) == len(set(ids))  # 3.19.23: unique
    for rule in driver["rules"]:  # 3.49
        assert re.fullmatch(r"[^/\s]+(/[^/\s]+)*", rule["id"])  # 3.5.4: hierarchical string
        assert rule["shortDescription"]["text"].endswith(".")
        assert urlsplit(rule["helpUri"]).scheme == "https"
        assert rule["defaultConfiguration"]["level"] in ("none", "note", "warning", "error")
    for result in run["results"]:
        _check_result(result, ids, run["originalUriBaseIds"])


def _check_result(result: dict[str, Any], ids: list[str], bases: dict[str, Any]) -> None:
    assert result["ruleId"] == ids[result["ruleIndex"]]  # 3.27.6
    assert result["level"] in ("none", "note", "warning", "error")  # 3.27.10
    text = result["message"]["text"]  # 3.27.11, 3.11
    assert text
    # 3.11.5: a brace that is no placeholder is doubled; there are no placeholders here.
    assert "{" not in text.replace("{{", "")
    assert "}" not in text.replace("}}", "")
    prints = result["partialFingerprints"]  # 3.27.17: strings, with a version in their names
    assert all(isinstance(value, str) and "/v" in name for name, value in prints.items())
    for location in result.get("locations", ()):
        physical = location["physicalLocation"]
        artifact = physical["artifactLocation"]
        uri = artifact["uri"]
        assert re.fullmatch(r"[A-Za-z0-9\-._~:/?#@!$&'()*+,;=%]+", uri)  # RFC 3986
        if "uriBaseId" in artifact:  # 3.4.4: relative to a base that the run defines
            assert artifact["uriBaseId"] in bases
            assert urlsplit(uri).scheme == ""
            assert not uri.startswith("/")
            assert ".." not in uri.split("/")
        else:
            assert uri.startswith("file:///")
        if "region" in physical:
            assert physical["region"]["startLine"] >= 1  # 3.30.5


def _results(diagnosis: Diagnosis = FOUND) -> list[dict[str, Any]]:
    log = sarif_log(diagnosis, ROOT, "0.1.0")
    _check_log(log)
    results: list[dict[str, Any]] = log["runs"][0]["results"]
    return results


def test_log_follows_the_standard() -> None:
    log = json.loads(sarif_json(FOUND, ROOT, "0.1.0"))
    _check_log(log)
    assert log == sarif_log(FOUND, ROOT, "0.1.0"), "nothing but JSON's own types"
    assert log["runs"][0]["tool"]["driver"]["version"] == "0.1.0"


def test_diagnosis_without_mends_is_a_log_without_results() -> None:
    assert _results(replace(FOUND, fixes=())) == []


def test_level_follows_the_kind() -> None:
    levels = {result["ruleId"]: result["level"] for result in _results()}
    assert levels == {
        "COMPILER/NOTHING_COMPILED": "error",
        "GRAPH_BREAK/PRINT_OR_LOGGING": "warning",
        "RECOMPILE/OTHER": "warning",
        "GRAPH_BREAK/OTHER": "warning",
        "JOB/DATA_WAIT": "note",
    }


def test_one_rule_for_each_cause_in_plain_words() -> None:
    rules = sarif_log(FOUND, ROOT, "0")["runs"][0]["tool"]["driver"]["rules"]
    texts = {rule["id"]: rule["shortDescription"]["text"] for rule in rules}
    assert len(texts) == 5, "two breaks have the same cause"
    assert texts["GRAPH_BREAK/PRINT_OR_LOGGING"] == "It prints, logs or warns."
    assert texts["RECOMPILE/OTHER"] != texts["GRAPH_BREAK/OTHER"]


def test_file_of_the_workload_is_named_from_its_folder() -> None:
    run = sarif_log(FOUND, ROOT, "0")["runs"][0]
    artifact = run["results"][1]["locations"][0]["physicalLocation"]["artifactLocation"]
    base = run["originalUriBaseIds"][artifact["uriBaseId"]]["uri"]
    assert artifact["uriBaseId"] == "%SRCROOT%"
    assert base == "file:///home/ann/my%20job/"
    assert unquote(urlsplit(base + artifact["uri"]).path) == BREAK.file
    for file in ("models/net.py", "./models/net.py", "/home/ann/my job/models/../models/net.py"):
        (named,) = _results(replace(FOUND, fixes=(replace(BREAK, file=file),)))
        location = named["locations"][0]["physicalLocation"]["artifactLocation"]
        assert location == {"uri": "models/net.py", "uriBaseId": "%SRCROOT%"}


@pytest.mark.parametrize("file", ["/usr/lib/python3/lib.py", "../elsewhere/lib.py"])
def test_any_other_file_is_named_as_a_whole(file: str) -> None:
    (result,) = _results(replace(FOUND, fixes=(replace(BREAK, file=file),)))
    artifact = result["locations"][0]["physicalLocation"]["artifactLocation"]
    assert set(artifact) == {"uri"}
    assert artifact["uri"].endswith("/lib.py")
    assert ".." not in artifact["uri"]


def test_line_is_shown_with_its_source_and_left_out_when_not_known() -> None:
    results = _results()
    assert results[1]["locations"][0]["physicalLocation"]["region"] == {
        "startLine": 14,
        "snippet": {"text": 'print(f"{h}")'},
    }
    assert "region" not in results[4]["locations"][0]["physicalLocation"]


def test_mend_of_no_file_is_shown_at_the_workload() -> None:
    assert _results()[0]["locations"] == [
        {"physicalLocation": {"artifactLocation": {"uri": "train.py", "uriBaseId": "%SRCROOT%"}}}
    ]
    for target in ("hf:gpt2", "package.module:build"):
        assert "locations" not in _results(replace(FOUND, target=target))[0]


def test_message_is_the_mend_with_its_gain() -> None:
    results = _results()
    assert results[1]["message"]["text"] == (
        "It prints, logs or warns. A graph ends here, it prints: remove it. "
        f"Gain: 1.21x (1.10-1.35), an estimate. See {BREAK.link}"
    )
    assert results[5]["message"]["text"].endswith("Gain: 1.50x (1.00-2.00), measured.")
    assert results[1]["properties"]["gain"]["median"] == 1.21
    with_setting = replace(BREAK, options=(("torch._dynamo.config.x", "true"),))
    (result,) = _results(replace(FOUND, fixes=(with_setting,)))
    assert "remove it. Or set torch._dynamo.config.x = true. Gain" in result["message"]["text"]
    again = results[3]["message"]["text"]
    assert "{{1: 2}}" in again
    assert r"\[a\](1)" in again, "a bracket before a number in parentheses would be a link"


def test_fingerprint_survives_a_move_of_the_line() -> None:
    def prints(*fixes: Fix) -> list[str]:
        found = _results(replace(FOUND, fixes=fixes))
        return [result["partialFingerprints"][FINGERPRINT] for result in found]

    moved = replace(BREAK, line=99, code='print(f"{h}")  ', gain=None, what="in other words")
    assert prints(BREAK) == prints(moved)
    for other in (
        replace(BREAK, cause="SCALAR_READ"),
        replace(BREAK, code="print(1)"),
        replace(BREAK, file="/home/ann/my job/other.py"),
        replace(BREAK, kind=FixKind.RECOMPILE),
    ):
        assert prints(BREAK) != prints(other)


def test_equal_lines_are_told_apart_in_their_order_whatever_their_rank() -> None:
    upper, lower = BREAK, replace(BREAK, line=20)
    results = _results(replace(FOUND, fixes=(lower, upper)))
    found = {
        result["locations"][0]["physicalLocation"]["region"]["startLine"]: result[
            "partialFingerprints"
        ][FINGERPRINT]
        for result in results
    }
    again = _results(replace(FOUND, fixes=(upper, lower)))
    assert [result["partialFingerprints"][FINGERPRINT] for result in again] == [
        found[14],
        found[20],
    ]
    assert max(Counter(found.values()).values()) == 1


def test_names_that_are_no_text_do_not_break_the_log() -> None:
    hostile = replace(BREAK, file="/home/ann/my job/\udce9.py", code="\x1b[2J", cause="a b\x00/c")
    (result,) = _results(replace(FOUND, fixes=(hostile,), target="\x1b.py:build"))
    assert result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == "%E9.py"
    assert "\x1b" not in sarif_json(replace(FOUND, fixes=(hostile,)), ROOT, "0")

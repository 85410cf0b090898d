"""A diagnosis as SARIF 2.1.0, so that editors and code review show each mend at its line.

The format: OASIS, Static Analysis Results Interchange Format (SARIF) Version 2.1.0, 2020
(https://docs.oasis-open.org/sarif/sarif/v2.1.0/sarif-v2.1.0.html); section numbers refer to it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import quote

from advisor.cause_names import cause_name, cause_page, plain_mend
from advisor.explain import short_path
from advisor.profiler.records import Diagnosis, Fix, FixKind
from advisor.profiler.units import config_name, printable, ratio

VERSION = "2.1.0"
SCHEMA = (
    "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
)
# The folder that relative URIs start from (3.14.14); the name that code review expects.
ROOT = "%SRCROOT%"
# Tells one line from another wherever it moves to; raised with each change of what it is made of.
FINGERPRINT = "advisorCauseAndSource/v1"

_LINK = re.compile(r"\[([^\[\]]*)\]\((?=\d+\)|[a-z][a-z0-9+.-]*:)")
_LEVELS = {
    FixKind.COMPILER: "error",
    FixKind.GRAPH_BREAK: "warning",
    FixKind.RECOMPILE: "warning",
    FixKind.JOB: "note",
}


def sarif_json(diagnosis: Diagnosis, root: Path, tool_version: str) -> str:
    """Returns a diagnosis as the text of a SARIF log file. `root` is the folder of the workload."""
    return json.dumps(sarif_log(diagnosis, root, tool_version), indent=2, ensure_ascii=False)


def sarif_log(diagnosis: Diagnosis, root: Path, tool_version: str) -> dict[str, Any]:
    """Returns a diagnosis as a SARIF log of one run: a rule for each cause, a result for each mend.

    A file below `root` is named from there, any other by its absolute `file:` URI. A mend that
    belongs to no file is shown at that of the workload, as code review refuses results that have
    no location at all; a preset or a module has none.
    """
    rules = _rules(diagnosis.fixes)
    places = {rule["id"]: index for index, rule in enumerate(rules)}
    own = _workload_file(diagnosis.target)
    results = [_result(fix, places[rule_id(fix)], root, own) for fix in diagnosis.fixes]
    _tell_apart(diagnosis.fixes, results)
    run = {
        "tool": {
            "driver": {
                "name": "compile-advisor",
                "version": tool_version,
                "rules": rules,
            }
        },
        "originalUriBaseIds": {ROOT: {"uri": _uri(str(root), folder=True)}},
        "results": results,
        "properties": _properties(diagnosis),
    }
    return {"$schema": SCHEMA, "version": VERSION, "runs": [run]}


def rule_id(fix: Fix) -> str:
    """Returns the name of a mend's rule, such as `GRAPH_BREAK/SCALAR_READ`.

    It has two parts because breaks and recompiles both know a cause `OTHER` (hierarchical
    strings: 3.5.4).
    """
    cause = re.sub(r"[^A-Za-z0-9_.-]+", "_", fix.cause).strip("_") or "UNKNOWN"
    return f"{fix.kind.value}/{cause}"


def _rules(fixes: Iterable[Fix]) -> list[dict[str, Any]]:
    """Returns a rule (reportingDescriptor, 3.49) for each cause that was met, in their order."""
    first = {rule_id(fix): fix for fix in reversed(tuple(fixes))}
    return [
        {
            "id": name,
            "name": "".join(word.capitalize() for word in re.split(r"[/_.-]", name)),
            "shortDescription": {"text": _text(cause_name(fix.kind, fix.cause) + ".")},
            "helpUri": cause_page(fix.kind),
            "defaultConfiguration": {"level": _LEVELS[fix.kind]},
        }
        for name, fix in reversed(first.items())
    ]


def _workload_file(target: str) -> str:
    """Returns the file of `path/to/file.py:function`, "" for other workloads."""
    place = target.rpartition(":")[0]
    return place if place.endswith(".py") else ""


def _result(fix: Fix, index: int, root: Path, own: str) -> dict[str, Any]:
    result: dict[str, Any] = {
        "ruleId": rule_id(fix),
        "ruleIndex": index,
        "level": _LEVELS[fix.kind],
        "message": {"text": _text(_message(fix))},
        "partialFingerprints": {FINGERPRINT: _fingerprint(fix, root)},
    }
    if fix.file or own:
        physical: dict[str, Any] = {"artifactLocation": _artifact(fix.file or own, root)}
        if fix.file and fix.line > 0:
            region: dict[str, Any] = {"startLine": fix.line}
            if fix.code:
                region["snippet"] = {"text": printable(fix.code)}
            physical["region"] = region
        result["locations"] = [{"physicalLocation": physical}]
    if fix.gain is not None:
        result["properties"] = {
            "gain": asdict(fix.gain),
            "measured": fix.measured,
        }
    return result


def _tell_apart(fixes: Iterable[Fix], results: Iterable[dict[str, Any]]) -> None:
    """Numbers the fingerprints of equal lines of one file, in the order of the lines."""
    seen: Counter[str] = Counter()
    for _, result in sorted(zip(fixes, results, strict=True), key=lambda pair: pair[0].line):
        prints = result["partialFingerprints"]
        seen[prints[FINGERPRINT]] += 1
        prints[FINGERPRINT] += f":{seen[prints[FINGERPRINT]]}"


def _message(fix: Fix) -> str:
    """Returns what a line of an editor can show: the cause, the mend, what it brings."""
    mend = plain_mend(fix).rstrip(".")
    text = f"{cause_name(fix.kind, fix.cause)}. {mend[:1].upper()}{mend[1:]}."
    if fix.options:
        # Not as lines of code: those may hold braces, which come doubled here.
        text += f" Or set {', '.join(f'{name} = {value}' for name, value in fix.options)}."
    if fix.gain is not None:
        kind = "measured" if fix.measured else "an estimate"
        text += f" Gain: {ratio(fix.gain)}, {kind}."
    if fix.link:
        text += f" See {fix.link}"
    return text


def _artifact(file: str, root: Path) -> dict[str, str]:
    short = _short(file, root)
    if os.path.isabs(short):
        return {"uri": _uri(short)}
    return {"uri": _quoted(short), "uriBaseId": ROOT}


def _short(file: str, root: Path) -> str:
    """Returns a file's name from `root` when it lies below it, else its absolute name."""
    return short_path(os.path.normpath(root / file), root)


def _uri(path: str, *, folder: bool = False) -> str:
    """Returns the `file:` URI of an absolute path; that of a folder ends in a slash (3.14.14)."""
    return "file://" + _quoted(path.rstrip("/") + ("/" if folder else "") or "/")


def _quoted(path: str) -> str:
    # A name that is no text at all (surrogates) is written with the bytes that it has on disk.
    return quote(path, errors="surrogateescape")


def _fingerprint(fix: Fix, root: Path) -> str:
    """Returns what stays the same when a line moves: cause, file and source text (3.27.17)."""
    file = _short(fix.file, root) if fix.file else ""
    source = " ".join(fix.code.split())
    digest = hashlib.sha256()
    for part in (rule_id(fix), file, source):
        digest.update(part.encode("utf-8", "backslashreplace") + b"\0")
    return digest.hexdigest()[:32]


def _properties(diagnosis: Diagnosis) -> dict[str, Any]:
    """Returns what the format has no field for (property bags: 3.8)."""
    found: dict[str, Any] = {
        "target": printable(diagnosis.target),
        "adviceId": diagnosis.advice_id,
        "summary": [printable(sentence) for sentence in diagnosis.summary],
    }
    if diagnosis.config is not None:
        found["configuration"] = config_name(diagnosis.config)
    if diagnosis.speedup is not None:
        found["speedup"] = asdict(diagnosis.speedup)
    if diagnosis.environment is not None:
        found["torch"] = diagnosis.environment.torch
        found["device"] = diagnosis.environment.device_name or diagnosis.environment.device
    return found


def _text(text: str) -> str:
    """Returns text as a message string: braces would be placeholders, so they come doubled.

    3.11.5 has it so; `[text](1)` and `[text](https:...)` would be links (3.11.6).
    """
    clean = printable(text).encode("utf-8", "backslashreplace").decode("utf-8")
    clean = clean.replace("{", "{{").replace("}", "}}")
    return _LINK.sub(r"\\[\1\\](", clean)

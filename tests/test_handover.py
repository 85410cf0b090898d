"""Compile caches that outlive their trials: whole or not at all, and only where they fit."""

from __future__ import annotations

import errno
import gzip
import io
import os
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from advisor import handover
from advisor.profiler import archive, bundle, place
from advisor.profiler import handover as handovers
from advisor.profiler.bundle import Bundle, BundleFacts, BundleFile
from advisor.profiler.cache_proof import CacheProof
from advisor.profiler.errors import NotFoundError, PlanError, StoreError
from advisor.profiler.handover import HandoverStore
from advisor.profiler.records import Config, Scope

HERE = place.here(torch="2.13.0")
FACTS = BundleFacts(fingerprint="f00d", config=Config(), place=HERE, advice_id="a1")


@pytest.fixture(autouse=True)
def header_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keeps precompiled headers of the machine out of it."""
    (tmp_path / "machine").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "machine"))
    return handovers.header_folder()


def trial(folder: Path, text: str = "code", size: int = 0) -> Path:
    """Makes what a trial leaves, among it what must not be taken."""
    for path, content in {
        "inductor/ab/cab.py": text,
        "inductor/ab/cab.main.so": "\x7fELF" + text + "x" * size,
        "inductor/fxgraph/aa/key/graph": "graph",
        "inductor/dynamo/code_state.pkl": "sizes",
        "triton/hash/kernel.cubin": "cubin",
        "inductor/locks/cab.lock": "",
        "inductor/ab/.12.34.tmp": "half",
        "triton/tmp.pid_1_2/kernel.cubin": "half",
        "tmp/torchinductor_me/precompiled_headers/c1.h": "#include",
        "tmp/torchinductor_me/precompiled_headers/c1.h.gch": "header",
        "tmp/somebody's.dat": "data",
    }.items():
        place_of = folder / path
        place_of.parent.mkdir(parents=True, exist_ok=True)
        place_of.write_text(content)
    (folder / "inductor" / "link").symlink_to("/etc/passwd")
    return folder


TAKEN = {
    "inductor/ab/cab.py",
    "inductor/ab/cab.main.so",
    "inductor/fxgraph/aa/key/graph",
    "inductor/dynamo/code_state.pkl",
    "triton/hash/kernel.cubin",
    "headers/c1.h",
    "headers/c1.h.gch",
}


def test_a_run_finds_all_that_the_trial_compiled_and_nothing_else(
    tmp_path: Path, header_folder: Path
) -> None:
    store = HandoverStore(tmp_path / "store")
    kept = store.put([trial(tmp_path / "trial")], FACTS, names=["a1"])
    assert {each.path for each in kept.files} == TAKEN
    for name in (kept.bundle_id, "a1", kept.key):
        assert store.find(name) == kept
    handed = store.hand_over(kept, HERE)
    inductor = Path(handed.variables["TORCHINDUCTOR_CACHE_DIR"])
    assert (inductor / "ab" / "cab.py").read_text() == "code"
    assert (inductor / "dynamo" / "code_state.pkl").read_text() == "sizes"
    assert not list(inductor.rglob("*.tmp")) + list(inductor.rglob("*.lock"))
    assert Path(handed.variables["TRITON_CACHE_DIR"], "hash", "kernel.cubin").exists()
    assert (header_folder / "c1.h.gch").read_text() == "header"


def test_what_a_run_adds_stays_for_the_next_one(tmp_path: Path) -> None:
    store = HandoverStore(tmp_path / "store")
    kept = store.put([trial(tmp_path / "trial")], FACTS)
    folder = store.hand_over(kept, HERE).folder
    (folder / "inductor" / "more.py").write_text("another length")
    assert (store.hand_over(kept, HERE).folder / "inductor" / "more.py").exists()


def test_every_ranks_cache_is_in_it(tmp_path: Path) -> None:
    first, second = trial(tmp_path / "rank0"), trial(tmp_path / "rank1")
    (second / "inductor" / "only_on_rank_1.py").write_text("other shapes")
    kept = HandoverStore(tmp_path / "store").put([first, second], FACTS)
    assert {each.path for each in kept.files} == TAKEN | {"inductor/only_on_rank_1.py"}


def test_the_same_content_is_kept_once(tmp_path: Path) -> None:
    store = HandoverStore(tmp_path / "store")
    one = store.put([trial(tmp_path / "t1")], FACTS)
    two = store.put([trial(tmp_path / "t2", "other code")], replace(FACTS, fingerprint="beef"))
    assert one.bundle_id != two.bundle_id
    assert len(list((tmp_path / "store" / "blobs").glob("*/*"))) == len(TAKEN) + 2
    again = store.put([trial(tmp_path / "t3")], FACTS)
    assert again.bundle_id == one.bundle_id


def test_a_trial_that_compiled_nothing_leaves_nothing(tmp_path: Path) -> None:
    store = HandoverStore(tmp_path / "store")
    (tmp_path / "trial" / "inductor").mkdir(parents=True)
    with pytest.raises(StoreError, match="left no compile cache: no graph was compiled"):
        store.put([tmp_path / "trial"], FACTS)
    assert store.bundles() == ()


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"torch": "2.14.0"}, r"torch was 2\.13\.0 and is 2\.14\.0"),
        ({"python": "3.12"}, "Python was .* and is 3.12"),
        ({"cpu": "another"}, "the CPU was .* and is another"),
        ({"system": "darwin-arm64"}, "the system was"),
    ],
)
def test_another_place_is_refused(tmp_path: Path, other: dict[str, str], words: str) -> None:
    store = HandoverStore(tmp_path / "store")
    kept = store.put([trial(tmp_path / "trial")], FACTS)
    with pytest.raises(PlanError, match=f"was made elsewhere: {words}"):
        store.hand_over(kept, replace(HERE, **other))


def test_another_gpu_is_refused_once_it_is_known(tmp_path: Path) -> None:
    store = HandoverStore(tmp_path / "store")
    made = replace(HERE, capability="8.0", cuda="12.6")
    kept = store.put([trial(tmp_path / "trial")], replace(FACTS, place=made))
    store.hand_over(kept, HERE)
    with pytest.raises(PlanError, match=r"the GPU's capability was 8\.0 and is 9\.0"):
        store.hand_over(kept, replace(made, capability="9.0"))


def test_the_least_recently_used_makes_room_but_never_under_a_run(tmp_path: Path) -> None:
    store = HandoverStore(tmp_path / "store", limit_bytes=2_500)
    kept = []
    for number in range(2):
        facts = replace(FACTS, fingerprint=str(number))
        kept.append(store.put([trial(tmp_path / f"t{number}", str(number), 1000)], facts))
        os.utime(tmp_path / "store" / "bundles" / f"{kept[-1].bundle_id}.json", (number, number))
    with store.in_use(kept[0]):
        wide = trial(tmp_path / "t2", "2", 1200)
        last = store.put([wide], replace(FACTS, fingerprint="2"))
    assert {each.bundle_id for each in store.bundles()} == {kept[0].bundle_id, last.bundle_id}
    with pytest.raises(NotFoundError, match="has made room for later ones"):
        store.find(kept[1].bundle_id)
    listed = {each.sha256 for one in store.bundles() for each in one.files}
    assert {blob.name for blob in (tmp_path / "store" / "blobs").glob("*/*")} == listed


def test_a_cache_larger_than_the_store_is_told(tmp_path: Path) -> None:
    store = HandoverStore(tmp_path / "store", limit_bytes=10)
    with pytest.raises(StoreError, match=r"not kept.*ADVISOR_HANDOVER_LIMIT"):
        store.put([trial(tmp_path / "trial")], FACTS)
    assert not list((tmp_path / "store" / "blobs").glob("*/*"))


@pytest.mark.fault
def test_a_damaged_file_is_never_loaded(tmp_path: Path) -> None:
    store = HandoverStore(tmp_path / "store")
    kept = store.put([trial(tmp_path / "trial")], FACTS)
    code = next(each for each in kept.files if each.path.endswith(".so"))
    store.blob(code).write_text("\x7fELF!")
    with pytest.raises(StoreError, match=r"cab\.main\.so of the compile cache is damaged"):
        store.hand_over(kept, HERE)
    assert not (tmp_path / "store" / "runs" / kept.bundle_id).exists()
    with pytest.raises(NotFoundError):
        store.find(kept.bundle_id)
    # The next trial keeps it anew.
    again = store.put([trial(tmp_path / "trial2")], FACTS)
    assert store.hand_over(again, HERE).folder.exists()


@pytest.mark.fault
def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = HandoverStore(tmp_path / "store")
    replaced = os.replace
    written = []

    def full(source: Path, target: Path) -> None:
        written.append(target)
        if len(written) == 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        replaced(source, target)

    monkeypatch.setattr(handovers.os, "replace", full)
    with pytest.raises(StoreError, match=r"the disk is full \(the job runs all the same"):
        store.put([trial(tmp_path / "trial")], FACTS)
    monkeypatch.setattr(handovers.os, "replace", replaced)
    assert store.bundles() == ()
    assert not list((tmp_path / "store" / "parts").iterdir())
    kept = store.put([tmp_path / "trial"], FACTS)
    assert store.hand_over(kept, HERE).folder.exists()


@pytest.mark.fault
def test_two_processes_write_the_same_entry(tmp_path: Path) -> None:
    folders = [trial(tmp_path / f"t{number}", size=200_000) for number in range(2)]
    writers = [
        subprocess.Popen([sys.executable, "-P", "-c", WRITER, str(tmp_path / "store"), str(each)])
        for each in folders
    ]
    assert [writer.wait(60) for writer in writers] == [0, 0]
    store = HandoverStore(tmp_path / "store")
    (kept,) = store.bundles()
    assert store.hand_over(kept, HERE).folder.exists()


WRITER = """
import sys
from pathlib import Path
from advisor.profiler import place
from advisor.profiler.bundle import BundleFacts
from advisor.profiler.handover import HandoverStore
from advisor.profiler.records import Config

store = HandoverStore(Path(sys.argv[1]))
facts = BundleFacts(fingerprint="f00d", config=Config(), place=place.here(torch="2.13.0"))
for _ in range(5):
    store.put([Path(sys.argv[2])], facts, names=["a1"])
"""


# --- archives


def packed(tmp_path: Path) -> tuple[HandoverStore, Bundle, Path]:
    store = HandoverStore(tmp_path / "here")
    kept = store.put([trial(tmp_path / "trial")], FACTS)
    archive.pack(store, kept, tmp_path / "cache.tgz")
    return store, kept, tmp_path / "cache.tgz"


def test_an_archive_brings_the_cache_to_another_machine(tmp_path: Path) -> None:
    _, kept, file = packed(tmp_path)
    there = HandoverStore(tmp_path / "there")
    assert archive.unpack(there, file) == kept
    folder = there.hand_over(there.find(kept.bundle_id), HERE).folder
    assert (folder / "inductor" / "ab" / "cab.py").read_text() == "code"


@pytest.mark.fault
@pytest.mark.parametrize("damage", ["cut", "flipped", "nothing", "text", "other hash"])
def test_a_corrupt_archive_is_told_and_leaves_nothing(tmp_path: Path, damage: str) -> None:
    _, _, file = packed(tmp_path)
    data = bytearray(file.read_bytes())
    if damage == "cut":
        del data[len(data) // 2 :]
    elif damage == "flipped":
        data[len(data) // 2] ^= 0xFF
    elif damage == "nothing":
        data.clear()
    elif damage == "text":
        data[:] = b"no archive at all" * 100
    else:
        data[:] = gzip.compress(gzip.decompress(bytes(data)).replace(b"cubin\0", b"cuban\0"))
    file.write_bytes(bytes(data))
    there = HandoverStore(tmp_path / "there")
    with pytest.raises(StoreError, match=r"damaged|begin with a list|cannot be read|holds|missing"):
        archive.unpack(there, file)
    assert there.bundles() == ()


def test_no_archive_no_file_no_traceback(tmp_path: Path) -> None:
    store, kept, _ = packed(tmp_path)
    with pytest.raises(PlanError, match="there is no archive"):
        archive.unpack(store, tmp_path / "none.tgz")
    with pytest.raises(PlanError, match="cannot be written"):
        archive.pack(store, kept, tmp_path / "none" / "cache.tgz")


def repacked(file: Path, listed: bytes, members: list[tarfile.TarInfo]) -> None:
    with tarfile.open(file, "w:gz") as made:
        first = tarfile.TarInfo("bundle.json")
        first.size = len(listed)
        made.addfile(first, io.BytesIO(listed))
        for member in members:
            made.addfile(member, io.BytesIO(b"x" * member.size))


@pytest.mark.fault
@pytest.mark.parametrize(
    "path",
    ["../evil.so", "/etc/evil.so", "inductor/../../evil", "other/evil.so", "inductor", "a\\b/c",
     "inductor//evil"],
)  # fmt: skip
def test_entries_that_leave_the_folder_are_refused(tmp_path: Path, path: str) -> None:
    file = tmp_path / "evil.tgz"
    listed = Bundle(facts=FACTS, files=(BundleFile(path, 1, "a" * 64),)).encoded()
    repacked(file, listed, [])
    with pytest.raises(StoreError, match="outside of its folders"):
        archive.unpack(HandoverStore(tmp_path / "there"), file)


@pytest.mark.fault
@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE])
def test_only_plain_files_that_are_listed_are_taken(tmp_path: Path, kind: bytes) -> None:
    file = tmp_path / "evil.tgz"
    listed = Bundle(facts=FACTS, files=(BundleFile("inductor/x", 0, "a" * 64),)).encoded()
    member = tarfile.TarInfo("a" * 64)
    member.type, member.linkname = kind, "/etc/passwd"
    repacked(file, listed, [member])
    with pytest.raises(StoreError, match="the archive holds"):
        archive.unpack(HandoverStore(tmp_path / "there"), file)
    unlisted = tarfile.TarInfo("b" * 64)
    repacked(file, listed, [unlisted])
    with pytest.raises(StoreError, match="its list of files does not"):
        archive.unpack(HandoverStore(tmp_path / "there"), file)


@pytest.mark.parametrize(
    "listed",
    [b"{}", b"[]", b"\xff", b'{"facts": {}, "files": []}',
     Bundle(facts=FACTS, files=(), format=2).encoded(),
     Bundle(facts=FACTS, files=(BundleFile("inductor/x", -1, "a" * 64),)).encoded(),
     Bundle(facts=FACTS, files=(BundleFile("inductor/x", 1, "short"),)).encoded(),
     Bundle(facts=FACTS, files=(BundleFile("inductor/x", 1 << 40, "a" * 64),)).encoded(),
     Bundle(facts=FACTS, files=(BundleFile("inductor/x", 1, "a" * 64),) * 2).encoded()],
)  # fmt: skip
def test_lists_that_make_no_sense_are_refused(listed: bytes) -> None:
    with pytest.raises(StoreError):
        bundle.decoded(listed)


# --- names, faces


@pytest.mark.parametrize("name", ["", "../x", "a/b", "x" * 65, "a b"])
def test_what_is_no_name_is_told(tmp_path: Path, name: str) -> None:
    with pytest.raises(PlanError, match="is no id"):
        HandoverStore(tmp_path / "store").find(name)


def test_activate_sets_the_variables_before_anything_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_COMPILE_JOB_ID", "my-job")
    monkeypatch.setattr(handover, "compiling_has_begun", lambda: False)
    here = handover._this_place()
    store = handover.store(tmp_path)
    kept = store.put([trial(tmp_path / "trial")], replace(FACTS, place=here), names=["a1"])
    activation = handover.activate("a1", data=tmp_path)
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(activation.folder / "inductor")
    assert os.environ["TORCH_COMPILE_JOB_ID"] == "my-job"
    assert kept.bundle_id in activation.sentence()
    monkeypatch.setattr(handover, "compiling_has_begun", lambda: True)
    with pytest.raises(PlanError, match="comes too late"):
        handover.activate("a1", data=tmp_path)


def test_limit_that_is_no_size(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ADVISOR_HANDOVER_LIMIT", "much")
    with pytest.raises(PlanError, match="ADVISOR_HANDOVER_LIMIT"):
        handover.store(tmp_path)


@pytest.mark.parametrize(
    ("proof", "words"),
    [
        (CacheProof(hits=2, misses=0), "all 2 graphs came from it"),
        (CacheProof(hits=1, misses=0), "all 1 graph came from it"),
        (CacheProof(hits=1, misses=2), "1 of 3 graphs came from it, 2 were compiled anew"),
        (CacheProof(hits=1, misses=0, bypassed=1), "torch caches 1 of them never"),
        (CacheProof(hits=0, misses=0), "nothing was compiled yet"),
    ],
)
def test_proof_in_words(proof: CacheProof, words: str) -> None:
    assert words in proof.sentence("3f2a")
    assert proof.served == words.startswith("all")


def test_scope_and_mode_are_part_of_the_key() -> None:
    one = bundle.key_of("f00d", Config(), HERE)
    assert one != bundle.key_of("f00d", Config(scope=Scope.REGIONAL), HERE)
    assert one != bundle.key_of("beef", Config(), HERE)
    assert one != bundle.key_of("f00d", Config(), replace(HERE, torch="2.14"))

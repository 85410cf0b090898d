"""The results database: what is written is read again; what is not ours is never touched."""

from __future__ import annotations

import sqlite3
import struct
import threading
from pathlib import Path

import pytest

from advisor.profiler import records
from advisor.profiler.errors import AdvisorError, NotFoundError, StoreError
from advisor.service import store as stores
from advisor.service.store import Store


def trial(name: str, **more: object) -> records.Trial:
    values: dict[str, object] = {
        "trial_id": name,
        "kind": records.TrialKind.EAGER,
        "status": records.TrialStatus.OK,
        "wall_s": 2.5,
    }
    return records.Trial(**(values | more))  # type: ignore[arg-type]


def advice(name: str, *trials: records.Trial) -> records.Advice:
    total = records.Interval(median=10.0, low=9.0, high=11.0)
    return records.Advice(
        advice_id=name,
        created=stores.now(),
        enable=False,
        target="train.py:build",
        config=None,
        code="",
        speedup=None,
        compile_s=None,
        saved_s=None,
        eager_total_s=total,
        advised_total_s=total,
        break_even_step=None,
        p_saves=0.0,
        reasons=("too short",),
        steps=50.0,
        trials=trials,
    )


def test_what_is_written_is_read_again_after_reopening(tmp_path: Path) -> None:
    first = trial("t1", stdout_tail="größer \x00 %s'; --")
    with Store(tmp_path) as store:
        store.add_trial(first, advice_id="a1", target="train.py:build")
        store.add_advice(advice("a1", first))
    with Store(tmp_path) as store:
        assert store.advice("a1").trials == (first,)
        (stored,), more = store.trials()
        assert (stored.advice_id, stored.target, stored.trial) == ("a1", "train.py:build", first)
        assert more is None


def test_unknown_advice_is_not_found(tmp_path: Path) -> None:
    with Store(tmp_path) as store, pytest.raises(NotFoundError, match="no advice nope"):
        store.advice("nope")


def test_pages_hold_everything_once_newest_first(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        for number in range(7):
            store.add_trial(trial(f"t{number}"), advice_id=f"a{number % 2}", target="x")
            store.add_advice(advice(f"b{number}"))
        names, before = [], None
        while True:
            page, before = store.trials(most=3, before=before)
            assert len(page) <= 3
            names += [stored.trial.trial_id for stored in page]
            if before is None:
                break
        assert names == [f"t{number}" for number in reversed(range(7))]
        page, _ = store.trials(advice_id="a1")
        assert [stored.trial.trial_id for stored in page] == ["t5", "t3", "t1"]
        newest, more = store.advices(most=2)
        assert [it.advice_id for it in newest] == ["b6", "b5"]
        assert more is not None


def test_page_stays_below_the_size_of_a_message(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        for number in range(5):
            large = trial(f"t{number}", stdout_tail="x" * (3 << 20))
            store.add_trial(large, advice_id="a", target="x")
        first, before = store.trials()
        assert len(first) == 2
        second, _ = store.trials(before=before)
        assert [it.trial.trial_id for it in second] == ["t2", "t1"]


def test_same_trial_twice_is_refused_whole(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        store.add_trial(trial("t1"), advice_id="a", target="x")
        with pytest.raises(StoreError) as caught:
            store.add_trial(trial("t1", wall_s=9.0), advice_id="a", target="x")
        assert "INSERT" not in str(caught.value)
        (stored,), _ = store.trials()
        assert stored.trial.wall_s == 2.5


def test_record_that_could_not_be_read_again_is_not_written(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        with pytest.raises(AdvisorError):
            store.add_trial(trial("t1", wall_s=float("nan")), advice_id="a", target="x")
        assert store.trials() == ([], None)


def test_two_servers_write_at_once(tmp_path: Path) -> None:
    errors: list[BaseException] = []

    def write(name: str) -> None:
        try:
            with Store(tmp_path) as store:
                for number in range(20):
                    store.add_trial(trial(f"{name}{number}"), advice_id=name, target="x")
        except BaseException as error:  # noqa: BLE001 - told by the assertion below
            errors.append(error)

    threads = [threading.Thread(target=write, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    with Store(tmp_path) as store:
        assert len(store.trials(most=500)[0]) == 80


def _foreign(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE mine (x)")
    connection.commit()
    connection.close()


def _newer(path: Path) -> None:
    Store(path.parent).close()
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA user_version={stores.SCHEMA + 1}")
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()


def _filled(path: Path) -> None:
    with Store(path.parent) as store:
        for number in range(50):
            large = trial(f"t{number}", stdout_tail="x" * 5000)
            store.add_trial(large, advice_id="a", target="x")
    # as one file, without its log
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()


def _truncated(path: Path) -> None:
    _filled(path)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def _bad_page(path: Path) -> None:
    _filled(path)
    data = bytearray(path.read_bytes())
    (page,) = struct.unpack_from(">H", data, 16)
    data[page * 1 : page * 6] = b"\xa5" * (page * 5)
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda path: path.write_bytes(b""), "not a sound database"),
        (lambda path: path.write_text("some text of mine\n" * 20), "not a sound database"),
        (lambda path: path.write_bytes(b"SQLite format 3\0" + b"\xff" * 84), "another program"),
        (_foreign, "another program"),
        (_newer, "newer compile-advisor"),
        (_truncated, "not a sound database"),
        (_bad_page, "not a sound database"),
    ],
    ids=["empty", "text", "header", "foreign", "newer", "truncated", "bad_page"],
)
def test_file_that_is_not_ours_is_refused_and_stays(
    tmp_path: Path, spoil: object, sentence: str
) -> None:
    path = tmp_path / stores.FILE_NAME
    spoil(path)  # type: ignore[operator]
    before = path.read_bytes()
    with pytest.raises(StoreError, match=sentence) as caught:
        Store(tmp_path)
    assert str(tmp_path) not in str(caught.value)
    assert path.read_bytes() == before


def test_leftover_of_a_creation_that_died_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / stores.FILE_NAME).with_suffix(".new").write_bytes(b"half")
    with Store(tmp_path) as store:
        assert store.trials() == ([], None)


def test_nobody_else_can_read_it(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        store.add_trial(trial("t1"), advice_id="a", target="x")
        files = list(tmp_path.iterdir())
        assert len(files) >= 2
        assert [path.name for path in files if path.stat().st_mode & 0o077] == []


def test_missing_folder_is_told(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="data folder"):
        Store(tmp_path / "gone")

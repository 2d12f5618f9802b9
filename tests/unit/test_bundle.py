"""Bundles: the same verdict in an empty folder, a script that shows it, and not one word of whose it is."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import zstandard

from analysis import bundle as bundles
from analysis.bundle import FILES, BundleError, make, prove, zipped
from capture_hooks.options import parse_size
from replay import cli
from replay.judge import JudgeOptions, judge
from replay.trace.reader import open_trace
from tests.scenarios.planted import planted_scene
from tests.scenarios.scene import Job, Scene
from tests.scenarios.stories import begun, ended
from tests.scenarios.test_s1_completion_early import torn
from tests.scenarios.test_s2_late_foreign_write import overtaken
from tests.scenarios.test_s3_sent_before_written import too_early
from tests.scenarios.test_s9_torn_block_table import torn_table
from tests.scenarios.test_store_inputs import stored

LARGE = 24_000_000


def wrong_read(folder: Path, change: Callable[[dict[str, Any]], None]) -> Scene:
    scene = Scene(folder)
    job = begun(scene)
    scene.send(job)
    ended(scene, job)
    scene.read(job, logits=True, change=change)
    return scene


def off(read: dict[str, Any]) -> None:
    read["logits"][128:] *= np.float32(1.1)


def invalid(read: dict[str, Any]) -> None:
    read["top_k"][100:192] = -1


def zeroed(folder: Path) -> Scene:
    scene = Scene(folder)
    job = begun(scene)
    scene.send(job)
    scene.arrive(job)
    scene.decode.memory[0][6] = 0
    scene.look("LT", job)
    scene.read(job)
    return scene


#: A story, and what repro.py must say of it.
STORIES: dict[str, tuple[Callable[[Path], Scene], str]] = {
    "torn": (lambda folder: torn(Scene(folder)), "4255 bytes differ; rows: values 32..63; scales 0..63"),
    "late": (lambda folder: overtaken(Scene(folder, layers=(2, 6))), "64 of 64 of these rows are those of room 7000"),
    "digests": (lambda folder: overtaken(Scene(folder, keep="digests")), "by digest; rows: values 0..63; scales 0..63"),
    "early": (lambda folder: too_early(Scene(folder)), "3127 bytes differ; rows: values 40..63"),
    "zero": (zeroed, "the page is all zero"),
    "table": (lambda folder: torn_table(Scene(folder)), "entry 3: the read used page 41, the allocator gave page 14"),
    "store": (lambda folder: stored(folder, "fp8", wrong={70: 0x40}), "1 values and 0 scales are none that rounding"),
    "bf16": (lambda folder: stored(folder, "bf16", wrong={70: 0x80}), "rows 6: 1 values"),
    "fp4": (lambda folder: stored(folder, "fp4", wrong={70: 0x04}), "rows 6: 1 values"),
    "kernel": (lambda folder: wrong_read(folder, off), "64 of 192 logits are farther off than an fp32 kernel may be"),
    "top-k": (lambda folder: wrong_read(folder, invalid), "92 invalid entries"),
}  # fmt: skip


def unpacked(found: bundles.Bundle, folder: Path) -> Path:
    folder.mkdir()
    for name, content in found.files.items():
        (folder / name).write_bytes(content)
    return folder


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports without pictures: drawing takes most of the time, and other tests are about it."""
    monkeypatch.setattr("analysis.story._draw", lambda *_: ([], []))


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize("story", STORIES)
def test_the_script_of_each_kind_of_bundle_shows_its_difference(story: str, tmp_path: Path) -> None:
    build, said = STORIES[story]
    scene = build(tmp_path)
    scene.close()

    found = make(tuple(scene.paths), LARGE)

    assert list(found.files) == list(FILES)
    assert found.verdict.verdict == "divergent"
    assert found.cases > 0
    folder = unpacked(found, tmp_path / "empty")
    done = subprocess.run(
        [sys.executable, "-I", "-W", "error", "repro.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert said in done.stdout
    assert f"{found.cases} of {found.cases} differences shown" in done.stdout
    with open_trace(folder / "trace.h5") as trace:
        again = judge(trace, JudgeOptions(reexecute=False))
    enclosed = json.loads(found.files["verdict.json"])
    assert json.loads(json.dumps(again.to_json())) == enclosed


@pytest.mark.usefixtures("no_pictures")
def test_the_script_says_what_is_not_there_and_ends_quietly_without_a_reader(tmp_path: Path) -> None:
    scene = torn(Scene(tmp_path))
    scene.close()
    folder = unpacked(make(tuple(scene.paths), LARGE), tmp_path / "empty")
    with np.load(folder / "pages.npz", allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    arrays["0.seen"] = arrays["0.right"]
    np.savez(folder / "pages.npz", **arrays)

    done = subprocess.run(
        [sys.executable, "-I", "repro.py"], cwd=folder, capture_output=True, text=True, check=False
    )

    assert done.returncode == 1
    assert "NOT as the verdict says" in done.stdout

    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-I", "repro.py"], cwd=folder, stdout=writer, stderr=subprocess.PIPE, check=False
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")

    (folder / "pages.npz").unlink()
    done = subprocess.run(
        [sys.executable, "-I", "repro.py"], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "pages.npz is not there: unpack the whole bundle" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.usefixtures("no_pictures")
def test_a_clean_trace_can_be_sent_too(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.healthy(Job(5, 0, 100, [1, 2], [3, 4]))
    scene.close()

    found = make(tuple(scene.paths), LARGE)

    assert found.verdict.verdict == "clean"
    assert found.cases == 0
    assert "names no difference" in found.files["REPLAY.md"].decode()


# Whose it is


def pieces(content: bytes, name: str = "") -> Iterator[tuple[str, bytes]]:
    """``content`` and everything packed inside it, by whatever name: files of a ZIP, chunks of an HDF5 file."""
    yield name, content
    if content[:4] == b"PK\x03\x04":
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            yield f"{name} (comment)", archive.comment
            for entry in archive.infolist():
                yield from pieces(archive.read(entry), f"{name}/{entry.filename}")
    if content[:4] == b"\x89HDF":
        yield from _chunks(content, name)


def _chunks(content: bytes, name: str) -> Iterator[tuple[str, bytes]]:
    with h5py.File(io.BytesIO(content)) as file:
        found: list[Any] = [file]
        file.visititems(lambda _, item: found.append(item))
        for item in found:
            for key, value in item.attrs.items():
                yield f"{name}:{item.name}@{key}", f"{key} {value}".encode()
            if not isinstance(item, h5py.Dataset):
                continue
            place = f"{name}:{item.name}"
            if item.chunks is None:
                yield place, np.asarray(item[()]).tobytes()
                continue
            for number in range(item.id.get_num_chunks()):
                offset = item.id.get_chunk_info(number).chunk_offset
                _, raw = item.id.read_direct_chunk(offset)
                yield place, raw
                yield place, _decoded(raw)
            if item.dtype.kind in "iuf" and item.ndim == 1 and item.compression == "gzip":
                yield place, item[()].astype(item.dtype).tobytes()


def _decoded(raw: bytes) -> bytes:
    """A chunk without its compression. Byte-shuffled columns are read through h5py besides."""
    for decode in (zlib.decompress, lambda data: zstandard.ZstdDecompressor().decompress(data, 1 << 26)):
        try:
            return decode(raw)
        except (zlib.error, zstandard.ZstdError):
            continue
    return raw


def holds(content: bytes, secrets: list[bytes]) -> dict[bytes, str]:
    """Each secret that is in ``content`` or in anything packed in it, and where."""
    found: dict[bytes, str] = {}
    for name, piece in pieces(content):
        found.update({secret: name for secret in secrets if secret in piece})
    return found


SECRET = "s3cr3t"


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[bytes]]:
    """A trace with a secret in every text, in a folder and a file with secret names; and all secrets as bytes."""
    folder = tmp_path_factory.mktemp(f"{SECRET}-folder")
    with pytest.MonkeyPatch.context() as monkeypatch:
        scene, used = planted_scene(folder, monkeypatch, lambda place: f"{SECRET}-{place.replace('.', '-')}-")
        thread = 0x7F3A_1B2C_3D4E
        scene.decode.process.trigger(reason="x", rid="prompt text", thread=thread, stream=0x55AA_1234_5678)
        scene.close()
    words = [f"{SECRET}-{place.replace('.', '-')}-".encode() for place in sorted(used)]
    numbers = [scene.prefill.base, scene.decode.base, thread, 0x55AA_1234_5678]
    numbers.append(1_700_000_000_123_456_789)
    return scene.paths[0], [*words, b"prompt text", *(number.to_bytes(8, "little") for number in numbers)]


def test_the_search_finds_every_secret_where_it_is(planted: tuple[Path, list[bytes]]) -> None:
    """Otherwise finding none in the bundle would prove nothing."""
    path, secrets = planted

    found = holds(path.read_bytes(), secrets)
    assert [secret for secret in secrets if secret not in found] == []


def test_no_secret_is_in_the_bundle(planted: tuple[Path, list[bytes]], tmp_path: Path) -> None:
    path, secrets = planted
    out = tmp_path / "bug.zip"

    assert cli.run(["bundle", str(path), "-o", str(out), "--yes"]) == 0

    content = out.read_bytes()
    assert holds(content, secrets) == {}
    text = b"".join(piece for _, piece in pieces(content))
    for word in (SECRET, SECRET.upper(), str(path.parent), "pytest-of-"):
        assert word.encode() not in text
        assert word.encode("utf-16-le") not in text
    with zipfile.ZipFile(out) as archive:
        verdict = json.loads(archive.read("verdict.json"))
        assert {entry.date_time for entry in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}
    assert [finding["code"] for finding in verdict["findings"]] == ["F14"]
    assert verdict["findings"][0]["pages"][0]["donor"] == {"room": 7000, "layer": 0, "logical": 0}


# Size


@pytest.mark.usefixtures("no_pictures")
def test_what_does_not_fit_is_left_out_piece_by_piece_and_said(tmp_path: Path) -> None:
    scene = overtaken(Scene(tmp_path, layers=(2, 6)))
    for number in range(4):
        scene.healthy(Job(100 + number, 20 + number, 128, [30, 31], [32, 33]), finish=True)
    scene.close()
    paths = tuple(scene.paths)

    whole = make(paths, LARGE)
    assert {finding.layer for finding in whole.verdict.findings} == {2, 6}
    assert any("4 of 7 requests" in text for text in whole.left_out)
    one = make(paths, whole.size - 1)
    assert {finding.layer for finding in one.verdict.findings} == {2}
    assert one.size < whole.size
    assert any("in other layers than 2" in text for text in one.left_out)
    assert "in other layers than 2" in one.files["REPLAY.md"].decode()
    with pytest.raises(BundleError, match="give --max-size") as told:
        make(paths, 10_000)
    enough = re.search(r"--max-size (\S+) or more", str(told.value))
    assert enough is not None
    assert {finding.layer for finding in make(paths, parse_size(enough[1])).verdict.findings} == {2}


# The command


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    scene = torn(Scene(tmp_path_factory.mktemp("bundle")))
    scene.close()
    return scene.paths[0]


@pytest.mark.usefixtures("no_pictures")
def test_the_command_lists_what_goes_in_and_asks(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "bug.zip"
    args = ["bundle", str(path), "-o", str(out)]
    assert cli.run(args) == 2
    said = capsys.readouterr()
    assert "give --yes" in said.err
    for part in (*FILES, "Key bytes are computed from the prompt", "client request ids"):
        assert part in said.out
    assert max(map(len, said.out.splitlines())) <= 80

    answers = iter(["n\n", "y\n"])
    monkeypatch.setattr(sys, "stdin", Asked(lambda: next(answers)))
    assert cli.run(args) == 130
    said = capsys.readouterr()
    assert "Nothing was written" in said.out
    assert said.err == ""
    assert list(tmp_path.iterdir()) == []

    assert cli.run(args) == 0
    assert prove(out) == []
    assert cli.run([*args, "--yes"]) == 2, "never over a file"
    assert cli.run([*args, "--yes", "--force", "--max-size", "much"]) == 2
    assert [entry.name for entry in tmp_path.iterdir()] == ["bug.zip"]


@pytest.mark.usefixtures("no_pictures")
def test_a_size_that_nothing_fits_into_is_an_error_and_no_file(path: Path, tmp_path: Path) -> None:
    args = ["bundle", str(path), "-o", str(tmp_path / "bug.zip"), "--yes"]

    assert cli.run([*args, "--request", "7000", "--layer", "0", "--max-size", "9kB"]) == 2
    assert list(tmp_path.iterdir()) == []


class Asked(io.StringIO):
    """A terminal at which somebody answers."""

    def __init__(self, answer: Callable[[], str]) -> None:
        super().__init__()
        self._answer = answer

    def isatty(self) -> bool:
        return True

    def readline(self, *_: Any) -> str:
        return self._answer()


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize(("problem", "code"), [(["it is broken"], 70), (KeyboardInterrupt(), 130)])
def test_what_does_not_prove_itself_is_not_kept(
    problem: Any, code: int, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(_: Path) -> list[str]:
        if isinstance(problem, BaseException):
            raise problem
        return list(problem)

    monkeypatch.setattr(bundles, "prove", failing)

    assert cli.run(["bundle", str(path), "-o", str(tmp_path / "bug.zip"), "--yes"]) == code
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("no_pictures")
def test_the_proof_sees_another_verdict_and_another_page(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = make((path,), LARGE)
    out = tmp_path / "bug.zip"
    out.write_bytes(
        zipped({**found.files, "verdict.json": found.files["verdict.json"].replace(b"certain", b"likely")})
    )
    assert any("does not give the enclosed verdict" in text for text in prove(out))

    out.write_bytes(zipped({**found.files, "repro.py": b"raise SystemExit(1)"}))
    assert any("does not show the difference" in text for text in prove(out))

    out.write_bytes(zipped(found.files))
    monkeypatch.setattr(bundles, "PROOF_SECONDS", 0.1)
    assert prove(out) == ["its replay or its repro.py took more than 0.1 s"]

    out.write_bytes(zipped({**found.files, "more.txt": b""}))
    assert prove(out) == ["its files are not those that it should have"]

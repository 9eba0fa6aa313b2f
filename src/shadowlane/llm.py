"""The public API: a language model on this machine, as an object."""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from shadowlane.arguments import (
    PACK_NAMES,
    check_model,
    check_progress,
    check_routing,
    one_of,
    switch,
    whole_number,
)
from shadowlane.engine_arguments import EngineArguments, spec_of
from shadowlane.models import resolve_model
from shadowlane.ops.sampling import SamplingParams
from shadowlane.prompts import as_ids, as_messages, as_prompt, as_prompts, checked_params

if TYPE_CHECKING:
    import numpy as np

    from shadowlane.actors.cluster import Cluster
    from shadowlane.actors.spec import Chunk, DataType, KvType, ServiceSpec
    from shadowlane.ops.pack import PackLayout

Progress = Callable[[str, float | None], None]
Message = Mapping[str, str]
READING = "reading the model"  # its headers and tokenizer
POLL_S = 0.05  # how often the stage of a loading engine is asked for
CLOSED_S = 10.0  # what a closed stream may take to end: a step, which may have to read the disk
KEPT_CLOSED = 16  # closed streams whose end may still be waited for


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
    which is written first where there is none yet. expand: also hold packed weights in the compute
    type, which makes prompts faster. True: as many as fit; False: none; None: in what is left of
    the budget that `ram` names, where that is measured to pay. trace_routing: a file to which the
    experts that a mixture's routers choose are written; see `shadowlane simulate`.
    For experiments (the planner chooses otherwise): replan=False keeps the first plan, shares fixes
    the rows of each compute lane, spin_us is how long a wait spins before it sleeps, subchunks is
    how many times `prefill_chunk` tokens of a prompt one step carries at most (1, 2, 4, ...),
    micro_batches in how many groups, at most, these go through cards one behind another,
    replay_routing makes routers choose what such a file says (what is written then means nothing),
    expert_policy ("lru/layer", ...) keeps a mixture's experts by one policy.

    pins: where groups are to live, {"experts": "cpu", r"^0\\.": "gpu:0"} or ["experts=cpu", ...]: a
    regular expression that is looked for in their names, and gpu:<n>, cpu (RAM) or disk.

    hardware: a file that describes a machine with cards, which is then emulated: lanes give the
    same tokens and take its time, `slowed` times slower (None: as slow as they must be). gpu_memory
    of each card, for weights, KV cache and what is brought: "6GiB", or one for each,
    "6GiB,4GiB". strategy, gpu_layers, cpu_moe, n_cpu_moe: a
    layout by hand instead of the best that is found. emulate_seed hides factors on all rates;
    fixed_costs below 1 makes launches and crossings as cheap beside the weights of a small model as
    they are beside those of a large one;
    disturb: "40:cpu=0.4,vram=1GiB" lets other programs take something from 40 tokens on.

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
        expand: bool | None = None,
        prefetch: bool = True,
        direct_io: bool = True,
        replan: bool = True,
        shares: Sequence[float] | None = None,
        spin_us: int | None = None,
        subchunks: int | None = None,
        micro_batches: int | None = None,
        trace_routing: str | Path | None = None,
        replay_routing: str | Path | None = None,
        expert_policy: str | None = None,
        pins: Mapping[str, str] | Sequence[str] = (),
        hardware: str | Path | None = None,
        gpu_memory: str | int | None = None,
        strategy: str | None = None,
        gpu_layers: int | None = None,
        cpu_moe: bool = False,
        n_cpu_moe: int | None = None,
        slowed: float | None = None,
        emulate_seed: int | None = None,
        fixed_costs: float = 1.0,
        disturb: Sequence[str] = (),
        dashboard: bool = False,
        progress: Progress | None = None,
    ) -> None:
        arguments = locals()
        self._engine: Any = None
        self._cluster: Cluster | None = None
        self._about: dict[str, Any] | None = None  # of the model, once it is loaded
        self._closed: deque[Any] = deque(maxlen=KEPT_CLOSED)  # streams that may not have ended yet
        tell = check_progress(progress)
        switch("dashboard", dashboard)
        spec = _prepare(model, weights, tell, EngineArguments.of(arguments))
        from shadowlane.actors.cluster import is_joined, join_cluster, running_address

        is_running = is_joined()
        address = None if is_running else running_address()
        if address is None and not is_running:
            # Before seconds go into Ray. An engine on a running cluster says the same as soon.
            tell(READING, None)
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
        try:
            if engine is not None and ray.is_initialized():
                if self._about is not None:  # else there is nothing to be kept of it
                    with suppress(Exception):  # it is going away in any case
                        ray.get(engine.call.remote("close"), timeout=10)
                ray.kill(engine)
        finally:
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

    def _known(self, name: str) -> Any:
        assert self._about is not None, "the constructor returns once the model is loaded"
        return self._about[name]

    # -- text

    @property
    def has_chat_template(self) -> bool:
        return bool(self._known("has_chat_template"))

    @property
    def vocab_size(self) -> int:
        return int(self._known("vocab_size"))

    @property
    def context_tokens(self) -> int:
        """Tokens that one conversation may hold."""
        return int(self._known("context_tokens"))

    def generate(
        self,
        prompts: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]],
        params: SamplingParams | None = None,
    ) -> list[Completion]:
        """Continue one prompt or several, texts or lists of token ids; answers in their order."""
        answers = self._call("generate", as_prompts(prompts), checked_params(params))
        return [_completion(answer) for answer in answers]

    def chat(self, messages: Sequence[Message], params: SamplingParams | None = None) -> Completion:
        """Answer a conversation; what an earlier call has in the KV cache is not computed again."""
        made = [as_messages(messages)]
        return _completion(self._call("generate", made, checked_params(params))[0])

    def stream(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None
    ) -> Iterator[Chunk]:
        """The continuation, a token at a time. Closing the iterator cancels the request."""
        return self._stream(as_prompt(prompt), checked_params(params))

    def stream_chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None
    ) -> Iterator[Chunk]:
        """Like `chat`, a token at a time."""
        return self._stream(as_messages(messages), checked_params(params))

    def _stream(self, prompt: Any, params: SamplingParams) -> Iterator[Chunk]:
        import ray

        if self._engine is None:
            raise ValueError("the model has been closed")
        request = f"{os.getpid()}-{time.monotonic_ns()}"
        remote = self._engine.stream_chunks.options(num_returns="streaming")
        references = remote.remote(request, prompt, params)
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
                self._closed.append(references)

    def logits(self, token_ids: Sequence[int]) -> np.ndarray:
        """What the model says after each token: float32 [tokens, vocab]."""
        return self._call("logits", as_ids(token_ids))  # type: ignore[no-any-return]

    def log_probabilities(self, token_ids: Sequence[int], first: int = 0) -> np.ndarray:
        """How likely each token was, given those before it: float32 [tokens - 1 - first].

        Natural logarithms, of token first + 1 and those after it. Much smaller than `logits`, from
        which they come.
        """
        start = whole_number("first", first, 0)
        return self._call("log_probabilities", as_ids(token_ids), start)  # type: ignore[no-any-return]

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
        """Speeds, bytes per tier and lane use of the newest request.

        A stream that was closed ends with the step that runs, for which this waits. Raises
        ValueError while the newest request runs, and before the first.
        """
        self._wait_for_closed()
        return self._call("stats")  # type: ignore[no-any-return]

    def _wait_for_closed(self) -> None:
        import ray

        if not self._closed or not ray.is_initialized():
            return
        ends = {each.completed(): each for each in self._closed}
        over, _ = ray.wait(list(ends), num_returns=len(ends), timeout=CLOSED_S)
        for end in over:
            self._closed.remove(ends[end])

    def lane_use(self) -> tuple[float, dict[str, tuple[float, int]]]:
        """(monotonic s, lane -> (busy s, bytes moved)) since the start, for meters.

        Of an emulated machine, in its seconds.
        """
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


def check_spec(spec: ServiceSpec) -> None:
    """Refuse what cannot run before anything is started. Reads headers and the tokenizer."""
    from shadowlane.actors.preview import check_plan, check_tokenizer

    check_plan(spec)
    check_tokenizer(spec)


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
    weights, tell = options.pop("weights", None), check_progress(progress)
    spec = _prepare(model, weights, tell, EngineArguments(**options))
    tell("planning", None)
    from shadowlane.actors.preview import preview

    return preview(spec)


def profile_model(
    model: str | Path, refresh: bool = True, progress: Progress | None = None, **options: Any
) -> dict[str, Any]:
    """Measure this machine with `LLM(model, **options)`, and keep the figures for later plans.

    A profile belongs to a model, its types and the threads of each lane.
    """
    weights = options.pop("weights", None)
    switch("refresh", refresh)
    spec = _prepare(model, weights, check_progress(progress), EngineArguments(**options))
    from shadowlane.actors.preview import cached_profile, forget_profile, profile_report

    if refresh:
        forget_profile(spec)
    if cached_profile(spec) is None:
        with LLM(spec.root, progress=progress, **options):
            pass
    return profile_report(spec)


def _prepare(
    model: str | Path, weights: PackLayout | None, tell: Progress, asked: EngineArguments
) -> ServiceSpec:
    """What `LLM` is asked to serve. Refuses bad arguments before it fetches or packs a model."""
    tell(READING, None)
    name = check_model(model)
    if weights is not None:
        one_of("weights", weights, PACK_NAMES)
    check_routing(name, asked.trace_routing, asked.replay_routing)
    spec = spec_of(Path(), asked)
    path, notes = _chosen_weights(resolve_model(name, tell), weights, tell)
    return replace(spec, root=path.absolute(), notes=(*notes, *spec.notes))


def _chosen_weights(
    path: Path, weights: PackLayout | None, tell: Progress
) -> tuple[Path, tuple[str, ...]]:
    """The files to run, and what to say about them."""
    if weights is None:
        return path, ()
    from shadowlane.packing import packed_model

    path, note = packed_model(path, weights, tell)
    return path, (note,)


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

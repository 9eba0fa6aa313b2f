"""`shadowlane chat`: a conversation that keeps its KV cache: a turn costs only its own tokens."""

from __future__ import annotations

import sys
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

from shadowlane.cli import options
from shadowlane.cli.bars import LaneBars
from shadowlane.cli.engine_options import EngineOptions, refuse_shape, sampling_params
from shadowlane.cli.errors import exit_code, report_error
from shadowlane.cli.notes import say_notes
from shadowlane.cli.stages import Stages
from shadowlane.cli.summary import show_new_decisions, show_summary
from shadowlane.models import DEFAULT_MODEL, resolve_model
from shadowlane.texts import check_chats

if TYPE_CHECKING:
    from shadowlane import LLM, SamplingParams

EPILOG = options.epilog(
    "shadowlane chat",
    "shadowlane chat smollm2 --ram 128MiB --temp 0.7",
    "shadowlane chat org/name --ctx-size 4096",
    "shadowlane chat smollm2 --hardware examples/hardware/rtx-3060-laptop-6gb.yaml --gpu-layers 12",
)

HELP = """\
/clear   forget the conversation
/stats   what each lane did for the last answer
/exit    leave (also Ctrl-D)
/help    this list
Ctrl-C   stop the answer, not the program"""


def chat(
    model: options.ModelArgument = DEFAULT_MODEL,
    max_tokens: options.MaxTokens = 1024,
    ram: options.Ram = None,
    gpu_memory: options.GpuMemory = None,
    ctx_size: options.CtxSize = None,
    no_prefetch: options.NoPrefetch = False,
    cpu_threads: options.CpuThreads = None,
    cpu_workers: options.CpuWorkers = 1,
    dtype: options.DtypeOption = None,
    kv: options.Kv = None,
    expand: options.Expand = None,
    weights: options.Weights = None,
    pins: options.Pins = None,
    hardware: options.Hardware = None,
    strategy: options.Strategy = None,
    gpu_layers: options.GpuLayers = None,
    cpu_moe: options.CpuMoe = False,
    n_cpu_moe: options.NCpuMoe = None,
    slowed: options.Slowed = None,
    emulate_seed: options.EmulateSeed = None,
    disturb: options.Disturb = None,
    explain: options.Explain = False,
    temp: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    repeat_penalty: options.RepeatPenalty = None,
    seed: options.Seed = None,
    stop: options.Stop = None,
) -> None:
    """Talk with a model that has a chat template.

    Ctrl-C stops the answer and keeps the conversation. /clear forgets it, /stats
    says what each lane did, /exit leaves.
    """
    engine = EngineOptions.of(locals())
    refuse_shape(model, "to run")
    params = sampling_params(
        max_tokens,
        temperature=temp,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repeat_penalty=repeat_penalty,
        seed=seed,
        stop=stop,
    )
    with Stages() as stages:
        path = resolve_model(model, stages)
        check_chats(path, "chat")
        with engine.open(path, stages) as llm:
            stages.stop()
            if not llm.has_chat_template:
                raise ValueError(f"chat needs a model with a chat template; {model} has none")
            say_notes(llm.plan["notes"])
            has_answered = _talk(llm, params, explain, engine.is_emulated)
            if engine.is_emulated and has_answered:
                show_summary(llm.stats())


def _talk(llm: LLM, params: SamplingParams, explain: bool, is_emulated: bool) -> bool:
    """Until the person leaves; whether there was an answer."""
    is_terminal = sys.stdin.isatty()
    has_answered = False
    decisions: list[str] = []  # that have been told
    if is_terminal:
        import readline  # noqa: F401  (gives input() editing and history)

        print("/help lists the commands, Ctrl-D leaves.", file=sys.stderr)
    messages: list[dict[str, str]] = []
    while True:
        try:
            line = input("> " if is_terminal else "").strip()
        except EOFError:
            if is_terminal:
                print()
            return has_answered
        except KeyboardInterrupt:
            if not is_terminal:
                raise
            print("\n(/exit or Ctrl-D leaves)", file=sys.stderr)
            continue
        if line in ("/exit", "/quit"):
            return has_answered
        if line == "/clear":
            messages.clear()
            print("The conversation is forgotten.", file=sys.stderr)
        elif line == "/help":
            print(HELP, file=sys.stderr)
        elif line == "/stats" and has_answered:
            show_summary(llm.stats())
        elif line == "/stats":
            print("There has been no answer yet.", file=sys.stderr)
        elif line.startswith("/"):
            print(f"There is no command {line.split()[0]}; /help lists them.", file=sys.stderr)
        elif line:
            messages.append({"role": "user", "content": line})
            try:
                answer = _answer(llm, messages, params, is_emulated)
            except Exception as error:
                # A turn that does not fit, or a lane that died, costs that turn. A script that
                # feeds us must see it, a person can go on.
                if not is_terminal or exit_code(error) == 1:
                    raise
                report_error(error)
                if len(messages) > 1 and isinstance(error, ValueError):
                    print("(/clear forgets the conversation)", file=sys.stderr)
                messages.pop()
                continue
            messages.append({"role": "assistant", "content": answer})
            has_answered = True
            if explain:
                decisions = show_new_decisions(llm.stats(), decisions)


def _answer(
    llm: LLM, messages: list[dict[str, str]], params: SamplingParams, is_emulated: bool
) -> str:
    """Streams one answer to standard output; after Ctrl-C, what was written so far."""
    written: list[str] = []
    chunks = llm.stream_chat(messages, params)
    try:
        with closing(chunks), Stages() as stages, ExitStack() as shown:
            stages("reading")
            bars: LaneBars | None = None
            for chunk in chunks:
                stages.stop()
                written.append(chunk.text)
                bars = bars or shown.enter_context(LaneBars(llm, is_emulated=is_emulated))
                bars.write(chunk.text)
                if chunk.finish_reason == "length":
                    limits = "--max-tokens or --ctx-size allows no more"
                    print(f" ({limits})", end="", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        print(" (stopped)", end="", file=sys.stderr, flush=True)
    print(flush=True)
    return "".join(written)

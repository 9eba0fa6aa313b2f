"""Micro-batches on emulated cards: how long a prompt takes whose chunk goes through in several.

    python benchmarks/micro_batches.py --rounds 3

The engine itself, its lanes as threads of this process, on a machine of two equal cards that is
emulated: one half of the layers on each. A made-up model whose matrices are small, so launches,
crossings and what small matrices lose are as cheap beside them as beside layers of 400 MB. Each
lane holds every instruction as long as the machine would take, slowed down so far that kernels of
this machine are through before (`over`: by how much they were not, of the prompt's time). The
prompt is one chunk of `--subchunks` sub-chunks; ratios are within a round, and tokens the same.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from emulated_pair import HARDWARE, LARGE_LAYER_NBYTES
from machine import hardware_line
from measure import markdown_table, spread
from shapes import Shape
from synthesize import write_model

from shadowlane.actors.engine import Engine
from shadowlane.actors.hosts import ThreadHost
from shadowlane.actors.sequence import Output
from shadowlane.actors.spec import CardSettings, EngineSettings, Options
from shadowlane.emulate import emulated_machine
from shadowlane.ops.sampling import SamplingParams

SHAPE = Shape(256, 16, 768, 4, 2, 64, 1024, max_position_embeddings=4096)
RAM = 1 << 29
CARD_NBYTES = 1 << 28
PATIENCE_S = 600.0


@contextmanager
def serving(model: Path, given: argparse.Namespace, count: int) -> Iterator[Engine]:
    weights = SHAPE.nbytes - 2 * SHAPE.vocab_size * SHAPE.hidden_size
    costs = weights / SHAPE.num_hidden_layers / LARGE_LAYER_NBYTES
    _, emulated = emulated_machine(
        HARDWARE / f"{given.hardware}.yaml", slowed=given.slowed, fixed_costs=costs
    )
    half = SHAPE.num_hidden_layers // 2
    first = "|".join(map(str, range(half)))
    settings = EngineSettings(
        RAM,
        cores=((0,),),
        cards=(CardSettings(CARD_NBYTES),) * 2,
        emulated=emulated,
        subchunks=given.subchunks,
        micro_batches=count,
        pins=((rf"^({first})\.", "gpu:0"), (rf"^(?!({first})\.)\d|lm_head", "gpu:1")),
        replan=False,
    )
    tokens = given.subchunks * given.rows
    options = Options(context=tokens + 64, prefill_chunk=given.rows)
    host = ThreadHost()
    engine = Engine(model, options, settings, host)
    thread = threading.Thread(target=engine.serve, daemon=True)
    try:
        engine.start(None)
        thread.start()
        placement = engine.placement
        assert (placement.micro_batches, placement.subchunks) == (count, given.subchunks)
        yield engine
    finally:
        engine.close()
        if thread.ident is not None:
            thread.join(PATIENCE_S)
        host.close()


def prompt_s(engine: Engine, tokens: int) -> tuple[float, float, list[int]]:
    """Emulated seconds until the first token, what kernels took beyond that, and the answer."""
    assert engine.emulator is not None
    before = engine.emulator.overrun_s()
    ids = [(17 * number + 5) % 997 for number in range(tokens)]
    request = engine.submit(ids, SamplingParams(max_tokens=3, ignore_eos=True))
    answer: list[int] = []
    output = Output()
    while output.finish_reason is None:
        output = request.outputs.get(timeout=PATIENCE_S)
        if output.error is not None:
            raise RuntimeError(output.error)
        answer += output.token_ids
    after = engine.emulator.overrun_s()
    seconds = (request.timing.first_token - request.timing.started) / engine.slowed
    return seconds, max(after[lane] - before[lane] for lane in after), answer


def measured(model: Path, given: argparse.Namespace) -> dict[int, list[tuple[float, float]]]:
    found: dict[int, list[tuple[float, float]]] = {count: [] for count in given.counts}
    expected: list[int] = []
    for number in range(given.rounds):
        for count in given.counts:
            with serving(model, given, count) as engine:
                prompt_s(engine, given.rows)  # what torch makes ready once
                seconds, over_s, answer = prompt_s(engine, given.subchunks * given.rows)
            expected = expected or answer
            if answer != expected:
                raise AssertionError(f"{count} micro-batches: other tokens than before")
            found[count].append((seconds, over_s / seconds))
            told = f"round {number}, {count} micro-batches: {1e3 * seconds:.3f} ms"
            print(f"{told}, over by {100 * over_s / seconds:.1f} %", file=sys.stderr, flush=True)
    return found


def report(found: dict[int, list[tuple[float, float]]]) -> str:
    """Of each number of micro-batches the time over that of one; counts: by rising number."""
    rows: list[Sequence[object]] = []
    for count, each in found.items():
        ratio = spread(ours / whole for (ours, _), (whole, _) in zip(each, found[1], strict=True))
        assert ratio is not None
        over = max(part for _, part in each)
        rows.append(
            (count, ratio.text(3), f"{(count + 1) / (2 * count):.3f}", f"{100 * over:.1f} %")
        )
    return markdown_table(("micro-batches", "time / one's", "(M + 1) / 2M", "over"), rows)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hardware", default="two-rtx-3090", help="in examples/hardware")
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--subchunks", type=int, default=8)
    parser.add_argument("--rows", type=int, default=128, help="of a sub-chunk")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--slowed", type=float, default=50_000.0)
    given = parser.parse_args()
    if given.counts[0] != 1:
        parser.error("--counts must begin with 1, which the others are held against")
    return given


def main() -> None:
    given = arguments()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        write_model(SHAPE, model)
        found = measured(model, given)
    print(f"{hardware_line()}; everything below is emulated\n")
    print(report(found))


if __name__ == "__main__":
    main()

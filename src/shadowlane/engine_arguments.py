"""What an engine is asked for, by one name each, and the specification that it makes.

`LLM` has the same names as its arguments, the command line as its options.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shadowlane.arguments import (
    DTYPES,
    KV_NAMES,
    MAX_SPIN_US,
    file_name,
    lane_shares,
    named_pins,
    one_of,
    switch,
    whole_number,
)
from shadowlane.emulate import emulated_machine, strategy_of
from shadowlane.sizes import format_size, free_ram, parse_size

if TYPE_CHECKING:
    from shadowlane.actors.spec import CardSettings, DataType, Emulated, KvType, ServiceSpec
    from shadowlane.planner.hardware import Hardware
    from shadowlane.planner.placement import Expand


@dataclass(frozen=True, slots=True)
class EngineArguments:
    """See `LLM`, which explains each."""

    ram: str | int | None = None
    cpu_threads: int | None = None
    cpu_workers: int = 1
    dtype: DataType | None = None
    ctx_size: int | None = None
    max_batch: int = 1
    prefill_chunk: int | None = None
    logit_rows: int | None = None
    kv: KvType | None = None
    expand: bool | None = None
    prefetch: bool = True
    direct_io: bool = True
    replan: bool = True
    shares: Sequence[float] | None = None
    spin_us: int | None = None
    subchunks: int | None = None
    micro_batches: int | None = None
    trace_routing: str | Path | None = None
    replay_routing: str | Path | None = None
    expert_policy: str | None = None
    pins: Mapping[str, str] | Sequence[str] = ()
    hardware: str | Path | None = None
    gpu_memory: str | int | None = None
    strategy: str | None = None
    gpu_layers: int | None = None
    cpu_moe: bool = False
    n_cpu_moe: int | None = None
    slowed: float | None = None
    emulate_seed: int | None = None
    fixed_costs: float = 1.0
    disturb: Sequence[str] = ()

    @classmethod
    def of(cls, named: Mapping[str, Any]) -> EngineArguments:
        """Those of `named` that are meant for an engine, of which all must be there."""
        return cls(**{field.name: named[field.name] for field in fields(cls)})


def make_spec(path: Path, **options: Any) -> ServiceSpec:
    """What is to be served, with every default decided; options are `EngineArguments`.

    Reads nothing of the model, unless cards that are here are to be used: then it times the disk.
    """
    return spec_of(path, EngineArguments(**options))


def spec_of(path: Path, asked: EngineArguments) -> ServiceSpec:
    """See `make_spec`."""
    from shadowlane.actors.machine import assign_cores
    from shadowlane.actors.spec import PREFILL_CHUNK, SPIN_US, EngineSettings, Options, ServiceSpec
    from shadowlane.ops.table import FEW_ROWS
    from shadowlane.planner.experts import policy_named

    machine = {"slowed": asked.slowed, "emulate_seed": asked.emulate_seed, "disturb": asked.disturb}
    cards, emulated, measured = _machine(
        path, asked.hardware, asked.gpu_memory, asked.fixed_costs, **machine
    )
    layout, layers = strategy_of(asked.strategy, asked.gpu_layers, asked.cpu_moe, asked.n_cpu_moe)
    if not cards and layout not in ("auto", "cpu" if emulated is not None else "auto"):
        named = "strategy"
        if asked.gpu_layers is not None:
            named = "gpu_layers"
        elif layout == "cpu-moe" and asked.strategy is None:
            named = "cpu_moe" if asked.cpu_moe else "n_cpu_moe"
        if emulated is not None:
            raise ValueError(f"{named} needs a card to use; on {emulated.hardware.name} is none")
        raise ValueError(f"{named} needs hardware: without cards there is nothing to place on them")
    threads = (
        None if asked.cpu_threads is None else whole_number("cpu_threads", asked.cpu_threads, 1)
    )
    cores, notes = assign_cores(threads, whole_number("cpu_workers", asked.cpu_workers, 1))
    options = Options(
        dtype=None if asked.dtype is None else one_of("dtype", asked.dtype, DTYPES),
        kv=None if asked.kv is None else one_of("kv", asked.kv, KV_NAMES),
        context=None if asked.ctx_size is None else whole_number("ctx_size", asked.ctx_size, 1),
        max_batch=whole_number("max_batch", asked.max_batch, 1, FEW_ROWS),
        logit_rows=FEW_ROWS
        if asked.logit_rows is None
        else whole_number("logit_rows", asked.logit_rows, 1),
        prefill_chunk=PREFILL_CHUNK
        if asked.prefill_chunk is None
        else whole_number("prefill_chunk", asked.prefill_chunk, 1),
    )
    ram, headroom = _ram(asked.ram, emulated)
    settings = EngineSettings(
        ram=ram,
        headroom=headroom,
        cards=cards,
        emulated=emulated,
        machine=measured,
        strategy=layout,
        strategy_layers=layers,
        cores=tuple(cores),
        expand=_expand(asked.expand, is_budget_named=asked.ram is not None),
        direct=switch("direct_io", asked.direct_io),
        prefetch=switch("prefetch", asked.prefetch),
        replan=switch("replan", asked.replan),
        shares=None if asked.shares is None else lane_shares(asked.shares, len(cores)),
        spin_us=SPIN_US
        if asked.spin_us is None
        else whole_number("spin_us", asked.spin_us, 0, MAX_SPIN_US),
        subchunks=None
        if asked.subchunks is None
        else whole_number("subchunks", asked.subchunks, 1),
        micro_batches=None
        if asked.micro_batches is None
        else _micro_batches(asked.micro_batches, cards),
        trace_routing=_path("trace_routing", asked.trace_routing),
        replay_routing=_path("replay_routing", asked.replay_routing),
        expert_policy=None
        if asked.expert_policy is None
        else policy_named(asked.expert_policy).name,
        pins=named_pins(asked.pins),
    )
    return ServiceSpec(path.absolute(), options, settings, notes)


def _machine(
    model: Path,
    hardware: str | Path | None,
    gpu_memory: str | int | None,
    fixed_costs: float,
    **how: Any,
) -> tuple[tuple[CardSettings, ...], Emulated | None, Hardware | None]:
    """Cards, the machine that is emulated, and what was measured of the one that is here."""
    if hardware is not None:
        how["seed"] = how.pop("emulate_seed")
        return (*emulated_machine(hardware, gpu_memory, fixed_costs=fixed_costs, **how), None)
    for name, value in (how | {"fixed_costs": None if fixed_costs == 1.0 else fixed_costs}).items():
        if value is not None and value not in ((), []):
            raise ValueError(f"{name} needs hardware, the machine that is to be emulated")
    if gpu_memory is None or str(gpu_memory).strip() == "0":
        return (), None, None
    from shadowlane.card_budget import check_card_budget

    check_card_budget(gpu_memory)
    from shadowlane.actors.cards_here import cards_here

    cards, measured = cards_here(gpu_memory, model)
    return cards, None, measured


def _path(name: str, asked: str | Path | None) -> Path | None:
    return None if asked is None else Path(file_name(name, asked)).absolute()


def _ram(asked: str | int | None, emulated: Emulated | None) -> tuple[int, int | None]:
    """(budget, what it leaves free for others); one that is named is kept, whatever others need.

    Of an emulated machine no more than it has and no more than is free here.
    """
    if asked is not None:
        budget = parse_size(asked, "ram")
        if emulated is not None and budget > emulated.hardware.ram_nbytes:
            most, got = format_size(int(emulated.hardware.ram_nbytes)), format_size(budget)
            raise ValueError(
                f"ram must be at most the {most} of {emulated.hardware.name}; got {got}"
            )
        return budget, None
    free = free_ram()
    if emulated is None:
        return free.budget_nbytes, free.headroom_nbytes
    machine = emulated.hardware
    most = int(machine.ram_nbytes - machine.reserved_nbytes)
    return min(free.budget_nbytes, most), free.headroom_nbytes


def _micro_batches(asked: int, cards: Sequence[CardSettings]) -> int:
    count = whole_number("micro_batches", asked, 1)
    if count > 1 and not cards:
        raise ValueError(f"micro_batches needs cards, which work one behind another; got {count}")
    return count


def _expand(asked: bool | None, *, is_budget_named: bool) -> Expand:
    """Whether packed weights get expanded copies.

    Unasked only from a budget that somebody named, and so has given away: the automatic one is all
    that is free, which other programs may want.
    """
    if asked is None:
        return "spare" if is_budget_named else "never"
    return "always" if switch("expand", asked) else "never"

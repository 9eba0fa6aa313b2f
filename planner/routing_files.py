"""Files of routing traces: writing ours, reading ours and recorded ones.

Two kinds of file are read. Ours is a text of JSON lines, gzipped if its name
ends in `.gz`, so that an engine can append step by step:

    {"format": "shadowlane-routes", "version": 1, "model": "...", "title": "...", "layers": 48,
     "experts": 128, "top_k": 8, "expert_nbytes": [one per layer],
     "dense_nbytes": [one per layer], "outside_nbytes": 0}       (the header, on one line)
    {"step": 0, "turn": 0, "phase": "prefill", "experts": [[3, 17, ...], ...]}    (one per token)

`model` is a fingerprint, `title` what people call it (it may be missing). `experts` has one list
per layer, the choices in the router's order, best first; one may be shorter than top_k, or empty.
Tokens of one forward pass have the same step. "layers" counts layers with experts only;
`dense_nbytes` is what else of such a layer each token reads, `outside_nbytes` what it reads outside
them (dense layers, the head). The other kind is a recorded `route_trace v1`: CSV with one row per
chosen expert, after a header of comment lines.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import numpy.typing as npt

from shadowlane.planner.routing import NOBODY, RoutedModel, Trace

FORMAT, VERSION = "shadowlane-routes", 1
RECORDED = "# route_trace v1"
WRITTEN_ENDINGS = (".jsonl", ".jsonl.gz")
READ_ENDINGS = (*WRITTEN_ENDINGS, ".csv", ".csv.gz")

Numbered = Iterator[tuple[int, str]]  # (line number from 1, the line)


def check_ending(path: Path, endings: tuple[str, ...], argument: str) -> None:
    """Raises ValueError for a file that is called like something else; nothing is opened."""
    if not path.name.endswith(endings):
        listed = f"{', '.join(endings[:-1])} or {endings[-1]}"
        raise ValueError(f"{argument} must end in {listed}; got {path}")


class TraceWriter:
    """Appends to a file of our own, step by step; a context manager. Raises OSError.

    NOTE: a gzipped file is whole only after `close`; a plain one is after every step.
    """

    def __init__(self, path: Path, model: RoutedModel) -> None:
        self._num_steps = 0
        self._is_gzip = path.suffix == ".gz"
        open_text = gzip.open if self._is_gzip else open
        self._file = cast(IO[str], open_text(path, "wt", encoding="utf-8"))
        header = {
            "format": FORMAT,
            "version": VERSION,
            "model": model.name,
            "title": model.title,
            "layers": model.num_layers,
            "experts": model.num_experts,
            "top_k": model.top_k,
            "expert_nbytes": model.expert_nbytes,
            "dense_nbytes": model.dense_nbytes,
            "outside_nbytes": model.outside_nbytes,
        }
        self._file.write(json.dumps(header) + "\n")

    def step(self, choices: npt.NDArray[np.integer[Any]], *, turn: int, is_prefill: bool) -> None:
        """One forward pass: choices [rows, layers, top_k], NOBODY where there is none."""
        phase = "prefill" if is_prefill else "decode"
        for row in choices.tolist():
            experts = [[each for each in ids if each != NOBODY] for ids in row]
            line = {"step": self._num_steps, "turn": turn, "phase": phase, "experts": experts}
            self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
        self._num_steps += 1
        if not self._is_gzip:
            self._file.flush()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


def write_trace(path: Path, trace: Trace) -> None:
    """All of `trace`, as an engine would have written it. Raises OSError."""
    turn_of = np.searchsorted(np.array(trace.turn_starts), np.arange(trace.num_tokens), "right") - 1
    bounds = np.flatnonzero(np.diff(trace.steps)) + 1
    with TraceWriter(path, trace.model) as writer:
        for rows in np.split(np.arange(trace.num_tokens), bounds):
            if len(rows):
                is_prefill = bool(trace.is_prefill[rows[0]])
                writer.step(trace.choices[rows], turn=int(turn_of[rows[0]]), is_prefill=is_prefill)


def read_trace(path: Path) -> Trace:
    """Either kind of file. Raises OSError, or ValueError that names the file and the line."""
    try:
        opened = gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")  # noqa: SIM115
        with opened as file:
            return _parse(_numbered(cast(IO[bytes], file)))
    except _Malformed as error:
        raise ValueError(f"{path}: {error}") from error.__cause__


class _Malformed(Exception):
    """What is wrong in which line."""

    def __init__(self, number: int, what: str) -> None:
        super().__init__(f"line {number} {what}")


def _numbered(file: IO[bytes]) -> Numbered:
    number = 0
    try:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                raise _Malformed(number, "is cut off: a trace must end with a line break")
            yield number, line.decode("utf-8").rstrip("\r\n")
    except EOFError:
        raise _Malformed(number + 1, "is cut off: the gzip stream must have an end") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise _Malformed(number + 1, f"must be readable as gzip; {error}") from error
    except UnicodeDecodeError:
        raise _Malformed(number, "must be UTF-8") from None


def _parse(lines: Numbered) -> Trace:
    number, first = next(lines, (1, ""))
    if first.strip() == RECORDED:
        return _parse_recorded(lines)
    if first.startswith("{"):
        return _parse_own(number, first, lines)
    raise _Malformed(
        number, f"must be the header of a routing trace ({FORMAT} or {RECORDED[2:]}); "
        f"got {first[:40]!r}"
    )  # fmt: skip


def _parse_own(number: int, header: str, lines: Numbered) -> Trace:
    try:
        said = json.loads(header)
        if (said["format"], said["version"]) != (FORMAT, VERSION):
            raise ValueError(
                f"must be {FORMAT} version {VERSION}; got {said['format']} {said['version']}"
            )
        sizes = [_whole(each) for name in ("expert_nbytes", "dense_nbytes") for each in said[name]]
        num_layers = _whole(said["layers"])
        model = RoutedModel(
            name=str(said["model"]),
            num_experts=_whole(said["experts"]),
            top_k=_whole(said["top_k"]),
            expert_nbytes=tuple(sizes[:num_layers]),
            dense_nbytes=tuple(sizes[num_layers:]),
            outside_nbytes=_whole(said["outside_nbytes"]),
            title=str(said.get("title", "")),
        )
    except KeyError as error:
        raise _Malformed(number, f"must have {error} in the header") from None
    except (ValueError, TypeError) as error:
        raise _Malformed(number, f"must be the header: {error}") from error
    rows: list[npt.NDArray[np.int16]] = []
    marks: list[tuple[int, int, bool]] = []  # step, turn, is_prefill
    for number, line in lines:
        try:
            said = json.loads(line)
            rows.append(_choices(said["experts"], model))
            mark = _whole(said["step"]), _whole(said["turn"]), said["phase"] == "prefill"
            if said["phase"] not in ("prefill", "decode"):
                raise ValueError(f"phase must be prefill or decode; got {said['phase']!r}")
            if marks and mark[:2] < marks[-1][:2]:
                raise ValueError(f"steps and turns must not fall; got {mark[0]} and {mark[1]}")
            marks.append(mark)
        except KeyError as error:
            raise _Malformed(number, f"must have {error}") from None
        except (ValueError, TypeError) as error:
            raise _Malformed(number, f"must be a token: {error}") from error
    if not rows:
        raise _Malformed(number + 1, "must be a token: a trace must not be empty")
    steps, turns, is_prefill = zip(*marks, strict=True)
    return _trace(model, np.stack(rows), steps, turns, is_prefill)


def _choices(experts: Any, model: RoutedModel) -> npt.NDArray[np.int16]:
    """[layers, top_k]. Raises ValueError, TypeError."""
    if len(experts) != model.num_layers:
        raise ValueError(f"experts must be {model.num_layers} lists; got {len(experts)}")
    row = np.full((model.num_layers, model.top_k), NOBODY, np.int16)
    for layer, ids in enumerate(experts):
        if len(ids) > model.top_k:
            raise ValueError(f"layer {layer} must have at most {model.top_k} ids; got {len(ids)}")
        if len(set(ids)) != len(ids):
            raise ValueError(f"layer {layer} must have distinct ids; got {ids}")
        for each in ids:
            if not 0 <= _whole(each) < model.num_experts:
                raise ValueError(
                    f"ids of layer {layer} must be below {model.num_experts}; got {each}"
                )
        row[layer, : len(ids)] = ids
    return row


def _whole(value: object) -> int:
    if type(value) is not int:
        raise ValueError(f"numbers must be whole; got {value!r}")
    return value


def _trace(
    model: RoutedModel, choices: npt.NDArray[np.int16], steps: Any, turns: Any, is_prefill: Any
) -> Trace:
    changes = np.flatnonzero(np.diff(np.array(turns))) + 1
    return Trace(
        model,
        choices,
        np.array(steps, np.int32),
        np.array(is_prefill, np.bool_),
        (0, *(int(each) for each in changes)),
    )


_COLUMNS = "turn,phase,step,layer,slot,expert,weight,residency,expert_bytes"
_Row = tuple[int, int, int, int, int, int]  # turn, phase (0: prefill), step, layer, slot, expert


def _parse_recorded(lines: Numbered) -> Trace:
    """A step of the file is a token; what a turn has in prefill is taken to be one pass."""
    known: dict[str, str] = {}
    sizes: list[tuple[int, int]] = []
    number = 1
    for number, line in lines:
        if not line.startswith("#"):
            break
        pairs = dict(pair.split("=", 1) for pair in line[1:].split() if "=" in pair)
        if "expert_bytes" in pairs:
            sizes.append((_recorded(pairs, "expert_bytes", number),
                          _recorded(pairs, "dense_bytes", number)))  # fmt: skip
        else:
            known |= pairs
    if line != _COLUMNS:
        raise _Malformed(number, f"must name the columns {_COLUMNS}; got {line[:80]!r}")
    if len(sizes) != _recorded(known, "n_layer", number):
        raise _Malformed(
            number, f"must follow the sizes of {known['n_layer']} layers; got {len(sizes)}"
        )
    try:
        model = RoutedModel(
            name=Path(known.get("model", "")).name,
            num_experts=_recorded(known, "n_expert", number),
            top_k=_recorded(known, "n_expert_used", number),
            expert_nbytes=tuple(expert for expert, _ in sizes),
            dense_nbytes=tuple(dense for _, dense in sizes),
        )
    except ValueError as error:
        raise _Malformed(number, f"must follow a header: {error}") from error
    limits = {3: model.num_layers, 4: model.top_k, 5: model.num_experts}
    rows: list[_Row] = []
    for number, line in lines:
        fields = line.split(",")
        try:
            row = tuple(int(each) for each in fields[:6])
        except ValueError:
            row = ()
        if len(row) != 6 or len(fields) != 9 or min(row) < 0:
            raise _Malformed(number, f"must have the nine columns; got {line[:80]!r}")
        for column, limit in limits.items():
            if row[column] >= limit:
                name = _COLUMNS.split(",")[column]
                raise _Malformed(number, f"must have a {name} below {limit}; got {row[column]}")
        rows.append(row)
    return _from_rows(model, rows, number)


def _from_rows(model: RoutedModel, rows: list[_Row], number: int) -> Trace:
    if not rows:
        raise _Malformed(number + 1, "must be a row: a trace must not be empty")
    tokens = {
        each: at for at, each in enumerate(sorted({(turn, step) for turn, _, step, *_ in rows}))
    }
    choices = np.full((len(tokens), model.num_layers, model.top_k), NOBODY, np.int16)
    is_prefill = np.zeros(len(tokens), np.bool_)
    for turn, phase, step, layer, slot, expert in rows:
        token = tokens[turn, step]
        choices[token, layer, slot] = expert
        is_prefill[token] = phase == 0
    turns = np.array([turn for turn, _ in tokens])
    is_new = np.ones(len(tokens), np.bool_)
    is_new[1:] = ~is_prefill[1:] | ~is_prefill[:-1] | (turns[1:] != turns[:-1])
    return _trace(model, choices, np.cumsum(is_new) - 1, turns, is_prefill)


def _recorded(pairs: dict[str, str], name: str, number: int) -> int:
    try:
        return int(pairs[name])
    except (KeyError, ValueError):
        raise _Malformed(
            number, f"must follow a header with a whole {name}; got {pairs.get(name, 'none')!r}"
        ) from None

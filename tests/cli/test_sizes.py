"""Sizes as people write them, and the RAM that is free."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shadowlane.planner.placement import InfeasiblePlan, show_nbytes
from shadowlane.sizes import (
    GIB,
    HEADROOM_NBYTES,
    MIB,
    available_ram,
    format_size,
    free_ram,
    parse_size,
)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("6", 6 * GIB),
        ("6G", 6 * GIB),
        ("6GiB", 6 * GIB),
        ("6 gib", 6 * GIB),
        ("512MiB", 512 * MIB),
        ("1.5GB", 1_500_000_000),
        ("0.5", GIB // 2),
        (".5k", 512),
        ("100MB", 100_000_000),
        ("2TiB", 2 << 40),
        ("4096b", 4096),
        (4096, 4096),
    ],
)
def test_reads_what_people_write(text: str | int, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(
    ("text", "meant", "nbytes"),
    [
        ("77777777", "77777777B is 74.2 MiB", 77_777_777),
        ("4096", "4096MiB is 4.00 GiB", 4 * GIB),
        ("1024", "1024MiB is 1.00 GiB", GIB),
        ("1048576", "1048576B is 1.00 MiB", MIB),
    ],
)
def test_large_bare_numbers_are_no_gib_and_what_was_meant_is_said(
    text: str, meant: str, nbytes: int
) -> None:
    with pytest.raises(ValueError, match=f"a bare number is GiB; got '{text}'; {meant}$"):
        parse_size(text, "--ram")
    assert parse_size(meant.split()[0]) == nbytes
    assert parse_size("1023") == 1023 * GIB


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "G",
        "6X",
        "six",
        "-1",
        "-1GiB",
        "0",
        "0GiB",
        "1e3",
        "nan",
        "inf",
        "1,5GB",
        "6 G B",
        "٦",
        "0.1b",
        0,
        -5,
    ],
)
def test_refuses_everything_else_by_name(text: str | int) -> None:
    with pytest.raises(ValueError, match=r"^--ram must be .*; got "):
        parse_size(text, "--ram")


@given(st.integers(1, 1 << 50))
@example(1070)  # 1.04 KiB are 1064.96 bytes
@example(1111)
@example(1152)
def test_what_is_formatted_reads_back_within_half_a_percent(nbytes: int) -> None:
    assert abs(parse_size(format_size(nbytes)) - nbytes) <= nbytes * 0.005


@given(st.integers(1, 10**6), st.sampled_from([("KiB", 10), ("MiB", 20), ("GiB", 30)]))
def test_whole_binary_sizes_are_exact(count: int, unit: tuple[str, int]) -> None:
    assert parse_size(f"{count}{unit[0]}") == count << unit[1]


@given(st.text())
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        assert parse_size(text) >= 1
    except ValueError as error:
        assert "\n" not in str(error)  # noqa: PT017


def test_formats_stay_short() -> None:
    sizes = [0, 512, 1023, 1024, 98362432, 1048524, 1048575, GIB, 5_400_000_000, 3 << 50]
    assert [format_size(nbytes) for nbytes in sizes] == [
        "0 B", "512 B", "1023 B", "1.00 KiB", "93.8 MiB", "1024 KiB", "1.00 MiB", "1.00 GiB",
        "5.03 GiB", "3072 TiB",
    ]  # fmt: skip


def test_the_planner_shows_sizes_alike() -> None:
    error = InfeasiblePlan("too much", {"scratch": 5 * GIB // 2, "KV": 700 << 10}, 1536 << 20)
    assert str(error) == (
        "too much: scratch 2.50 GiB + KV 700.0 KiB = 2.50 GiB; the RAM budget is 1.50 GiB, "
        "short by 1.00 GiB"
    )
    assert [show_nbytes(-nbytes) for nbytes in (0, 5, 98362432)] == ["0 B", "-5 B", "-93.8 MiB"]


def _machine(root: Path, available: int, cgroup: str) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(
        f"MemTotal: 99999999 kB\nMemAvailable: {available >> 10} kB\n"
    )
    (root / "proc/self/cgroup").write_text(cgroup)
    return root


def _write(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(f"{content}\n")


def test_without_limits_what_is_available_counts(tmp_path: Path) -> None:
    free = free_ram(_machine(tmp_path, 16 * GIB, "0::/\n"))
    assert (free.free_nbytes, free.source) == (16 * GIB, "MemAvailable")
    assert free.budget_nbytes == 16 * GIB - HEADROOM_NBYTES


def test_the_tightest_control_group_above_counts(tmp_path: Path) -> None:
    root = _machine(tmp_path, 16 * GIB, "0::/slice/job\n")
    group = root / "sys/fs/cgroup/slice"
    _write(group / "job", memory__max="max", memory__current=GIB)
    _write(group, memory__max=6 * GIB, memory__current=3 * GIB)
    _write(group, memory__stat=f"anon 1\ninactive_file {GIB}")
    free = free_ram(root)
    # File pages that nobody uses are room: 6 - (3 - 1).
    assert (free.free_nbytes, free.source) == (4 * GIB, "control group /slice")
    assert free.headroom_nbytes == 2 * GIB


def test_first_version_of_control_groups_in_a_container(tmp_path: Path) -> None:
    # The name is the host's; inside the container only the mount itself is there.
    root = _machine(tmp_path, 16 * GIB, "5:cpu,memory:/docker/abc\n2:pids:/docker/abc\n")
    mount = root / "sys/fs/cgroup/memory"
    _write(mount, memory__limit_in_bytes=GIB, memory__usage_in_bytes=GIB // 2)
    free = free_ram(root)
    assert (free.free_nbytes, free.source) == (GIB // 2, "control group /")
    assert free.budget_nbytes == GIB // 4  # half of what is free, where that is little


def test_a_full_control_group_has_no_room(tmp_path: Path) -> None:
    root = _machine(tmp_path, 16 * GIB, "0::/\n")
    _write(root / "sys/fs/cgroup", memory__max=GIB, memory__current=2 * GIB)
    assert free_ram(root).budget_nbytes == 0


def test_this_machine_has_room() -> None:
    assert 0 < available_ram() < free_ram().free_nbytes + GIB

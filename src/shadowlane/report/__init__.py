"""What a run did and what a plan says, as tables for people and as objects for programs.

Pure formatting: takes the dictionaries that the Python API returns. A figure that is missing is
shown as a dash, never guessed, and an emulated one says so beside the figure.
"""

from shadowlane.report.bench import BenchRow, bench_markdown, bench_object
from shadowlane.report.figures import rate, seconds, size
from shadowlane.report.plan import plan_report
from shadowlane.report.profile import group_figures, tree
from shadowlane.report.run import RUN_KEYS, run_object, summary

__all__ = [
    "RUN_KEYS",
    "BenchRow",
    "bench_markdown",
    "bench_object",
    "group_figures",
    "plan_report",
    "rate",
    "run_object",
    "seconds",
    "size",
    "summary",
    "tree",
]

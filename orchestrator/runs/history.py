"""`gangway history RUN [METRIC ...]`: the course of a run's metrics, drawn: those of training, and of its evaluations.

It reads what the run has tracked, and disturbs nothing. Without METRIC it is the loss, in training and on held-out data.
Exit status: 0; 2 when there is no such run or metric.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from gangway.config.section import did_you_mean
from gangway.program import Parser
from gangway.published import SYSTEM
from gangway.storage import not_finite
from gangway.storage.documents import DamagedDocument, Where
from gangway.storage.opening import place_of
from gangway.terminal import command
from orchestrator.config.locate import REFUSALS, RUN_HELP, NoRunError, in_one_line, run_of
from orchestrator.run_state import lines
from orchestrator.tracking.spool import entry
from trainers.console import curves

EXIT_FINE, EXIT_REFUSED = 0, 2
LOSS = "loss"
Curves = dict[str, list[tuple[int, float]]]


@command
def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser("orchestrator.runs.history", "The course of a run's metrics.", example="runs/spirals loss eval_loss")
    parser.add_argument("run", metavar="RUN", help=RUN_HELP)
    parser.add_argument("metrics", nargs="*", metavar="METRIC", help="such as loss eval_loss; default: all losses")
    parser.add_argument("--list", action="store_true", help="the names of all metrics")
    parser.add_argument("--json", action="store_true", help="for programs: [step, value] by the name of the metric")
    options = parser.parse_args(argv)
    try:
        found = read(run_of(options.run))
        if options.list:
            print("\n".join(sorted(found)))
            return EXIT_FINE
        chosen = {name: found[name] for name in named(options.metrics, found)}
    except REFUSALS as error:
        print(f"error: {in_one_line(error)}", file=sys.stderr)
        return EXIT_REFUSED
    print(not_finite.dumps(chosen) if options.json else "\n".join(curves.chart(chosen)))
    return EXIT_FINE


def read(run: Where) -> Curves:
    """Returns the curve of each metric that a run has tracked: (step, value) by step, of each step the newest value. Raises
    NoRunError if it has tracked nothing."""
    by_name: dict[str, dict[int, float]] = {}
    try:
        found = list(lines.metrics(place_of(run)))
    except FileNotFoundError as error:
        raise NoRunError(f"{run} has tracked no metrics yet: there is no {error.filename}") from error
    for line in found:
        try:
            record = entry(line)
        except DamagedDocument:  # half written
            continue
        for name, value in record.get("metrics", {}).items():
            # Null: it was not finite.
            by_name.setdefault(name, {})[record["step"]] = float("nan") if value is None else value
    if not by_name:
        raise NoRunError(f"{run} has tracked no metrics yet")
    return {name: sorted(points.items()) for name, points in by_name.items()}


def named(asked: Sequence[str], found: Curves) -> list[str]:
    """Returns the names of the metrics to show. Raises NoRunError for one that there is not."""
    if not asked:
        return [name for name in found if name == LOSS or (name.endswith(f"_{LOSS}") and name not in SYSTEM)]
    for name in asked:
        if name not in found:
            raise NoRunError(f"{name}: the run has no such metric{did_you_mean(name, found)}; --list shows all names")
    return list(asked)


if __name__ == "__main__":
    sys.exit(main())

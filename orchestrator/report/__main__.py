"""`gangway report RUN [RUN ...] [--out FILE]`: a page about a run, or about several side by side, as one file of HTML.

Each RUN is a run's folder, its URL in a bucket, or the YAML file that it was started with. The page needs no network. Of one run
it is `report.html` in the run's folder by default, of several `report.html` here. Exit status: 0; 2 when there is no such run.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from gangway.program import EXIT_FINE, Parser, command
from gangway.storage import documents, durable
from gangway.storage.opening import place_of
from orchestrator.config.locate import REFUSALS, RUN_HELP, run_of
from orchestrator.report.child import NAME
from trainers.console.text import printable


@command(*REFUSALS)
def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser("orchestrator.report", "A page about runs, in one file.", example="runs/spirals --figures pictures")
    parser.add_argument("runs", nargs="+", metavar="RUN", help=RUN_HELP)
    parser.add_argument("--out", metavar="FILE", help=f"default: {NAME} in the run's folder; of several runs, here")
    parser.add_argument("--figures", metavar="FOLDER", help="of one run: write its pictures there too, as PNG")
    options = parser.parse_args(argv)
    if options.figures and len(options.runs) > 1:
        parser.error("--figures: expected one run")
    runs = [run_of(run) for run in options.runs]
    out = options.out or ((runs[0] / NAME).url if len(runs) == 1 else NAME)
    write(runs, out, Path(options.figures) if options.figures else None)
    print(out)
    return EXIT_FINE


def write(runs: Sequence[documents.Where], out: documents.Where, figures: Path | None = None) -> None:
    """Writes the page, whole or not at all, and the pictures of one run. Raises OSError."""
    from orchestrator.report import page, record

    records = [record.read(run) for run in runs]
    text = page.of_one(records[0]) if len(records) == 1 else page.of_several(records)
    documents.write_text(out, printable(text))  # half a character of a file's name, or signs that turn the others round
    if figures is not None:
        if figures.absolute().parent == Path(place_of(runs[0]).url):
            durable.make_folder(figures)
        figures.mkdir(parents=True, exist_ok=True)
        for name, picture in page.figures(records[0]).items():
            durable.write_shared(figures / f"{name}.png", picture, 0o666)


if __name__ == "__main__":
    sys.exit(main())

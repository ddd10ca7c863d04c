"""`gangway report RUN [RUN ...] [--out FILE]`: a page about a run, or about several side by side, as one file of HTML.

Each RUN is a run's folder, or the YAML file that it was started with. The page needs no network. Of one run it is
`report.html` in the run's folder by default, of several `report.html` here. Exit status: 0; 2 when there is no such run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from orchestrator.config.job import ConfigError
from orchestrator.config.locate import NoRunError, checkpoints_of
from orchestrator.report.child import NAME
from trainers.program import program
from trainers.storage import durable
from trainers.terminal import command

EXIT_FINE, EXIT_REFUSED = 0, 2


@command
def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=program("orchestrator.report"), description="A page about runs, in one file.")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run's folder, or the YAML file it was started with")
    parser.add_argument("--out", metavar="FILE", help=f"default: {NAME} in the run's folder; of several runs, here")
    parser.add_argument("--figures", metavar="FOLDER", help="of one run: write its pictures there too, as PNG")
    options = parser.parse_args(argv)
    if options.figures and len(options.runs) > 1:
        parser.error("--figures: expected one run")
    try:
        folders = [checkpoints_of(run).parent for run in options.runs]
        out = Path(options.out) if options.out else folders[0] / NAME if len(folders) == 1 else Path(NAME)
        write(folders, out, Path(options.figures) if options.figures else None)
    except (ConfigError, NoRunError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_REFUSED
    print(out)
    return EXIT_FINE


def write(folders: Sequence[Path], out: Path, figures: Path | None = None) -> None:
    """Writes the page, whole or not at all, and the pictures of one run. Raises OSError."""
    from orchestrator.report import page, record

    records = [record.read(folder) for folder in folders]
    text = page.of_one(records[0]) if len(records) == 1 else page.of_several(records)
    durable.write(out, text)
    if figures is not None:
        figures.mkdir(parents=True, exist_ok=True)
        for name, picture in page.figures(records[0]).items():
            durable.write_shared(figures / f"{name}.png", picture, 0o666)


if __name__ == "__main__":
    sys.exit(main())

"""`gangway deploy CONFIG --to TARGET [--out FOLDER]`: writes the files with which a configuration runs on a cluster.

TARGET: kuberay, gke-tpu, tpu-vm, slurm or ray-cluster. Nothing is started, and no file has a secret. `docs/deploy.md` goes on
from there. Exit status: 0; 2 when the configuration is wrong, or cannot be deployed so.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from gangway.config.yaml_source import ConfigError
from gangway.program import EXIT_FINE, Parser, command


@command(ConfigError, OSError)
def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    # After the help: this imports much.
    from orchestrator.config.job import load
    from orchestrator.deploy import files, refusals
    from orchestrator.deploy.request import Request

    config = load(options.config, options.overrides)
    request = Request(
        Path(options.config),
        options.to,
        Path(options.out or f"deploy/{options.to}"),
        options.image,
        options.project,
        options.zone,
        options.machine,
        options.spot,
    )
    written = files.write(config, request)
    print(
        "\n".join(
            [
                f"{request.out} has",
                *(f"  {name}" for name in written),
                *(f"note: {line}" for line in refusals.absent(config, request)[1].values()),
                "next:",
                *(f"  {line}" for line in files.next_commands(config, request)),
            ]
        )
    )
    return EXIT_FINE


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    from orchestrator.deploy.request import TARGETS

    about = "; ".join(f"{name}: {target.about}" for name, target in TARGETS.items())
    parser = Parser(
        "orchestrator.deploy",
        "Write the files with which a configuration runs on a cluster. Nothing is started.",
        example="config.yaml --to slurm storage=/shared/runs",
    )
    parser.add_argument("config", help="a YAML file; its section `hosts` says which machines")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="such as storage=gs://my-bucket/runs hosts.slices=2")
    parser.add_argument("--to", required=True, choices=tuple(TARGETS), help=about)
    parser.add_argument("--out", metavar="FOLDER", help="default: deploy/TARGET; files of earlier calls there are replaced")
    parser.add_argument("--image", help="kuberay, gke-tpu: the name and tag under which you will push the image")
    parser.add_argument("--project", help="tpu-vm, ray-cluster on Google: the project of Google Cloud")
    parser.add_argument("--zone", help="tpu-vm, ray-cluster: such as us-east5-b, or us-east-1a of Amazon")
    parser.add_argument("--machine", metavar="TYPE", help="ray-cluster with GPUs or CPUs: such as a3-highgpu-8g or p5.48xlarge")
    parser.add_argument(
        "--spot", action="store_true", help="gke-tpu, tpu-vm, ray-cluster: cheaper machines that may be taken away"
    )
    return parser.parse_intermixed_args(argv)


if __name__ == "__main__":
    sys.exit(main())

"""What a run will need: `gangway plan CONFIG [--on NAME] [key=value ...]`. Nothing is started, and no machine is taken.

Tells what a run will need. It joins the arithmetic of `--dry-run`, the compiled step of `gangway compile`, and the figures of the
hardware: memory of a device, FLOPs, exchanges, the expected time of a step, tokens a day, days to the end, checkpoints, goodput,
and a price.
Data, a tokenizer and weights that only the hosts have need not be here: a note names them.
NAME: v5e-256 (chips of a slice), v5p-512x4 (of four slices), h100-8x16 (GPUs of a machine x machines); default: `hosts`.
Exit status: 0 it fits; 1 the compiler itself failed; 2 the configuration is wrong, or the step does not fit.
"""

from __future__ import annotations

import sys

from gangway.first_line import say
from gangway.program import EXIT_REFUSED, Parser, command

EXIT_FITS, EXIT_FAILED = 0, 1


@command(ValueError, is_read=True)
def main(argv: list[str] | None = None) -> int:
    parser = Parser("orchestrator.plan", __doc__.split("\n\n")[1], example="config.yaml --on v5e-256 --price 1.2")
    parser.add_argument("config", help="a YAML file, such as configs/large/llama3_8b_v5e.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="such as mesh.tensor=4 global_batch_size=512")
    parser.add_argument("--on", metavar="NAME", help="other machines than `hosts`: v5e-256, v5p-512x4, h100-8x16")
    parser.add_argument(
        "--meshes", action="store_true", help="try meshes of data, fsdp and tensor, and propose one; takes minutes"
    )
    parser.add_argument("--price", type=float, metavar="P", help="of a device-hour, in your currency")
    parser.add_argument("--hours-between-failures", type=float, metavar="H", help="of the whole run; default: by its devices")
    parser.add_argument("--json", action="store_true", help="for programs")
    options = parser.parse_intermixed_args(argv)
    say(f"planning {options.config}: nothing is started", stream=sys.stderr)
    # After the first line: this imports much.
    from gangway.config.masking import masked
    from gangway.storage import json_text
    from orchestrator.commands.plan import lines, planned
    from orchestrator.config.job import load
    from orchestrator.planning import hardware, meshes
    from orchestrator.planning.child import PlanError

    try:
        machines = [] if options.on is None else hardware.overrides_for(options.on)
        config = load(options.config, [*machines, *options.overrides])
        if options.meshes:
            found = meshes.compared(config, lambda changed: planned(changed, options, remedies=False))
        else:
            found = planned(config, options)
    except PlanError as error:
        print(f"error: {masked(str(error))}", file=sys.stderr)
        return EXIT_FAILED
    told = meshes.lines(found) if options.meshes else lines(found)
    print(json_text.dumps(found, indent=1) if options.json else "\n".join(told))
    return EXIT_FITS if found["fits"] else EXIT_REFUSED


if __name__ == "__main__":
    sys.exit(main())

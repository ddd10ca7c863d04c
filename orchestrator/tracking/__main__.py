"""The command `python -m orchestrator.tracking`, which the tracker starts too."""

import sys

from orchestrator.tracking import mlflow_shipper


def main() -> int:
    return mlflow_shipper.main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())

"""The command `python -m orchestrator.tracking`, which the tracker starts too."""

import sys

from orchestrator.tracking.mlflow_shipper import main

if __name__ == "__main__":
    sys.exit(main())

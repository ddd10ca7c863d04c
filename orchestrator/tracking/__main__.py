"""The command `python -m orchestrator.tracking`, which the tracker starts too."""

import sys

from orchestrator.tracking.mlflow_shipper import main

sys.exit(main(sys.argv[1:]))

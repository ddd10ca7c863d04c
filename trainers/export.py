"""The command `python -m trainers.export`, and what it does as functions."""

import sys

from trainers.checkpoint.export import from_safetensors, to_hugging_face, to_mlflow, to_safetensors
from trainers.commands.export import main

__all__ = ["from_safetensors", "main", "to_hugging_face", "to_mlflow", "to_safetensors"]

if __name__ == "__main__":
    sys.exit(main())

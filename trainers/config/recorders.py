"""The recorders that a configuration may name, and what each needs installed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from gangway.config.section import PATH, did_you_mean
from gangway.config.working_folder import is_installed

BUILT_IN = {
    "jsonl": "trainers.recorders.jsonl:JsonLines",
    "tensorboard": "trainers.recorders.tensorboard:TensorBoard",
    "wandb": "trainers.recorders.wandb:WeightsAndBiases",
}
NEEDS = {"tensorboard": ("tensorboardX", "tensorboardX"), "wandb": ("wandb", "gangway[wandb]")}
"""(module, what to install)."""


def problems(names: Sequence[str], folders: Mapping[str, str], storage: str) -> Iterator[str]:
    """Yields what is wrong with the recorders that a configuration names, and with the folders that it gives them."""
    for name, folder in folders.items():
        if name not in names:
            yield f"recorder_folders.{name}: expected one of recorders ({', '.join(names) or 'none'}){did_you_mean(name, names)}"
        elif not folder or "://" in folder:
            yield f"recorder_folders.{name} = {folder!r}: expected a folder, relative to that of the run or absolute"
    on_storage = [name for name in names if not folders.get(name, "").startswith("/")]
    if "://" in storage and (appending := [name for name in on_storage if name in ("jsonl", "tensorboard")]):
        yield (
            f"recorders: {', '.join(appending)} append to files, which {storage} cannot do: set storage to a local or mounted "
            "folder, give them an absolute folder (recorder_folders), or leave them out"
        )
    for name in names:
        if name not in BUILT_IN and not PATH.fullmatch(name):
            allowed = ", ".join([*BUILT_IN, "package.module:Class"])
            yield f"recorders: {name!r}: expected one of {allowed}{did_you_mean(name, BUILT_IN)}"
        module, install = NEEDS.get(name, (None, None))
        if module is not None and not is_installed(module):
            how = f"pip install '{install}', or leave it out"
            yield f"recorders: {name!r} needs the package {module}, which is not installed: {how}"
    if len(set(names)) < len(names):
        yield f"recorders = {list(names)}: expected each once"

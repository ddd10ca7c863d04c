"""The section `init_from` of the configuration: parameters to begin with."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from gangway.config.conversion import CheckedSection
from trainers.config.frozen import not_readable


@dataclass(frozen=True, kw_only=True)
class InitConfig(CheckedSection):
    """Parameters that a run without a checkpoint begins with; the optimizer's state is new, and the step is 0. `init_from: PATH`
    is short for `init_from: {path: PATH}`."""

    shorthand: ClassVar = "path"

    path: str
    """The folder of a run (its newest whole checkpoint), RUN/best, a checkpoint, what `save_pretrained` wrote, a folder
    `models/STEP`, a file that `gangway export` wrote, a folder of Hugging Face with a decoder of one of the families, or with
    `lora` the folder of an adapter of PEFT. Each may lie in a bucket: `s3://` and `gs://`."""
    include: tuple[str, ...] = ()
    """Which parameters of the model are taken from there: regular expressions that are searched in names such as
    `layers.query`. []: all. The others begin as in any new run."""
    exclude: tuple[str, ...] = ()
    """Which of these are not."""
    rename: tuple[tuple[str, str], ...] = ()
    """Pairs [regular expression, replacement], applied in this order to the names there, which gives the names here."""
    strict: bool = True
    """Whether a parameter that only one side has is an error, among those that are included. A wrong shape always is."""

    def selects(self, name: str) -> bool:
        """Whether the parameter of the model that has this name is to be loaded."""
        included = not self.include or any(re.search(pattern, name) for pattern in self.include)
        return included and not any(re.search(pattern, name) for pattern in self.exclude)

    def renamed(self, name: str) -> str:
        for pattern, replacement in self.rename:
            name = re.sub(pattern, replacement, name)
        return name

    def _problems(self) -> Iterator[str]:
        yield from not_readable(self, "path")
        for field in ("include", "exclude"):
            for pattern in getattr(self, field):
                try:
                    re.compile(pattern)
                except re.error as error:
                    yield f"{field} = {pattern!r}: expected a regular expression ({error})"
        for pair in self.rename:
            try:
                pattern, replacement = pair
                re.compile(pattern).sub(replacement, "")
            except (re.error, IndexError) as error:
                yield f"rename = {list(pair)}: expected a regular expression and its replacement ({error})"
            except ValueError:
                yield f"rename = {list(pair)}: expected pairs [regular expression, replacement]"


def plain(config: InitConfig) -> dict[str, Any]:
    """Returns the settings as JSON has them."""
    return {
        "path": config.path,
        "include": list(config.include),
        "exclude": list(config.exclude),
        "rename": [list(pair) for pair in config.rename],
        "strict": config.strict,
    }


def from_plain(recorded: Mapping[str, Any]) -> InitConfig:
    """Returns the settings that `plain` gave, among other keys."""
    return InitConfig(
        path=recorded["path"],
        include=tuple(recorded["include"]),
        exclude=tuple(recorded["exclude"]),
        rename=tuple((pattern, replacement) for pattern, replacement in recorded["rename"]),
        strict=recorded["strict"],
    )

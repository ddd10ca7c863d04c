"""What pyproject.toml cannot say: in the wheel, `configs` and `examples` lie inside the package `orchestrator.shipped`."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithShipped(build_py):
    def run(self):
        super().run()
        if self.editable_mode:
            return  # it uses the folders where they are
        for name in ("configs", "examples"):
            target = Path(self.build_lib, "orchestrator", "shipped", name)
            shutil.rmtree(target, ignore_errors=True)  # an earlier build may have left files that are no longer there
            shutil.copytree(name, target, ignore=shutil.ignore_patterns("__pycache__"))


setup(cmdclass={"build_py": BuildWithShipped})

"""Who may import whom: read from the sources, so that nothing has to be imported to know."""

import sys
from pathlib import Path

import pytest

from tests import PACKAGES, ROOT
from tests.imports import file_of, imports, imports_for_types, sources, top

MAY_IMPORT = {
    "gangway": set(),
    "trainers": {"gangway"},
    "cluster": {"gangway"},
    "orchestrator": {"gangway", "trainers", "cluster"},
}
JAX = {"jax", "jaxlib", "flax", "optax", "orbax", "grain", "tensorstore", "chex"}
NEVER = {
    "gangway": JAX | {"ray", "mlflow", "pydantic", "transformers", "tokenizers"},
    "trainers": {"ray", "mlflow", "pydantic"},
    "cluster": JAX | {"mlflow", "pydantic", "transformers", "tokenizers"},
    "orchestrator": JAX | {"pydantic", "transformers", "tokenizers"},
}
ONLY_WHERE_USED = {
    "gangway": {"obstore", "rich", "yaml"},
    "trainers": {"grain", "fsspec", "obstore", "psutil", "rich", "transformers", "tokenizers"},
    "orchestrator": {"mlflow"},
}
"""Heavy, or absent where a package is used alone: imported inside the functions that need them."""

ASSUMED_OF_THE_MACHINE = {"gangway": set(), "trainers": {"gangway", "jax", "jaxlib", "flax", "optax", "orbax", "numpy", "etils"}}
"""What `trainers` alone may ask of a machine: JAX and its companions, and what those bring along."""
FLOORS = {
    "gangway": (
        ("first_line", "foreign_errors", "published", "stop_reason", "surroundings", "text", "waits"),
        ("config", "storage", "terminal"),
        ("wire", "program"),
        ("errors",),
        ("user_modules",),
    ),
    "trainers": (
        (
            "config",
            "other_systems",
            "jax_internals",
        ),
        ("parallel", "protocol"),
        ("models", "optim", "text", "runtime", "recorders", "metrics", "overrides"),
        ("settings", "console", "tasks", "step"),
        ("data", "checkpoint"),
        ("evaluation", "callbacks"),
        ("loop", "diagnostics"),
        ("trainer",),
        ("planning", "commands", "worker", "library", "base"),
        ("run", "evaluate", "generate", "export", "prepare", "reference", "data.__main__", "pyfunc"),
    ),
    "cluster": (("hosts", "ray_internals"), ("placement",), ("agent",), ("gang",)),
    "orchestrator": (
        ("shipped", "failures"),
        ("policies", "tracking"),
        ("run_state",),
        ("config", "reporting"),
        ("planning", "runs"),
        ("report", "deploy"),
        ("driver", "faultlab"),
        ("gangway", "library"),
        ("commands",),
        ("run", "plan", "chaos", "verify"),
    ),
}
"""Wings (subpackages, and modules beside them) from the ground up: each imports those of lower floors only."""

LIGHT_MODULES = tuple(f"{path.relative_to(ROOT)}" for path in sources("gangway")) + tuple(
    f"trainers/{name}.py"
    for name in (
        "__init__",
        "checkpoint/__init__",
        "checkpoint/copied",
        "checkpoint/going_on",
        "checkpoint/layout",
        "checkpoint/manifest",
        "checkpoint/mlflow_model",
        "checkpoint/retention",
        "config/__init__",
        "config/attention",
        "config/checkpoint",
        "config/arguments",
        "config/data",
        "config/mesh",
        "config/evaluation",
        "config/families",
        "config/frozen",
        "config/hf_files",
        "config/keywords",
        "config/model",
        "config/monitoring",
        "config/optimizer",
        "config/tasks",
        "config/vision",
        "config/weights",
        "config/without_effect",
        "console/__init__",
        "console/progress",
        "console/screens",
        "console/text",
        "console/view",
        "metrics/__init__",
        "metrics/host_usage",
        "metrics/peak_flops",
        "models/__init__",
        "models/hf/__init__",
        "models/hf/computed",
        "models/hf/config",
        "models/hf/keys",
        "models/hf/pretrained",
        "models/hf/text_part",
        "models/hf/vision_config",
        "recorders/__init__",
        "recorders/dispatch",
        "recorders/recorder",
        "runtime/__init__",
        "runtime/context",
        "settings",
    )
)
"""Read by the driver and by command lines: free of everything but the standard library."""


def wing_of(path: Path) -> str:
    """The subpackage that a file lies in, or its own name beside them. A program that is named after a wing has its own floor."""
    wing, *rest = path.relative_to(ROOT).with_suffix("").parts[1:]
    return "data.__main__" if (wing, rest) == ("data", ["__main__"]) else wing


def offenders(package: str, forbidden: set[str], *, only_at_import: bool = False) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for path in sources(package)
        for module, line in imports(path, only_at_import=only_at_import)
        if top(module) in forbidden
    ]


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_import_only_along_the_arrows(package):
    forbidden = {*PACKAGES, "tests", "configs"} - {package} - MAY_IMPORT[package]
    assert offenders(package, forbidden) == []


@pytest.mark.parametrize("package", PACKAGES)
def test_wings_import_lower_floors_only(package):
    floor = {wing: number for number, wings in enumerate(FLOORS[package]) for wing in wings}
    assert {wing_of(path) for path in sources(package)} - {"__init__"} == set(floor)
    wrong = [
        f"{path.relative_to(ROOT)}:{line} (floor {floor[wing_of(path)]}) imports {module}"
        for path in sources(package)
        for module, line in imports(path)
        # A package's own __init__ may hand on a name of any wing: when it is asked for, see below.
        if wing_of(path) != "__init__"
        if top(module) == package and module != package and (other := module.split(".")[1]) != wing_of(path)
        if floor[other] >= floor[wing_of(path)]
    ]
    assert wrong == []


def imports_that_count(path):
    """All imports but those of a neighbour's type: what the files of a room call each other is theirs."""
    of_neighbours = {found for found in imports_for_types(path) if (file_of(found[0]) or path).parent == path.parent}
    return [found for found in imports(path) if found not in of_neighbours]


def test_no_files_import_each_other_in_a_circle():
    arrows = {path: {file_of(name) for name, _ in imports_that_count(path)} for package in PACKAGES for path in sources(package)}
    while leaves := {path for path, targets in arrows.items() if not targets & arrows.keys() - {path}}:
        arrows = {path: targets for path, targets in arrows.items() if path not in leaves}
    assert sorted(str(path.relative_to(ROOT)) for path in arrows) == []


@pytest.mark.parametrize("path", [path for package in PACKAGES for path in sources(package) if path.name == "__init__.py"])
def test_a_wings_init_hands_on_light_names_only(path):
    """One careless import there, and the driver imports Orbax."""
    light = {ROOT / other for other in LIGHT_MODULES} | {ROOT / "trainers/callbacks/callback.py"}
    needed = {name for name, _ in imports(path, only_at_import=True)} - {"__future__", "importlib", "typing"}
    assert [name for name in needed if file_of(name) not in light] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_what_a_package_never_imports(package):
    assert offenders(package, NEVER[package]) == []


@pytest.mark.parametrize("package", ONLY_WHERE_USED)
def test_what_is_imported_only_where_it_is_used(package):
    assert offenders(package, ONLY_WHERE_USED[package], only_at_import=True) == []


@pytest.mark.parametrize("package", ASSUMED_OF_THE_MACHINE)
def test_the_core_asks_no_more_of_a_machine(package):
    known = ASSUMED_OF_THE_MACHINE[package] | {package} | sys.stdlib_module_names
    asked = {top(module) for path in sources(package) for module, _ in imports(path, only_at_import=True)}
    assert asked <= known


@pytest.mark.parametrize("path", LIGHT_MODULES)
def test_light_modules_need_the_standard_library_and_each_other_only(path):
    light = {ROOT / other for other in LIGHT_MODULES}
    needed = {module for module, _ in imports(ROOT / path) if top(module) not in sys.stdlib_module_names}
    needed = {module for module in needed if top(module) not in ONLY_WHERE_USED["trainers"] | ONLY_WHERE_USED["gangway"]}
    assert [module for module in needed if file_of(module) not in light] == []


def test_the_driver_reaches_only_the_light_modules_of_trainers():
    allowed = {path.removesuffix(".py").replace("/", ".") for path in LIGHT_MODULES}
    reached = {module for path in sources("orchestrator") for module, _ in imports(path) if top(module) == "trainers"}
    assert reached <= allowed


def test_a_wrong_configuration_is_reported_without_waiting_for_ray():
    reached = imported_with(
        *("orchestrator.commands.launching", "orchestrator.planning.report", "orchestrator.config.job"),
        *("orchestrator", "orchestrator.library"),
    )
    assert "cluster.hosts.config" in reached
    assert {"ray", "mlflow", "jax"} & {top(module) for module in reached} == set()


def test_what_an_agent_decides_needs_no_threads_clocks_files_or_processes():
    reached = imported_with("cluster.agent.state")
    assert {"cluster.agent.event_log", "cluster.agent.standby", "cluster.agent.watchdog"} <= reached
    assert {"threading", "time", "os", "subprocess", "socket", "queue", "ray"} & {top(name) for name in reached} == set()


def imported_with(*modules: str) -> set[str]:
    """Returns the names of all modules that are imported with these."""
    reached: set[str] = set()
    waiting = {*modules}
    while waiting:
        module = waiting.pop()
        reached.add(module)
        path = file_of(module)
        waiting |= {name for name, _ in imports(path, only_at_import=True)} - reached if path else set()
        if "." in module:  # the packages around it too
            waiting |= {module.rpartition(".")[0]} - reached
    return reached


def test_the_command_answers_without_waiting_for_anything():
    assert {top(module) for module in imported_with("orchestrator.gangway")} - sys.stdlib_module_names == set(PACKAGES) - {
        "trainers",
        "cluster",
    }


COMMANDS = (
    *(f"orchestrator.{name}" for name in ("run", "verify", "chaos", "commands.checkpoints", "commands.profile")),
    *(f"trainers.{name}" for name in ("run", "export", "evaluate", "generate", "data.__main__", "reference")),
)
SLOW_TO_IMPORT = {"ray", "jax", "jaxlib", "flax", "optax", "orbax", "mlflow", "grain", "tensorstore", "safetensors"}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_tells_its_help_and_its_first_line_before_it_imports_what_is_slow(command):
    """What a module imports as it is imported comes before everything that it prints."""
    reached = imported_with(command)
    assert top(command) in reached
    assert SLOW_TO_IMPORT & {top(module) for module in reached} == set()


def test_the_first_line_of_a_run_needs_the_standard_library_alone():
    light = {"gangway.first_line", "gangway.program", "gangway.terminal", "gangway.surroundings"}
    ours = {module for module in imported_with("orchestrator.run") if top(module) in PACKAGES}
    assert ours - {"gangway.first_line.say", "gangway.program.program"} == {
        "orchestrator",
        "orchestrator.run",
        "gangway",
        *light,
    }
    assert {top(module) for module in imported_with("orchestrator.run")} <= {*PACKAGES, *sys.stdlib_module_names}


def test_the_reader_of_imports_sees_what_it_should(tmp_path):
    path = tmp_path / "module.py"
    path.write_text(
        "import a\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import b\n"
        "try:\n    import c.d\nexcept ImportError:\n    pass\n"
        "class C:\n    import e\n    def f(self):\n        import g\n"
    )
    assert [module for module, _ in imports(path, only_at_import=True)] == ["a", "typing", "c.d", "e"]
    assert {module for module, _ in imports(path)} == {"a", "typing", "b", "c.d", "e", "g"}

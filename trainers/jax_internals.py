"""All that is used of JAX without a public name. No other file imports `jax._src`.

A new version of JAX may rename any of it: `tests/unit/test_internals.py` fails then, and `USED` says what breaks.
"""

from __future__ import annotations

from collections.abc import Mapping

from jax._src import compilation_cache, compiler, distributed, source_info_util, tree_util, xla_bridge
from jax._src.lib import _jax as jaxlib
from jax._src.lru_cache import LRUCache

__all__ = [
    "NAMES_IN_EXECUTABLES",
    "USED",
    "LRUCache",
    "compilation_cache",
    "compiler",
    "distributed",
    "jaxlib",
    "source_info_util",
    "tree_util",
    "xla_bridge",
]

USED: Mapping[str, str] = {
    "LRUCache.put": "an entry of JAX's compile cache is written whole (runtime/compile_cache.py)",
    "compilation_cache.get_executable_and_time": "an entry that cannot be read is compiled again (runtime/compile_cache.py)",
    "compiler._cache_write": "each process of a job writes to the compile cache, not the first alone (runtime/distributed.py)",
    "distributed.global_state": "hosts agree through the coordination service (runtime/multihost.py, checkpoint/commit.py)",
    "jaxlib.make_gloo_tcp_collectives": "CPU hosts exchange arrays by the address that they were given (runtime/distributed.py)",
    "source_info_util.Scope": "the layer in which a NaN began (diagnostics/nonfinite.py)",
    "source_info_util.Transform": "whether a NaN began backward (diagnostics/nonfinite.py)",
    "source_info_util.user_frame": "the line in which a NaN began (diagnostics/nonfinite.py)",
    "source_info_util.current_name_stack": "names of layers in a step whose update may be left out (step/kept_update.py)",
    "source_info_util.user_context": "the same",
    "tree_util._registry": "which classes of a user's state may be in a kept executable (runtime/executable_files.py)",
    "xla_bridge._discover_and_register_pjrt_plugins": "a standby knows its platform before it touches devices",
    "xla_bridge.backends": "code that uses devices before the hosts are joined is refused at its line (runtime/distributed.py)",
    "xla_bridge.backends_are_initialized": "whether this process has touched its devices",
}
"""What is used, and what stops working without it."""
NAMES_IN_EXECUTABLES = frozenset(
    {
        ("jax._src.core", "ManualAxisType"),
        ("jax._src.core", "MemorySpace"),
        ("jax._src.core", "ShapedArray"),
        ("jax._src.interpreters.pxla", "AllArgsInfo"),
        ("jax._src.interpreters.pxla", "UnloadedMeshExecutable"),
        ("jax._src.layout", "Format"),
        ("jax._src.layout", "Layout"),
        ("jax._src.linear_util", "DebugInfo"),
        ("jax._src.mesh", "AbstractDevice"),
        ("jax._src.mesh", "AbstractMesh"),
        ("jax._src.mesh", "AxisType"),
        ("jax._src.mesh", "Mesh"),
        ("jax._src.named_sharding", "_unpickle_named_sharding"),
        ("jax._src.partition_spec", "PartitionSpec"),
        ("jax._src.sharding_impls", "_unpickle_single_device_sharding"),
        ("jax._src.stages", "ArgInfo"),
        ("jax._src.tree_util", "default_registry"),
        ("jax._src.tree_util", "tracing_registry"),
        ("jaxlib._jax", "DeviceList"),
        ("jaxlib._jax.pytree", "PyTreeDef"),
    }
)
"""What JAX pickles with an executable (runtime/executable_files.py): a kept program that has another name is compiled again."""

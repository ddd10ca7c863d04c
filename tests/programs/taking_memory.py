"""Code of a user that tells, when it is imported, how its process gets memory, and what its children are told of allocators."""

from __future__ import annotations

import json
import os
import resource

from gangway.surroundings import OF_ALLOCATOR

for _ in range(12):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    array = bytearray(48 << 20)
    del array
pages = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
variables = {name: os.environ[name] for name in OF_ALLOCATOR if name in os.environ}
print(f"pages in the last turn: {pages}; variables: {json.dumps(variables)}", flush=True)

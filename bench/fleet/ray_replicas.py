"""`python -m bench.fleet.ray_replicas PORT MODEL NUM_BLOCKS [DIRECTORY]`: the deployment of the guide of Ray Serve.

Runs in a process of its own, with `deployment.py`, the guide's block, on its path. Two replicas with NUM_BLOCKS each
share the directory, if any. The last line of an answer has the replica's process too (`pid`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator
from typing import Any


def main() -> None:
    """Serve until standard input ends."""
    import deployment
    import ray
    from ray import serve

    port, model, blocks, *store = sys.argv[1:]
    plain = deployment.Engine.func_or_class

    class Watched(plain):  # type: ignore[misc]  # its own class is Any
        async def complete(self, asked: Any) -> AsyncIterator[dict[str, object]]:
            async for part in plain.complete(self, asked):
                yield part | {"pid": os.getpid()}

    ray.init(num_cpus=4, include_dashboard=False, object_store_memory=80_000_000, _node_ip_address="127.0.0.1")
    serve.start(http_options={"host": "127.0.0.1", "port": int(port)})
    deployment.Engine = deployment.Engine.options(func_or_class=Watched, ray_actor_options={"num_cpus": 1})
    options = {"model": model, "num_blocks": int(blocks), **({"autosave": store[0]} if store else {})}
    serve.run(deployment.build(options), name="kv", route_prefix="/")
    print("ready", flush=True)
    sys.stdin.read()
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()

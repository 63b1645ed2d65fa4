"""The guide of Ray Serve: its deployment as it stands there, over HTTP, by two replicas on this machine."""

import json
import os
import re
import subprocess
import sys
from textwrap import dedent

import pytest
from places import PROJECT

pytest.importorskip("ray.serve")

from kvcache.demo import DIRECTORY

# Runs beside deployment.py, the guide's block. Its class says in which process an answer was made, and can be broken.
DRIVER = """
    import http.client, json, os, random, sys, time, urllib.error, urllib.request
    import ray
    from ray import serve
    import deployment

    Engine = deployment.Engine.func_or_class

    class Watched(Engine):
        async def complete(self, asked):
            if asked.prompt == "break":
                self.engine.close()
            async for part in Engine.complete(self, asked):
                yield part | {"pid": os.getpid()}

    deployment.THREADS = 1
    url, model = "http://127.0.0.1:" + sys.argv[1], sys.argv[2]
    ray.init(num_cpus=4, include_dashboard=False, object_store_memory=80_000_000, _node_ip_address="127.0.0.1")
    serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[1])})

    def ask(body, tenant="a"):
        request = urllib.request.Request(url, json.dumps(body).encode(), {"x-tenant": tenant})
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return [json.loads(line) for line in answer]
        except (http.client.HTTPException, OSError) as error:
            return getattr(error, "code", repr(error))

    def spread(prompts):
        answers = [ask({"prompt": prompt, "max_tokens": 4}) for prompt in prompts]
        usage = [answer[-1] for answer in answers]
        cached = sum(each["cached_tokens"] for each in usage) / sum(each["prompt_tokens"] for each in usage)
        return {"cached": cached, "pids": [each["pid"] for each in usage], "answers": answers}

    def questions(name):
        rng, lines = random.Random(name), "def walk(path, topdown=True):\\n    return path\\n" * 18
        heads = [f"# tenant {i} {rng.random()}\\n{lines}" for i in range(8)]
        return [heads[rng.randrange(8)] + f"    x{i} = " for i in range(64)]

    found, options = {}, {"model": model, "num_blocks": 600}
    ends = deployment.Engine.options
    deployment.Engine = ends(func_or_class=Watched, ray_actor_options={"num_cpus": 1})
    serve.run(deployment.build(options), name="kv", route_prefix="/")
    found["routed"] = spread(questions("routed"))
    found["other tenant"] = ask({"prompt": questions("routed")[0], "max_tokens": 4}, tenant="b")[-1]
    found["bad"] = [ask({"prompt": 7}), ask({"prompt": "x", "max_tokens": -1})]
    found["broken"] = ask({"prompt": "break"})
    before, until = set(found["routed"]["pids"]), time.time() + 90
    while time.time() < until:
        seen = ask({"prompt": questions(str(time.time()))[0], "max_tokens": 1})
        if isinstance(seen, list) and seen and seen[-1]["pid"] not in before:
            found["replaced"] = True
            break
        time.sleep(1)
    serve.delete("kv")
    usual = serve.config.RequestRouterConfig()
    deployment.Engine = ends(func_or_class=Watched, ray_actor_options={"num_cpus": 1}, request_router_config=usual)
    serve.run(deployment.build(options), name="kv", route_prefix="/")
    found["unrouted"] = spread(questions("unrouted"))
    print("FOUND" + json.dumps(found), flush=True)
    serve.shutdown()
    ray.shutdown()
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Answers of the guide's deployment, as a driver saw them."""
    folder = tmp_path_factory.mktemp("ray")
    guide = (PROJECT / "kvcache" / "guides" / "ray.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```py\n(.*?)```", guide, re.DOTALL)
    (folder / "deployment.py").write_text(block)
    (folder / "driver.py").write_text(dedent(DRIVER))
    path = os.pathsep.join([str(folder), str(PROJECT), os.environ.get("PYTHONPATH", "")])
    slow = {"RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60"}  # of 5 s, in which a busy machine starts no proxy
    ran = subprocess.run(
        [sys.executable, "driver.py", "8561", str(DIRECTORY)], cwd=folder, env=os.environ | slow | {"PYTHONPATH": path},
        stdout=subprocess.PIPE, text=True, timeout=400, check=False,
    )
    lines = [line for line in ran.stdout.splitlines() if line.startswith("FOUND")]
    assert lines, ran.stdout[-4000:]
    return json.loads(lines[0].removeprefix("FOUND"))


def test_answers_stream_their_text_and_end(found):
    for *parts, usage in found["routed"]["answers"]:
        assert "".join(part["text"] for part in parts)
        assert [part["finish_reason"] for part in parts][-1] in ("length", "stop")
        assert 0 <= usage["cached_tokens"] < usage["prompt_tokens"]


def test_prompts_go_where_their_prefix_is(found):
    routed, unrouted = found["routed"], found["unrouted"]
    assert len(set(routed["pids"])) == len(set(unrouted["pids"])) == 2  # one replica doing all is no success
    assert routed["cached"] >= 0.8
    assert routed["cached"] >= unrouted["cached"] + 0.05


def test_tenants_share_nothing(found):
    assert found["other tenant"]["cached_tokens"] == 0


def test_a_bad_body_is_refused(found):
    assert found["bad"] == [400, 400]


def test_a_replica_whose_engine_ended_is_replaced(found):
    assert found["broken"] == 503
    assert found["replaced"]

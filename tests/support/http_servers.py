"""A server of the tests: over a tiny random network whose tokens are bytes, in a thread of this process."""

import socket
import threading
from dataclasses import replace
from functools import wraps
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import numpy as np
import openai
import uvicorn
from gguf_files import ARRAY, I32, STRING, U32, convert
from places import GOLDEN
from tokenizers.pre_tokenizers import ByteLevel

from kvcache import BatchEngine, InferenceEngine
from kvcache.engine import Transformer
from kvcache.server.app import make_app
from kvcache.server.body_parts import BodyParts
from kvcache.server.served_model import ServedModel

MODEL = "tiny"
OF_A_MODEL = (
    "adapters", "aliases", "plain_special_tokens", "tool_parser", "pooling", "reranker", "max_vectors", "edit_masks",
)
TEMPLATE = "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}\n{% endfor %}assistant:"


TALK = [{"role": "user", "content": "Which weather?"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
# A thought, a text and two calls, in the words of Qwen3.
SAID = (
    '<think>\nhm é\n</think>\n\nI look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
    '\n<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>\n'
)

# Entries of a file whose network ends its texts with a token that is no text.
ENDING = {
    "tokenizer__ggml__eos_token_id": (U32, 200),
    "tokenizer__ggml__token_type": (ARRAY, [3 if token == 200 else 1 for token in range(256)], I32),
}


def tools_template(end, content="{{ m.content }}"):
    """A template in the words of Qwen3; `end` is what follows the last role, `content` the content of a message."""
    return (
        "{% if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}<tool_call>{% endif %}"
        "{% for m in messages %}{{ m.role }}:"
        "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}" + content
        + "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %};"
        "{% endfor %}assistant:" + end
    )


def tiny_file(folder, template=TEMPLATE, **more):
    """A GGUF file of the golden Llama with a vocabulary of bytes and a chat template; `more` are further entries."""
    return convert(
        GOLDEN / "llama",
        folder / "tiny.gguf",
        tokenizer__ggml__model=(STRING, "gpt2"),
        tokenizer__ggml__tokens=(ARRAY, [*sorted(ByteLevel.alphabet())[:-1], "im"], STRING),
        tokenizer__ggml__merges=(ARRAY, ["i m"], STRING),
        tokenizer__chat_template=(STRING, template),
        **more,
    )


def fetched(served, path, headers=None):
    """The status, the content type and the text of a page of a server."""
    request = Request(served.url.removesuffix("/v1") + path, headers=headers or {})
    try:
        with urlopen(request, timeout=60) as page:
            return page.status, page.headers["content-type"], page.read().decode()
    except HTTPError as error:
        with error:
            return error.code, error.headers["content-type"], error.read().decode()


class Script:
    """A logits processor under which the next answer is a text, and then the end token.

    Attributes:
        tokens: ids of the answer; None: the network answers.
    """

    END = 255

    def __init__(self):
        self.tokens, self._start = None, None

    def say(self, tokens):
        self.tokens, self._start = [*tokens, self.END], None

    def __call__(self, text, logits):
        if self.tokens is not None:
            self._start = len(text) if self._start is None else self._start
            logits[:] = -100.0
            logits[self.tokens[min(len(text) - self._start, len(self.tokens) - 1)]] = 100.0


class Gated:
    """A network whose passes wait for permission, while `closed`.

    Attributes:
        error: what every pass raises, if not None.
        follow: the token that follows each token, of one request at a time, if not None.
    """

    def __init__(self, network):
        self.network, self.config = network, network.config
        self.gives_hidden, self.attention = getattr(network, "gives_hidden", False), network.attention
        self.prepare_adapter = network.prepare_adapter
        self.closed, self.permits, self.waiting = False, threading.Semaphore(0), threading.Event()
        self.error = self.follow = None

    @wraps(Transformer.forward)  # it has the arguments of that
    def forward(self, tokens, *args, **places):
        if self.closed:
            self.waiting.set()
            self.permits.acquire()
        if self.error is not None:
            raise self.error
        logits = self.network.forward(tokens, *args, **places)
        if self.follow is not None and len(logits):
            after = [self.follow.get(int(token), 0) for token in tokens[-len(logits) :]]
            logits[np.arange(len(logits)), after] = 1e6
        return logits

    def open(self):
        self.closed = False
        self.permits.release()


class Served:
    """A server on a free port, until the end of the `with` block.

    Attributes:
        path: of the checkpoint.
        alone: an engine for one request at a time over the same network.
        model, engine, network, app, server, bodies: of the server.
        url: of its interface.
    """

    def __init__(self, path, keys=None, drain=None, limits=(), **options):
        self.path, self.alone = path, InferenceEngine.from_pretrained(path)
        self.network = Gated(self.alone.model)
        self.engine = BatchEngine(self.network, self.alone.sampling_params, **{"num_blocks": 400, **options})
        self.engine._text = self.alone.requests.text
        self._script = Script()
        limits = dict(limits)
        names = {name: limits.pop(name) for name in OF_A_MODEL if name in limits}
        self.model = ServedModel(self.engine, MODEL, **names)
        self.app = make_app([self.model, *limits.pop("others", ())], keys, **limits)
        self.bodies = self.app.state.bodies
        app = BodyParts.offered(self.app)
        config = uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=drain, lifespan="on")
        self.server = uvicorn.Server(config)
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=512)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)  # so that slow readers are felt soon
        self.address = self._socket.getsockname()
        self.url = f"http://127.0.0.1:{self.address[1]}/v1"
        self._thread = threading.Thread(target=self.server.run, args=([self._socket],))

    def say(self, text):
        """Let the next answers be this text."""
        if self.engine.sampling_params.logits_processor is None:
            params = replace(self.engine.sampling_params, logits_processor=self._script, stop_token_ids=[Script.END])
            self.engine.sampling_params = params
        self._script.say(self.engine.tokenizer.encode(text).ids)

    def client(self, kind=openai.OpenAI, key="x"):
        return kind(base_url=self.url, api_key=key, max_retries=0, timeout=120)

    def connect(self, request, receive_buffer=None):
        """A bare connection that has sent `request`."""
        connection = socket.socket()
        if receive_buffer is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connection.connect(self.address)
        connection.sendall(request)
        connection.settimeout(120)
        return connection

    def __enter__(self):
        self._thread.start()
        while not self.server.started:
            assert self._thread.is_alive()
        return self

    def end(self):
        """As SIGTERM does."""
        self.server.should_exit = True

    def __exit__(self, *exception):
        self.network.open()
        self.end()
        self._thread.join()
        self._socket.close()


def post(body, path="/v1/completions", host="localhost", kind="application/json", length=None):
    """The bytes of a request; `body` is bytes."""
    length = len(body) if length is None else length
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\n\r\n"
    return head.encode() + body


def answer(connection):
    """The status and the body of an answer that ends with its connection, or has a length."""
    data = b""
    while piece := connection.recv(1 << 16):
        data += piece
        head, found, body = data.partition(b"\r\n\r\n")
        length = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
        if found and length and len(body) >= int(length[0].split(b":")[1]):
            break
        if body.endswith(b"0\r\n\r\n"):
            break
    connection.close()
    head, _, body = data.partition(b"\r\n\r\n")
    return int(head.split()[1]), body

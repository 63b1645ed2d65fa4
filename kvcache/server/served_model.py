"""A model of a server: its engine, its names, and what it makes of bodies. All of it runs beside the event loop."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Union

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp

from kvcache.engine.vectors import Vectors
from kvcache.errors import GrammarError, OutOfMemoryError, QueueFullError
from kvcache.grammar import Grammar
from kvcache.grammar.trials import Trials
from kvcache.sampling.text_tokens import TooManyTokens
from kvcache.sampling.tokenizer_errors import decoded
from kvcache.server.answers import HttpAnswer
from kvcache.server.asked import Asked
from kvcache.server.cache_hints import cache_hints_of, hinted
from kvcache.server.completion_bodies import asked_of_completion, check_scores
from kvcache.server.completion_form import CompletionForm
from kvcache.server.constraints import grammar_refused
from kvcache.server.conversations import Conversation
from kvcache.server.fields import DETOKENIZE, TOKENIZE, checked
from kvcache.server.fingerprints import Fingerprints
from kvcache.server.forms import Form, unique
from kvcache.server.limits import Threads
from kvcache.server.logprobs import TokenTexts
from kvcache.server.message_bodies import COUNTED, MESSAGES, asked_of_message
from kvcache.server.message_form import MessageForm
from kvcache.server.prompts import Prompt, Prompts
from kvcache.server.refusals import BodyError, no_adapter, too_large, too_many
from kvcache.server.response_bodies import RESPONSES, asked_of_response
from kvcache.server.response_form import ResponseForm
from kvcache.server.served_adapters import ServedAdapters
from kvcache.server.vector_bodies import (
    EMBEDDINGS,
    RERANK,
    VectorBody,
    asked_of_embeddings,
    asked_of_rerank,
    names_reranker,
)
from kvcache.server.voices import Voices
from kvcache.serving import BatchEngine
from kvcache.support.arguments import as_count, as_instance

__all__ = ["MAX_VECTORS", "Answer", "Prepared", "ServedModel"]

MAX_VECTORS = 64 << 20  # bytes

_READING = 30.0  # seconds beyond the time limit, for reading the end of an answer


class Prepared(NamedTuple):
    """An answer that is to be made, with its prompts, in a form and a namespace."""

    asked: Asked
    prompts: list[Prompt]
    form: Form
    space: Hashable


Answer = Union[ASGIApp, Prepared, VectorBody]  # noqa: UP007  # for Python 3.10 at run time


class ServedModel:
    """Answers bodies by an engine.

    Args:
        engine: has a tokenizer; it has the limits of queue and memory.
        name: by which clients ask for the model.
        aliases: further names of it.
        plain_special_tokens: whether special tokens in the texts of users are text; see `PlainText`.
        tool_parser: the dialect in which the network writes thoughts and calls, a name of `DIALECTS`; None: that of its
            chat template.
        pooling: how its vectors are made, "last" or "mean", where its checkpoint does not say it.
        reranker: whether it judges documents, where neither its checkpoint nor its name says so.
        max_vectors: the most bytes of the vectors of a body.
        adapters: those that it gets; None: none.
        edit_masks: whether `context_management` clears results of tools by masks where a body says nothing of it.

    Raises:
        TypeError, ValueError: no such pooling, or another one than the checkpoint's; no number of bytes; a network
            without masks.
        FileNotFoundError, CheckpointError: an adapter that cannot be read.

    Attributes:
        engine: see above.
        names: all of them; that of the model first.
        adapters: by the names that requests give as their model.
        trials: of new grammars.
        tasks: what it is for: "generate", "embed", "rerank".
    """

    def __init__(
        self, engine: BatchEngine, name: str, *, aliases: Sequence[str] = (), plain_special_tokens: bool = False,
        tool_parser: str | None = None, pooling: str | None = None, reranker: bool = False,
        max_vectors: int = MAX_VECTORS, adapters: ServedAdapters | None = None, edit_masks: bool = False,
    ) -> None:
        self.engine, self.names = engine, tuple(dict.fromkeys((name, *aliases)))
        self.adapters = ServedAdapters() if adapters is None else adapters
        self.adapters.attach(engine)
        self.trials = Trials()
        if as_instance(edit_masks, bool, "edit_masks"):
            engine.expect_masks()
        self._prompts = Prompts(engine, plain_special_tokens, edit_masks)
        self._voices = Voices(engine.tokenizer, engine.chat_template, tool_parser)
        self._texts, self._fingerprints = TokenTexts(engine.tokenizer), Fingerprints()
        self._declared = pooling, as_instance(reranker, bool, "reranker")
        self._max_vectors = as_count(max_vectors, "max_vectors", 1, most=None)
        self.tasks = self._tasks()

    def _tasks(self) -> list[str]:
        """Name the uses of the model; "generate" is that of text."""
        if not self.engine.shares_prefixes:  # a policy evicts tokens
            return ["generate"]
        vectors = self._vectors()
        given = {
            "generate": self.engine.generates, "embed": vectors.pools,
            "rerank": vectors.is_reranker or names_reranker(self.names[0]),
        }
        return [task for task, is_given in given.items() if is_given]

    # -- answers of the network -----------------------------------------------------------------------------

    def complete(self, found: dict[str, Any], space: Hashable, *, chat: bool) -> Prepared:
        """Answer a chat completion, or a completion."""
        asked = self._prompts.noted(self._completion(found, chat))
        prompts = self._prompts.of(asked)
        asked = asked._replace(applied=prompts[0].applied)
        form = CompletionForm(asked, self.engine, self._texts, [prompt.tokens for prompt in prompts])
        return self._prepared(asked, prompts, form, space)

    def message(self, found: dict[str, Any], space: Hashable) -> Prepared:
        """Answer a body of `/v1/messages`."""
        given, answer = checked(found, MESSAGES, ("model", "messages", "max_tokens")), unique("msg_")
        asked = self._prompts.noted(asked_of_message(given, self.engine.sampling_params))
        prompts = self._prompts.of(asked)
        comparison = self._fingerprints.note(given, space, answer, len(prompts[0].tokens))
        asked = asked._replace(applied=prompts[0].applied)
        return self._prepared(asked, prompts, MessageForm(asked, self.engine, answer, comparison), space)

    def respond(self, found: dict[str, Any], space: Hashable) -> Prepared:
        """Answer a body of `/v1/responses`."""
        given = checked(found, RESPONSES, ("model", "input"))
        asked = self._prompts.noted(asked_of_response(given, self.engine.sampling_params))
        return self._prepared(asked, self._prompts.of(asked), ResponseForm(asked, self.engine, given), space)

    def embed(self, found: dict[str, Any], space: Hashable) -> VectorBody:
        """Answer a body of `/v1/embeddings`."""
        given = self._without_adapter(checked(found, EMBEDDINGS, ("model", "input")))
        return asked_of_embeddings(given, self._vectors(), self.names[0], space, self._max_vectors)

    def rerank(self, found: dict[str, Any], space: Hashable) -> VectorBody:
        """Answer a body of `/v1/rerank`."""
        given = self._without_adapter(checked(found, RERANK, ("model", "query", "documents")))
        return asked_of_rerank(given, self._vectors(), self.names[0], space)

    def _without_adapter(self, given: dict[str, Any]) -> dict[str, Any]:
        if given["model"] not in self.names:
            message = f"model: expected {' or '.join(self.names)}, since vectors have no adapters, got {given['model']}"
            raise BodyError(message, "unsupported_model")
        return given

    def _vectors(self) -> Vectors:
        vectors = self.engine.vectors()
        vectors.plain = self._prompts.plain
        vectors.declare(*self._declared)
        return vectors

    def _completion(self, found: dict[str, Any], chat: bool) -> Asked:
        return asked_of_completion(found, chat, self.engine.sampling_params, self.engine.max_positions)

    def _prepared(self, asked: Asked, prompts: list[Prompt], form: Form, space: Hashable) -> Prepared:
        if asked.model not in self.names:
            asked = asked._replace(adapter=asked.model)
        if (talk := asked.conversation) is not None:
            wanted = asked.params.grammar
            if (grammar := self._grammar(talk, prompts[0], wanted)) is not None:
                asked = asked._replace(params=replace(asked.params, grammar=grammar), form=wanted)
        return Prepared(asked, prompts, form, _space(asked, space))

    def _grammar(self, talk: Conversation, prompt: Prompt, form: Grammar | None) -> Grammar | None:
        """The grammar of the answer to a conversation: calls, or the form that is asked for, or one of both."""
        is_free = form is None and talk.choice.mode != "required"
        if is_free and not any(tool["function"].get("strict") is True for tool in talk.tools or ()):
            return None
        found = self._voices.calling(talk, prompt.tail, form)
        return self._voices.formed(form, prompt.tail) if found is None and form is not None else found

    def compiles(self, asked: Asked) -> bool:
        """Whether an answer has a grammar that is new, for which `compile` may take long."""
        grammar = asked.params.grammar
        try:
            return grammar is not None and not self.engine.knows_grammar(grammar, asked.params.stop_token_ids)
        except GrammarError:  # of the tokenizer, as `compile` says
            return True

    def compile(self, asked: Asked) -> None:
        """Compile the grammar of an answer, when it has passed a trial."""
        if (grammar := asked.params.grammar) is None:
            return
        try:
            self.engine.prepare_grammar(grammar, asked.params.stop_token_ids, trials=self.trials)
        except GrammarError as error:
            raise grammar_refused(error, self._field_of(asked)) from None
        except OutOfMemoryError:
            message = "grammar: expected room for it beside those of texts that run and wait, got none"
            raise HTTPException(503, message) from None

    def _field_of(self, asked: Asked) -> str:
        """The field that a grammar is refused for: the form of the answer, if that cannot be compiled alone either."""
        if asked.form is not None:
            try:
                self.engine.prepare_grammar(asked.form, asked.params.stop_token_ids, trials=self.trials)
            except (GrammarError, OutOfMemoryError):
                return "response_format"
        return "tools"

    def queued(self, prepared: Prepared, threads: Threads, timeout: float) -> ASGIApp:
        """Queue the requests of a body, all or none: the answer.

        Args:
            threads: that make whole answers.
            timeout: seconds from now to the last token.
        """
        engine, (asked, prompts, form, space) = self.engine, prepared
        readers = [partial(self._voices.reader, asked, prompt.tail) for prompt in prompts]
        answer = HttpAnswer(form, asked, readers, threads, timeout + _READING)
        prompt = None
        try:
            if (scores := asked.scores) is not None:
                check_scores(sum(len(each.tokens) for each in prompts), scores)
            if asked.adapter is not None:
                self._expect_adapter(asked.adapter)
            for number, prompt in enumerate(prompts):
                later = asked.priority + number * asked.n  # a body of many texts waits rather than one of a single text
                watch = None if asked.conversation is None else readers[number]
                answer.requests.append(engine.submit(
                    prompt.own, asked.params, namespace=space, deadline=timeout, n=asked.n, priority=later,
                    keep=prompt.kept, parts_at=prompt.parts, **prompt.before, prompt_logprobs=scores, watch=watch,
                    adapter=asked.adapter,
                ))
        except BaseException as error:
            answer.cancel()
            if asked.adapter is not None:
                self._expect_adapter(asked.adapter)  # it may have been unloaded just now
                field, _, rest = str(error).partition(": ")
                if isinstance(error, ValueError) and field == "prompt":  # without an invocation, as an engine says it
                    raise ValueError(f"{asked.field}: {rest}") from None
            count = asked.n * len(prompts)
            if isinstance(error, QueueFullError) and count > error.max_queue:  # there is never room for all of it
                raise too_many(asked.field, error.max_queue, count) from None
            if isinstance(error, OutOfMemoryError) and prompt is not None:
                raise self._too_large(asked.field, f"{len(prompt.tokens)} tokens") from None
            raise
        self.adapters.count(asked.adapter)
        return answer

    def _expect_adapter(self, name: str) -> None:
        if name not in self.engine.adapters:
            raise no_adapter(name)

    def too_many_tokens(self, error: TooManyTokens) -> ValueError:
        """The error of a text with more tokens than the network has positions: of the memory where that has fewer."""
        field, _, rest = str(error).partition(": ")
        most = self.engine.max_prompt
        return error if most is None or error.most <= most else self._too_large(field, rest.rpartition(", got ")[2])

    def _too_large(self, field: str, got: str) -> ValueError:
        return too_large(field, got, self.engine.max_prompt)

    # -- hints ----------------------------------------------------------------------------------------------

    def hint(self, found: dict[str, Any], space: Hashable) -> ASGIApp:
        """Take a body of `/v1/cache/hints`: its texts are made as those of requests, and nothing runs."""
        given = cache_hints_of(found)
        asked = [self._named_by(given.endpoint, body) for body in given.bodies]
        if any(each.conversation is not None and each.conversation.segments for each in asked):
            raise ValueError("messages: expected no segments in hints, got some")
        texts = [[prompt.tokens for prompt in self._prompts.of(each, runs=False)] for each in asked]
        if (adapter := asked[0].model if asked[0].model not in self.names else None) is not None:
            self._expect_adapter(adapter)
        name = adapter or self.names[0]
        return JSONResponse(hinted(self.engine, name, given, texts, _space(asked[0], space), adapter))

    def _named_by(self, endpoint: str, body: dict[str, Any]) -> Asked:
        """Read the body of a request for the text that it names."""
        if endpoint == "/v1/messages":
            return asked_of_message(checked(body, COUNTED, ("model", "messages")), self.engine.sampling_params)
        if endpoint == "/v1/responses":
            return asked_of_response(checked(body, RESPONSES, ("model", "input")), self.engine.sampling_params)
        return self._completion(body, endpoint == "/v1/chat/completions")

    # -- tokens alone ---------------------------------------------------------------------------------------

    def count(self, found: dict[str, Any], space: Hashable) -> ASGIApp:
        """The number of tokens of a body of `/v1/messages`."""
        asked = asked_of_message(checked(found, COUNTED, ("model", "messages")), self.engine.sampling_params)
        prompt = self._prompts.of(asked, runs=False)[0]
        managed = {} if prompt.applied is None else {"context_management": {"original_input_tokens": prompt.original}}
        return JSONResponse({"input_tokens": len(prompt.tokens), **managed})

    def render(self, found: dict[str, Any], space: Hashable, *, chat: bool) -> ASGIApp:
        """The token ids of the prompts of a body, as routers ask for them."""
        asked = self._completion(found, chat)
        rendered = [
            {"request_id": unique("render-"), "token_ids": prompt.tokens.tolist(), "model": asked.model}
            for prompt in self._prompts.of(asked, runs=False)
        ]
        return JSONResponse(rendered[0] if chat else rendered)

    def tokenize(self, found: dict[str, Any], space: Hashable) -> ASGIApp:
        """The token ids of a prompt or of a conversation."""
        with_texts = checked(found, TOKENIZE, ()).get("return_token_strs", False)
        given = {"model": self.names[0]} | {
            name: value for name, value in found.items() if name not in ("add_special_tokens", "return_token_strs")
        }
        asked = self._completion(given, "messages" in given)
        if len(asked.prompts) != 1:
            raise ValueError(f"prompt: expected one, got {len(asked.prompts)}")
        ids = self._prompts.of(asked, runs=False)[0].tokens.tolist()
        texts = [self._texts.of(token)[0] for token in ids] if with_texts else None
        most = self.engine.max_prompt
        return JSONResponse({"count": len(ids), "max_model_len": most, "tokens": ids, "token_strs": texts})

    def detokenize(self, found: dict[str, Any], space: Hashable) -> ASGIApp:
        """The text of token ids."""
        given = checked(found, DETOKENIZE, ("tokens",))
        tokens = self._prompts.checked(given["tokens"], "tokens").tolist()
        return JSONResponse({"prompt": decoded(self.engine.tokenizer, tokens, skip_special_tokens=False)})


def _space(asked: Asked, space: Hashable) -> Hashable:
    """The namespace of the texts of a body, of a key with this one."""
    return space if asked.salt is None else (space, asked.salt)

"""Conversations: messages in the words of a checkpoint's chat template, and the text of an answer as it comes.

A template is a Jinja program of the checkpoint, which runs in a sandbox (`template_sandbox.py`) over plain data.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

from kvcache.engine.call_ids import with_counted_ids
from kvcache.engine.completion import FinishReason, Request
from kvcache.engine.documents import LINK, Documents, Placed, Segment, SegmentUse, place
from kvcache.engine.edit_masks import EditMasks, seen_by
from kvcache.engine.edits import Edited, as_edits, edited
from kvcache.engine.history import THOUGHTS, TOOLS, Messages, Rewriting, are_texts, rewritings, with_arguments
from kvcache.engine.prompt_measure import PromptMeasure
from kvcache.engine.segment_spans import SegmentSpan, cuts_of, segment_places, spans_of, text_of_content, with_documents
from kvcache.engine.template_sandbox import compiled
from kvcache.engine.text_places import located
from kvcache.engine.text_rows import TextRows
from kvcache.engine.vectors import VectorOptions, Vectors
from kvcache.networks.protocols import Float32
from kvcache.sampling.text_tokens import encoded, encoded_with_ends
from kvcache.sampling.tokenizer import SPECIAL_TOKENS, CheckpointText, GgufText
from kvcache.support.arguments import plain_int, short
from kvcache.support.exclusions import expect
from kvcache.support.json_text import read_json_text
from kvcache.texts.behind import base_of, reused_before
from kvcache.texts.seen_parts import SeenParts
from kvcache.texts.text import NO_TOKEN

__all__ = [
    "Answer", "ChatEngine", "ChatPrompt", "chat_tokens", "chat_tokens_with_ends", "render", "template_arguments",
]

# Where a template reads the thoughts of an assistant.
_THOUGHTS = {key: re.compile(rf"\.{key}\b|(['\"]){key}\1") for key in THOUGHTS}
# Variables that are not a caller's to give.
_GIVEN = {"add_generation_prompt", "chat_template", "documents", "messages", "tools", *SPECIAL_TOKENS}
_COUNTED = "<|tool_calls_section_begin|>"  # the mark of a template whose network counts calls


class Answer:
    """The text of an answer: an iterator of pieces, each of whole characters, together the text.

    Nothing of a stop string is in them: text that may begin one waits until the next tokens tell. From its first piece
    to its last, or until it is closed or dropped, it has exclusive use of the engine, as `InferenceEngine.stream` has.

    Attributes:
        prompt_tokens: tokens of the conversation, as the template writes it.
        cached_tokens: those whose K and V came from a prefix cache; 0 before the first piece.
        tokens: the new tokens so far.
        applied_edits: what each edit of the conversation has cleared, see `ChatEngine.edit`.
        segments: as of `Completion`; before the first piece none of them is cached.

    Args:
        request: the request.
        new: yields its tokens.
        prompt: what it was made of.
    """

    def __init__(self, request: Request, new: Iterator[int], prompt: ChatPrompt) -> None:
        self.applied_edits = [*prompt.applied_edits]
        request.placed = prompt.placed or request.placed
        self.prompt_tokens = prompt.num_tokens
        self.tokens: list[int] = []
        self._request, self._pieces = request, request.pieces(new, self.tokens)

    @property
    def cached_tokens(self) -> int:
        found = self._request
        return found.cached_tokens + (reused_before(found.prefix, found.cached_texts) if self.tokens else 0)

    @property
    def segments(self) -> list[SegmentUse] | None:
        return self._request.segments

    @property
    def finish_reason(self) -> FinishReason | None:
        """See `Completion`; None before the end, and after `close`."""
        return self._request.end if self._request.is_complete else None

    def __iter__(self) -> Answer:
        return self

    def __next__(self) -> str:
        return next(self._pieces)

    def close(self) -> None:
        """End the answer; a second call does nothing."""
        self._pieces.close()  # type: ignore[attr-defined]  # a generator

    def __repr__(self) -> str:
        return f"Answer({len(self.tokens)} tokens to {self.prompt_tokens}, {self.finish_reason or 'not at its end'})"


class ChatPrompt(NamedTuple):
    """The prompt of a conversation after its edits, or with segments.

    Attributes:
        tokens: those to run behind `prefix`.
        prefix: what they see of the tokens before them, for `prefix=` of a request; None: they are all of the prompt.
        applied_edits: what each edit has cleared, as the interface says it.
        original_tokens: of the prompt before its edits.
        messages: of the conversation, as the template got them.
        placed: its segments; None: it has none.
        parts_at: see `Text`.
    """

    tokens: list[int]
    prefix: SeenParts | None
    applied_edits: tuple[dict[str, Any], ...]
    original_tokens: int
    messages: Messages
    placed: Placed | None = None
    parts_at: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        """The tokens of the prompt, those of `prefix` included."""
        return base_of(self.prefix) + len(self.tokens)


class ChatEngine:
    """The base of the engines: tokenizer, chat template and vectors of the checkpoint that each has."""

    def _checkpoint(self) -> CheckpointText | GgufText | None:
        raise NotImplementedError

    @property
    def tokenizer(self) -> Any:
        """The checkpoint's `tokenizers.Tokenizer`, loaded on first use; None if it has none.

        Raises:
            ImportError: the checkpoint has one, but the `tokenizers` package (extra `text`) is not installed.
            CheckpointError: it is damaged.
        """
        return None if (text := self._checkpoint()) is None else text.tokenizer

    @property
    def chat_template(self) -> str | None:
        """The checkpoint's Jinja template of a conversation; None if it has none. CheckpointError: it is damaged."""
        return None if (text := self._checkpoint()) is None else text.chat_template

    def edit(self, messages: Any, edits: Any, *, tools: Any = None, template: Any = None) -> Edited:
        """Clear old results of tools and old thoughts of a conversation.

        The edits are those of `context_management` in Anthropic's interface, such as
        `{"type": "clear_tool_uses_20250919", "trigger": {"type": "input_tokens", "value": 30_000}}`. What they clear is
        a function of the conversation alone; tokens are counted in the words of the template.

        Args:
            messages, tools, template: as of `apply_chat_template`.
            edits: a list of dicts; an edit of thoughts comes first. None, or an empty list, changes nothing.

        Returns:
            The messages that stay, what each edit has cleared, and the tokens of the prompt before. An edit by masks
            changes no message: `chat_prompt` does it.

        Raises:
            TypeError, ValueError: no such edits; as `apply_chat_template`.
        """
        known, found = None if edits is None else as_edits(edits), _messages(messages)
        if known is None:
            return Edited(found)
        if known.uses is not None and known.uses.mask:
            self.expect_masks()
        tokenizer = _tokenizer_of(self._checkpoint())
        return edited(found, known, PromptMeasure(self._writer(tools, template), tokenizer))

    def chat_prompt(
        self, messages: Any, edits: Any = None, *, tools: Any = None, template: Any = None,
        segments: Iterable[Any] | None = None, link: int = LINK,
    ) -> ChatPrompt:
        """The prompt of a conversation after its edits, those by masks too, or with segments.

        An edit of results of tools with `"kvcache_mode": "mask"` leaves the results in the text: tokens behind the edit
        do not see them, and nothing runs again. `tokens` and `prefix` are for `complete`, `stream` and `submit`.

        Args:
            messages, edits, tools, template: as of `edit`. A part of a message such as `{"type": "text", "text": "...",
                "segment": True}` is a segment; segments follow each other.
            segments: documents before the first words of the user, each a `Segment` or a text; as such parts there. The
                head is all before them, and what is behind them goes on with the conversation.
            link: as of `InferenceEngine.complete`.

        Raises:
            TypeError, ValueError: as `edit`; a network or a cache that has no masks, or no segments; the template does
                not write results, or segments, as they are; edits beside segments.
        """
        names: list[str | None] | None = None
        if segments is not None:
            messages, names = with_documents(_messages(messages), segments)
        plain, spans = spans_of(_messages(messages), "messages")
        if not spans:
            return self._prompt_of(self.edit(plain, edits, tools=tools, template=template), tools, template)
        if edits:
            raise ValueError(f"edits: expected none beside segments, got {short(edits)}")
        return self._prompt_of_segments(plain, spans, names or [None] * len(spans), link, self._writer(tools, template))

    def _prompt_of_segments(
        self, messages: Messages, spans: Sequence[SegmentSpan], names: Sequence[str | None], link: int,
        write: Callable[[Any], str],
    ) -> ChatPrompt:
        """The prompt of messages, of which some parts are segments; see `chat_prompt`."""
        (features, most), said = self._limits(), [text_of_content(each) for each in messages]
        expect("segments", [said[each.message][each.start : each.stop] for each in spans], features)
        text = write(messages)
        places = [place for span in spans for place in segment_places(span, said[span.message])]
        found = located(write, text, messages, dict(enumerate(places)))
        cuts = cuts_of(spans, said, text, [found.get(number) for number in range(len(places))])
        tokenizer = _tokenizer_of(self._checkpoint())
        head, *documents, own = (
            encoded(tokenizer, text[start:stop], "messages", most=most, add_special_tokens=False)
            for start, stop in pairwise([0, *cuts, len(text)])
        )
        if not own:
            raise ValueError("messages: expected a text behind the segments, got none")
        given = [Segment(ids, name) for ids, name in zip(documents, names, strict=True)]
        placed = place(own, None, Documents(head, given, link), lambda: None, NO_TOKEN)
        assert isinstance(placed.prefix, SeenParts), "it stands behind segments"
        prompt = ChatPrompt(placed.prompt.tolist(), placed.prefix, (), 0, messages, placed)
        return prompt._replace(original_tokens=prompt.num_tokens)

    def _prompt_of(self, found: Edited, tools: Any, template: Any) -> ChatPrompt:
        """The prompt of an edited conversation; see `chat_prompt`."""
        write = self._writer(tools, template)
        text, tokenizer = write(found.messages), _tokenizer_of(self._checkpoint())
        most = self._limits()[1]
        if not found.masked:
            ids = encoded(tokenizer, text, "messages", most=most, add_special_tokens=False)
            original = len(ids) if found.original_tokens is None else found.original_tokens
            return ChatPrompt(ids, None, found.applied, original, found.messages)
        masks = EditMasks(found.messages, found.masked)
        ends = masks.located(write, text)
        ids, counts = encoded_with_ends(tokenizer, text, "messages", ends, most=most)
        chain = masks.chain(counts, len(ids))
        found = found.with_masked(len(ids), sum(stop - start for _, spans in chain for start, stop in spans))
        seen, original = seen_by(ids, chain), found.original_tokens or len(ids)
        return ChatPrompt(ids[0 if seen is None else seen.num_tokens :], seen, found.applied, original, found.messages)

    def expect_masks(self) -> None:
        """Raise ValueError if the network, or how the engine stores K and V, has no edits by masks."""
        expect("kvcache_mode", "mask", self._limits()[0])

    def _limits(self) -> tuple[Collection[str], int | None]:
        """The features of network and settings, see `exclusions`, and the most positions of a text; None: no limit."""
        raise NotImplementedError

    def _writer(self, tools: Any, template: Any) -> Callable[[Any], str]:
        """The function that writes messages, with the beginning of an answer."""
        return lambda messages: render(self._checkpoint(), messages, tools, template=template)

    def apply_chat_template(
        self, messages: Any, *, tools: Any = None, add_generation_prompt: bool = True, tokenize: bool = False,
        template: Any = None, edits: Any = None,
    ) -> Any:
        """A conversation in the words of the checkpoint's chat template, as transformers writes it; text or token ids.

        Turns of an assistant that the template refuses are written in another way, such as several calls one by one.

        Args:
            messages: dicts with "role", "content" and what else the template knows.
            tools: JSON schemas of functions, dicts.
            add_generation_prompt: whether the beginning of the answer follows.
            tokenize: return token ids instead of the text. The tokenizer adds no special tokens to those in the text.
            template: more variables of the template, such as `{"enable_thinking": False}`: plain data by their names.
            edits: what leaves the conversation first, see `edit`.

        Raises:
            TypeError, ValueError: no template or tokenizer; messages that the template does not take.
            ImportError: without the packages of the extra `text`. CheckpointError: a damaged template.
        """
        if edits is not None:
            found = self.edit(messages, edits, tools=tools, template=template)
            if found.masked:
                raise ValueError("edits: expected none by masks, which `chat` and `chat_prompt` do, got one")
            messages = found.messages
        text = render(self._checkpoint(), messages, tools, add_generation_prompt, template)
        return chat_tokens(self._checkpoint(), text) if tokenize else text

    def embed(
        self, texts: Iterable[Any], pooling: str | None = None, *, normalise: bool = True,
        dimensions: int | None = None, prompt_name: str | None = None, truncate: bool = False,
        progress: Callable[[int, int], object] | None = None,
    ) -> Float32:
        """Vectors of texts, float32 `(n, dimensions)`: rows of the network behind its last norm, pooled.

        A vector has the same bits alone and beside others. The current sequence of an engine that has one is replaced
        by an empty one.

        Args:
            texts: strings, or token ids; none of them empty of tokens. The tokenizer adds its own, such as an end.
            pooling: "last", the row of the last token; "mean", of all tokens; None: that of the checkpoint
                (`modules.json` of sentence-transformers, `pooling_type` of GGUF).
            normalise: whether vectors have the length 1, after they were cut.
            dimensions: how many of the first numbers stay; None: those of the checkpoint.
            prompt_name: of the checkpoint's prompts, the one that stands before each text; None: its default, if any.
            truncate: whether a text with more tokens than there may be is cut; else it raises.
            progress: called with the number of texts that have run, and of all.

        Raises:
            TypeError, ValueError: no such pooling, prompt or dimensions; a text without tokens, or with too many
                (`TooManyTokens`); a network that gives no such rows; an engine that evicts tokens.
            OutOfMemoryError: the cache is too small for a text.
            InvalidOperationError: the engine was closed meanwhile, and cancelled what ran.
        """
        options = VectorOptions(pooling, normalise, dimensions, prompt_name, truncate)
        vectors, progress = self.vectors(), _as_progress(progress)
        readings = vectors.readings(texts, options)
        self._read(readings, progress)
        return vectors.made(readings, options)

    def rerank(
        self, query: str, documents: Iterable[str], instruction: str | None = None, *, truncate: bool = False,
        progress: Callable[[int, int], object] | None = None,
    ) -> list[float]:
        """How well each document answers a query, from 0 to 1, in their order, by a network such as Qwen3-Reranker.

        The prompts are those of Qwen3-Reranker, which answers "yes" or "no"; a score is the share of "yes" in the two
        logits. What all prompts have in common runs once, and engines that cache prefixes find it in later calls. A
        score has the same bits alone and beside others.

        Args:
            instruction: what a good document is; None: that of web search.
            truncate: whether a document that is too long is cut at its end; else it raises.
            progress: as of `embed`.

        Raises:
            as `embed`; ValueError: a tokenizer without the tokens of such prompts.
        """
        progress = _as_progress(progress)
        vectors = self.vectors()
        readings = vectors.judged(query, documents, instruction, truncate)
        self._read(readings, progress)
        return vectors.scores(readings)

    def vectors(self) -> Vectors:
        """The maker of vectors and scores of texts, by the checkpoint. ValueError: the engine evicts tokens."""
        raise NotImplementedError

    def _read(self, readings: Sequence[TextRows], progress: Callable[[int, int], object] | None) -> None:
        raise NotImplementedError


def _as_progress(progress: Any) -> Any:
    if progress is not None and not callable(progress):
        raise TypeError(f"progress: expected a function or None, got {type(progress).__name__}")
    return progress


def chat_tokens(text: CheckpointText | GgufText | None, rendered: str, most: int | None = None) -> list[int]:
    """The token ids of a conversation that a template wrote. The tokenizer adds no special tokens to those in the text.

    Args:
        most: as of `encoded`.

    Raises:
        ValueError: the engine has no tokenizer, or the text is not Unicode.
        TooManyTokens: the text certainly has more than `most` tokens.
        ImportError, CheckpointError: as `InferenceEngine.tokenizer`.
    """
    return encoded(_tokenizer_of(text), rendered, "messages", most=most, add_special_tokens=False)


def chat_tokens_with_ends(
    text: CheckpointText | GgufText | None, rendered: str, ends: Iterable[int], most: int | None = None
) -> tuple[list[int], list[int]]:
    """The ids of `chat_tokens`, and how many of them stand before each place; see `encoded_with_ends`."""
    return encoded_with_ends(_tokenizer_of(text), rendered, "messages", ends, most=most)


def _tokenizer_of(text: CheckpointText | GgufText | None) -> Any:
    if text is None or (tokenizer := text.tokenizer) is None:
        raise ValueError("messages: expected an engine with a tokenizer, got one without")
    return tokenizer


def render(
    text: CheckpointText | GgufText | None, messages: Any, tools: Any = None, add_generation_prompt: bool = True,
    template: Any = None,
) -> str:
    """A conversation in the words of the checkpoint's template; see `InferenceEngine.apply_chat_template`."""
    if text is None or (source := text.template("tool_use" if tools else "default")) is None:
        raise ValueError("messages: expected an engine whose checkpoint has a chat template, got none")
    conversation = _in_words_of(source, _messages(messages))
    known = None if tools is None else _tools(tools)
    more = {} if template is None else template_arguments(template, "template")
    for rewriting in _rewritings(source, tuple(text.special_tokens.items())):
        conversation = rewriting(conversation)
    if _COUNTED in source:
        conversation = with_counted_ids(conversation)
    names = {"messages": conversation, "tools": known, "documents": None, **more, **text.special_tokens}
    return _written(source, names, bool(add_generation_prompt))


def _written(source: str, names: dict[str, Any], add_generation_prompt: bool) -> str:
    """The text that a template writes of its variables. ValueError: it refuses them."""
    template = compiled(source)
    try:
        return str(template.render(names, add_generation_prompt=add_generation_prompt))
    except MemoryError:
        raise
    except Exception as error:  # a template can raise anything
        raise ValueError(f"messages: expected ones that the chat template takes, got an error of it: {error}") from None


@lru_cache(maxsize=8)
def _rewritings(source: str, special_tokens: Sequence[tuple[str, str]]) -> list[Rewriting]:
    """The other forms of turns that a template needs: it is tried once."""

    def words(messages: Messages) -> Messages:
        return _in_words_of(source, _messages(messages))

    def write(messages: Messages) -> str:
        names = {"messages": messages, "tools": _tools(TOOLS), "documents": None, **dict(special_tokens)}
        return _written(source, names, True)

    return rewritings(words, write)


def _messages(messages: Any) -> list[dict[str, Any]]:
    found = _plain(messages, "messages")
    if not isinstance(found, list) or not all(isinstance(message, dict) for message in found):
        raise TypeError(f'messages: expected a list of dicts with "role" and "content", got {short(messages)}')
    if not found:
        raise ValueError("messages: expected at least one, got none")
    for message in found:
        if not isinstance(message.get("role"), str):
            raise ValueError(f'messages: expected a "role" in each, a text, got {short(message.get("role"))}')
        _expect_content(message)
    return found


_SPEAKERS = ("system", "developer", "user", "assistant")  # other roles have contents as their templates say


def _expect_content(message: dict[str, Any]) -> None:
    """Refuse a content that no template writes; some write objects as results of tools. An answer may have none."""
    role, content = message["role"], message.get("content")
    if isinstance(content, (bool, int, float)) or (isinstance(content, dict) and role in _SPEAKERS):
        raise TypeError(f'messages: expected a "content" of text or parts, got {short(content)}')
    if role in _SPEAKERS and role != "assistant" and "content" not in message:
        raise ValueError(f'messages: expected a "content" beside the role {role}, got none')


# A template that asks whether a content is none knows contents of none; one that has a loop over it knows lists of
# parts. The others are written for texts alone.
_CONTENT = r"(?:\w+\.content|\w+\[\s*['\"]content['\"]\s*\]|\bcontent)"
_KNOWS_NONE = re.compile(rf"{_CONTENT}\s+is\s+(?:not\s+)?none\b", re.IGNORECASE)
_KNOWS_PARTS = re.compile(rf"\bfor\s+\w+\s+in\s+{_CONTENT}\s*(?:\||-?%}}|\bif\b)")


# A template that asks whether arguments are a text, or adds them to one, takes texts; the others write objects. One
# that goes through the members of an object, or writes arguments by `tojson` without a question, takes objects too.
_ARGUMENTS = r"\barguments\b(?:['\"]\s*\])?"
_KNOWS_TEXTS = re.compile(
    rf"{_ARGUMENTS}\s+is\s+(?:not\s+)?string\b|\+\s*[\w.\[\]'\"]*{_ARGUMENTS}(?!['\"\]\s]*\|\s*tojson)|{_ARGUMENTS}\s*\+"
)
_KNOWS_OBJECTS = re.compile(rf"{_ARGUMENTS}\s*(?:\|\s*(?:dictsort|items)\b|\.items\()")
_ASKS = re.compile(rf"{_ARGUMENTS}\s+is\s+(?:not\s+)?string\b")
_WRITES_JSON = re.compile(rf"{_ARGUMENTS}\s*\|\s*tojson")


def _takes_objects(template: str) -> bool:
    """Whether a template takes arguments as objects, rather than as texts of JSON."""
    if not _has(template, _KNOWS_TEXTS) or _has(template, _KNOWS_OBJECTS):
        return True
    return _has(template, _WRITES_JSON) and not _has(template, _ASKS)


@lru_cache(maxsize=64)
def _has(template: str, pattern: re.Pattern[str]) -> bool:
    """Whether a template has such a part. The search takes up to a millisecond: one for all messages."""
    return pattern.search(template) is not None


def _in_words_of(template: str, messages: Messages) -> Messages:
    """Messages as the template expects them, each by itself."""
    return [_with_thoughts(template, _with_contents(template, each)) for each in messages]


def _with_contents(template: str, message: dict[str, Any]) -> dict[str, Any]:
    """A message as the template expects it: any other key without a value is no key.

    Arguments of calls, texts of JSON as interfaces have them, are objects unless the template takes texts.

    Content: none, or none in an answer, is an empty text, but beside calls where the template knows none; a list of
    parts is their text, unless the template knows parts.
    """
    kept = {key: value for key, value in message.items() if value is not None}
    if isinstance(calls := message.get("tool_calls"), list) and _takes_objects(template):
        kept["tool_calls"] = [with_arguments(call, _object_of) for call in calls]
    if "content" not in message and message["role"] != "assistant":
        return kept
    content = message.get("content")
    if content is None:
        content = None if calls and _has(template, _KNOWS_NONE) else ""
    elif isinstance(content, list) and not _has(template, _KNOWS_PARTS):
        if not are_texts(content):
            raise ValueError(f"messages: expected parts of type text, got {short(content)}")
        content = "".join(part["text"] for part in content)
    return {**kept, "content": content}


def _object_of(arguments: Any) -> Any:
    """The arguments of a call as an object, if their text is one in JSON."""
    if not isinstance(arguments, str):
        return arguments
    try:
        found = read_json_text(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return found if isinstance(found, dict) else arguments


def _with_thoughts(template: str, message: dict[str, Any]) -> dict[str, Any]:
    """A message with its thoughts under the keys that the template reads, whichever of them it has."""
    thoughts = next((message[key] for key in _THOUGHTS if key in message), None)
    if thoughts is None:
        return message
    return {key: thoughts for key, read in _THOUGHTS.items() if _has(template, read)} | message


def _tools(tools: Any) -> list[dict[str, Any]]:
    found = _plain(tools, "tools")
    if not isinstance(found, list) or not all(isinstance(tool, dict) for tool in found):
        raise TypeError(f"tools: expected a list of JSON schemas, dicts, got {short(tools)}")
    return found


def template_arguments(template: Any, name: str) -> dict[str, Any]:
    """A copy of what a caller gives to a template beside messages and tools: plain data by names of variables.

    Args:
        name: of the argument, for messages.

    Raises:
        TypeError: not a mapping of plain data.
        ValueError: a name that the engine gives itself, or none that a template can have.
    """
    found = _plain(template, name)
    if not isinstance(found, dict):
        raise TypeError(f"{name}: expected a dict, got {short(template)}")
    for variable in found:
        if not isinstance(variable, str) or not variable.isidentifier() or variable.startswith("_"):
            raise ValueError(f"{name}: expected names of variables, got {short(variable)}")
        if variable in _GIVEN:
            raise ValueError(f"{name}: expected other names than {', '.join(sorted(_GIVEN))}, got {variable}")
    return found


def _plain(value: Any, name: str, depth: int = 100) -> Any:
    """A copy of plain data: what else an object can do is out of a template's reach."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, str):  # subclasses have more, and methods of their own, as an Enum has
        return str.__str__(value)
    if isinstance(value, int):
        return plain_int(value)
    if isinstance(value, float):
        return float.__add__(value, 0.0)
    if depth == 0:
        raise ValueError(f"{name}: expected at most 100 levels, got more")
    if isinstance(value, Mapping):
        return {_plain(key, name, depth - 1): _plain(each, name, depth - 1) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each, name, depth - 1) for each in value]
    raise TypeError(f"{name}: expected texts, numbers, lists and dicts, got {type(value).__name__}")

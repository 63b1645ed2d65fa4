"""`ForcedTokens`: a vocabulary as llguidance reads it, and the tokens of each text that a grammar forces.

Llguidance calls it while it makes a mask, and takes any exception for a fault of its own. So it is compiled: the
interpreter raises a KeyboardInterrupt between two lines of Python, and none runs here.
"""


cdef class ForcedTokens:
    """Spells texts with tokens that together have exactly their bytes.

    Args:
        tokenizer: a `tokenizers.Tokenizer` that adds nothing to a text.
        tokens: the bytes of each token, by its id; those that are no text begin with byte 255.
        end_token: an id.

    Attributes:
        tokens: see above.
        eos_token_id: `end_token`.
        bos_token_id, special_token_ids, is_tokenizer_wrapper: what llguidance looks for, and finds in `tokens`.
    """

    cdef object _encode
    cdef dict _bytes
    cdef readonly list tokens
    cdef readonly object eos_token_id, bos_token_id, special_token_ids, is_tokenizer_wrapper

    def __init__(self, tokenizer, list tokens not None, end_token):
        self._encode, self.tokens, self.eos_token_id = tokenizer.encode, tokens, end_token
        self.bos_token_id, self.special_token_ids, self.is_tokenizer_wrapper = None, (), True
        self._bytes = {token: id for id, token in enumerate(tokens) if len(token) == 1}

    def __call__(self, str text not None):
        """The ids of a text: those of the tokenizer, or the bytes one by one where these are another text."""
        cdef bytes wanted = text.encode()
        try:
            ids = self._encode(text, add_special_tokens=False).ids
            if b"".join([self.tokens[id] for id in ids]) == wanted:
                return ids
        except BaseException:  # a panic is no Exception
            pass
        return [self._bytes[wanted[i : i + 1]] for i in range(len(wanted)) if wanted[i : i + 1] in self._bytes]

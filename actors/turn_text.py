"""One choice's text on its way from tokens to the client: characters, stop strings, verdicts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from attrs import define, field, frozen

from actors.protocol import Allow, Screen, TextDelta, TextLogprob, TokenLogprob
from actors.stop_strings import StopStrings

CONTEXT_CHARACTERS = 64
"""How much of the text before its start a `Screen` brings along, as the protocol says."""


class Detokenizer(Protocol):
    """Tokens in, whole characters out."""

    def push(self, tokens: Sequence[int]) -> str:
        """Return the text that these tokens complete."""

    def finish(self) -> str:
        """Return what is left at the end of the reply."""


@frozen
class _Placed:
    """A token's log-probability and the offset of its first character in the reply."""

    start: int
    logprob: TokenLogprob


@define
class ChoiceText:
    """Pure state: `push` tokens, ask `next_screen`, `release` what it allows. Offsets are in characters."""

    request_id: str
    choice: int
    detokenizer: Detokenizer
    stops: StopStrings
    token_bytes: Callable[[int], bytes]
    finish: str = ""
    """`stop | length` once no more text will come, `""` before."""
    text: str = ""
    """What the stop strings let through."""
    released: int = 0
    """Characters that are out."""
    _seen: int = field(default=0, init=False)
    _asked: tuple[int, bool] = field(default=(0, False), init=False)
    _logprobs: deque[_Placed] = field(factory=deque, init=False)

    def push(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob], finish: str) -> None:
        """Take the next tokens; `finish` is the engine's reason when they are the last."""
        if self.finish:
            return
        if logprobs:
            for token, logprob in zip(tokens, logprobs, strict=True):
                self._logprobs.append(_Placed(self._seen, logprob))
                self._take(self.detokenizer.push((token,)))
        else:
            self._take(self.detokenizer.push(tokens))
        if finish and not self.stops.matched:
            self._take(self.detokenizer.finish())
            self.text += "" if self.stops.matched else self.stops.finish()
        self.finish = "stop" if self.stops.matched else finish

    def push_text(self, text: str) -> None:
        """Take a whole reply that did not come from a model."""
        self._take(text)
        self.text += "" if self.stops.matched else self.stops.finish()
        self.finish = "stop"

    def _take(self, text: str) -> None:
        self._seen += len(text)
        self.text += self.stops.push(text)

    def skip(self, released: int) -> None:
        """Say that this much is out already: the choice goes on after a restart."""
        self.released = released
        self._asked = (released, False)
        self._drop_logprobs_before(released)

    @property
    def is_out(self) -> bool:
        """Whether the choice has ended and all of its text is out."""
        return bool(self.finish) and self.released == len(self.text)

    def next_screen(self) -> Screen | None:
        """Return the question to the checker, or None while there is nothing that it has not been asked."""
        asked = (len(self.text), bool(self.finish))
        if asked == self._asked or self.released == len(self.text):
            return None
        self._asked = asked
        return self.screen_until(len(self.text), final=bool(self.finish))

    def screen_until(self, end: int, *, final: bool) -> Screen:
        """Return the question about the text from what is out up to `end`."""
        context = self.text[max(0, self.released - CONTEXT_CHARACTERS) : self.released]
        text = self.text[self.released : end]
        return Screen(self.request_id, "output", self.choice, self.released, text, context, final)

    def release(self, allow: Allow) -> TextDelta | None:
        """Return the delta that the verdict lets out, its sequence yet to be given; None when it is empty."""
        start, end = self.released, min(allow.end, len(self.text))
        if end <= start:
            return None
        self.released = end
        return TextDelta(0, self.choice, start, self.text[start:end], tuple(self._logprobs_before(end)))

    def _logprobs_before(self, end: int) -> list[TextLogprob]:
        taken = []
        while self._logprobs and self._logprobs[0].start < end:
            taken.append(self._in_bytes(self._logprobs.popleft().logprob))
        return taken

    def _drop_logprobs_before(self, end: int) -> None:
        while self._logprobs and self._logprobs[0].start < end:
            self._logprobs.popleft()

    def _in_bytes(self, logprob: TokenLogprob) -> TextLogprob:
        top = tuple((self.token_bytes(token), value) for token, value in logprob.top)
        return TextLogprob(self.token_bytes(logprob.token), logprob.logprob, top)

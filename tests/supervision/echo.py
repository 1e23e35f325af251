"""A small actor with every habit the tests need."""

from typing import Any

import trio
from attrs import field, frozen

from supervision.actor import LATER, Actor, Sender
from supervision.message import WhenFull, message


@message(repeatable=True)
class Say:
    text: str
    number: int = 0


@message(repeatable=True)
class Said:
    text: str
    number: int
    epoch: int


@message(repeatable=True)
class Hold:
    """Answered only when released."""

    number: int


@message(repeatable=True)
class LetGo:
    number: int


@message(repeatable=True)
class Nap:
    """Handled in the actor's own task for `seconds`."""

    seconds: float


@message(repeatable=True)
class Fall:
    """Makes the actor raise."""

    why: str


@message(repeatable=True, when_full=WhenFull.NEWEST)
class Level:
    number: int


@message(repeatable=True, when_full=WhenFull.WAIT)
class Item:
    number: int


class Fell(Exception):
    pass


class Echo(Actor):
    @frozen
    class Settings:
        """What the tree's data may say."""

        greeting: str = "hello"
        limits: tuple[int, ...] = field(default=())

    def __init__(self, settings: "Echo.Settings | None" = None) -> None:
        self.settings = settings or Echo.Settings()
        self.seen: list[Any] = []
        self.held: dict[int, Sender] = {}
        self.given_up: list[int] = []
        self.downs: list[tuple[str, int]] = []
        self.stopped = False

    async def on_message(self, message: Any, sender: Sender) -> Any:
        self.seen.append(message)
        match message:
            case Say(text, number):
                return Said(text, number, self.context.epoch) if sender.correlation else None
            case Hold(number):
                self.held[number] = sender
                return LATER
            case LetGo(number):
                await self.context.reply(self.held.pop(number), Said("released", number, self.context.epoch))
            case Nap(seconds):
                await trio.sleep(seconds)
            case Fall(why):
                raise Fell(why)
        return None

    async def on_cancel(self, sender: Sender) -> None:
        for number, held in list(self.held.items()):
            if held == sender:
                del self.held[number]
                self.given_up.append(number)

    async def on_down(self, name: str, epoch: int) -> None:
        self.downs.append((name, epoch))

    async def on_stop(self) -> None:
        self.stopped = True

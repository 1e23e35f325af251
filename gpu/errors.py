"""What the engine refuses, as exceptions that say what to do."""


class EngineError(Exception):
    """Base of everything the engine raises."""


class ModelError(EngineError):
    """A model file cannot be used: missing, cut short, or of a kind this engine does not run."""


class EngineFull(EngineError):
    """The waiting queue is at its bound. Nothing was taken; ask again later or elsewhere."""


class BadRequest(EngineError):
    """One field of a request cannot be honoured. `param` names it; nothing was taken."""

    def __init__(self, param: str, text: str) -> None:
        super().__init__(f"{param}: {text}")
        self.param = param
        self.text = text


class TemplateError(EngineError):
    """The model's chat template refuses these messages, and says why."""

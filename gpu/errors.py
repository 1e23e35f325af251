"""What the engine refuses, as exceptions that say what to do."""


class EngineError(Exception):
    """Base of everything the engine raises."""


class ModelError(EngineError):
    """A model file cannot be used: missing, cut short, or of a kind this engine does not run."""


class EngineFull(EngineError):
    """The waiting queue is at its bound. Nothing was taken; ask again later or elsewhere."""


class StepTooLarge(EngineError):
    """A step's input does not fit the buffer made for it. Nothing was started; a smaller step may fit."""


class GpuFull(EngineError):
    """The GPU had no memory for a step. Nothing of it was kept: the same step may be tried again."""


class GpuFailed(EngineError):
    """The GPU, or its driver, failed. This process can use it no more; another one may."""


class BadRequest(EngineError):
    """One field of a request cannot be honoured. `param` names it; nothing was taken."""

    def __init__(self, param: str, text: str) -> None:
        super().__init__(f"{param}: {text}")
        self.param = param
        self.text = text


class TemplateError(EngineError):
    """The model's chat template refuses these messages, and says why."""

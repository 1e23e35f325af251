"""Whether an answer that was found should be served: a small model, scored in this process.

A model is flat arrays in a JSON file, never a pickle. It scores rows of named inputs; a threshold, which has
a version of its own, turns the score into yes or no. `store.decision_import` makes models from scikit-learn's
and XGBoost's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

SCHEMA: Final = 1
INPUTS: Final = (
    "historical_uplift",
    "log_query_frequency",
    "answer_age_days",
    "log_feedback_volume",
    "request_characters",
    "request_words",
    "request_is_plain",
)
"""What a model may ask for, in the order `inputs_of` gives it."""
Matrix = NDArray[np.float64]


class DecisionError(Exception):
    """A decision model or threshold that cannot be used; the text says why."""


def inputs_of(features: tuple[float, ...], text: str, key: bytes, today: int) -> tuple[float, ...]:
    """Return the inputs of one decision, in the order of `INPUTS`. `today` is in whole days since 1970.

    `features` are the entry's. Within a day the inputs depend on the entry and the text alone.
    """
    uplift, frequency, answered_at, feedback = features
    return (
        uplift,
        math.log1p(frequency),
        today - answered_at if answered_at < today else 0.0,
        math.log1p(feedback),
        len(text),
        key.count(b" ") + 1,
        1 if text.encode() == key else 0,
    )


class Logistic(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="logistic", tag_field="kind"):
    """p = 1 / (1 + exp(-(x · weights + intercept))). Scaling of inputs is folded into the weights."""

    schema: int
    version: str
    features: tuple[str, ...]
    weights: tuple[float, ...]
    intercept: float


class Trees(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="trees", tag_field="kind"):
    """Boosted trees as arrays over all nodes of all trees.

    An inner node sends an input, rounded to float32, left when it is `compare` the threshold. A leaf is its
    own left and right child. The margin is `base` and the value of one leaf of each tree; the link `logistic`
    makes it a probability.
    """

    schema: int
    version: str
    features: tuple[str, ...]
    roots: tuple[int, ...]
    feature: tuple[int, ...]
    threshold: tuple[float, ...]
    left: tuple[int, ...]
    right: tuple[int, ...]
    value: tuple[float, ...]
    base: float
    compare: Literal["<", "<="]
    link: Literal["logistic", "none"]


class Threshold(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Serve at this score and above."""

    schema: int
    version: str
    threshold: float


Model = Logistic | Trees


class Scorer:
    """A model ready to score."""

    def __init__(self, model: Model) -> None:
        """Check the model and lay it out. Raises `DecisionError`."""
        check(model)
        self.version = model.version
        self._columns = np.array([INPUTS.index(name) for name in model.features], np.intp)
        self._margin = _LogisticMargin(model) if isinstance(model, Logistic) else _TreeMargin(model)
        self._is_probability = isinstance(model, Logistic) or model.link == "logistic"

    def score(self, inputs: Sequence[tuple[float, ...]]) -> list[float]:
        """Score rows of `INPUTS`; the same row has the same score whatever else is in the batch."""
        if not inputs:
            return []
        margin = self._margin(np.array(inputs, np.float64)[:, self._columns])
        if self._is_probability:
            margin = np.exp(-np.logaddexp(0.0, -margin))  # 1 / (1 + exp(-margin)), which would overflow
        scores: list[float] = margin.tolist()
        return scores


class _LogisticMargin:
    def __init__(self, model: Logistic) -> None:
        self._weights = np.array(model.weights, np.float64)
        self._intercept = model.intercept

    def __call__(self, rows: Matrix) -> Matrix:
        # (rows, features) -> (rows,): summed in a fixed order, which a matrix product does not promise.
        margin: Matrix = (rows * self._weights).sum(axis=1) + self._intercept
        return margin


class _TreeMargin:
    def __init__(self, model: Trees) -> None:
        self._roots = np.array(model.roots, np.intp)
        self._feature = np.array(model.feature, np.intp)
        self._threshold = np.array(model.threshold, np.float64)
        self._children = np.array([model.right, model.left], np.intp)
        self._value = np.array(model.value, np.float64)
        self._base = model.base
        self._less = np.less if model.compare == "<" else np.less_equal
        self._depth = _depth(model)

    def __call__(self, rows: Matrix) -> Matrix:
        rows = rows.astype(np.float32).astype(np.float64)
        row = np.arange(len(rows))[:, None]
        node = np.broadcast_to(self._roots, (len(rows), len(self._roots)))  # (rows, trees)
        for _ in range(self._depth):
            goes_left = self._less(rows[row, self._feature[node]], self._threshold[node])
            node = self._children[goes_left.astype(np.intp), node]
        margin: Matrix = self._value[node].sum(axis=1) + self._base
        return margin


def _depth(model: Trees) -> int:
    """Levels below the roots. Children come after their parents, so this ends."""
    depth = [0] * len(model.left)
    for node in reversed(range(len(model.left))):
        if model.left[node] != node:
            depth[node] = 1 + max(depth[model.left[node]], depth[model.right[node]])
    return max((depth[root] for root in model.roots), default=0)


def check(model: Model) -> None:
    """Raise `DecisionError` for a model that could not be scored."""
    if model.schema != SCHEMA:
        raise DecisionError(f"decision model schema {model.schema}: this program reads {SCHEMA}")
    unknown = [name for name in model.features if name not in INPUTS]
    if unknown:
        raise DecisionError(f"decision model asks for {', '.join(unknown)}: known are {', '.join(INPUTS)}")
    if isinstance(model, Logistic):
        if len(model.weights) != len(model.features):
            raise DecisionError(f"{len(model.weights)} weights for {len(model.features)} features")
    else:
        _check_trees(model)


def _check_trees(model: Trees) -> None:
    nodes = len(model.feature)
    if any(len(a) != nodes for a in (model.threshold, model.left, model.right, model.value)):
        raise DecisionError("the arrays of the trees have different lengths")
    if not model.features or any(not 0 <= f < len(model.features) for f in model.feature):
        raise DecisionError("a node splits on a feature that is not there")
    if any(not 0 <= root < nodes for root in model.roots):
        raise DecisionError("a root is outside the arrays")
    for node, children in enumerate(zip(model.left, model.right, strict=True)):
        if children != (node, node) and not all(node < child < nodes for child in children):
            raise DecisionError(
                f"node {node} has children {children}: they must come after it, or be itself twice"
            )


def read_model(path: Path) -> Model:
    """Read and check a model file. Raises `DecisionError`."""
    try:
        model: Model = msgspec.json.decode(path.read_bytes(), type=Model)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DecisionError(f"{path} is no decision model: {error}") from error
    check(model)
    return model


def read_threshold(path: Path) -> Threshold:
    """Read and check a threshold file. Raises `DecisionError`."""
    try:
        threshold = msgspec.json.decode(path.read_bytes(), type=Threshold)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DecisionError(f"{path} is no threshold: {error}") from error
    if threshold.schema != SCHEMA or not math.isfinite(threshold.threshold):
        raise DecisionError(f"{path}: threshold {threshold.threshold} of schema {threshold.schema}")
    return threshold


def write(value: Model | Threshold, path: Path) -> None:
    """Write a model or a threshold as JSON that can be read and compared."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n")


ALWAYS = Logistic(SCHEMA, "always", (), (), 20.0)
"""The model to begin with: every reviewed answer is good enough."""
EVEN = Threshold(SCHEMA, "even", 0.5)

"""Decision models from other libraries' trained ones. Neither library is imported."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from attrs import define, field

from store.decision import SCHEMA, DecisionError, Logistic, Trees, check


def from_logistic_regression(model: Any, features: Sequence[str], version: str) -> Logistic:
    """Take over a binary scikit-learn `LogisticRegression`. Raises `DecisionError`."""
    if len(model.classes_) != 2:
        raise DecisionError(f"the model tells {len(model.classes_)} classes apart: a decision has two")
    weights = tuple(float(w) for w in model.coef_[0])
    made = Logistic(SCHEMA, version, tuple(features), weights, float(model.intercept_[0]))
    check(made)
    return made


def from_gradient_boosting(model: Any, features: Sequence[str], version: str) -> Trees:
    """Take over a binary scikit-learn `GradientBoostingClassifier`. Raises `DecisionError`."""
    if len(model.classes_) != 2 or model.loss != "log_loss":
        raise DecisionError(
            "only a gradient boosting classifier of two classes with log_loss can be taken over"
        )
    if model.init_ == "zero":
        base = 0.0
    elif hasattr(model.init_, "class_prior_"):
        base = _logit(float(model.init_.class_prior_[1]))
    else:
        raise DecisionError("the model starts from another estimator: train it with the default init")
    nodes = _Nodes()
    for (estimator,) in model.estimators_:
        tree = estimator.tree_
        nodes.add(
            [
                -1 if left == right else int(left)
                for left, right in zip(tree.children_left, tree.children_right, strict=True)
            ],
            [int(child) for child in tree.children_right],
            [int(f) for f in tree.feature],
            [float(t) for t in tree.threshold],
            [float(v) * float(model.learning_rate) for v in tree.value[:, 0, 0]],
        )
    return nodes.trees(version, features, base, "<=", "logistic")


def from_xgboost(saved: bytes, features: Sequence[str], version: str) -> Trees:
    """Take over an XGBoost model saved as JSON: `booster.save_raw("json")`. Raises `DecisionError`."""
    learner = json.loads(saved)["learner"]
    objective = learner["objective"]["name"]
    if (
        objective not in {"binary:logistic", "reg:squarederror"}
        or learner["gradient_booster"]["name"] != "gbtree"
    ):
        raise DecisionError(
            f"objective {objective}: binary:logistic or reg:squarederror with gbtree can be taken over"
        )
    base = float(learner["learner_model_param"]["base_score"].strip("[]"))
    nodes = _Nodes()
    for tree in learner["gradient_booster"]["model"]["trees"]:
        if any(tree["split_type"]):
            raise DecisionError("the model splits on categories: decision inputs are numbers")
        # Decimal in the file, float32 in the library: an input that equals a threshold must find it equal.
        conditions = np.array(tree["split_conditions"], np.float32).tolist()
        nodes.add(
            tree["left_children"],
            tree["right_children"],
            tree["split_indices"],
            conditions,
            conditions,
        )
    if objective == "binary:logistic":
        return nodes.trees(version, features, _logit(base), "<", "logistic")
    return nodes.trees(version, features, base, "<", "none")


@define
class _Nodes:
    """Trees put end to end. A left child of -1 marks a leaf."""

    roots: list[int] = field(factory=list)
    left: list[int] = field(factory=list)
    right: list[int] = field(factory=list)
    feature: list[int] = field(factory=list)
    threshold: list[float] = field(factory=list)
    value: list[float] = field(factory=list)

    def add(
        self,
        left: list[int],
        right: list[int],
        feature: list[int],
        threshold: list[float],
        value: list[float],
    ) -> None:
        start = len(self.left)
        self.roots.append(start)
        for node, child in enumerate(left):
            is_leaf = child == -1
            self.left.append(start + (node if is_leaf else child))
            self.right.append(start + (node if is_leaf else right[node]))
            self.feature.append(0 if is_leaf else feature[node])
            self.threshold.append(0.0 if is_leaf else threshold[node])
            self.value.append(value[node] if is_leaf else 0.0)

    def trees(
        self,
        version: str,
        features: Sequence[str],
        base: float,
        compare: Literal["<", "<="],
        link: Literal["logistic", "none"],
    ) -> Trees:
        made = Trees(
            SCHEMA,
            version,
            tuple(features),
            tuple(self.roots),
            tuple(self.feature),
            tuple(self.threshold),
            tuple(self.left),
            tuple(self.right),
            tuple(self.value),
            base,
            compare,
            link,
        )
        check(made)
        return made


def _logit(probability: float) -> float:
    return math.log(probability / (1.0 - probability))

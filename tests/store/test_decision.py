"""Scores equal those of the libraries that trained the models; what cannot be scored is refused."""

import math

import numpy as np
import pytest

from store.decision import (
    ALWAYS,
    EVEN,
    INPUTS,
    SCHEMA,
    DecisionError,
    Logistic,
    Scorer,
    Threshold,
    Trees,
    inputs_of,
    read_model,
    read_threshold,
    write,
)
from store.decision_import import from_gradient_boosting, from_logistic_regression, from_xgboost

FEATURES = ("answer_age_days", "historical_uplift", "request_words")
STUMP = Trees(
    SCHEMA,
    "s",
    ("request_words",),
    (0,),
    (0, 0, 0),
    (3.0, 0, 0),
    (1, 1, 2),
    (2, 1, 2),
    (0, -1, 1),
    0.5,
    "<",
    "none",
)


@pytest.fixture(scope="module")
def sample():
    random = np.random.default_rng(7)
    rows = random.normal(size=(300, len(INPUTS))) * [0.1, 3, 200, 2, 40, 8, 1]
    chosen = rows[:, [INPUTS.index(name) for name in FEATURES]]
    labels = (chosen @ [0.01, 5.0, 0.1] + random.normal(size=300) > 0).astype(int)
    return rows, chosen, labels


def scores(model, rows):
    return np.array(Scorer(model).score([tuple(row) for row in rows]))


def test_logistic_regression_scores_as_in_scikit_learn(sample):
    linear = pytest.importorskip(
        "sklearn.linear_model", reason="scikit-learn is not installed: the [test] extra"
    )
    rows, chosen, labels = sample
    trained = linear.LogisticRegression(max_iter=5000).fit(chosen, labels)
    ours = scores(from_logistic_regression(trained, FEATURES, "v1"), rows)
    np.testing.assert_allclose(ours, trained.predict_proba(chosen)[:, 1], rtol=0, atol=1e-9)


@pytest.mark.parametrize("init", [None, "zero"])
def test_boosted_trees_score_as_in_scikit_learn(sample, init):
    ensemble = pytest.importorskip(
        "sklearn.ensemble", reason="scikit-learn is not installed: the [test] extra"
    )
    rows, chosen, labels = sample
    options = {"n_estimators": 12, "max_depth": 4, "random_state": 1, "init": init}
    trained = ensemble.GradientBoostingClassifier(**options).fit(chosen, labels)
    ours = scores(from_gradient_boosting(trained, FEATURES, "v1"), rows)
    np.testing.assert_allclose(ours, trained.predict_proba(chosen)[:, 1], rtol=0, atol=1e-9)


@pytest.mark.parametrize("objective", ["binary:logistic", "reg:squarederror"])
def test_boosted_trees_score_as_in_xgboost(sample, objective):
    xgboost = pytest.importorskip("xgboost", reason="xgboost is not installed: the [test] extra")
    rows, chosen, labels = sample
    data = xgboost.DMatrix(chosen, labels)
    options = {"objective": objective, "max_depth": 4, "nthread": 1, "base_score": 0.4}
    trained = xgboost.train(options, data, num_boost_round=12)
    ours = scores(from_xgboost(bytes(trained.save_raw("json")), FEATURES, "v1"), rows)
    np.testing.assert_allclose(ours, trained.predict(data), rtol=0, atol=1e-6)


def test_a_row_scores_the_same_in_any_batch(sample):
    rows = sample[0]
    model = Logistic(SCHEMA, "v", INPUTS, tuple(0.1 * i for i in range(len(INPUTS))), 0.3)
    together = scores(model, rows)
    assert [scores(model, [row])[0] for row in rows[:40]] == together[:40].tolist()


def test_a_stump_by_hand():
    row = [0.0] * len(INPUTS)
    words = INPUTS.index("request_words")
    rows = [[*row[:words], value, *row[words + 1 :]] for value in (2.0, 3.0, 4.0)]
    assert scores(STUMP, rows).tolist() == [-0.5, 1.5, 1.5]


@pytest.mark.filterwarnings("error")
def test_the_surest_scores_do_not_overflow():
    model = Logistic(SCHEMA, "v", ("historical_uplift",), (1.0,), 0.0)
    rows = [[uplift] + [0.0] * (len(INPUTS) - 1) for uplift in (-1e9, 0.0, 1e9)]
    assert scores(model, rows).tolist() == [0.0, 0.5, 1.0]


def test_no_rows_have_no_scores():
    assert Scorer(ALWAYS).score([]) == []


def test_the_model_to_begin_with_serves_everything():
    row = inputs_of((-1.0, 0.0, 0.0, 0.0), "x", b"x", 20_000)
    assert scores(ALWAYS, [row])[0] >= EVEN.threshold


def test_inputs_are_what_their_names_say():
    features = (0.25, math.e - 1, 20000.0, 0.0)
    made = dict(zip(INPUTS, inputs_of(features, "What is  it?", b"what is it", 20010), strict=True))
    assert made == {
        "historical_uplift": 0.25,
        "log_query_frequency": pytest.approx(1.0),
        "answer_age_days": 10.0,
        "log_feedback_volume": 0.0,
        "request_characters": 12.0,
        "request_words": 3.0,
        "request_is_plain": 0.0,
    }


@pytest.mark.parametrize("value", [ALWAYS, STUMP, EVEN])
def test_what_is_written_is_read_again(tmp_path, value):
    write(value, tmp_path / "file.json")
    read = read_threshold if isinstance(value, Threshold) else read_model
    assert read(tmp_path / "file.json") == value


def changed(model, **changes):
    return type(model)(**{name: getattr(model, name) for name in model.__struct_fields__} | changes)


UNUSABLE = [
    (changed(ALWAYS, schema=2), "schema 2"),
    (changed(ALWAYS, features=("mood",), weights=(1.0,)), "asks for mood"),
    (changed(ALWAYS, weights=(1.0,)), "1 weights for 0 features"),
    (changed(STUMP, left=(1, 1)), "different lengths"),
    (changed(STUMP, feature=(1, 0, 0)), "not there"),
    (changed(STUMP, roots=(3,)), "outside"),
    (changed(STUMP, left=(1, 0, 2)), "node 1"),
    (changed(STUMP, left=(0, 1, 2)), "node 0"),
    (changed(STUMP, right=(9, 1, 2)), "node 0"),
]


@pytest.mark.parametrize(("model", "says"), UNUSABLE, ids=[says for _, says in UNUSABLE])
def test_a_model_that_cannot_be_scored_is_refused(tmp_path, model, says):
    write(model, tmp_path / "model.json")
    with pytest.raises(DecisionError, match=says):
        read_model(tmp_path / "model.json")
    with pytest.raises(DecisionError, match=says):
        Scorer(model)


@pytest.mark.parametrize(
    "text", ["", "{}", '{"kind": "pickle"}', '{"schema": 1, "version": "v", "threshold": null}']
)
def test_a_file_of_another_kind_is_refused(tmp_path, text):
    (tmp_path / "file.json").write_text(text)
    for read in (read_model, read_threshold):
        with pytest.raises(DecisionError, match=r"file\.json"):
            read(tmp_path / "file.json")


def test_a_model_of_three_classes_is_refused(sample):
    linear = pytest.importorskip(
        "sklearn.linear_model", reason="scikit-learn is not installed: the [test] extra"
    )
    trained = linear.LogisticRegression(max_iter=5000).fit(sample[1] / 100, np.arange(300) % 3)
    with pytest.raises(DecisionError, match="3 classes"):
        from_logistic_regression(trained, FEATURES, "v1")

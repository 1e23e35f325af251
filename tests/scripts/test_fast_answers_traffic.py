"""The made-up traffic has the shares it states, and the catalog it asks."""

from collections import Counter

from scripts.bench.fast_answers_traffic import CATALOG_SHARE, MadeUpRows, question, traffic
from store.catalog import Catalog
from store.catalog_build import CatalogBuilder
from store.normalise import key_of

ENTRIES = 400


def test_traffic_is_the_same_for_the_same_seed():
    assert traffic(ENTRIES, 50, 1) == traffic(ENTRIES, 50, 1) != traffic(ENTRIES, 50, 2)


def test_no_two_questions_are_one():
    assert len({key_of(question(rank)) for rank in range(5000)}) == 5000


def test_about_half_of_it_is_in_the_catalog_and_the_commonest_most_often(tmp_path):
    CatalogBuilder(MadeUpRows(ENTRIES, mark="v1")).build(tmp_path / "catalog.mdb")
    catalog = Catalog(tmp_path / "catalog.mdb")
    asked = traffic(ENTRIES, 3000, 1)
    found = [catalog.find(key) for text in asked if (key := key_of(text))]
    catalog.close()
    hits = Counter(entry.name for entry in found if entry)
    assert abs(hits.total() / len(asked) - CATALOG_SHARE) < 0.05
    assert [name for name, _ in hits.most_common(2)] == ["e0", "e1"]
    assert all(entry.answer.startswith("v1") for entry in found if entry)

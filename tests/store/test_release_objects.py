"""A release that was pushed to object storage is fetched whole, once, or not at all."""

# ruff: noqa: E402  what is imported may not be there
import json
import socket

import pytest

obstore = pytest.importorskip("obstore", reason="obstore is not installed: the [objects] extra")
from obstore.store import LocalStore, MemoryStore, S3Store

from store.catalog_build import CatalogBuilder, open_source
from store.decision import ALWAYS, EVEN
from store.release import CATALOG, MANIFEST, ReleaseError, verify
from store.release_objects import open_store, pull, push
from store.release_publish import build, published


def built(base, version, answer="Yes."):
    base.mkdir(parents=True, exist_ok=True)
    row = {"question": "a", "answer": answer, "approved_by": "Ada", "answered_on": "2026-03-01"}
    (base / "rows.jsonl").write_text(json.dumps(row) + "\n")
    (base / CATALOG).unlink(missing_ok=True)
    CatalogBuilder(open_source(base / "rows.jsonl")).build(base / CATALOG)
    build(base / version, version, base / CATALOG, ALWAYS, EVEN)
    return base / version


@pytest.fixture(params=["memory", "directory"])
def store(request, tmp_path):
    return MemoryStore() if request.param == "memory" else LocalStore(tmp_path / "store", mkdir=True)


def names(store):
    return sorted(item["path"] for batch in obstore.list(store) for item in batch)


def test_what_was_pushed_is_fetched_and_published(tmp_path, store):
    pushed = push(store, built(tmp_path, "v1"))
    assert pull(store, "v1", tmp_path / "releases") == pushed
    assert verify(tmp_path / "releases" / "v1") == pushed


def test_pushing_again_is_harmless_and_other_content_is_refused(tmp_path, store):
    push(store, built(tmp_path, "v1"))
    before = names(store)
    push(store, tmp_path / "v1")
    with pytest.raises(ReleaseError, match="other content"):
        push(store, built(tmp_path / "other", "v1", "No."))
    assert names(store) == before


def test_of_two_publishers_at_once_one_wins_and_the_other_is_told(tmp_path, store, monkeypatch):
    first, second = built(tmp_path, "v1"), built(tmp_path / "other", "v1", "No.")
    put = obstore.put

    def put_after_the_other(store, path, file, **options):
        if path.endswith(MANIFEST):
            monkeypatch.setattr("store.release_objects.obstore.put", put)
            push(store, first)
        return put(store, path, file, **options)

    monkeypatch.setattr("store.release_objects.obstore.put", put_after_the_other)
    with pytest.raises(ReleaseError, match="other content"):
        push(store, second)
    assert pull(store, "v1", tmp_path / "releases") == verify(first)


def test_a_push_that_was_killed_before_the_manifest_is_no_release(tmp_path, store):
    push(store, built(tmp_path, "v1"))
    obstore.delete(store, f"v1/{MANIFEST}")
    with pytest.raises(ReleaseError, match="not in the store"):
        pull(store, "v1", tmp_path / "releases")
    assert published(tmp_path / "releases") == []


def test_a_part_that_was_changed_in_the_store_is_refused(tmp_path, store):
    push(store, built(tmp_path, "v1"))
    (part,) = [name for name in names(store) if name.endswith(CATALOG)]
    size = obstore.head(store, part)["size"]
    obstore.put(store, part, b"\0" * size)
    with pytest.raises(ReleaseError, match="corrupt"):
        pull(store, "v1", tmp_path / "releases")
    assert published(tmp_path / "releases") == []


def test_a_url_is_opened_by_its_scheme(tmp_path):
    (tmp_path / "bucket").mkdir()
    push(open_store(f"file://{tmp_path}/bucket"), built(tmp_path, "v1"))
    assert (tmp_path / "bucket" / "v1" / MANIFEST).exists()
    with pytest.raises(ReleaseError, match="cannot be opened"):
        open_store("carrier-pigeon://loft")


def test_a_store_that_cannot_be_reached_is_one_line_that_names_it(tmp_path):
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        unreachable = S3Store(
            "bucket",
            endpoint=f"http://127.0.0.1:{nobody.getsockname()[1]}",
            region="r",
            access_key_id="a",
            secret_access_key="b",
            client_options={"allow_http": True},
            retry_config={"max_retries": 0},
        )
        with pytest.raises(ReleaseError, match=r"v1 was not fetched from .*bucket.*refused") as fetching:
            pull(unreachable, "v1", tmp_path / "releases")
        with pytest.raises(ReleaseError, match=r"v1 was not pushed to .*bucket.*refused") as pushing:
            push(unreachable, built(tmp_path, "v1"))
    assert "\n" not in str(fetching.value) + str(pushing.value)


@pytest.mark.parametrize(
    "url", ["file:///there/is/no/such/bucket", "carrier-pigeon://loft", "az://c/p", "bucket"]
)
def test_a_url_that_cannot_be_opened_is_one_line_that_names_it(url):
    with pytest.raises(ReleaseError, match="cannot be opened: ") as fault:
        open_store(url)
    assert str(fault.value).startswith(url)
    assert "\n" not in str(fault.value)


def test_a_release_that_is_not_in_the_store_is_one_line(tmp_path, store):
    with pytest.raises(ReleaseError, match="v9 is not in the store") as fault:
        pull(store, "v9", tmp_path / "releases")
    assert "\n" not in str(fault.value)
